"""The step of `fp8_adamw_step` on CUDA as one kernel: weights, gradients and states are read once and written once.

Codes, scales and powers are equal to `step_in_torch`'s to the bit, at every step, for equal gradients. Powers of two
and logarithms, which every device rounds in its own way, only guess: at an entry of the tables of `range_expansion`
that the right one is next to. What is added to a weight is within `UPDATE_ERROR` of that in `step_in_torch`, relative.

Sixteen groups a program, sixteen elements a thread: what is done once a group, some sixty instructions, is done by few
threads for many elements. Rows of the tables, 512 bytes a group and moment, come out of the L1 cache. Programs that are
filled run without masks, the last one of a tensor with them.

Shape letters: R groups (rows) of a program, of 128 elements each.
"""

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl

from tahq.memory.adamw_step import AdamwNumbers
from tahq.memory.fp8_formats import E4M3, E5M2, NAN
from tahq.memory.fp8_groups import GROUP, LARGEST_SCALE, SMALLEST_NORMAL, MomentFormat, StoredGroups
from tahq.memory.range_expansion import NUM_POWERS, STEPS_PER_OCTAVE, UNEXPANDED
from tahq.quant.gpu.launch import EXACT, Launch, aligned, on_device_of
from tahq.quant.gpu.tiles import IS_INTERPRETED
from tahq.quant.stream import ALIGNMENT

ROWS, WARPS = 16, 4
"""Groups of a program, and its warps."""
UPDATE_ERROR = 2.0**-21
"""Of m/(√v·c + ε): 2⁻²² of the root (PTX: sqrt.approx), 2⁻²³ of the reciprocal, and four roundings of 2⁻²⁴."""
_FRACTIONS = {"e4m3": 3, "e5m2": 2}
"""Bits of the fraction, by which the kernel knows the format."""
_E4M3_LARGEST, _E5M2_LARGEST = tl.constexpr(E4M3.largest), tl.constexpr(E5M2.largest)
_E4M3_LOG2_LARGEST = tl.constexpr(math.log2(E4M3.largest))
_E5M2_LOG2_LARGEST = tl.constexpr(math.log2(E5M2.largest))
_E4M3_RANGE = tl.constexpr(-math.log2(E4M3.smallest_share))
_E5M2_RANGE = tl.constexpr(-math.log2(E5M2.smallest_share))
_GROUP = tl.constexpr(GROUP)
_NAN = tl.constexpr(NAN)
_UNEXPANDED = tl.constexpr(UNEXPANDED)
_LAST_POWER = tl.constexpr(NUM_POWERS - 1)
_STEPS = tl.constexpr(float(STEPS_PER_OCTAVE))
_SMALLEST_NORMAL_BITS, _LARGEST_SCALE_BITS = (
    tl.constexpr(int(torch.tensor(number).view(torch.int32))) for number in (SMALLEST_NORMAL, LARGEST_SCALE)
)
"""As bits, which are in the order of magnitudes."""
_SMALLEST_NORMAL = tl.constexpr(SMALLEST_NORMAL)
_INFINITY_BITS = tl.constexpr(0x7F800000)


def step_on_cuda(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    moments: tuple[StoredGroups, StoredGroups],
    formats: tuple[MomentFormat, MomentFormat],
    numbers: AdamwNumbers,
) -> None:
    """As `step_in_torch`, for tensors on a CUDA device; the host waits for nothing.

    What is compiled for a shape is launched by itself from the second step on: in Triton's way a launch takes longer
    than most tensors of a model.
    """
    if weights.numel() == 0:
        return
    tensors = [aligned(gradients)]
    for moment, by in zip(moments, formats, strict=True):
        powers = moment.codes if moment.powers is None else moment.powers
        tables = (by.tables.values, by.tables.uppers, by.tables.least)
        tensors += [moment.codes, moment.scales.view(torch.int16), powers, *tables]
    kinds = tuple((by.expand, by.format.name) for by in formats)
    # A launch that is kept takes aligned tensors only.
    launches = _kept_launches if _are_aligned(weights, *tensors) else _launches
    n = numbers
    factors = (n.decay, n.rest1, n.beta2, n.rest2, n.rate, n.root_factor, n.epsilon)
    with on_device_of(weights):
        for launch in launches(weights.numel(), kinds):
            launch(weights, *tensors, last=factors)


def _are_aligned(*tensors: torch.Tensor) -> bool:
    return all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)


@lru_cache(maxsize=4096)
def _kept_launches(count: int, kinds: tuple[tuple[bool, str], ...]) -> tuple[Launch, ...]:
    return _launches(count, kinds)


