"""The step of `fp8_adamw_step` on CUDA as one kernel: weights, gradients and states are read once and written once.

Weights, codes, scales and powers are equal to `step_in_torch`'s to the bit. Powers of two and logarithms, which every
device rounds in its own way, only guess: at an entry of the tables of `range_expansion` that the right one is next to.

A warp has a group, a thread four elements of it: all loads are of 4 or 16 bytes, and nothing passes between warps.
Rows of the tables, 512 bytes a group and moment, come out of the L1 cache.

Shape letters: R groups (rows) of a program, of 128 elements each.
"""

import math

import torch
import triton
import triton.language as tl

from tahq.memory.fp8_adamw_step import StepNumbers
from tahq.memory.fp8_formats import E4M3, E5M2, NAN
from tahq.memory.fp8_groups import GROUP, LARGEST_SCALE, SMALLEST_SCALE, MomentFormat, StoredGroups, num_groups
from tahq.memory.range_expansion import NUM_POWERS, STEPS_PER_OCTAVE, UNEXPANDED
from tahq.quant.gpu.launch import EXACT, on_device_of

ROWS = 4
"""Groups of a program, and its warps."""
_FRACTIONS = {"e4m3": 3, "e5m2": 2}
"""Bits of the fraction, by which the kernel knows the format."""
_E4M3_LARGEST, _E5M2_LARGEST = tl.constexpr(E4M3.largest), tl.constexpr(E5M2.largest)
_E4M3_RANGE = tl.constexpr(-math.log2(E4M3.smallest_share))
_E5M2_RANGE = tl.constexpr(-math.log2(E5M2.smallest_share))
_GROUP = tl.constexpr(GROUP)
_NAN = tl.constexpr(NAN)
_UNEXPANDED = tl.constexpr(UNEXPANDED)
_LAST_POWER = tl.constexpr(NUM_POWERS - 1)
_STEPS = tl.constexpr(float(STEPS_PER_OCTAVE))
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_LARGEST_SCALE = tl.constexpr(LARGEST_SCALE)
_INFINITY_BITS = tl.constexpr(0x7F800000)


def step_on_cuda(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    moments: tuple[StoredGroups, StoredGroups],
    formats: tuple[MomentFormat, MomentFormat],
    numbers: StepNumbers,
) -> None:
    """As `step_in_torch`, for tensors on a CUDA device; the host waits for nothing."""
    count = weights.numel()
    if count == 0:
        return
    tensors = [weights, gradients.contiguous()]
    constants: dict[str, int | bool] = {}
    for name, moment, by in zip(("FIRST", "SECOND"), moments, formats, strict=True):
        powers = moment.codes if moment.powers is None else moment.powers
        tables = (by.tables.values, by.tables.uppers, by.tables.least)
        tensors += [moment.codes, moment.scales.view(torch.int16), powers, *tables]
        constants |= {f"{name}_EXPAND": by.expand, f"{name}_FRACTION": _FRACTIONS[by.format.name]}
    grid = (triton.cdiv(num_groups(count), ROWS),)
    values = (numbers.kept, numbers.first_share, numbers.second_kept, numbers.second_share)
    rest = (numbers.step_size, numbers.correction, numbers.epsilon)
    with on_device_of(weights):
        _step_kernel[grid](*tensors, count, *values, *rest, **constants, R=ROWS, num_warps=ROWS, **EXACT)


@triton.jit
def _log2(x):
    """log₂ of x ≥ 0, subnormal or not, to some 10⁻⁶; −∞ of 0."""
    is_tiny = x < 2.0**-64
    return tl.log2(tl.where(is_tiny, x * 2.0**64, x)) - tl.where(is_tiny, 64.0, 0.0)


@triton.jit
def _decode(codes, scales, powers, values, element, is_real, group, is_group, EXPAND: tl.constexpr):
    """x = ±M·(code/Δmax)^(1/k), fp32 [R, 128]."""
    code = tl.load(codes + element, mask=is_real, other=0).to(tl.int32)
    bits = tl.load(scales + group, mask=is_group, other=0).to(tl.int32) << 16
    scale = bits.to(tl.float32, bitcast=True)
    if EXPAND:
        power = tl.load(powers + group, mask=is_group, other=_UNEXPANDED).to(tl.int32)
        share = tl.load(values + power[:, None] * 128 + (code & 0x7F))
    else:
        share = tl.load(values + _UNEXPANDED * 128 + (code & 0x7F))
    magnitude = share * scale[:, None]
    return tl.where(code >= 128, -magnitude, magnitude)


@triton.jit
def _scale_bits(largest):
    """M as stored: the bits of the nearest bf16, as fp32's [R]; 0 for 0."""
    kept = tl.minimum(tl.maximum(largest, _SMALLEST_SCALE), _LARGEST_SCALE)
    bits = kept.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return tl.where(largest > 0, rounded, 0)


@triton.jit
def _last_usable(least, ratio, RANGE: tl.constexpr):
    """The largest index of a power whose entry in `least` is not above the ratio [R]; 0 where there is none.

    The guess, 28·(log₂ k + 4), is right but for its rounding, so the right one is at most one away.
    """
    k = RANGE / tl.maximum(-_log2(ratio), 1e-6)
    guess = tl.minimum(tl.maximum((_log2(k) + 4.0) * _STEPS, 0.0), _LAST_POWER * 1.0).to(tl.int32)
    above = tl.minimum(guess + 1, _LAST_POWER)
    found = tl.where(tl.load(least + above) <= ratio, above, guess)
    return tl.where(tl.load(least + guess) <= ratio, found, tl.maximum(guess - 1, 0))


