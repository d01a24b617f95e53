"""AdamW with moments in FP8 with dynamic range expansion (COAT, §4): 2.05 bytes per parameter instead of 8.

Each moment of a parameter is three states: `<moment>` the codes, uint8 of the parameter's shape; `<moment>_scale`,
bf16, and `<moment>_power`, uint8, one each per 128 consecutive elements of the flattened parameter; no `_power` where
ranges are not expanded. Together 8 + (16 + 8)/128 = 8.19 bits. Reasons: decision 18.

    m ← m + (1 − β₁)·(g − m);   v ← β₂·v + ((1 − β₂)·g)·g
    w ← w·(1 − η·λ) − η/(1 − β₁ᵗ) · (m / (√v · 1/√(1 − β₂ᵗ) + ε))

The order of operations is a contract: single sums, products, quotients and roots in fp32, each rounded once, none
fused. So for equal gradients the states are bit-equal after every step, in plain torch on any device and in CUDA's
kernel: states saved on one device continue on another. Weights are bit-equal too, except in CUDA's kernel, which
approximates root and quotient (`fp8_adamw_kernels.UPDATE_ERROR`).

The root's correction is a factor, since torch divides by a number differently on a CPU and on CUDA. Otherwise this is
torch's AdamW: decay is decoupled, ε stands outside the root (COAT's Eq. 1 has it inside). The weights use m and v
before they are quantised.
"""

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch

from tahq.memory.adam.loop import STEP_COUNTER, AdamwLoop, AdamwNumbers, State, StateSpec, StateSpecs, has_ptx
from tahq.memory.coat.fp8_groups import (
    GROUP,
    UNEXPANDED,
    Moments,
    StoredMoment,
    as_groups,
    decode,
    encode,
    moment_format,
    num_groups,
)
from tahq.memory.config import Fp8AdamWConfig

if TYPE_CHECKING:  # needs triton
    from tahq.quant.gpu.launch import BoundLaunches

FIRST, SECOND = "exp_avg", "exp_avg_sq"
CHUNK_GROUPS = 512
"""Groups computed at a time, a quarter of a megabyte in fp32: temporaries stay small and in the cache."""


class Fp8AdamW(AdamwLoop):
    """AdamW of fp32 parameters with moments in the formats of `stored`."""

    def __init__(self, params: Any, stored: Fp8AdamWConfig, **defaults: Any) -> None:
        super().__init__(params, partial(fp8_adamw_states, stored), **defaults)
        self._stored = stored

    def _bind(self, weight: torch.Tensor, gradient: torch.Tensor, state: State) -> "BoundLaunches | None":
        if weight.numel() == 0 or not has_ptx(weight.device.type):
            return None
        bind = import_module("tahq.memory.coat.fp8_adamw_kernels").bind_step
        return cast("BoundLaunches | None", bind(weight, gradient, self._moments(state)))

    def _advance(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: State, numbers: AdamwNumbers, key: int | None
    ) -> None:
        step = step_in_torch
        if weight.device.type == "cpu":
            step = import_module("tahq.memory.coat.fp8_adamw_cpu").step_on_cpu
        step(weight, gradient, self._moments(state), numbers)

    def _moments(self, state: State) -> Moments:
        def moment(name: str, fp8: str, expand: bool) -> StoredMoment:
            codes = state[name]
            by = moment_format(fp8, expand, codes.device)
            return StoredMoment(codes.view(-1), state[f"{name}_scale"], state.get(f"{name}_power"), by)

        keys = self._stored
        return moment(FIRST, keys.first, keys.expand_first), moment(SECOND, keys.second, keys.expand_second)


def fp8_adamw_states(stored: Fp8AdamWConfig, shape: tuple[int, ...]) -> StateSpecs:
    """The state of a parameter of this shape: 2 bytes per element, 6 bytes per 128, and its number of steps."""
    count = num_groups(torch.Size(shape).numel())
    specs = dict(STEP_COUNTER)
    for name, expand in ((FIRST, stored.expand_first), (SECOND, stored.expand_second)):
        specs[name] = StateSpec(shape, torch.uint8)
        specs[f"{name}_scale"] = StateSpec((count,), torch.bfloat16)
        if expand:
            specs[f"{name}_power"] = StateSpec((count,), torch.uint8, UNEXPANDED)
    return specs


def step_in_torch(weights: torch.Tensor, gradients: torch.Tensor, moments: Moments, numbers: AdamwNumbers) -> None:
    """Take one step, in place, on any device; weights and gradients fp32 [N], contiguous, and codes of moments [N]."""
    for start in range(0, weights.numel(), CHUNK_GROUPS * GROUP):
        chunks = [_chunk(moment, start) for moment in moments]
        m, v = (decode(as_groups(each.codes), each.scales, each.powers, each.by) for each in chunks)
        part = weights[start : start + CHUNK_GROUPS * GROUP]
        gradient = as_groups(gradients[start : start + part.numel()])
        updated, *new = _adamw(as_groups(part), gradient, m, v, numbers)
        part.copy_(updated.view(-1)[: part.numel()])
        for chunk, value in zip(chunks, new, strict=True):
            codes, scales, powers = encode(value, chunk.by)
            chunk.codes.copy_(codes.view(-1)[: part.numel()])
            chunk.scales.copy_(scales)
            if chunk.powers is not None:
                chunk.powers.copy_(powers)


def _adamw(
    weights: torch.Tensor, gradients: torch.Tensor, first: torch.Tensor, second: torch.Tensor, numbers: AdamwNumbers
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first = first + (gradients - first) * numbers.rest1
    second = second * numbers.beta2 + (gradients * numbers.rest2) * gradients
    # torch's square root of fp32 errs by an ulp on a CPU; that of fp64 is right once it is rounded.
    denominator = second.double().sqrt().float() * numbers.root_factor + numbers.epsilon
    return weights * numbers.decay - (first / denominator) * numbers.rate, first, second


def _chunk(moment: StoredMoment, start: int) -> StoredMoment:
    groups = slice(start // GROUP, start // GROUP + CHUNK_GROUPS)
    powers = None if moment.powers is None else moment.powers[groups]
    return StoredMoment(moment.codes[start : start + CHUNK_GROUPS * GROUP], moment.scales[groups], powers, moment.by)
