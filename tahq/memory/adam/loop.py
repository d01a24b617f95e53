"""The part that all of tahq's AdamWs share: groups, step counts, states, and kernels bound to a parameter's tensors."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from tahq.memory.adam.step import AdamwNumbers

if TYPE_CHECKING:  # needs triton
    from tahq.quant.gpu.launch import BoundLaunches

State = dict[str, torch.Tensor]
"""An optimizer's state of one parameter, by name; `step` is its number of steps, on the host."""
Job = tuple[torch.Tensor, Callable[[], None]]
"""A job, and the tensor by whose size and device it is scheduled."""
STREAMS = 3
"""CUDA streams that share the work, the caller's included."""
_ALIGNMENT = 16
"""Bytes: kernels are compiled for tensors that begin at a multiple of it."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor of a parameter's optimizer state: checkpoints are checked against it, and memory is counted.

    `dtype` None: the parameter's. `is_counter`: it lies on the CPU wherever the parameter is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    is_counter: bool = False


StateSpecs = Mapping[str, StateSpec]
"""By name, such as `exp_avg`."""


def states_nbytes(specs: StateSpecs, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of a parameter's states without counters; `dtype` is the parameter's."""
    return sum(math.prod(spec.shape) * (spec.dtype or dtype).itemsize for spec in specs.values() if not spec.is_counter)


@cache
def has_ptx(device_type: str) -> bool:
    """Whether kernels with inline PTX run on a kind of device: NVIDIA's, not AMD's, with triton installed."""
    return device_type == "cuda" and torch.version.hip is None and find_spec("triton") is not None


class AdamwLoop(Optimizer):
    """AdamW over single parameters; subclasses define how moments are stored.

    The states of all parameters are made at the first step, also of those without a gradient: the tensors of a
    checkpoint do not depend on which layers were used. A parameter without a gradient keeps its weight, its moments
    and its own number of steps.

    Args:
        params: groups, or parameters.
        lr, betas, eps, weight_decay: as in torch's AdamW; decay is decoupled.
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
        self._bound: dict[Parameter, _BoundStep | None] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step on the parameters' gradients; the host waits for no device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        run_side_by_side([job for group in self.param_groups for job in self._jobs_of(group)])
        return loss

    def _jobs_of(self, group: dict[str, Any]) -> Iterator[Job]:
        numbers: dict[int, AdamwNumbers] = {}
        for parameter in group["params"]:
            state: State = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state.update(self._moments(parameter))
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
            bound = self._bound[parameter] = _BoundStep.of(self._bind, parameter, gradient, state)
        if bound is not None:
            bound.launches(gradient, numbers.in_order())
            return
        weight = parameter.detach()
        flat = weight.contiguous().view(-1)  # shares the weight's memory unless its strides are unusual
        flat_gradient = gradient.detach().contiguous().view(-1)
        if launches := self._bind(flat, flat_gradient, state):
            launches(flat_gradient, numbers.in_order())
        else:
            self._advance(flat, flat_gradient, state, numbers)
        if flat.data_ptr() != weight.data_ptr():
            weight.copy_(flat.view(weight.shape))

    @abstractmethod
    def _bind(self, weight: torch.Tensor, gradient: torch.Tensor, state: State) -> "BoundLaunches | None":
        """Kernels that take steps on these flat tensors and state; None where no kernel can."""

    @abstractmethod
    def _moments(self, parameter: Parameter) -> State:
        """Moments of 0."""

    @abstractmethod
    def _advance(self, weight: torch.Tensor, gradient: torch.Tensor, state: State, numbers: AdamwNumbers) -> None:
        """Take one step without `_bind`, in place, on flat contiguous tensors [N]."""


class _BoundStep:
    """Launches bound to a parameter's weight and states, for gradients of one dtype."""

    __slots__ = ("_address", "_gradient_type", "_kept", "launches")

    def __init__(self, launches: "BoundLaunches", parameter: Parameter, gradient: torch.Tensor, state: State) -> None:
        self.launches = launches
        self._address, self._gradient_type = parameter.data_ptr(), gradient.dtype
        self._kept = tuple((name, tensor) for name, tensor in state.items() if name != "step")

    @classmethod
    def of(
        cls,
        bind: Callable[[torch.Tensor, torch.Tensor, State], Optional["BoundLaunches"]],
        parameter: Parameter,
        gradient: torch.Tensor,
        state: State,
    ) -> Optional["_BoundStep"]:
        """None where the tensors are not contiguous, or `bind` has no kernels for them."""
        if not parameter.is_contiguous() or not _is_plain(gradient):
            return None
        launches = bind(parameter.detach().view(-1), gradient.detach().view(-1), state)
        return None if launches is None else cls(launches, parameter, gradient, state)

    def fits(self, parameter: Parameter, gradient: torch.Tensor, state: State) -> bool:
        """Whether weight and states are still the bound tensors, and the gradient has the bound dtype."""
        return (
            parameter.data_ptr() == self._address
            and parameter.is_contiguous()
            and gradient.dtype == self._gradient_type
            and _is_plain(gradient)
            and all(state.get(name) is tensor for name, tensor in self._kept)
        )


def _is_plain(gradient: torch.Tensor) -> bool:
    return gradient.layout == torch.strided and gradient.is_contiguous() and gradient.data_ptr() % _ALIGNMENT == 0


def run_side_by_side(jobs: Sequence[Job], streams: int = STREAMS) -> None:
    """Run independent jobs, those on a CUDA device on several streams; later work of the caller waits for all of them.

    In one stream a kernel begins when the last program of the one before has ended, and with a hundred tensors of some
    millions of elements the device is half empty for a quarter of the time. The host does not wait. A job must not
    return memory that it allocates.
    """
    for device in sorted({tensor.device for tensor, _ in jobs}, key=str):
        here = [job for job in jobs if job[0].device == device]
        count = min(streams, len(here)) if device.type == "cuda" else 1
        own, *others = _dealt_out(here, count) if count > 1 else [here]
        side = [_side_stream(device, number) for number in range(1, count)]
        for stream, part in zip(side, others, strict=True):
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _, run in part:
                    run()
        for _, run in own:
            run()
        for stream in side:
            torch.cuda.current_stream(device).wait_stream(stream)


def _dealt_out(jobs: Sequence[Job], count: int) -> list[list[Job]]:
    """The largest job first, each to the stream with the least work."""
    parts: list[list[Job]] = [[] for _ in range(count)]
    loads = [0] * count
    for job in sorted(jobs, key=lambda job: -job[0].numel()):
        least = loads.index(min(loads))
        parts[least].append(job)
        loads[least] += job[0].numel()
    return parts


@lru_cache(maxsize=64)
def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