@triton.jit
def _floor_code(y, FRACTION: tl.constexpr):
    """The code of the largest magnitude of the format that is not above y ≥ 0."""
    BIAS: tl.constexpr = 7 if FRACTION == 3 else 15
    LAST: tl.constexpr = 126 if FRACTION == 3 else 123
    normal = (y.to(tl.int32, bitcast=True) >> (23 - FRACTION)) - ((127 - BIAS) << FRACTION)
    subnormal = (y * 2.0 ** (BIAS - 1 + FRACTION)).to(tl.int32)
    return tl.minimum(tl.where(y < 2.0 ** (1 - BIAS), subnormal, normal), LAST)


@triton.jit
def _encode(
    x,
    codes,
    scales,
    powers,
    uppers,
    least,
    element,
    is_real,
    group,
    is_group,
    EXPAND: tl.constexpr,
    FRACTION: tl.constexpr,
):
    """code = round(Δmax·(|x|/M)^k) of x [R, 128], with M and k as they are stored."""
    magnitude_bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    is_finite = magnitude_bits < _INFINITY_BITS
    magnitude = tl.where(is_finite, magnitude_bits, 0).to(tl.float32, bitcast=True)
    largest = tl.max(magnitude, axis=1)
    scale_bits = _scale_bits(largest)
    tl.store(scales + group, (scale_bits >> 16).to(tl.int16), mask=is_group)
    scale = scale_bits.to(tl.float32, bitcast=True)
    divisor = tl.where(scale > 0, scale, 1.0)
    inverse = tl.where(scale > 0, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), divisor), 0.0)
    ratio = magnitude * inverse[:, None]
    LARGEST: tl.constexpr = _E4M3_LARGEST if FRACTION == 3 else _E5M2_LARGEST
    if EXPAND:
        smallest = tl.min(tl.where(magnitude > 0, magnitude, float("inf")), axis=1)
        RANGE: tl.constexpr = _E4M3_RANGE if FRACTION == 3 else _E5M2_RANGE
        usable = _last_usable(least, smallest * inverse, RANGE)
        power = tl.where(smallest < largest, usable, _UNEXPANDED)
        tl.store(powers + group, power.to(tl.uint8), mask=is_group)
        k = tl.exp2(power.to(tl.float32) * (1.0 / _STEPS) - 4.0)
        y = tl.exp2(_log2(ratio) * k[:, None]) * LARGEST
        row = power[:, None] * 128
    else:
        y = ratio * LARGEST
        row = tl.full(magnitude_bits.shape, _UNEXPANDED * 128, tl.int32)
    floor = _floor_code(y, FRACTION)
    code = floor + (ratio > tl.load(uppers + row + floor)).to(tl.int32)
    signed = tl.where(x < 0, code | 128, code)
    tl.store(codes + element, tl.where(is_finite, signed, _NAN).to(tl.uint8), mask=is_real)


@triton.jit(
    do_not_specialize=[
        "count",
        "kept",
        "first_share",
        "second_kept",
        "second_share",
        "step_size",
        "correction",
        "epsilon",
    ]
)
def _step_kernel(
    weights,
    gradients,
    first_codes,
    first_scales,
    first_powers,
    first_values,
    first_uppers,
    first_least,
    second_codes,
    second_scales,
    second_powers,
    second_values,
    second_uppers,
    second_least,
    count,
    kept,
    first_share,
    second_kept,
    second_share,
    step_size,
    correction,
    epsilon,
    FIRST_EXPAND: tl.constexpr,
    FIRST_FRACTION: tl.constexpr,
    SECOND_EXPAND: tl.constexpr,
    SECOND_FRACTION: tl.constexpr,
    R: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    element = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    is_real = element < count
    is_group = group * _GROUP < count
    weight = tl.load(weights + element, mask=is_real, other=0.0)
    gradient = tl.load(gradients + element, mask=is_real, other=0.0)
    m = _decode(first_codes, first_scales, first_powers, first_values, element, is_real, group, is_group, FIRST_EXPAND)
    v = _decode(
        second_codes, second_scales, second_powers, second_values, element, is_real, group, is_group, SECOND_EXPAND
    )
    m = m + (gradient - m) * first_share
    v = v * second_kept + (gradient * second_share) * gradient
    denominator = tl.sqrt_rn(v) * correction + epsilon
    weight = weight * kept - tl.div_rn(m, denominator) * step_size
    tl.store(weights + element, weight, mask=is_real)
    _encode(
        m,
        first_codes,
        first_scales,
        first_powers,
        first_uppers,
        first_least,
        element,
        is_real,
        group,
        is_group,
        FIRST_EXPAND,
        FIRST_FRACTION,
    )
    _encode(
        v,
        second_codes,
        second_scales,
        second_powers,
        second_uppers,
        second_least,
        element,
        is_real,
        group,
        is_group,
        SECOND_EXPAND,
        SECOND_FRACTION,
    )
