"""What is done to gradients between backward and the optimizer, in a way that no cut can change.

Each parameter's squared norm is taken alone, in fp64; sums over parameters are left to whoever has
them all, by `math.fsum`, which is exact and therefore blind to the order.
"""

from collections.abc import Iterable
from typing import Protocol

import torch

NORM_ELEMENTS = 2**24
"""Of a gradient that are squared at a time, so that its copy in fp64 stays small."""


class HoldsGradient(Protocol):
    """A parameter, or a low-rank weight, whose gradient is a projected one."""

    grad: torch.Tensor | None

    @property
    def shape(self) -> torch.Size:
        """Of the weight; of the gradient too, unless that is a projected one."""

    @property
    def device(self) -> torch.device:
        """Where the gradient is, or would be."""


def squared_norms(holders: Iterable[HoldsGradient]) -> list[float]:
    """‖g‖² of each gradient in fp64, 0.0 where there is none; one device round trip.

    Returns:
        As many numbers as holders, in order; NaN or infinity where a gradient holds one.
    """
    squares = [squared_norm(holder) for holder in holders]
    return [float(square) for square in torch.stack(squares).tolist()] if squares else []


def squared_norm(holder: HoldsGradient) -> torch.Tensor:
    """‖g‖² in fp64, on the gradient's device."""
    if holder.grad is None:
        return torch.zeros((), dtype=torch.float64, device=holder.device)
    parts = (part.double() for part in torch.split(holder.grad.detach().flatten(), NORM_ELEMENTS))
    return torch.stack([torch.dot(part, part) for part in parts]).sum()


def scale_gradients(holders: Iterable[HoldsGradient], factor: float) -> None:
    """Multiply every gradient, in place; 1.0 touches nothing."""
    if factor == 1.0:
        return
    gradients = [holder.grad for holder in holders if holder.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)  # one launch for many, as torch's own optimizers do
