"""Measures what codecs do to a model's gradients, along the trajectory that training without them takes.

At each probed step weights stand still while M batches are computed: the step's own and the M − 1 that follow it.
Of each batch, g is the gradient without codecs, and ĝ that of a wire, from the same weights, samples and dropout
masks. Two things are compared (TAH-Quant, Assumption 4.4): ĝ with g batch by batch (Eq. 9), and their means over the
M batches, which stand for the expectation (Eq. 10). Then g of the step's own batch moves the weights.

Invariant: the weights and every g are the same whatever wires are probed, and however many batches.
Memory beside weights and gradients, in copies of the gradient in fp32: one for g, and with M > 1 one for its sum and
one a wire for the sum of its errors.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tahq.data.batches import BatchSource
from tahq.errors import NonFiniteError
from tahq.pipeline.probe.cut_model import CutModel, Wire, copied_gradients
from tahq.pipeline.probe.result import GroupSums, compare

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepErrors:
    """What one wire did to the gradients of one step's weights.

    Attributes:
        step: steps taken before.
        batches: of each batch, the step's own first; the sums by group of parameters.
        mean: of the sum over the batches; None where there was only one batch.
    """

    step: int
    batches: tuple[GroupSums, ...]
    mean: GroupSums | None


@dataclass(frozen=True, slots=True)
class ProbedStep:
    """One probed step: its loss without codecs (nats a token), and the errors of each wire, in their order."""

    step: int
    loss: float
    wires: tuple[StepErrors, ...]


class GradientProbe:
    """A model, its data, and the wires to be tried on it.

    Args:
        model: cut as the run would be.
        batches: the run's.
        wires: what is tried.
        update: takes the optimizer's step number `step` with the gradients that are there.
        on_gradient: called after each forward and backward pass over a batch, for a progress bar.

    Raises:
        ConfigError: a codec that does not exist or cannot be probed.
    """

    def __init__(
        self,
        model: CutModel,
        batches: BatchSource,
        wires: Sequence[Wire],
        update: Callable[[int], None],
        on_gradient: Callable[[], None] = lambda: None,
    ) -> None:
        for wire in wires:
            wire.cut()
        self._model = model
        self._batches = batches
        self._wires = tuple(wires)
        self._update = update
        self._on_gradient = on_gradient
        self._groups = model.groups()

    def train(self, step: int) -> float:
        """A step of training without codecs; returns its loss in nats a token."""
        loss = self._compute(step, Wire())
        self._update(step)
        return loss

    def probe(self, step: int, num_batches: int) -> ProbedStep:
        """Measure every wire at the present weights, then train this step without codecs.

        Args:
            step: the next step of training; its batch and those of the following steps are computed.
            num_batches: M, 1 or more.

        Raises:
            NonFiniteError: a gradient without codecs is NaN or infinite.
            CodecError: a codec refuses what crosses a cut.
        """
        sums = _Sums(len(self._wires)) if num_batches > 1 else None
        errors: list[list[GroupSums]] = []
        # Last to first, so that what remains at the end is the gradient that the step is taken with.
        for batch_step in reversed(range(step, step + num_batches)):
            loss, reference, compared = self._compare(batch_step, sums)
            errors.insert(0, compared)
        for name, parameter in self._model.parameters.items():
            parameter.grad = reference[name]
        measured = self._collect(step, errors, sums)
        self._update(step)
        return ProbedStep(step, loss, measured)

    def _compare(self, step: int, sums: "_Sums | None") -> tuple[float, Gradients, list[GroupSums]]:
        """Loss, g and each wire's error for one batch."""
        loss = self._compute(step, Wire())
        reference = copied_gradients(self._model.parameters)
        self._check_finite(step, loss, reference)
        if sums is not None:
            sums.add_reference(reference)
        compared = []
        for number, wire in enumerate(self._wires):
            self._compute(step, wire)
            error = self._subtract(reference)
            compared.append(self._by_group(reference, error))
            if sums is not None:
                sums.add_error(number, error)
        return loss, reference, compared

    def _compute(self, step: int, wire: Wire) -> float:
        loss = self._model.compute_gradients(self._batches.train(step), step, wire)
        self._on_gradient()
        return loss

    def _subtract(self, reference: Gradients) -> Gradients:
        """ĝ − g, in the memory of ĝ."""
        error = {}
        for name, parameter in self._model.parameters.items():
            gradient, parameter.grad = parameter.grad, None
            error[name] = torch.zeros_like(parameter) if gradient is None else gradient
            error[name] -= reference[name]
        return error

    def _by_group(self, reference: Gradients, error: Gradients) -> GroupSums:
        return {
            group: compare(reference, {name: error[name] for name in parameters})
            for group, parameters in self._groups.items()
        }

    def _check_finite(self, step: int, loss: float, reference: Gradients) -> None:
        if math.isfinite(loss) and all(bool(g.isfinite().all()) for g in reference.values()):
            return
        raise NonFiniteError(
            f"step {step}: loss ({loss:.3g}) or gradient is NaN or infinite without any codec, so there is nothing to "
            "compare with; lower training.lr, or start from other weights"
        )

    def _collect(self, step: int, errors: list[list[GroupSums]], sums: "_Sums | None") -> tuple[StepErrors, ...]:
        return tuple(
            StepErrors(
                step,
                tuple(batch[number] for batch in errors),
                None if sums is None else self._by_group(sums.reference, sums.errors[number]),
            )
            for number in range(len(self._wires))
        )


class _Sums:
    """Σ g and, by wire, Σ (ĝ − g) over the batches of a step; the means differ by the same factor."""

    def __init__(self, num_wires: int) -> None:
        self.reference: Gradients = {}
        self.errors: list[Gradients] = [{} for _ in range(num_wires)]

    def add_reference(self, gradients: Gradients) -> None:
        _add(self.reference, gradients)

    def add_error(self, wire: int, error: Gradients) -> None:
        _add(self.errors[wire], error)


def _add(total: Gradients, terms: Gradients) -> None:
    for name, term in terms.items():
        if name in total:
            total[name] += term
        else:
            total[name] = term.clone()
