"""AdamW with moments in FP8 with dynamic range expansion (COAT, §4): 2.05 bytes per parameter instead of 8.

Each moment of a parameter is three states: `<moment>` the codes, uint8 of the parameter's shape; `<moment>_scale`,
bf16, and `<moment>_power`, uint8, one each per 128 consecutive elements of the flattened parameter; no `_power` where
ranges are not expanded. Together 8 + (16 + 8)/128 = 8.19 bits. Reasons: decision 0018.

    m ← m + (1 − β₁)·(g − m);   v ← β₂·v + ((1 − β₂)·g)·g
    w ← w·(1 − η·λ) − η/(1 − β₁ᵗ) · (m / (√v · 1/√(1 − β₂ᵗ) + ε))

The order of operations is a contract: single sums, products, quotients and roots in fp32, each rounded once, none
fused. So for equal gradients the states are bit-equal after every step, in plain torch on any device, in the CPU's
kernel and in CUDA's: states saved on one device continue on another. Weights are bit-equal too, except in CUDA's
kernel, which approximates root and quotient (`fp8_adamw_kernels.UPDATE_ERROR`).

The root's correction is a factor, since torch divides by a number differently on a CPU and on CUDA. Otherwise this is
torch's AdamW: decay is decoupled, ε stands outside the root (COAT's Eq. 1 has it inside). The weights use m and v
before they are quantised.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import Parameter

from tahq.memory.adam.loop import AdamwLoop, State, StateSpec, StateSpecs, has_ptx
from tahq.memory.adam.step import AdamwNumbers
from tahq.memory.coat.fp8_groups import (
    FP8_FORMATS,
    GROUP,
    UNEXPANDED,
    MomentFormat,
    StoredGroups,
    as_groups,
    decode,
    encode,
    make_tables,
    num_groups,
)
from tahq.memory.config import Fp8AdamWConfig

if TYPE_CHECKING:  # needs triton
    from tahq.quant.gpu.launch import BoundLaunches

FIRST, SECOND = "exp_avg", "exp_avg_sq"
Formats = tuple[MomentFormat, MomentFormat]
Step = Callable[[torch.Tensor, torch.Tensor, tuple[StoredGroups, StoredGroups], Formats, AdamwNumbers], None]
CHUNK_GROUPS = 512
"""Groups computed at a time, a quarter of a megabyte in fp32: temporaries stay small and in the cache."""


class Fp8AdamW(AdamwLoop):
    """AdamW with moments in eight bits.

    Args:
        params: groups of fp32 parameters.
        stored: formats of the moments.
        lr, betas, eps, weight_decay: defaults of groups, as in `AdamwLoop`.

    Raises:
        ValueError: a parameter is not fp32.
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
        bind = import_module("tahq.memory.coat.fp8_adamw_kernels").bind_step
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
    """The state of a parameter of this shape: 2 bytes per element, 6 bytes per 128, and its number of steps."""
    count = num_groups(torch.Size(shape).numel())
    specs = {"step": StateSpec((), torch.float32, is_counter=True)}
    for name, expand in ((FIRST, stored.expand_first), (SECOND, stored.expand_second)):
        specs[name] = StateSpec(shape, torch.uint8)
        specs[f"{name}_scale"] = StateSpec((count,), torch.bfloat16)
        if expand:
            specs[f"{name}_power"] = StateSpec((count,), torch.uint8)
    return specs


def _step_on(device_type: str) -> Step:
    """The step for a kind of device, imported on first use, since importing tahq needs neither numba nor triton."""
    if device_type == "cpu":
        return cast(Step, import_module("tahq.memory.coat.fp8_adamw_numba").step_on_cpu)
    if has_ptx(device_type):
        return cast(Step, import_module("tahq.memory.coat.fp8_adamw_kernels").step_on_cuda)
    return step_in_torch


def _moment_format(name: str, expand: bool, device: torch.device) -> MomentFormat:
    format = FP8_FORMATS[name]
    return MomentFormat(format, expand, make_tables(format).to(device))


def _stored_groups(state: Mapping[str, torch.Tensor], moment: str) -> StoredGroups:
    return StoredGroups(state[moment].view(-1), state[f"{moment}_scale"], state.get(f"{moment}_power"))


def step_in_torch(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    moments: tuple[StoredGroups, StoredGroups],
    formats: tuple[MomentFormat, MomentFormat],
    numbers: AdamwNumbers,
) -> None:
    """Take one step, in place, on any device.

    Args:
        weights: fp32 [N], contiguous.
        gradients: fp32 [N].
        moments: m and v, with codes [N].
        formats: theirs, with tables on the same device.
        numbers: of this step.
    """
    count = weights.numel()
    starts = [*range(0, count, CHUNK_GROUPS * GROUP), count]
    for start, stop in pairwise(starts):
        chunks = tuple(_part(moment, start, stop) for moment in moments)
        first, second = (
            decode(as_groups(chunk.codes), chunk.scales, chunk.powers, by)
            for chunk, by in zip(chunks, formats, strict=True)
        )
        part = weights[start:stop]
        updated, *new = _adamw(as_groups(part), as_groups(gradients[start:stop]), first, second, numbers)
        part.copy_(updated.view(-1)[: stop - start])
        for chunk, values, by in zip(chunks, new, formats, strict=True):
            _store(chunk, values, by)


def _adamw(
    weights: torch.Tensor, gradients: torch.Tensor, first: torch.Tensor, second: torch.Tensor, numbers: AdamwNumbers
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first = first + (gradients - first) * numbers.rest1
    second = second * numbers.beta2 + (gradients * numbers.rest2) * gradients
    # torch's square root of fp32 errs by an ulp on a CPU; that of fp64 is right once it is rounded.
    denominator = second.double().sqrt().float() * numbers.root_factor + numbers.epsilon
    return weights * numbers.decay - (first / denominator) * numbers.rate, first, second


def _part(moment: StoredGroups, start: int, stop: int) -> StoredGroups:
    """A view of the groups of elements from `start`, a multiple of 128, to `stop`."""
    groups = slice(start // GROUP, -(-stop // GROUP))
    powers = moment.powers[groups] if moment.powers is not None else None
    return StoredGroups(moment.codes[start:stop], moment.scales[groups], powers)


def _store(moment: StoredGroups, values: torch.Tensor, by: MomentFormat) -> None:
    codes, scales, powers = encode(values, by)
    moment.codes.copy_(codes.view(-1)[: moment.codes.numel()])
    moment.scales.copy_(scales)
    if moment.powers is not None:
        moment.powers.copy_(powers)
