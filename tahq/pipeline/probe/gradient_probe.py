"""Measures what codecs do to a model's gradients, along the trajectory of training without them.

At each probed step the weights stand still while M batches are computed: the step's own and the M − 1 after it. For
each batch, g is the gradient without codecs and ĝ that of a wire, from the same weights, samples and dropout masks.
Two comparisons are made (TAH-Quant, Assumption 4.4): ĝ with g batch by batch (Eq. 9), and their means over the M
batches, which stand for the expectation (Eq. 10). Then g of the step's own batch moves the weights.

Invariant: the weights and every g do not depend on the wires, nor on the number of batches.
Memory besides weights and gradients, in fp32 copies of the gradient: one for g; with M > 1 one for its sum, and one per
wire for the sum of its errors.
"""

import math
from collections.abc import Callable, Sequence

import torch

from tahq.data.batches import BatchSource
from tahq.errors import NonFiniteError
from tahq.pipeline.probe.cut_model import UNCOMPRESSED, CutModel, ProbedWire, copied_gradients
from tahq.pipeline.probe.result import GroupSums, ProbedStep, StepErrors, compare

Gradients = dict[str, torch.Tensor]


class GradientProbe:
    """A model, its data, and the wires to try.

    Args:
        model: as the run would cut it.
        batches: the run's.
        wires: the codecs to try.
        update: takes the optimizer's step of this number with the present gradients.
        on_gradient: called after each forward and backward pass over a batch, for a progress bar.

    Raises:
        ConfigError: a codec that does not exist or cannot be probed.
    """

    def __init__(
        self,
        model: CutModel,
        batches: BatchSource,
        wires: Sequence[ProbedWire],
        update: Callable[[int], None],
        on_gradient: Callable[[], None] = lambda: None,
    ) -> None:
        for wire in wires:
            wire.codecs()
        self._model = model
        self._batches = batches
        self._wires = tuple(wires)
        self._update = update
        self._on_gradient = on_gradient
        self._groups = model.groups()

    def train(self, step: int) -> float:
        """Take a training step without codecs; returns its loss in nats per token."""
        loss = self._compute(step, UNCOMPRESSED)
        self._update(step)
        return loss

    def probe(self, step: int, num_batches: int) -> ProbedStep:
        """Measure every wire at the present weights, then take this training step without codecs.

        Args:
            step: the next training step; its batch and those of the following steps are computed.
            num_batches: M ≥ 1.

        Raises:
            NonFiniteError: a gradient without codecs is NaN or infinite.
            CodecError: a codec refuses a tensor.
        """
        sum_reference: Gradients = {}
        sum_errors: list[Gradients] = [{} for _ in self._wires]
        by_batch: list[list[GroupSums]] = []
        # Last to first, so that the gradient that remains is the one for the step.
        for batch_step in reversed(range(step, step + num_batches)):
            loss, reference = self._reference(batch_step)
            compared: list[GroupSums] = []
            for wire, sum_error in zip(self._wires, sum_errors, strict=True):
                self._compute(batch_step, wire)
                error = self._subtract(reference)
                compared.append(self._by_group(reference, error))
                if num_batches > 1:
                    _add(sum_error, error)
            by_batch.insert(0, compared)
            if num_batches > 1:
                _add(sum_reference, reference)
        for name, parameter in self._model.parameters.items():
            parameter.grad = reference[name]
        means = [self._by_group(sum_reference, sums) if num_batches > 1 else None for sums in sum_errors]
        self._update(step)
        by_wire = zip(zip(*by_batch, strict=True), means, strict=True)
        return ProbedStep(step, loss, tuple(StepErrors(step, batches, mean) for batches, mean in by_wire))

    def _reference(self, step: int) -> tuple[float, Gradients]:
        """Loss and gradients of one batch without codecs."""
        loss = self._compute(step, UNCOMPRESSED)
        reference = copied_gradients(self._model.parameters)
        if not (math.isfinite(loss) and all(bool(g.isfinite().all()) for g in reference.values())):
            raise NonFiniteError(
                f"step {step}: loss ({loss:.3g}) or gradient is NaN or infinite without any codec, so there is nothing "
                "to compare with; lower training.lr, or start from other weights"
            )
        return loss, reference

    def _compute(self, step: int, wire: ProbedWire) -> float:
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


def _add(total: Gradients, terms: Gradients) -> None:
    for name, term in terms.items():
        if name in total:
            total[name] += term
        else:
            total[name] = term.clone()
