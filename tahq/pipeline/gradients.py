"""What is done to gradients between backward and the optimizer, in a way that no cut can change.

Each parameter's squared norm is taken alone, in fp64; sums over parameters are left to whoever has
them all, by `math.fsum`, which is exact and therefore blind to the order.
"""

from collections.abc import Iterable

import torch
from torch.nn import Parameter


def squared_norms(parameters: Iterable[Parameter]) -> list[float]:
    """‖g‖² of each parameter's gradient in fp64, 0.0 where there is none; one device round trip.

    Returns:
        As many numbers as parameters, in order; NaN or infinity where a gradient holds one.
    """
    squares = [_squared_norm(parameter) for parameter in parameters]
    return [float(square) for square in torch.stack(squares).tolist()] if squares else []


def _squared_norm(parameter: Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros((), dtype=torch.float64, device=parameter.device)
    gradient = parameter.grad.detach().double().flatten()
    return torch.dot(gradient, gradient)


def scale_gradients(parameters: Iterable[Parameter], factor: float) -> None:
    """Multiply every gradient, in place; 1.0 touches nothing."""
    if factor == 1.0:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)  # one launch for many, as torch's own optimizers do