def _launches(count: int, kinds: tuple[tuple[bool, str], ...]) -> tuple[Launch, ...]:
    """The programs that are filled, and the last one, which is not."""
    constants: dict[str, int | bool] = {"R": ROWS, "num_warps": WARPS, **EXACT}
    for name, (expand, format) in zip(("FIRST", "SECOND"), kinds, strict=True):
        constants |= {f"{name}_EXPAND": expand, f"{name}_FRACTION": _FRACTIONS[format]}
    whole, left = divmod(count, ROWS * GROUP)
    parts = ((0, whole, False), (whole, int(left > 0), True))
    return tuple(
        Launch(_step_kernel, (programs, 1, 1), (first, count), constants | {"MASKED": masked})
        for first, programs, masked in parts
        if programs
    )


@triton.jit
def _log2(x):
    """log₂ of x ≥ 0, no subnormal, to some 10⁻⁶; −∞ of 0. Triton's own is a polynomial of twenty terms."""
    if IS_INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _product_without_subnormals(x, y):
    """x·y, where 0 stands for any of the three that is subnormal; as long as y is normal."""
    if IS_INTERPRETED:
        product = tl.where(x < _SMALLEST_NORMAL, 0.0, x) * y
        return tl.where(product < _SMALLEST_NORMAL, 0.0, product)
    return tl.inline_asm_elementwise(
        "mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _quotient(m, v, correction, epsilon):
    """m/(√v·correction + ε), to four units in the last place: a root and a reciprocal that are one instruction each.

    Rounded to the bit they would take two dozen. A subnormal v counts as 0: its root is below 10⁻¹⁹.
    """
    if IS_INTERPRETED:
        return tl.div_rn(m, tl.sqrt_rn(v) * correction + epsilon)
    root = tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1)
    return m * tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;",
        "=f,f",
        [root * correction + epsilon],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _load(pointers, is_real, MASKED: tl.constexpr):
    """What is read once: it leaves the cache before the tables do."""
    if MASKED:
        return tl.load(pointers, mask=is_real, other=0, eviction_policy="evict_first")
    return tl.load(pointers, eviction_policy="evict_first")


@triton.jit
def _store(pointers, values, is_real, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointers, values, mask=is_real)
    else:
        tl.store(pointers, values)


