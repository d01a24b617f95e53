"""What a probe found, as tables and sentences for a person and as JSON for a program.

Pure: measurements in, text or plain values out.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tahq.pipeline.probe.cut_model import Wire
from tahq.pipeline.probe.result import EXPECTATION_LIMIT, STEP_LIMIT, WireResult
from tahq.quant import CodecSpec, get_codec

ERROR_TITLES = ("", "activations", "bits", "gradients", "bits", "a step", "at most", "mean", "M → ∞", "cosine")
"""Relative error of a batch (median, largest), of the mean over M batches (largest) and its estimate for M → ∞;
the least cosine."""
TEXT_COLUMNS = (1, 3)


@dataclass(frozen=True, slots=True)
class ProbeFacts:
    """What was probed, for the head of the report.

    Attributes:
        title: the run.
        weights: where they come from, in words.
        trained: whether they have seen training: not random ones without warm-up.
        boundary: [B, S, C] of what crosses a cut.
        losses: nats a token at each probed step, without codecs.
    """

    title: str
    num_parameters: int
    num_cuts: int
    weights: str
    trained: bool
    boundary: tuple[int, int, int]
    global_batch: int
    first_step: int
    num_batches: int
    losses: tuple[float, ...]


def head(facts: ProbeFacts) -> list[str]:
    """What was probed, in two lines."""
    samples, length, channels = facts.boundary
    last = facts.first_step + len(facts.losses) - 1
    steps = f"step {last}" if last == facts.first_step else f"steps {facts.first_step} to {last}"
    return [
        f"{facts.title}: {facts.num_parameters:,} parameters in {facts.num_cuts + 1} stages, [{samples}, {length}, "
        f"{channels}] crosses each cut; weights: {facts.weights}",
        f"{steps}, M = {facts.num_batches} of the batches of {facts.global_batch} samples at each; loss without "
        f"codecs: {', '.join(f'{loss:.3f}' for loss in facts.losses)} nats a token",
    ]


def error_rows(facts: ProbeFacts, results: Sequence[WireResult]) -> list[list[str]]:
    """A row a wire; see `ERROR_TITLES`."""
    return [[str(number), *_error_cells(facts, result)] for number, result in enumerate(results, start=1)]


def _error_cells(facts: ProbeFacts, result: WireResult) -> list[str]:
    forward, backward = _bits(facts, result.wire)
    means = result.expectation_errors
    return [
        _brief(result.wire.activations),
        f"{forward:.2f}",
        _brief(result.wire.gradients),
        f"{backward:.2f}",
        _number(statistics.median(result.step_errors)),
        _number(max(result.step_errors)),
        _number(max(means) if means else None),
        _number(result.noiseless_expectation_error()),
        f"{min(result.cosines):.4f}",
    ]


def group_titles(results: Sequence[WireResult]) -> list[str]:
    """Of the table by part of the model: a column a wire, by its number."""
    return ["part of the model", *(str(number) for number in range(1, len(results) + 1))]


def group_rows(results: Sequence[WireResult]) -> list[list[str]]:
    """A row a part: the errors of all batches over the gradients of all batches."""
    groups = [result.by_group() for result in results]
    return [[name, *(_number(group[name].relative) for group in groups)] for name in groups[0]]


def wire_name(wire: Wire) -> str:
    """Both codecs, forward first, as short as they can be written."""
    return f"{_brief(wire.activations)} / {_brief(wire.gradients)}"


def sentence(result: WireResult) -> str:
    """Whether the assumption and the paper's figures hold for one wire, with the numbers."""
    name, step, delta = wire_name(result.wire), max(result.step_errors), result.delta
    if not math.isfinite(delta):
        return f"{name}: Assumption 4.4 does not hold: with these codecs a gradient is NaN or infinite."
    if delta <= 0:
        return f"{name}: Assumption 4.4 does not hold: an error of {1 - delta:.3g} is as large as the gradient itself."
    kept = f"{_against(result.keeps_step_limit)} the paper's {STEP_LIMIT} a step ({step:.3g} at most)"
    if result.keeps_expectation_limit is not None:
        mean = max(result.expectation_errors)
        kept += f" and {_against(result.keeps_expectation_limit)} its {EXPECTATION_LIMIT} of the expectation"
        kept += f" ({mean:.3g} at most)"
    return f"{name}: Assumption 4.4 holds with δ = {_floor(delta)}; {kept}."


def as_json(facts: ProbeFacts, results: Sequence[WireResult]) -> dict[str, Any]:
    """Everything that was measured, in plain values; what is not finite is null."""
    return {
        "run": facts.title,
        "num_parameters": facts.num_parameters,
        "num_cuts": facts.num_cuts,
        "weights": facts.weights,
        "first_step": facts.first_step,
        "batches_per_step": facts.num_batches,
        "samples_per_batch": facts.global_batch,
        "losses": list(facts.losses),
        "limits": {"step": STEP_LIMIT, "expectation": EXPECTATION_LIMIT},
        "wires": [_wire_values(facts, result) for result in results],
    }


def bits_per_element(spec: str | None, shape: tuple[int, ...]) -> float:
    """What a codec makes of an element of this shape, everything counted; fp32 where nothing is packed."""
    return 32.0 if spec is None else 8 * get_codec(spec).encoded_nbytes(shape) / math.prod(shape)


def notes(facts: ProbeFacts, results: Sequence[WireResult]) -> list[str]:
    """How to read the figures, and what to do about them."""
    said = []
    if not facts.trained:
        said.append(
            "These weights are random. Errors of trained ones differ: probe again with --warm-up 50, with --resume, "
            "or with --weights FOLDER."
        )
    if any(not result.keeps_step_limit or result.keeps_expectation_limit is False for result in results):
        said.append(
            "Where a figure is exceeded, spend more bits on the direction that errs (--wire with `raw` for one of the "
            "two tells which), or cut the model into fewer stages. Exceeding them is no proof that training fails, "
            "and keeping them none that it succeeds: the loss decides."
        )
    if facts.num_batches > 1:
        said.append(
            f"The mean is over M = {facts.num_batches} batches, so of what is random between them, in ĝ − g and in g, "
            f"1/{facts.num_batches} is still in it; M → ∞ is an estimate without, pooled over the steps."
        )
    return said


def _wire_values(facts: ProbeFacts, result: WireResult) -> dict[str, Any]:
    forward, backward = _bits(facts, result.wire)
    return {
        "activations": result.wire.activations,
        "gradients": result.wire.gradients,
        "bits_per_element": {"activations": forward, "gradients": backward},
        "step_errors": _finite(result.step_errors),
        "expectation_errors": _finite(result.expectation_errors),
        "expectation_error_noiseless": result.noiseless_expectation_error(),
        "cosines": _finite(result.cosines),
        "delta": _finite([result.delta])[0],
        "below_step_limit": result.keeps_step_limit,
        "below_expectation_limit": result.keeps_expectation_limit,
        "groups": {name: _finite([sums.relative])[0] for name, sums in result.by_group().items()},
    }


def _bits(facts: ProbeFacts, wire: Wire) -> tuple[float, float]:
    return bits_per_element(wire.activations, facts.boundary), bits_per_element(wire.gradients, facts.boundary)


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}" if value < 0.1 else f"{value:.3g}"


def _brief(spec: str | None) -> str:
    return "none" if spec is None else CodecSpec.parse(spec).brief()


def _floor(delta: float) -> str:
    """Rounded down: δ is promised to be as large as this."""
    return f"{math.floor(delta * 1000) / 1000:g}"


def _against(kept: bool) -> str:
    return "below" if kept else "NOT below"
