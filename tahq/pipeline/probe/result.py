"""The error of compressed gradients, and a probe's result for one wire against Assumption 4.4 of TAH-Quant.

With e = ĝ − g the error is kept as three sums, ‖g‖², ‖e‖² and ⟨g, e⟩ in fp64, which can be added over parameters.
Relative error and cosine follow from them, for one parameter, a stage or the whole model.

The assumption asks for some δ in (0, 1] with ‖ĝ − g‖² ≤ (1 − δ)‖g‖² for every stochastic gradient (Eq. 9), and the
same for the expectations (Eq. 10). Its authors measured less than 0.4 and less than 0.1 (§4.1, Figure 1: Gemma2-2B on
Math-7K, tiles of 64 and 32); these are the limits here. A mean over M batches stands for the expectation; 1/M of the
noise between batches remains in it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from tahq.pipeline.probe.cut_model import ProbedWire

STEP_LIMIT = 0.4
EXPECTATION_LIMIT = 0.1


@dataclass(frozen=True, slots=True)
class ErrorSums:
    """‖g‖², ‖ĝ − g‖² and ⟨g, ĝ − g⟩ over some parameters."""

    signal: float
    error: float
    product: float

    @classmethod
    def over(cls, parts: Iterable[Self]) -> Self:
        """The sums over all parts, exact whatever their order."""
        rows = [(part.signal, part.error, part.product) for part in parts] or [(0.0, 0.0, 0.0)]
        columns = zip(*rows, strict=True)
        return cls(*(math.fsum(column) if all(map(math.isfinite, column)) else math.nan for column in columns))

    @property
    def relative(self) -> float:
        """‖ĝ − g‖² / ‖g‖² (TAH-Quant Eq. 9 and 10); infinite if ĝ is not finite, or if only g is zero."""
        if self.error == 0:
            return 0.0
        return self.error / self.signal if math.isfinite(self.error) and self.signal > 0 else math.inf

    @property
    def cosine(self) -> float:
        """⟨g, ĝ⟩ / (‖g‖·‖ĝ‖), 1 if both are zero; NaN if ĝ is not finite."""
        if not math.isfinite(self.error):
            return math.nan
        compressed = max(0.0, self.signal + 2 * self.product + self.error)
        if self.signal == 0 or compressed == 0:
            return 1.0 if self.error == 0 else 0.0
        return max(-1.0, min(1.0, (self.signal + self.product) / math.sqrt(self.signal * compressed)))


GroupSums = Mapping[str, ErrorSums]
"""By group of parameters: embedding, each stage, head."""


def compare(reference: Mapping[str, torch.Tensor], error: Mapping[str, torch.Tensor]) -> ErrorSums:
    """The sums over some parameters, of g and ĝ − g (fp32) by name; one device round trip.

    Example: g = (3, 4), ĝ = (3, 5): signal 25, error 1, product 4; relative error 0.04.
    """
    sums = []
    for name in error:
        g, e = reference[name].flatten().double(), error[name].flatten().double()
        sums.append(torch.stack([g.dot(g), e.dot(e), g.dot(e)]))
    rows = torch.stack(sums).tolist() if sums else []
    return ErrorSums.over(ErrorSums(*row) for row in rows)


@dataclass(frozen=True, slots=True)
class StepErrors:
    """The error of one wire at the weights after `step` steps.

    `batches` has the sums of each batch, the step's own first; `mean` those of the sum over the batches, None of one.
    """

    step: int
    batches: tuple[GroupSums, ...]
    mean: GroupSums | None


@dataclass(frozen=True, slots=True)
class ProbedStep:
    """One probed step: its loss without codecs (nats per token), and the errors of each wire, in order."""

    step: int
    loss: float
    wires: tuple[StepErrors, ...]


@dataclass(frozen=True, slots=True)
class WireResult:
    """All measurements of one wire; at least one step with at least one batch."""

    wire: ProbedWire
    steps: tuple[StepErrors, ...]

    @property
    def step_errors(self) -> list[float]:
        """‖ĝ − g‖² / ‖g‖² of every batch of every step (Eq. 9)."""
        return [_total(batch).relative for batch in self._batches()]

    @property
    def expectation_errors(self) -> list[float]:
        """The same of the means over the batches, one per step (Eq. 10); empty if steps had one batch."""
        return [_total(step.mean).relative for step in self.steps if step.mean is not None]

    @property
    def cosines(self) -> list[float]:
        """⟨g, ĝ⟩ / (‖g‖·‖ĝ‖) of every batch."""
        return [_total(batch).cosine for batch in self._batches()]

    @property
    def delta(self) -> float:
        """The largest δ that all measurements allow: 1 − the largest error; the assumption needs it above 0."""
        return 1.0 - max([*self.step_errors, *self.expectation_errors])

    @property
    def keeps_step_limit(self) -> bool:
        """Whether every batch is below the paper's 0.4."""
        return max(self.step_errors) < STEP_LIMIT

    @property
    def keeps_expectation_limit(self) -> bool | None:
        """Whether every mean is below the paper's 0.1; None if none was measured."""
        errors = self.expectation_errors
        return max(errors) < EXPECTATION_LIMIT if errors else None

    def noiseless_expectation_error(self) -> float | None:
        """Estimate of Eq. 10 for infinitely many batches, pooled over the steps.

        For independent vectors, E‖Σ v‖² = M·E‖v‖² + M(M − 1)‖E v‖²; solved for ‖E v‖², for e and for g.

        Returns:
            ‖E e‖² / ‖E g‖², 0 if the estimate of the error is negative; None if steps had one batch, or too few for a
            positive estimate of ‖E g‖².
        """
        several = [step for step in self.steps if step.mean is not None]
        signal = math.fsum(_squared_expectation(step, "signal") for step in several)
        error = math.fsum(_squared_expectation(step, "error") for step in several)
        return max(0.0, error) / signal if signal > 0 and math.isfinite(error) else None

    def by_group(self) -> dict[str, ErrorSums]:
        """The sums of each group of parameters over every batch."""
        names = self.steps[0].batches[0]
        return {name: ErrorSums.over(batch[name] for batch in self._batches()) for name in names}

    def _batches(self) -> Iterator[GroupSums]:
        return (batch for step in self.steps for batch in step.batches)


def collect(wires: Sequence[ProbedWire], probed: Sequence[ProbedStep]) -> list[WireResult]:
    """The measurements of all steps, by wire."""
    return [WireResult(wire, tuple(step.wires[number] for step in probed)) for number, wire in enumerate(wires)]


def _total(groups: GroupSums) -> ErrorSums:
    return ErrorSums.over(groups.values())


def _squared_expectation(step: StepErrors, which: str) -> float:
    """Unbiased estimate of ‖E v‖², where v is g (`signal`) or ĝ − g (`error`)."""
    if step.mean is None:
        raise AssertionError("needs a step with several batches")
    num = len(step.batches)
    singles = math.fsum(getattr(_total(batch), which) for batch in step.batches)
    return float(getattr(_total(step.mean), which) - singles) / (num * (num - 1))
