"""Forward passes over the validation split, with what crosses the cuts packed as in training and not packed."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tahq.comm.link.frame import Direction, Purpose
from tahq.data.batches import BatchSource, StepBatch
from tahq.pipeline.chunk import Chunk, StepShape
from tahq.pipeline.loss import summed_cross_entropy


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Validation loss summed over `tokens`, in nats; known by the last stage."""

    tokens: int
    loss_sum: float
    raw_loss_sum: float


class ValidationPass:
    """Evaluates the present weights of a stage's chunks; arguments as of `StageEngine`."""

    def __init__(
        self,
        chunks: Mapping[int, Chunk],
        shape: StepShape,
        batches: BatchSource | None,
        device: torch.device,
        *,
        bf16: bool,
    ) -> None:
        self._chunks = chunks
        self._shape = shape
        self._batches = batches
        self._device = device
        self._bf16 = bf16
        self._held_out: tuple[int, StepBatch] | None = None

    def run(self, step: int, num_batches: int) -> EvaluationResult | None:
        """Validation loss with the wire's codec and without.

        Returns:
            The sums on the last stage, None elsewhere.
        """
        sums = {purpose: self._run_with(purpose, step, num_batches) for purpose in (Purpose.EVAL, Purpose.EVAL_RAW)}
        if all(chunk.outgoing is not None for chunk in self._chunks.values()):
            return None
        tokens = sum(self._batch(index).num_tokens for index in range(num_batches))
        return EvaluationResult(tokens, sums[Purpose.EVAL], sums[Purpose.EVAL_RAW])

    @torch.no_grad()
    def _run_with(self, purpose: Purpose, step: int, num_batches: int) -> float:
        every = range(num_batches * self._shape.num_micro_batches)
        for chunk in self._chunks.values():
            chunk.module.eval()
            if chunk.incoming is not None:
                chunk.incoming.post(step, purpose, Direction.FORWARD, every, self._shape.boundary)
        losses = [self._micro_batch(purpose, step, index) for index in every]
        return sum(losses)

    def _micro_batch(self, purpose: Purpose, step: int, index: int) -> float:
        batch_index, micro_batch = divmod(index, self._shape.num_micro_batches)
        loss = 0.0
        for number in sorted(self._chunks):
            chunk = self._chunks[number]
            if chunk.incoming is None:
                x = self._batch(batch_index).micro_batch(micro_batch)[0].to(self._device)
            else:
                x = chunk.incoming.receive(step, purpose, Direction.FORWARD, index, self._shape.boundary)
            y = chunk.compute(x, bf16=self._bf16)
            if chunk.outgoing is not None:
                chunk.outgoing.send(step, purpose, Direction.FORWARD, index, y)
            else:
                labels = self._batch(batch_index).micro_batch(micro_batch)[1].to(self._device)
                loss = float(summed_cross_entropy(y, labels))
        return loss

    def _batch(self, index: int) -> StepBatch:
        """A batch of the validation split; the last one asked for is kept."""
        if self._batches is None:
            raise AssertionError("first and last stage need a batch source")
        if self._held_out is None or self._held_out[0] != index:
            self._held_out = (index, self._batches.validation(index))
        return self._held_out[1]
