"""`tie: sync`: embedding and head stay one matrix although two stages own a copy of it.

Both start with the same values; each step both ends exchange their gradients, uncompressed, and both
add them in the same order (embedding + head). Equal gradients and equal optimizer states keep the
copies equal. A tied model in one process sums the two gradients in another order, so this promises
a tolerance against it and not equal bits.
"""

import torch

from tahq.comm.link.frame import Direction, Purpose
from tahq.pipeline.boundary import Boundary
from tahq.pipeline.update.gradients import HoldsGradient


class TiedEmbedding:
    """The exchange of one stage.

    Args:
        embedding: the embedding matrix, if this stage owns it.
        head: the head's matrix, if this stage owns it.
        boundary: the link between first and last stage; None where one stage owns both.
    """

    def __init__(self, embedding: HoldsGradient | None, head: HoldsGradient | None, boundary: Boundary | None) -> None:
        self._embedding = embedding
        self._head = head
        self._boundary = boundary

    @property
    def uncounted(self) -> HoldsGradient | None:
        """The copy whose gradient must not be counted a second time in the global norm."""
        return self._head

    def exchange(self, step: int) -> None:
        """Replace the gradient of each owned copy by the sum of both."""
        embedding, head = self._gradient(self._embedding), self._gradient(self._head)
        if embedding is None and head is not None:
            embedding = self._swap(step, head, Direction.BACKWARD)
        elif head is None and embedding is not None:
            head = self._swap(step, embedding, Direction.FORWARD)
        if embedding is None or head is None:
            return
        total = embedding + head
        for holder in (self._embedding, self._head):
            if holder is not None:
                holder.grad = total.clone()

    @staticmethod
    def _gradient(holder: HoldsGradient | None) -> torch.Tensor | None:
        if holder is None:
            return None
        return torch.zeros(holder.shape, device=holder.device) if holder.grad is None else holder.grad

    def _swap(self, step: int, mine: torch.Tensor, direction: Direction) -> torch.Tensor:
        if self._boundary is None:
            raise AssertionError("a stage that owns one of two tied copies needs the link to the other")
        shape = tuple(mine.shape)
        reply = Direction.BACKWARD if direction is Direction.FORWARD else Direction.FORWARD
        self._boundary.post(step, Purpose.TIE, reply, [0], shape)
        self._boundary.send(step, Purpose.TIE, direction, 0, mine)
        return self._boundary.receive(step, Purpose.TIE, reply, 0, shape)
