"""The base of tahq's AdamW optimizers: groups, step counts, states, streams, and kernels bound to tensors."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from tahq.kernel_launch import ALIGNMENT, has_triton
from tahq.randomness import derive_seed

if TYPE_CHECKING:  # needs triton
    from tahq.quant.gpu.launch import BoundLaunches

State = dict[str, torch.Tensor]
"""An optimizer's state of one parameter, by name; `step` is its number of steps, on the host."""
STREAMS = 3  # CUDA streams that share the work, the caller's included


class AdamwNumbers(NamedTuple):
    """The scalars of one step of one parameter in fp64, in the order of the kernels' arguments."""

    beta1: float
    rest1: float  # 1 − β₁
    beta2: float
    rest2: float  # 1 − β₂
    decay: float  # 1 − η·λ
    rate: float  # η/(1 − β₁^t)
    root_factor: float  # 1/√(1 − β₂^t)
    epsilon: float

    @classmethod
    def of(cls, group: Mapping[str, Any], step: int) -> "AdamwNumbers":
        """From an optimizer's group (`lr`, `betas`, `eps`, `weight_decay`) and the step t = 1, 2, …."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        decay, root_factor = 1 - lr * group["weight_decay"], 1 / math.sqrt(1 - beta2**step)
        return cls(beta1, 1 - beta1, beta2, 1 - beta2, decay, lr / (1 - beta1**step), root_factor, group["eps"])


class Task(NamedTuple):
    """One parameter's part of a step; `key`: of the draws by which bf16 is rounded, None: to nearest."""

    parameter: Parameter
    gradient: torch.Tensor
    state: State
    numbers: AdamwNumbers
    key: int | None


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor of a parameter's optimizer state: made from it, checked against it in checkpoints, and counted.

    `dtype` None: the parameter's. `initial`: its elements before the first step. `is_counter`: it lies on the CPU
    wherever the parameter is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    initial: int = 0
    is_counter: bool = False


StateSpecs = Mapping[str, StateSpec]  # By name, such as `exp_avg`
STEP_COUNTER: StateSpecs = {"step": StateSpec((), torch.float32, is_counter=True)}


