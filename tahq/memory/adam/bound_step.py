"""A parameter's step as kernels bound to its tensors, for as long as these are the same."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Optional

import torch
from torch.nn import Parameter

if TYPE_CHECKING:  # needs triton
    from tahq.quant.gpu.launch import BoundLaunches

State = dict[str, torch.Tensor]
"""What an optimizer keeps of a parameter, by name; `step` is its number of steps, on the host."""
_ALIGNMENT = 16
Bind = Callable[[torch.Tensor, torch.Tensor, State], Optional["BoundLaunches"]]
"""Launches for a weight and a gradient, both flat, and a state; None where kernels do not take them."""


class BoundStep:
    """Launches on a parameter's weight and states, and on gradients of one type."""

    __slots__ = ("_address", "_gradient_type", "_kept", "launches")

    def __init__(self, launches: "BoundLaunches", parameter: Parameter, gradient: torch.Tensor, state: State) -> None:
        self.launches = launches
        self._address, self._gradient_type = parameter.data_ptr(), gradient.dtype
        self._kept = tuple((name, tensor) for name, tensor in state.items() if name != "step")

    @classmethod
    def of(cls, bind: Bind, parameter: Parameter, gradient: torch.Tensor, state: State) -> Optional["BoundStep"]:
        """None where the tensors are not contiguous, or `bind` has nothing for them."""
        if not parameter.is_contiguous() or not _is_plain(gradient):
            return None
        launches = bind(parameter.detach().view(-1), gradient.detach().view(-1), state)
        return None if launches is None else cls(launches, parameter, gradient, state)

    def fits(self, parameter: Parameter, gradient: torch.Tensor, state: State) -> bool:
        """Whether weight and states are the tensors that these were bound to, and the gradient is of that type."""
        return (
            parameter.data_ptr() == self._address
            and parameter.is_contiguous()
            and gradient.dtype == self._gradient_type
            and _is_plain(gradient)
            and all(state.get(name) is tensor for name, tensor in self._kept)
        )


def _is_plain(gradient: torch.Tensor) -> bool:
    return gradient.layout == torch.strided and gradient.is_contiguous() and gradient.data_ptr() % _ALIGNMENT == 0
