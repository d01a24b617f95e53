"""What our AdamWs have in common: groups, the step's number, and a state for every parameter from the first step on."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from tahq.memory.adam.bound_step import BoundStep, State
from tahq.memory.adam.side_streams import Job, run_side_by_side
from tahq.memory.adam.step import AdamwNumbers

if TYPE_CHECKING:  # needs triton
    from tahq.quant.gpu.launch import BoundLaunches


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
        self._bound: dict[Parameter, BoundStep | None] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on the gradients at hand; waits for no device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        run_side_by_side([job for group in self.param_groups for job in self._jobs_of(group)])
        return loss

    def _jobs_of(self, group: dict[str, Any]) -> Iterator[Job]:
        """The steps of a group's parameters; those of the same number have the same numbers."""
        numbers: dict[int, AdamwNumbers] = {}
        for parameter in group["params"]:
            state = self._state_of(parameter)
            if parameter.grad is None:
                continue
            state["step"] += 1
            step = int(state["step"])
            if step not in numbers:
                numbers[step] = AdamwNumbers.of(group, step)
            yield parameter, partial(self._step_of, parameter, state, numbers[step])

    def _step_of(self, parameter: Parameter, state: State, numbers: AdamwNumbers) -> None:
        gradient = parameter.grad
        assert gradient is not None
        bound = self._bound.get(parameter)
        if bound is None or not bound.fits(parameter, gradient, state):
            bound = BoundStep.of(self._bind, parameter, gradient, state)
            self._bound[parameter] = bound
        if bound is not None:
            bound.launches(gradient, numbers.in_order())
        else:
            _advance_contiguous(self._advance, parameter, state, numbers)

    def _bind(self, weight: torch.Tensor, gradient: torch.Tensor, state: State) -> "BoundLaunches | None":
        """Kernels that take steps on these very tensors, weight and gradient flat; None where none do."""
        return None

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