def states_nbytes(specs: StateSpecs, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of a parameter's states without counters; `dtype` is the parameter's."""
    return sum(math.prod(spec.shape) * (spec.dtype or dtype).itemsize for spec in specs.values() if not spec.is_counter)


def new_states(specs: StateSpecs, device: torch.device) -> State:
    """The states before the first step; counters on the CPU."""
    return {
        name: torch.full(spec.shape, spec.initial, dtype=spec.dtype, device="cpu" if spec.is_counter else device)
        for name, spec in specs.items()
    }


@cache
def has_ptx(device_type: str) -> bool:
    """Whether kernels with inline PTX run on a kind of device: NVIDIA's, not AMD's, with triton installed."""
    return device_type == "cuda" and torch.version.hip is None and has_triton()


class AdamwLoop(Optimizer):
    """AdamW over single parameters; subclasses define the step with their states.

    The first step makes the states of all parameters, including those without a gradient, so the tensors of a
    checkpoint do not depend on which layers were used. A parameter without a gradient keeps its weight, its moments
    and its own number of steps.

    `states`: a parameter's shape -> its states; `is_stochastic`: bf16 is rounded by draws, whose key is a hash of the
    step and of the parameter's tuple in its group's `draws`. The other arguments are those of torch's AdamW; decay is
    decoupled.
    """

    reads_host_memory = False
    """Whether the kernels of a step take states in pinned memory."""

    def __init__(
        self,
        params: Any,
        states: Callable[[tuple[int, ...]], StateSpecs],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        is_stochastic: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.is_stochastic = is_stochastic
        self._states = states
        self._bound: dict[Parameter, tuple[tuple[object, ...], BoundLaunches | None]] = {}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take one step on the parameters' gradients; the host waits for no device."""
        tasks = [task for group in self.param_groups for task in self._tasks_of(group)]
        _run_side_by_side(self._take_together(tasks), self._step_of)

    def states_of(self, parameter: Parameter) -> State:
        """A parameter's states, made if it has none."""
        state: State = self.state[parameter]
        if not state:
            state.update(new_states(self._states(tuple(parameter.shape)), parameter.device))
        return state

    def _tasks_of(self, group: dict[str, Any]) -> Iterator[Task]:
        states = [(parameter, self.states_of(parameter)) for parameter in group["params"]]
        moving = [(parameter, state) for parameter, state in states if parameter.grad is not None]
        if not moving:
            return
        counters = [state["step"] for _, state in moving]
        torch._foreach_add_(counters, 1)  # one by one they take 2 µs each
        steps = list(map(int, torch.stack(counters).tolist()))
        numbers = {step: AdamwNumbers.of(group, step) for step in set(steps)}
        for (parameter, state), step in zip(moving, steps, strict=True):
            key = derive_seed(*group["draws"][parameter], step) if self.is_stochastic else None
            yield Task(parameter, cast("torch.Tensor", parameter.grad), state, numbers[step], key)

    def _take_together(self, tasks: list[Task]) -> list[Task]:
        """Take the steps that one launch can take for many parameters; returns the others."""
        return tasks

    def _step_of(self, task: Task) -> None:
        parameter, gradient, state, numbers, key = task
        if launches := self._bound_launches(parameter, gradient, state):
            launches(gradient, numbers)
            return
        weight = parameter.detach()
        flat = weight.contiguous().view(-1)  # shares the weight's memory unless its strides are unusual
        flat_gradient = gradient.detach().contiguous().view(-1)
        if launches := self._bind(flat, flat_gradient, state):
            launches(flat_gradient, numbers)
        else:
            self._advance(flat, flat_gradient, state, numbers, key)
        if flat.data_ptr() != weight.data_ptr():
            weight.copy_(flat.view(weight.shape))

    def _bound_launches(self, parameter: Parameter, gradient: torch.Tensor, state: State) -> "BoundLaunches | None":
        """Kernels, kept while weight and states stay at the same addresses; None if no kernel can read the tensors."""
        is_plain = gradient.layout == torch.strided and gradient.data_ptr() % ALIGNMENT == 0
        if not (is_plain and gradient.is_contiguous() and parameter.is_contiguous()):
            return None
        tensors = (tensor for name, tensor in state.items() if name != "step")
        places = (gradient.dtype, parameter.data_ptr(), *(tensor.data_ptr() for tensor in tensors))
        known = self._bound.get(parameter)
        if known is None or known[0] != places:
            known = places, self._bind(parameter.detach().view(-1), gradient.detach().view(-1), state)
            self._bound[parameter] = known
        return known[1]

    @abstractmethod
    def _bind(self, weight: torch.Tensor, gradient: torch.Tensor, state: State) -> "BoundLaunches | None":
        """Kernels that take steps on these flat tensors and state; None if no kernel can read them."""

    @abstractmethod
    def _advance(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: State, numbers: AdamwNumbers, key: int | None
    ) -> None:
        """Take one step without bound kernels, in place, on flat contiguous tensors [N]; `key`: of the draws."""


def _run_side_by_side(tasks: list[Task], run: Callable[[Task], None]) -> None:
    """Run independent tasks, on CUDA on several streams; later work of the caller waits for all of them.

    In one stream a kernel begins when the last program of the one before has ended, and with a hundred tensors of some
    millions of elements the device is half empty for a quarter of the time. The host does not wait. A task must not
    return memory that it allocates.
    """
    if not tasks or not tasks[0].parameter.is_cuda:
        for task in tasks:
            run(task)
        return
    device = tasks[0].parameter.device
    current = torch.cuda.current_stream(device)
    own, *others = _dealt_out(tasks, min(STREAMS, len(tasks)))
    side = [_side_stream(device, number) for number in range(len(others))]
    for stream, part in zip(side, others, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for task in part:
                run(task)
    for task in own:
        run(task)
    for stream in side:
        current.wait_stream(stream)


def _dealt_out(tasks: list[Task], count: int) -> list[list[Task]]:
    """The largest first, each to the stream with the least work."""
    parts: list[list[Task]] = [[] for _ in range(count)]
    loads = [0] * count
    for task in sorted(tasks, key=lambda task: -task.parameter.numel()):
        least = loads.index(min(loads))
        parts[least].append(task)
        loads[least] += task.parameter.numel()
    return parts


@lru_cache(maxsize=64)
def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
