"""INT8 weights and INT4 projections in Triton: decoding, and updating a weight in one read and one write; bf16 too.

The same operations in the same order as `stored_weight.py` and `subspace.py`, none of them fused, and the same hash
words: codes, scales and values are bit-equal.

Shape letters: R groups per program, 256 elements per group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from tahq.kernel_launch import on_device_of
from tahq.memory.galore.stored_weight import FINER, GROUP, MARGIN, OFFSET, SMALLEST_SCALE, STEPS, TOP_CODE
from tahq.memory.small_floats.device_bits import store_rounded
from tahq.quant.gpu.launch import EXACT
from tahq.quant.gpu.tiles import hash_words, rounded_to_bf16
from tahq.quant.stochastic_rounding import key_halves

if TYPE_CHECKING:
    from tahq.memory.galore.stored_weight import Int8Weight
    from tahq.memory.galore.subspace import Int4Projection

GROUPS_PER_PROGRAM = 8
ELEMENTS_PER_PROGRAM = GROUP * GROUPS_PER_PROGRAM
OPTIONS: dict[str, Any] = {**EXACT, "num_warps": 4}
_INDEX_LIMIT = 2**31 - GROUP * GROUPS_PER_PROGRAM
_GROUP, _STEPS, _OFFSET = tl.constexpr(GROUP), tl.constexpr(float(STEPS)), tl.constexpr(float(OFFSET))
_SMALLEST, _FINER = tl.constexpr(SMALLEST_SCALE), tl.constexpr(FINER)
_MARGIN, _TOP_CODE = tl.constexpr(float(MARGIN)), tl.constexpr(float(TOP_CODE))


@triton.jit
def _decoded(codes, zero, scale, at, groups, is_real, is_group):
    """fp32 [R, 256]; 0 after the last element."""
    code = tl.load(codes + at, mask=is_real, other=0).to(tl.float32)
    z = tl.load(zero + groups, mask=is_group, other=0).to(tl.float32)
    s = tl.load(scale + groups, mask=is_group, other=0).to(tl.float32)
    return tl.where(is_real, (code - z[:, None]) * s[:, None], 0.0)


@triton.jit
def decode8_kernel(codes, zero, scale, out, numel, num_groups, R: tl.constexpr):
    """out ← (codes − zero) · scale."""
    groups = tl.program_id(0) * R + tl.arange(0, R)
    at = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    is_real = at < numel
    store_rounded(out, at, _decoded(codes, zero, scale, at, groups, is_real, groups < num_groups), is_real)


@triton.jit
def decode4_kernel(packed, zero, scale, out, numel, num_groups, R: tl.constexpr):
    """out ← (codes − zero) · scale, with two codes per byte."""
    groups = tl.program_id(0) * R + tl.arange(0, R)
    is_group = groups < num_groups
    at = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    is_real = at < numel
    pair = tl.load(packed + at // 2, mask=is_real, other=0).to(tl.int32)
    code = ((pair >> (at % 2 * 4)) & 15).to(tl.float32)
    z = tl.load(zero + groups, mask=is_group, other=0).to(tl.float32)
    s = tl.load(scale + groups, mask=is_group, other=0).to(tl.float32)
    store_rounded(out, at, (code - z[:, None]) * s[:, None], is_real)


@triton.jit(do_not_specialize=["keep", "rate", "key_low", "key_high"])
def add8_kernel(
    codes, zero, scale, update, keep, rate, key_low, key_high, numel, num_groups,
    IS_STOCHASTIC: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """codes, zero, scale ← those of keep · W + rate · update."""
    groups = tl.program_id(0) * R + tl.arange(0, R)
    is_group = groups < num_groups
    at = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    is_real = at < numel
    weight = _decoded(codes, zero, scale, at, groups, is_real, is_group)
    change = tl.load(update + at, mask=is_real, other=0).to(tl.float32)
    weight = weight * keep + change * rate

    high = tl.maximum(tl.max(weight, axis=1), 0.0)
    low = tl.minimum(tl.min(weight, axis=1), 0.0)
    steps = tl.full(high.shape, _STEPS, tl.float32)
    step = tl.maximum(tl.div_rn(high, steps) - tl.div_rn(low, steps), _SMALLEST)
    # up to the next bf16
    step = ((step.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    place = tl.ceil(tl.div_rn(-low, step)) + _MARGIN

    old_step = tl.load(scale + groups, mask=is_group, other=0).to(tl.float32)
    old_place = tl.load(zero + groups, mask=is_group, other=0).to(tl.float32) + _OFFSET
    above, below = tl.ceil(tl.div_rn(high, old_step)), tl.ceil(tl.div_rn(-low, old_step))
    fits = (above + old_place <= _TOP_CODE) & (below <= old_place) & (step >= _FINER * old_step)
    step, place = tl.where(fits, old_step, step), tl.where(fits, old_place, place)

    y = tl.div_rn(weight, tl.broadcast_to(step[:, None], weight.shape))
    floor = tl.floor(y)
    fraction = y - floor
    if IS_STOCHASTIC:
        draw = (hash_words(at, key_low, key_high) >> 8).to(tl.float32) * 5.9604644775390625e-08
        code = floor + (draw < fraction).to(tl.float32)
    else:  # half to even
        is_odd = floor - 2.0 * tl.floor(floor * 0.5) != 0.0
        code = floor + ((fraction > 0.5) | ((fraction == 0.5) & is_odd)).to(tl.float32)
    code = code + (place[:, None] - _OFFSET)
    tl.store(codes + at, code.to(tl.int8), mask=is_real)
    tl.store(zero + groups, (place - _OFFSET).to(tl.int8), mask=is_group)
    tl.store(scale + groups, step.to(tl.bfloat16), mask=is_group)


@triton.jit(do_not_specialize=["keep", "rate", "key_low", "key_high"])
def add16_kernel(values, update, keep, rate, key_low, key_high, numel, SIZE: tl.constexpr):
    """values in bf16 ← keep · values + rate · update, rounded stochastically."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_real = at < numel
    weight = tl.load(values + at, mask=is_real, other=0).to(tl.float32)
    change = tl.load(update + at, mask=is_real, other=0).to(tl.float32)
    tl.store(values + at, rounded_to_bf16(weight * keep + change * rate, at, key_low, key_high), mask=is_real)


