"""`tahq probe`: the error that a run's codecs cause in its gradients, before a long run."""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from tahq.config.file import placed_errors
from tahq.errors import OutOfMemoryError
from tahq.observe import figures
from tahq.pipeline.gradient_probe import (
    EXPECTATION_LIMIT,
    STEP_LIMIT,
    GradientProbe,
    ProbedStep,
    WireResult,
    collect,
)
from tahq.quant import CodecSpec, get_codec
from tahq_launch.analysis.probe_setup import ProbeRequest, ProbeSetup, open_setup
from tahq_launch.command_line import check_writable, print_table, write_text

_QUIET_S = 5.0
_ERROR_TITLES = ("", "activations", "bits", "gradients", "bits", "median", "max", "mean", "M → ∞", "cosine")
"""Relative error of a batch (median, maximum), of the mean over M batches (maximum) and its estimate for M → ∞;
the smallest cosine."""


def run_probe(request: ProbeRequest, *, prints_json: bool = False, output: Path | None = None) -> None:
    """Measure and print the report, or one JSON object, which is written to `output` too.

    NonFiniteError: a plain gradient is not finite.
    """
    if output is not None:
        check_writable(output)
    try:
        with placed_errors(request.config_path, request.overrides):
            setup = open_setup(request)
            probed = measure(setup, request)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemoryError(
            f"the probe is out of memory ({str(error).partition('.')[0]}): it holds the whole model, its gradients, "
            "and one more copy of them per --codec; try one --codec, --batches 1, a smaller training.micro_batch, "
            "memory.recompute=block, or --device cpu"
        ) from error
    facts, results = _facts(setup, request, probed), collect(setup.wires, probed)
    text = json.dumps({**facts, "wires": [_wire_values(result, setup.boundary) for result in results]}, allow_nan=False)
    if output is not None:
        write_text(output, f"{text}\n")
    if prints_json:
        print(text)
        return
    _print_head(facts, setup.boundary)
    print("Relative error of the gradient, ‖ĝ − g‖² / ‖g‖²")
    print_table(_ERROR_TITLES, error_rows(results, setup.boundary), left=(1, 3))
    print("\nThe same by part of the model, over all batches")
    groups = [result.by_group() for result in results]
    rows = [[name, *(_number(group[name].relative) for group in groups)] for name in groups[0]]
    print_table(["part of the model", *map(str, range(1, len(results) + 1))], rows, left=(0,))
    print()
    for number, result in enumerate(results, start=1):
        print(f"{number}  {sentence(result)}")
    is_random = setup.weights == "random" and not request.warm_up
    print("", *_notes(results, request.batches, is_random=is_random), sep="\n")


# -- measuring -------------------------------------------------------------------------------------


def measure(setup: ProbeSetup, request: ProbeRequest) -> list[ProbedStep]:
    """Warm up, then probe; progress is shown on stderr."""
    first = setup.start_step + request.warm_up
    gradients = gradients_of(setup.start_step, request.warm_up, request.steps, request.batches, len(setup.wires))
    progress = Progress(gradients, sys.stderr)
    probe = GradientProbe(setup.model, setup.batches, setup.wires, setup.update, progress.advance)
    for step in range(setup.start_step, first):
        probe.train(step)
    return [probe.probe(step, request.batches) for step in range(first, first + request.steps)]


def gradients_of(first_step: int, warm_up: int, steps: int, batches: int, num_wires: int) -> list[str]:
    """The name of each gradient of a probe, in the order that `GradientProbe` computes them: batches last to first."""
    wires = ("without codecs", *(f"wire {number} of {num_wires}" for number in range(1, num_wires + 1)))
    probed = range(first_step + warm_up, first_step + warm_up + steps)
    trained = [f"step {step}, warm-up" for step in range(first_step, probed.start)]
    numbers = range(batches, 0, -1)
    return trained + [f"step {s}, batch {n} of {batches}, {wire}" for s in probed for n in numbers for wire in wires]