@triton.jit
def _decode(
    codes,
    scales,
    powers,
    values,
    offset,
    is_real,
    row,
    is_row,
    MASKED: tl.constexpr,
    EXPAND: tl.constexpr,
    IS_SIGNED: tl.constexpr,
):
    """x = ±M·(code/Δmax)^(1/k), fp32 [R, 128]."""
    code = _load(codes + offset, is_real, MASKED).to(tl.int32)
    bits = _load(scales + row, is_row, MASKED).to(tl.int32) << 16
    scale = bits.to(tl.float32, bitcast=True)
    place = code & 0x7F if IS_SIGNED else code
    if EXPAND:
        power = _load(powers + row, is_row, MASKED).to(tl.int32)
        share = tl.load(values + (power * 128)[:, None] + place)
    else:
        share = tl.load(values + _UNEXPANDED * 128 + place)
    if IS_SIGNED:
        share = (share.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    return share * scale[:, None]


@triton.jit
def _scale_bits(largest):
    """M as stored: the bits of the nearest bf16, as fp32's [R]; 0 for what is subnormal. `largest`: as bits."""
    kept = tl.minimum(largest, _LARGEST_SCALE_BITS)
    rounded = (kept + 0x7FFF + ((kept >> 16) & 1)) >> 16 << 16
    return tl.where(largest < _SMALLEST_NORMAL_BITS, 0, rounded)


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
    """The code of the largest magnitude of the format that is not above y ≥ 0, if y is not beyond Δmax.

    Below the smallest normal magnitude the format is linear, as fp32 is in the octave that begins there.
    """
    BIAS: tl.constexpr = 7 if FRACTION == 3 else 15
    LAST: tl.constexpr = 126 if FRACTION == 3 else 123
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    is_subnormal = y < SMALLEST_NORMAL
    bits = tl.where(is_subnormal, y + SMALLEST_NORMAL, y).to(tl.int32, bitcast=True)
    BELOW: tl.constexpr = (127 - BIAS) << FRACTION
    code = (bits >> (23 - FRACTION)) - tl.where(is_subnormal, BELOW + (1 << FRACTION), BELOW)
    return tl.minimum(code, LAST)


@triton.jit
def _encode(
    x,
    codes,
    scales,
    powers,
    uppers,
    least,
    offset,
    is_real,
    row,
    is_row,
    MASKED: tl.constexpr,
    EXPAND: tl.constexpr,
    FRACTION: tl.constexpr,
    IS_SIGNED: tl.constexpr,
):
    """code = round(Δmax·(|x|/M)^k) of x [R, 128], with M and k as they are stored."""
    bits = x.to(tl.int32, bitcast=True)
    is_finite = (bits & 0x7FFFFFFF) < _INFINITY_BITS
    magnitude = tl.where(is_finite, bits & 0x7FFFFFFF, 0)
    largest = tl.max(magnitude, axis=1)
    scale_bits = _scale_bits(largest)
    _store(scales + row, (scale_bits >> 16).to(tl.int16), is_row, MASKED)
    scale = scale_bits.to(tl.float32, bitcast=True)
    divisor = tl.where(scale > 0, scale, float("inf"))
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), divisor)
    ratio = _product_without_subnormals(
        magnitude.to(tl.float32, bitcast=True), tl.broadcast_to(inverse[:, None], magnitude.shape)
    )
    LARGEST: tl.constexpr = _E4M3_LARGEST if FRACTION == 3 else _E5M2_LARGEST
    if EXPAND:
        # less 1 and without a sign, 0 is the largest of all
        less_one = (ratio.to(tl.int32, bitcast=True) - 1).to(tl.uint32, bitcast=True)
        smallest = (tl.min(less_one, axis=1) + 1).to(tl.float32, bitcast=True)
        RANGE: tl.constexpr = _E4M3_RANGE if FRACTION == 3 else _E5M2_RANGE
        usable = _last_usable(least, smallest, RANGE)
        power = tl.where(smallest < largest.to(tl.float32, bitcast=True) * inverse, usable, _UNEXPANDED)
        _store(powers + row, power.to(tl.uint8), is_row, MASKED)
        k = tl.exp2(power.to(tl.float32) * (1.0 / _STEPS) - 4.0)
        LOG2_LARGEST: tl.constexpr = _E4M3_LOG2_LARGEST if FRACTION == 3 else _E5M2_LOG2_LARGEST
        y = tl.exp2(tl.fma(_log2(ratio), tl.broadcast_to(k[:, None], ratio.shape), LOG2_LARGEST))
        upper = uppers + (power * 128)[:, None]
    else:
        y = ratio * LARGEST
        upper = uppers + _UNEXPANDED * 128
    floor = _floor_code(y, FRACTION)
    code = floor + (ratio > tl.load(upper + floor)).to(tl.int32)
    if IS_SIGNED:
        code = code | ((bits >> 24) & 0x80)
    _store(codes + offset, tl.where(is_finite, code, _NAN).to(tl.uint8), is_real, MASKED)


@triton.jit(
    do_not_specialize=[
        "first_program",
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
    first_program,
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
    MASKED: tl.constexpr,
    R: tl.constexpr,
):
    # Where this program begins may be beyond 2³¹; what it adds to that is not.
    program = tl.program_id(0) + first_program
    start = program.to(tl.int64) * (R * _GROUP)
    first_row = program * R
    left = tl.minimum(count - start, R * _GROUP).to(tl.int32)
    row = tl.arange(0, R)
    offset = row[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    is_real, is_row = offset < left, row * _GROUP < left
    weights += start
    gradients += start
    first_codes += start
    second_codes += start
    first_scales += first_row
    second_scales += first_row
    if FIRST_EXPAND:
        first_powers += first_row
    if SECOND_EXPAND:
        second_powers += first_row
    weight = _load(weights + offset, is_real, MASKED)
    gradient = _load(gradients + offset, is_real, MASKED)
    m = _decode(
        first_codes, first_scales, first_powers, first_values, offset, is_real, row, is_row, MASKED, FIRST_EXPAND, True
    )
    v = _decode(
        second_codes,
        second_scales,
        second_powers,
        second_values,
        offset,
        is_real,
        row,
        is_row,
        MASKED,
        SECOND_EXPAND,
        False,
    )
    m = m + (gradient - m) * first_share
    v = v * second_kept + (gradient * second_share) * gradient
    weight = weight * kept - _quotient(m, v, correction, epsilon) * step_size
    _store(weights + offset, weight, is_real, MASKED)
    _encode(
        m,
        first_codes,
        first_scales,
        first_powers,
        first_uppers,
        first_least,
        offset,
        is_real,
        row,
        is_row,
        MASKED,
        FIRST_EXPAND,
        FIRST_FRACTION,
        True,
    )
    _encode(
        v,
        second_codes,
        second_scales,
        second_powers,
        second_uppers,
        second_least,
        offset,
        is_real,
        row,
        is_row,
        MASKED,
        SECOND_EXPAND,
        SECOND_FRACTION,
        False,
    )
