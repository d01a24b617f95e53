"""AdamW whose moments are kept in FP8 with dynamic range expansion (COAT, §4): 2.05 bytes a parameter instead of 8.

Each moment of a parameter is three states: `<moment>` its codes, uint8 of the parameter's shape; `<moment>_scale`,
bf16, and `<moment>_power`, uint8, one of each for 128 consecutive elements of the flattened parameter; no `_power`
where ranges are not expanded. Together 8 + (16 + 8)/128 = 8.19 bits. Why so: decision 0018.

For equal gradients the states are equal to the bit after every step, in plain torch on any device, in the CPU's kernel
and in CUDA's (`tests/memory/test_fp8_adamw*.py`, `tests/gpu/test_fp8_adamw.py`): states saved on one device go on on
another. Weights are equal to the bit in plain torch and on the CPU; CUDA's kernel rounds their update in its own way.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import Parameter

from tahq.memory.adam.loop import AdamwLoop, State, StateSpec, StateSpecs, has_ptx
from tahq.memory.adam.step import AdamwNumbers
from tahq.memory.coat.fp8_adamw_step import step_in_torch
from tahq.memory.coat.fp8_formats import FP8_FORMATS
from tahq.memory.coat.fp8_groups import MomentFormat, StoredGroups, num_groups
from tahq.memory.coat.range_expansion import UNEXPANDED, make_tables
from tahq.memory.config import Fp8AdamWConfig

if TYPE_CHECKING:  # needs triton
    from tahq.quant.gpu.launch import BoundLaunches

FIRST, SECOND = "exp_avg", "exp_avg_sq"
Formats = tuple[MomentFormat, MomentFormat]
Step = Callable[[torch.Tensor, torch.Tensor, tuple[StoredGroups, StoredGroups], Formats, AdamwNumbers], None]


class Fp8AdamW(AdamwLoop):
    """AdamW with moments in eight bits.

    Args:
        params: groups of fp32 parameters.
        stored: formats of the moments.
        lr, betas, eps, weight_decay: as of `AdamwLoop`, for groups that have none.

    Raises:
        ValueError: a parameter that is not fp32.
    """

    def __init__(self, params: Any, stored: Fp8AdamWConfig, **defaults: Any) -> None:
        super().__init__(params, **defaults)
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.dtype != torch.float32:
                raise ValueError(f"fp8_adamw takes parameters in torch.float32, got one in {parameter.dtype}")
        self._stored = stored
        self._formats: dict[torch.device, Formats] = {}

    def _bind(self, weight: torch.Tensor, gradient: torch.Tensor, state: State) -> "BoundLaunches | None":
        if weight.numel() == 0 or not has_ptx(weight.device.type):
            return None
        moments = (_stored_groups(state, FIRST), _stored_groups(state, SECOND))
        bind = import_module("tahq.memory.coat.fp8_adamw_triton").bind_step
        return cast("BoundLaunches | None", bind(weight, gradient, moments, self._formats_on(weight.device)))

    def _advance(self, weight: torch.Tensor, gradient: torch.Tensor, state: State, numbers: AdamwNumbers) -> None:
        moments = (_stored_groups(state, FIRST), _stored_groups(state, SECOND))
        step = _step_on(weight.device.type)
        step(weight, gradient, moments, self._formats_on(weight.device), numbers)

    def _moments(self, parameter: Parameter) -> State:
        specs = fp8_adamw_states(self._stored, tuple(parameter.shape))
        return {
            name: torch.full(
                spec.shape, UNEXPANDED if name.endswith("_power") else 0, dtype=spec.dtype, device=parameter.device
            )
            for name, spec in specs.items()
            if not spec.is_counter
        }

    def _formats_on(self, device: torch.device) -> Formats:
        if device not in self._formats:
            config = self._stored
            chosen = ((config.first, config.expand_first), (config.second, config.expand_second))
            first, second = (_moment_format(name, expand, device) for name, expand in chosen)
            self._formats[device] = (first, second)
        return self._formats[device]


def fp8_adamw_states(stored: Fp8AdamWConfig, shape: tuple[int, ...]) -> StateSpecs:
    """What is kept of a parameter of a shape: 2 bytes an element, 6 bytes for 128, and the number of its steps."""
    count = num_groups(torch.Size(shape).numel())
    specs = {"step": StateSpec((), torch.float32, is_counter=True)}
    for name, expand in ((FIRST, stored.expand_first), (SECOND, stored.expand_second)):
        specs[name] = StateSpec(shape, torch.uint8)
        specs[f"{name}_scale"] = StateSpec((count,), torch.bfloat16)
        if expand:
            specs[f"{name}_power"] = StateSpec((count,), torch.uint8)
    return specs


def _step_on(device_type: str) -> Step:
    """What takes a step on a device; loaded when it is first asked for, since importing tahq needs neither of them."""
    if device_type == "cpu":
        return cast(Step, import_module("tahq.memory.coat.fp8_adamw_numba").step_on_cpu)
    if has_ptx(device_type):
        return cast(Step, import_module("tahq.memory.coat.fp8_adamw_triton").step_on_cuda)
    return step_in_torch


def _moment_format(name: str, expand: bool, device: torch.device) -> MomentFormat:
    format = FP8_FORMATS[name]
    return MomentFormat(format, expand, make_tables(format).to(device))


def _stored_groups(state: Mapping[str, torch.Tensor], moment: str) -> StoredGroups:
    return StoredGroups(state[moment].view(-1), state[f"{moment}_scale"], state.get(f"{moment}_power"))
