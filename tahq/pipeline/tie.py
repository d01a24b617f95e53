"""`model.tie: sync`: embedding and head stay equal although two stages own a copy of the matrix.

Both copies start with the same values. In each step both ends exchange their gradients, uncompressed, and add them in
the same order (embedding + head), so gradients, optimizer states and weights stay equal. A tied model in one process
adds the two gradients in another order; against it this is exact to a tolerance only.
"""

import torch

from tahq.comm.link.frame import Direction, Purpose
from tahq.pipeline.boundary import Boundary
from tahq.pipeline.gradients import HoldsGradient


class TiedEmbedding:
    """One stage's part of the exchange: the copies that it owns, and the link between first and last stage.

    The boundary is None if one stage owns both copies.
    """

    def __init__(self, embedding: HoldsGradient | None, head: HoldsGradient | None, boundary: Boundary | None) -> None:
        self._embedding = embedding
        self._boundary = boundary
        self.uncounted = head
        """The copy whose gradient is left out of the global norm, which counts the other."""

    def exchange(self, step: int) -> None:
        """Replace the gradient of each owned copy by the sum of both."""
        embedding, head = self._gradient(self._embedding), self._gradient(self.uncounted)
        if embedding is None and head is not None:
            embedding = self._swap(step, head, Direction.BACKWARD)
        elif head is None and embedding is not None:
            head = self._swap(step, embedding, Direction.FORWARD)
        if embedding is None or head is None:
            return
        total = embedding + head
        for holder in (self._embedding, self.uncounted):
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
        theirs = self._boundary.name(step, Purpose.TIE, 0, Direction(1 - direction))
        self._boundary.post(theirs, tuple(mine.shape))
        self._boundary.send(self._boundary.name(step, Purpose.TIE, 0, direction), mine)
        return self._boundary.receive(theirs)
