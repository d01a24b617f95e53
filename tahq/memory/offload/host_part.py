"""The part of a parameter that is in host memory: its values, the copy that products read, its states, its gradient.

`HostPart` is the parameter's attribute `host`; a parameter without it is on its device as a whole.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.nn import Parameter

from tahq.memory.config import Offload
from tahq.memory.offload.host_memory import HostMemory, Loan, Offloaded, lent
from tahq.memory.small_floats.nf4 import packed_weight
from tahq.models.weights import FilledWeight, sum_of_bits


class HostGradient:
    """A parameter's gradient, summed on the device, in its own type, and kept on the host between micro-batches.

    It is multiplied when it is read, by one factor after the other, as a gradient on the device would have been.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._factors: list[float] = []
        self.is_there = False
        """Whether there is one."""

    def add(self, gradient: torch.Tensor) -> None:
        """Add a micro-batch's gradient; the first one gives all sums their type."""
        if not hasattr(self, "item"):
            self._sum = torch.empty_like(gradient, memory_format=torch.contiguous_format)
            self.item = self._memory.place_for(self._sum)
            self.item.release()
        if self.is_there:
            self.lent().add_(gradient)
            self._factors.clear()
        else:
            self.item.allocate()
            self.item.wait()  # an earlier sum may still be on its way to the host
            self._sum.copy_(gradient)
        self.is_there = True
        self._memory.let_go(self.item)

    def scale(self, factor: float) -> None:
        """Multiply it."""
        if self.is_there:
            self._factors.append(factor)

    def drop(self) -> None:
        """Forget it."""
        self.is_there = False
        self._factors.clear()

    def lent(self) -> torch.Tensor:
        """The gradient on the device, until `item` is released; what changes there is not kept."""
        self.item.fetch()
        self.item.wait()
        for factor in self._factors:
            self._sum.mul_(factor)
        return self._sum

    def copy(self) -> torch.Tensor:
        """A copy of it on the device."""
        gradient = self.lent().clone()
        self.item.release()
        return gradient


class HostPart:
    """What of one parameter is in host memory.

    Args:
        parameter: on its device.
        which: `memory.offload`.
        copies: type of the copies that products read, if they do. `master` keeps the values on the host, and so does
            `weights` if there are no copies; `weights` also keeps the copies there.
    """

    def __init__(
        self,
        parameter: Parameter,
        which: Collection[Offload],
        memory: HostMemory,
        *,
        copies: torch.dtype | None = None,
    ) -> None:
        self._which, self._memory = which, memory
        self.states: dict[str, Offloaded] = {}
        """By name, such as `exp_avg`."""
        self._is_in_place = False
        self.gradient = HostGradient(memory) if "gradients" in which else None
        self.values = self._away(parameter) if "master" in which or ("weights" in which and copies is None) else None
        self.copy: torch.Tensor | None = None
        self.product: Offloaded | None = self.values
        """What products read, where it is on the host."""
        self.is_here = True
        """Whether this process has the values; else another replica lends them (`pipeline/weight_loans.py`)."""
        if copies is not None and ("master" in which or "weights" in which):
            copy = self.add_copy(parameter, copies)
            self.product = self._away(copy) if "weights" in which else None

    def add_copy(self, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
        """Make room for the copy that products read."""
        self.copy = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        parameter.product_copy = self.copy  # type: ignore[attr-defined]
        return self.copy

    def _away(self, tensor: torch.Tensor) -> Offloaded:
        item = self._memory.place_for(tensor)
        item.release()
        return item

    def take_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Move a parameter's optimizer states to the host, unless they are there."""
        for name, state in states.items():
            if name not in self.states and name != "step" and moment_of(name) in self._which:
                item = self.states[name] = self._memory.place_for(state)
                item.store()
                item.release()

    def use_in_place(self, states: dict[str, torch.Tensor]) -> None:
        """Have kernels read and write states in the host's memory: zero-copy. `states`: the optimizer's."""
        self._is_in_place = True
        states |= {name: item.values for name, item in self.states.items()}

    def loans(self) -> list[Loan]:
        """What an update needs."""
        states = () if self._is_in_place else self.states.values()
        loans = [*map(Loan, states), *self.loans_of_copy(writes=True)]
        if self.gradient is not None and self.gradient.is_there:
            loans.append(Loan(self.gradient.item, writes=False))
        return loans

    def loans_of_copy(self, *, writes: bool = False) -> list[Loan]:
        """What `make_copy` needs; `writes`: of an update, which changes the values."""
        loans = [] if self.values is None else [Loan(self.values, writes=writes)]
        if self.product is not None and self.product is not self.values:
            loans.append(Loan(self.product, reads=False))
        return loans

    def updated(self, parameter: Parameter, states: Mapping[str, torch.Tensor]) -> None:
        """Called behind the parameter's update, while it is lent, with its states."""
        self.take_states(states)
        self.make_copy(parameter)
        for item in self.states.values() if self._is_in_place else ():
            item.changed()

    def make_copy(self, parameter: Parameter) -> None:
        """Make the copy that products read, if there is one."""
        if self.copy is not None:
            self.copy.copy_(parameter.detach())


def moment_of(state: str) -> Offload:
    """The moment, `m` or `v`, that an optimizer's state of this name belongs to."""
    return "v" if state.startswith("exp_avg_sq") else "m"


def host_part(holder: Any) -> HostPart | None:
    """The part of a parameter in host memory, if there is any."""
    part: HostPart | None = getattr(holder, "host", None)
    return part


def host_gradient(holder: Any) -> HostGradient | None:
    """A parameter's gradient in host memory, if that is its place."""
    part = host_part(holder)
    return None if part is None else part.gradient


def kept_values(parameter: Parameter) -> torch.Tensor:
    """A parameter's values, wherever they are; decoded to fp32 if they are in 4 bits."""
    if (packed := packed_weight(parameter)) is not None:
        return packed.decoded(torch.float32)
    part = host_part(parameter)
    return parameter.detach() if part is None or part.values is None else part.values.values


def sum_as_filled(parameter: Parameter) -> torch.Tensor:
    """`sum_of_bits` of the values that a parameter was given; of what is in 4 bits, before it was."""
    packed = packed_weight(parameter)
    return sum_of_bits(kept_values(parameter)) if packed is None else packed.sum_of_bits


def device_nbytes(parameter: Parameter) -> int:
    """Bytes of a parameter, and of its copy for products, that are on its device now."""
    part, packed = host_part(parameter), packed_weight(parameter)
    tensors = (parameter,) if part is None or part.copy is None else (parameter, part.copy)
    nbytes = sum(each.untyped_storage().nbytes() for each in tensors)
    return nbytes if packed is None else nbytes + packed.nbytes


def filled_weight(parameter: Parameter) -> FilledWeight:
    """What takes a parameter's new values, wherever they are; `copy_for_products` is due afterwards."""
    part, packed = host_part(parameter), packed_weight(parameter)
    if packed is not None:
        return packed
    return parameter if part is None or part.values is None else part.values


def is_here(parameter: Parameter) -> bool:
    """Whether this process has a parameter's values."""
    part = host_part(parameter)
    return part is None or part.is_here


@torch.no_grad()
def copy_for_products(parameters: Iterable[Parameter]) -> None:
    """Make the copies that products read, where they are kept, after the parameters have changed."""
    copied = ((each, part) for each in parameters if (part := host_part(each)) is not None and part.copy is not None)
    pairs = [(parameter, part) for parameter, part in copied if part.is_here]
    for _, (parameter, part) in zip(lent(part.loans_of_copy() for _, part in pairs), pairs, strict=True):
        part.make_copy(parameter)