def decoded8(weight: Int8Weight, dtype: torch.dtype) -> torch.Tensor:
    """See `Int8Weight.decoded`."""
    return _decoded_by(decode8_kernel, weight.codes, weight, dtype)


def decoded4(projection: Int4Projection, dtype: torch.dtype) -> torch.Tensor:
    """See `Int4Projection.decoded`."""
    return _decoded_by(decode4_kernel, projection.packed, projection, dtype)


def add8(weight: Int8Weight, update: torch.Tensor, *, keep: float, rate: float, key: int | None) -> None:
    """See `Int8Weight.add`."""
    with on_device_of(update):
        add8_kernel[_grid(weight.scale)](
            weight.codes, weight.zero, weight.scale, update.contiguous(), keep, rate, *key_halves(key or 0),
            update.numel(), weight.scale.numel(),
            IS_STOCHASTIC=key is not None, R=GROUPS_PER_PROGRAM, **OPTIONS,
        )  # fmt: skip


def add16(values: torch.Tensor, update: torch.Tensor, *, keep: float, rate: float, key: int) -> None:
    """See `FullWeight.add`: contiguous bf16, rounded stochastically."""
    numel = values.numel()
    _check_count(numel)
    with on_device_of(values):
        add16_kernel[(-(-numel // ELEMENTS_PER_PROGRAM),)](
            values, update.contiguous(), keep, rate, *key_halves(key), numel, SIZE=ELEMENTS_PER_PROGRAM, **OPTIONS
        )


def _decoded_by(
    kernel: Any, codes: torch.Tensor, stored: Int8Weight | Int4Projection, dtype: torch.dtype
) -> torch.Tensor:
    out, zero, scale = torch.empty(stored.shape, dtype=dtype, device=codes.device), stored.zero, stored.scale
    with on_device_of(out):
        kernel[_grid(scale)](codes, zero, scale, out, out.numel(), scale.numel(), R=GROUPS_PER_PROGRAM, **OPTIONS)
    return out


def _grid(scale: torch.Tensor) -> tuple[int]:
    _check_count(GROUP * scale.numel())
    return (-(-scale.numel() // GROUPS_PER_PROGRAM),)


def _check_count(numel: int) -> None:
    if numel > _INDEX_LIMIT:
        raise ValueError(f"a tensor of {numel} elements; the kernels count up to {_INDEX_LIMIT}")
