"""What our AdamWs have in common: groups, the step's number, and a state for every parameter from the first step on."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from tahq.memory.adamw_step import AdamwNumbers
from tahq.memory.side_streams import run_side_by_side

State = dict[str, torch.Tensor]


class AdamwLoop(Optimizer):
    """AdamW over single parameters, with moments that a subclass keeps as it likes.

    The states of all parameters are made at the first step, also of those that get no gradient: what a
    snapshot has does not depend on which experts or layers were used. A parameter without a gradient keeps
    its weight, its moments and its own number of steps.

    Args:
        params: groups, or parameters.
        lr, betas, eps, weight_decay: as of torch's AdamW; decay is decoupled.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on the gradients at hand; waits for no device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        run_side_by_side(
            [
                (parameter, partial(self._step_of, parameter, state, group))
                for group in self.param_groups
                for parameter in group["params"]
                if (state := self._state_of(parameter)) and parameter.grad is not None
            ]
        )
        return loss

    def _step_of(self, parameter: Parameter, state: State, group: dict[str, Any]) -> None:
        state["step"] += 1
        numbers = AdamwNumbers.of(group, int(state["step"]))
        _advance_contiguous(self._advance, parameter, state, numbers)

    def _state_of(self, parameter: Parameter) -> State:
        state: State = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update(self._moments(parameter))
        return state

    @abstractmethod
    def _moments(self, parameter: Parameter) -> State:
        """Moments of 0."""

    @abstractmethod
    def _advance(self, weight: torch.Tensor, gradient: torch.Tensor, state: State, numbers: AdamwNumbers) -> None:
        """Take one step, in place, of flat contiguous tensors [N]; moments in the state may have any shape."""


def _advance_contiguous(
    advance: Callable[[torch.Tensor, torch.Tensor, State, AdamwNumbers], None],
    parameter: Parameter,
    state: State,
    numbers: AdamwNumbers,
) -> None:
    weight, gradient = parameter.detach(), parameter.grad
    assert gradient is not None
    flat = weight.contiguous().view(-1)  # shares the weight's memory but where its strides are odd
    advance(flat, gradient.detach().contiguous().view(-1), state, numbers)
    if flat.data_ptr() != weight.data_ptr():
        weight.copy_(flat.view(weight.shape))