class Progress:
    """Prints lines such as ``12 of 32 gradients, 40 s left: step 20, batch 2 of 2, wire 1 of 5``; the first at once."""

    def __init__(self, gradients: Sequence[str], stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._gradients, self._stream, self._clock = gradients, stream, clock
        self._num_done = 0
        self._begin_s = self._printed_s = clock()
        self._print("")

    def advance(self) -> None:
        """Count one gradient; print a line if the last one was some seconds ago."""
        self._num_done += 1
        num_left, now_s = len(self._gradients) - self._num_done, self._clock()
        if num_left and now_s - self._printed_s >= _QUIET_S:
            left_s = num_left * (now_s - self._begin_s) / self._num_done
            self._print(f", {figures.duration(round(left_s))} left")
            self._printed_s = now_s

    def _print(self, left: str) -> None:
        name = self._gradients[self._num_done]
        print(f"{self._num_done} of {len(self._gradients)} gradients{left}: {name}", file=self._stream, flush=True)


# -- the report ------------------------------------------------------------------------------------


def _facts(setup: ProbeSetup, request: ProbeRequest, probed: Sequence[ProbedStep]) -> dict[str, Any]:
    """The head of the report, for people and as JSON; losses are nats per token at each step, without codecs."""
    warmed = f", then {request.warm_up} step{'s' * (request.warm_up > 1)} without codecs" if request.warm_up else ""
    training = setup.config.training
    moved = f", updated by AdamW in place of {training.optimizer}" if training.is_low_rank else ""
    return {
        "run": setup.config.run.name,
        "num_parameters": sum(parameter.numel() for parameter in setup.model.parameters.values()),
        "num_cuts": setup.model.num_cuts,
        "weights": setup.weights + warmed + moved,
        "first_step": probed[0].step,
        "batches_per_step": request.batches,
        "samples_per_batch": training.global_batch,
        "losses": [step.loss for step in probed],
        "limits": {"step": STEP_LIMIT, "expectation": EXPECTATION_LIMIT},
    }


def _print_head(facts: dict[str, Any], boundary: tuple[int, int, int]) -> None:
    first, losses = facts["first_step"], facts["losses"]
    steps = f"step {first}" if len(losses) == 1 else f"steps {first} to {first + len(losses) - 1}"
    print(
        f"{facts['run']}: {facts['num_parameters']:,} parameters in {facts['num_cuts'] + 1} stages, {list(boundary)} "
        f"at each cut; weights: {facts['weights']}\n"
        f"{steps}, M = {facts['batches_per_step']} batches of {facts['samples_per_batch']} samples per step; loss "
        f"without codecs: {', '.join(f'{loss:.3f}' for loss in losses)} nats per token\n"
    )


def error_rows(results: Sequence[WireResult], boundary: tuple[int, int, int]) -> list[list[object]]:
    """One row per wire; see `_ERROR_TITLES`."""
    rows = []
    for number, result in enumerate(results, start=1):
        specs = (result.wire.activations, result.wire.gradients)
        codecs = [cell for spec in specs for cell in (_brief(spec), f"{bits_per_element(spec, boundary):.2f}")]
        errors = (
            statistics.median(result.step_errors),
            max(result.step_errors),
            max(result.expectation_errors, default=None),
            result.noiseless_expectation_error(),
        )
        rows.append([number, *codecs, *map(_number, errors), f"{min(result.cosines):.4f}"])
    return rows


def sentence(result: WireResult) -> str:
    """Whether the assumption and the paper's figures hold for one wire, with the numbers."""
    name = f"{_brief(result.wire.activations)} / {_brief(result.wire.gradients)}"
    delta = result.delta
    if not math.isfinite(delta):
        return f"{name}: Assumption 4.4 does not hold: with these codecs a gradient is NaN or infinite."
    if delta <= 0:
        return f"{name}: Assumption 4.4 does not hold: an error of {1 - delta:.3g} is as large as the gradient itself."
    step = f"per step {_against(max(result.step_errors), STEP_LIMIT, result.keeps_step_limit)}"
    mean = ""
    if result.keeps_expectation_limit is not None:
        kept = result.keeps_expectation_limit
        mean = f", of the expectation {_against(max(result.expectation_errors), EXPECTATION_LIMIT, kept)}"
    floor = math.floor(delta * 1000) / 1000  # a promise is rounded down
    return f"{name}: Assumption 4.4 holds with δ = {floor:g}; error {step}{mean}."


def _against(error: float, limit: float, kept: bool) -> str:
    return f"at most {error:.3g}, {'below' if kept else 'NOT below'} the paper's {limit}"


def _notes(results: Sequence[WireResult], num_batches: int, *, is_random: bool) -> list[str]:
    """How to read the figures, and how to improve them."""
    lines = []
    if is_random:
        lines.append(
            "These weights are random. Errors of trained weights differ: probe again with --warm-up 50, with --resume, "
            "or with --weights FOLDER."
        )
    if any(not result.keeps_step_limit or result.keeps_expectation_limit is False for result in results):
        lines.append(
            "If a limit is exceeded, spend more bits on the direction that causes the error (--codec with `raw` for "
            "one direction shows which), or use fewer stages. Exceeding a limit does not prove that training fails, "
            "and keeping it does not prove that training succeeds: the loss decides."
        )
    if num_batches > 1:
        lines.append(
            f"A mean over M = {num_batches} batches still contains 1/{num_batches} of the noise between batches, in "
            "ĝ − g and in g; M → ∞ is an estimate without that noise, pooled over the steps."
        )
    return lines


def _wire_values(result: WireResult, boundary: tuple[int, int, int]) -> dict[str, Any]:
    """The measurements of a wire as plain values; NaN and infinity are null."""
    wire = result.wire
    return {
        "activations": wire.activations,
        "gradients": wire.gradients,
        "bits_per_element": {
            "activations": bits_per_element(wire.activations, boundary),
            "gradients": bits_per_element(wire.gradients, boundary),
        },
        "step_errors": _finite(result.step_errors),
        "expectation_errors": _finite(result.expectation_errors),
        "expectation_error_noiseless": result.noiseless_expectation_error(),
        "cosines": _finite(result.cosines),
        "delta": _finite([result.delta])[0],
        "below_step_limit": result.keeps_step_limit,
        "below_expectation_limit": result.keeps_expectation_limit,
        "groups": {name: _finite([sums.relative])[0] for name, sums in result.by_group().items()},
    }


def bits_per_element(spec: str | None, shape: tuple[int, ...]) -> float:
    """Encoded bits per element of a tensor of this shape, metadata included; None: fp32."""
    return 32.0 if spec is None else 8 * get_codec(spec).encoded_nbytes(shape) / math.prod(shape)


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}" if value < 0.1 else f"{value:.3g}"


def _brief(spec: str | None) -> str:
    return "none" if spec is None else CodecSpec.parse(spec).brief()
