"""Gradient scale, norms and tied gradients, which do not depend on how a step is divided.

Each parameter's squared norm is taken alone, in fp64; sums over parameters use
`math.fsum`, which is exact and therefore independent of the order.
"""

import math
from collections.abc import Callable, Iterable

import torch

from tahq.comm.link.frame import Direction, Purpose
from tahq.memory.agoq.stored_gradients import HoldsGradient, gradient_of, replace_gradient
from tahq.pipeline.boundary import Boundary


def gradient_scale(num_tokens: int) -> float:
    """The factor that gradients carry from the loss to the last backward of a step: a power of two, ≥ num_tokens.

    Without it an fp16 wire loses most of the gradient: that of a mean over 32,768 tokens has elements of 2e-8, and
    fp16's smallest step is 6e-8. In fp32 and bf16 a power of two rounds nothing. `num_tokens` ≥ 1 is that of the whole
    step, equal on every stage.
    """
    return math.ldexp(1.0, (num_tokens - 1).bit_length())


NORM_ELEMENTS = 2**24
"""Elements of a gradient that are squared at a time on a CPU, so that their fp64 copy stays small."""


def squared_norms(holders: Iterable[HoldsGradient], meanwhile: Callable[[], object] = lambda: None) -> list[float]:
    """‖g‖² of each gradient in fp64, in order, 0.0 without a gradient; one device round trip.

    NaN or infinity where a gradient has one. `meanwhile` is called while a device computes them.
    """
    squares, on_cuda = dict[int, torch.Tensor](), dict[torch.dtype, dict[int, torch.Tensor]]()
    for number, holder in enumerate(holders):
        if holder.grad is not None and holder.grad.is_cuda:
            on_cuda.setdefault(holder.grad.dtype, {})[number] = holder.grad
        else:
            squares[number] = squared_norm(holder)
    for gradients in on_cuda.values():  # in a few launches; each norm is the same with others beside it or alone
        norms = torch._foreach_norm([*gradients.values()], 2, torch.float64)
        squares.update(zip(gradients, torch._foreach_mul(norms, norms), strict=True))
    stacked = torch.stack([squares[number] for number in sorted(squares)]) if squares else torch.empty(0)
    meanwhile()
    return [float(square) for square in stacked.tolist()]


def squared_norm(holder: HoldsGradient) -> torch.Tensor:
    """‖g‖² in fp64, on the gradient's device."""
    gradient = gradient_of(holder)
    if gradient is None:
        return torch.zeros((), dtype=torch.float64, device=holder.device)
    if gradient.is_cuda:
        return torch._foreach_norm([gradient], 2, torch.float64)[0].square()
    wide = (part.double() for part in torch.split(gradient.detach().flatten(), NORM_ELEMENTS))
    return torch.stack([torch.dot(part, part) for part in wide]).sum()


class TiedEmbedding:
    """`model.tie: sync`: one stage's copies of the matrix that embedding and head share, and the link to the others.

    Both copies start with the same values. In each step both ends exchange their gradients, uncompressed, and add them
    in the same order (embedding + head), so gradients, optimizer states and weights stay equal. A tied model in one
    process adds the two gradients in another order; against it this is exact to a tolerance only.

    The boundary is None if one stage owns both copies.
    """

    def __init__(self, embedding: HoldsGradient | None, head: HoldsGradient | None, boundary: Boundary | None) -> None:
        self._embedding = embedding
        self._boundary = boundary
        self.uncounted = head
        """The copy whose gradient is left out of the global norm, which counts the other."""

    def holds(self, holder: object) -> bool:
        """Whether a holder is one of the two copies."""
        return holder is self._embedding or holder is self.uncounted

    def exchange(self, step: int) -> None:
        """Replace the gradient of each owned copy by the sum of both."""
        embedding, head = _gradient(self._embedding), _gradient(self.uncounted)
        if embedding is None and head is not None:
            embedding = self._swap(step, head, Direction.BACKWARD)
        elif head is None and embedding is not None:
            head = self._swap(step, embedding, Direction.FORWARD)
        if embedding is None or head is None:
            return
        total = embedding + head
        for holder in (self._embedding, self.uncounted):
            if holder is not None:
                replace_gradient(holder, total.clone())

    def _swap(self, step: int, mine: torch.Tensor, direction: Direction) -> torch.Tensor:
        if self._boundary is None:
            raise AssertionError("a stage that owns one of two tied copies needs the link to the other")
        theirs = self._boundary.name(step, Purpose.TIE, 0, Direction(1 - direction))
        self._boundary.post(theirs, tuple(mine.shape))
        self._boundary.send(self._boundary.name(step, Purpose.TIE, 0, direction), mine)
        return self._boundary.receive(theirs)


def _gradient(holder: HoldsGradient | None) -> torch.Tensor | None:
    if holder is None:
        return None
    gradient = gradient_of(holder)
    return torch.zeros(holder.shape, device=holder.device) if gradient is None else gradient.float()
