"""The step of `fp8_adamw` on CUDA as one kernel: weights, gradients and moments are read once and written once.

For equal gradients, codes, scales and powers are bit-equal to `fp8_adamw.step_in_torch` at every step: powers of two
and logarithms, which devices round differently, decide nothing that their error could change. The change of a
weight is within `UPDATE_ERROR` of that in `step_in_torch`, relative. Full programs run without masks, the last one with
them.

Codes are decoded by table, and encoded by one of two methods with the same result:

*Exact.* y = Δmax·(|x|/M)^k, by logarithms correct to about 10⁻⁶, estimates the largest magnitude of the format that is
not above it; the table `uppers` decides whether the next one is nearer. Subnormals, zeros and non-finite numbers may
occur anywhere.

*Fast*, for full programs, on devices with FP8 conversions. If the device rounds y·(1 ± 2⁻¹⁷) to the same code, and y
errs by less, that code is correct, and no table is read. If it does not for any number of a program (by estimate in 4 %
of programs of 256 numbers for each moment), or if there is a NaN, an infinity, or a zero beside other numbers, the
program encodes exactly. The relative error of y:

    log₂: 2⁻²² of it, or absolutely within (½, 2) (PTX, lg2.approx), so k·log₂ errs by at most 32·2⁻²², since k ≤ 32 and
    k·|log₂| ≤ 32, the range of E5M2; k is rounded, 32·2⁻²⁴; the sum, below 16, 2⁻²¹;  times ln 2: 7·10⁻⁶
    2^…: 2⁻²² (PTX, ex2.approx);  together 7.2·10⁻⁶ < 2⁻¹⁷ = 7.6·10⁻⁶

Shape letters: R groups per program, of 128 elements each in J = 4 runs of 32. Eight threads read a run, four elements
each, one line of memory; a warp has two groups, and work per group is repeated by its sixteen threads.
"""

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl

from tahq.memory.adam.kernels import NUMBERS, load_once, moved_weight, store
from tahq.memory.coat import fp8_codes
from tahq.memory.coat.fp8_codes import E4M3, E5M2, FRACTION_BITS
from tahq.memory.coat.fp8_groups import (
    GROUP,
    LARGEST_SCALE,
    NAN,
    NUM_POWERS,
    SMALLEST_NORMAL,
    STEPS_PER_OCTAVE,
    UNEXPANDED,
    Moments,
    smallest_share,
)
from tahq.memory.small_floats.block_codes import has_fp8_units
from tahq.memory.small_floats.device_bits import encode, exp2, look_up, product_without_subnormals, put, reciprocal_ftz
from tahq.quant.gpu.launch import EXACT, BoundLaunches, Launch
from tahq.quant.gpu.tiles import INFINITY, IS_INTERPRETED, log2
from tahq.quant.stream import ALIGNMENT

UPDATE_ERROR = 2.0**-21
"""Of m/(√v·c + ε): 2⁻²² of the root (PTX: sqrt.approx), 2⁻²³ of the reciprocal, and three roundings of 2⁻²⁴."""
_MARGIN = 2.0**-17
_BELOW = tl.constexpr(1 - _MARGIN)
_LOG2_BELOW = tl.constexpr(math.log2(1 - _MARGIN))
_ABOVE = tl.constexpr((1 + _MARGIN) / (1 - _MARGIN))
_E4M3_LARGEST, _E5M2_LARGEST = (tl.constexpr(fp8_codes.LARGEST[fp8]) for fp8 in (E4M3, E5M2))
_E4M3_LOG2_LARGEST, _E5M2_LOG2_LARGEST = (tl.constexpr(math.log2(fp8_codes.LARGEST[fp8])) for fp8 in (E4M3, E5M2))
_E4M3_RANGE, _E5M2_RANGE = (tl.constexpr(-math.log2(smallest_share(fp8))) for fp8 in (E4M3, E5M2))
_GROUP = tl.constexpr(GROUP)
_RUN = tl.constexpr(32)
_NAN = tl.constexpr(NAN)
_UNEXPANDED = tl.constexpr(UNEXPANDED)
_LAST_POWER = tl.constexpr(NUM_POWERS - 1)
_STEPS = tl.constexpr(float(STEPS_PER_OCTAVE))
_SMALLEST_NORMAL_BITS, _LARGEST_SCALE_BITS = (
    tl.constexpr(int(torch.tensor(number).view(torch.int32))) for number in (SMALLEST_NORMAL, LARGEST_SCALE)
)
"""As bits, which are in the order of magnitudes."""
# Codes of four lower and four upper bounds as words, and the difference of the words, as the first of four results.
_BOTH = """{
    .reg .b16 a, b, c, d;
    .reg .b32 low, high;
    cvt.rn.satfinite.FORMAT.f32 a, $6, $5;
    cvt.rn.satfinite.FORMAT.f32 b, $8, $7;
    cvt.rn.satfinite.FORMAT.f32 c, $10, $9;
    cvt.rn.satfinite.FORMAT.f32 d, $12, $11;
    mov.b32 low, {a, b};
    mov.b32 high, {c, d};
    mov.b32 $0, low;
    xor.b32 $1, low, high;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
    mov.b32 $4, 0;
}"""
ROWS = 2  # Groups per program, of one warp
Kinds = tuple[tuple[bool, int], ...]  # For both moments: whether ranges are expanded, and the format's bits of fraction
_PUT_8, _PUT_16 = (
    tl.constexpr(
        "{ .reg .b16 low; cvt.u16.u32 low, $2; st.global.bBITS [$1], low; mov.b32 $0, 0; }".replace("BITS", bits)
    )
    for bits in ("8", "16")
)
_BOTH_E4M3, _BOTH_E5M2 = (tl.constexpr(_BOTH.replace("FORMAT", name)) for name in ("e4m3x2", "e5m2x2"))


@triton.jit
def _largest(x):
    """Of each group [R, J, 32]: [R, 1, 1]."""
    return tl.max(tl.max(x, axis=1, keep_dims=True), axis=2, keep_dims=True)


@triton.jit
def _smallest(x):
    return tl.min(tl.min(x, axis=1, keep_dims=True), axis=2, keep_dims=True)


@triton.jit
def _either(left, right):
    return left | right


@triton.jit
def _decode(codes, scales, powers, values, offset, is_real, row, is_row, MASKED: tl.constexpr, EXPAND: tl.constexpr):
    """x = ±M·(code/Δmax)^(1/k), fp32 [R, J, 32]."""
    code = load_once(codes + offset, is_real, 0, MASKED).to(tl.int32)
    bits = load_once(scales + row, is_row, 0, MASKED).to(tl.int32) << 16
    power = tl.full(row.shape, _UNEXPANDED, tl.int32)
    if EXPAND:
        power = load_once(powers + row, is_row, 0, MASKED).to(tl.int32)
    return look_up(values, power, 256, code) * bits.to(tl.float32, bitcast=True)


@triton.jit
def _moved_weight(weight, m, v, decay, rate, root_factor, epsilon):
    if IS_INTERPRETED:  # rounded as by `step_in_torch`, which divides by the root
        return weight * decay - tl.div_rn(m, tl.sqrt_rn(v) * root_factor + epsilon) * rate
    return moved_weight(weight, m, v, decay, rate, root_factor, epsilon)


@triton.jit
def _scale_bits(largest):
    """M as stored: the bits of the nearest bf16, as fp32's; 0 for subnormals. `largest`: as bits."""
    kept = tl.minimum(largest, _LARGEST_SCALE_BITS)
    rounded = (kept + 0x7FFF + ((kept >> 16) & 1)) >> 16 << 16
    return tl.where(largest < _SMALLEST_NORMAL_BITS, 0, rounded)


@triton.jit
def _inverse_of(scale_bits):
    """1/M; 0 where M is 0."""
    return reciprocal_ftz(tl.where(scale_bits > 0, scale_bits, INFINITY).to(tl.float32, bitcast=True))


@triton.jit
def _last_usable(least, ratio, RANGE: tl.constexpr):
    """The largest index of a power whose entry in `least` is not above the ratio, else 0.

    The guess, 28·(log₂ k + 4), is right but for its rounding, so the right one is at most one away.
    """
    k = RANGE / tl.maximum(-log2(ratio), 1e-6)
    guess = tl.minimum(tl.maximum((log2(k) + 4.0) * _STEPS, 0.0), _LAST_POWER * 1.0).to(tl.int32)
    above = tl.minimum(guess + 1, _LAST_POWER)
    start = tl.zeros(ratio.shape, tl.int32)
    found = tl.where(look_up(least, start, 1, above) <= ratio, above, guess)
    return tl.where(look_up(least, start, 1, guess) <= ratio, found, tl.maximum(guess - 1, 0))


@triton.jit
def _power_of(smallest, largest_ratio, least, FRACTION: tl.constexpr):
    """The index of k for groups whose ratios, but for zeros, are from `smallest` to `largest_ratio`."""
    RANGE: tl.constexpr = _E4M3_RANGE if FRACTION == 3 else _E5M2_RANGE
    return tl.where(smallest < largest_ratio, _last_usable(least, smallest, RANGE), _UNEXPANDED)


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
def _encode_exactly(
    x, codes, scales, powers, uppers, least, exponents, offset, is_real, row, is_row,
    MASKED: tl.constexpr, EXPAND: tl.constexpr, FRACTION: tl.constexpr,
):  # fmt: skip
    """code = round(Δmax·(|x|/M)^k) of x [R, J, 32], with the stored M and k; for any x."""
    bits = x.to(tl.int32, bitcast=True)
    is_finite = (bits & 0x7FFFFFFF) < INFINITY
    magnitude = tl.where(is_finite, bits & 0x7FFFFFFF, 0)
    largest = _largest(magnitude)
    scale_bits = _scale_bits(largest)
    store(scales + row, (scale_bits >> 16).to(tl.int16), is_row, MASKED)
    inverse = _inverse_of(scale_bits)
    ratio = product_without_subnormals(
        magnitude.to(tl.float32, bitcast=True), tl.broadcast_to(inverse, magnitude.shape)
    )
    LARGEST: tl.constexpr = _E4M3_LARGEST if FRACTION == 3 else _E5M2_LARGEST
    power = tl.full(row.shape, _UNEXPANDED, tl.int32)
    if EXPAND:
        smallest = _smallest(tl.where(ratio > 0, ratio, float("inf")))
        power = _power_of(smallest, largest.to(tl.float32, bitcast=True) * inverse, least, FRACTION)
        store(powers + row, power.to(tl.uint8), is_row, MASKED)
        k = tl.broadcast_to(look_up(exponents, power, 1, tl.zeros(power.shape, tl.int32)), ratio.shape)
        LOG2_LARGEST: tl.constexpr = _E4M3_LOG2_LARGEST if FRACTION == 3 else _E5M2_LOG2_LARGEST
        y = exp2(tl.fma(log2(ratio), k, LOG2_LARGEST))
    else:
        y = ratio * LARGEST
    floor = _floor_code(y, FRACTION)
    code = floor + (ratio > look_up(uppers, power, 128, floor)).to(tl.int32)
    code = code | ((bits >> 24) & 0x80)
    store(codes + offset, tl.where(is_finite, code, _NAN).to(tl.uint8), is_real, MASKED)


@triton.jit
def _codes_of_both(low, high, FRACTION: tl.constexpr):
    """Codes of `low`, uint8, and words that are not 0 where those of `high` differ; both [R, J, 32]."""
    if IS_INTERPRETED:
        code = encode(low, 7 - FRACTION, FRACTION, False)
        return code, (code != encode(high, 7 - FRACTION, FRACTION, False)).to(tl.int32)
    ASM: tl.constexpr = _BOTH_E4M3 if FRACTION == 3 else _BOTH_E5M2
    return tl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,=r,f,f,f,f,f,f,f,f", [low, high], dtype=(tl.uint8, tl.int32), is_pure=True, pack=4
    )


@triton.jit
def _encode(
    x, codes, scales, powers, uppers, least, exponents, offset, is_real, row, is_row,
    MASKED: tl.constexpr, EXPAND: tl.constexpr, FRACTION: tl.constexpr, FAST: tl.constexpr,
    IS_SIGNED: tl.constexpr,
):  # fmt: skip
    """The same, fast where that is allowed; unless IS_SIGNED, no x is below 0."""
    if FAST:
        # An unsigned value with a sign bit is NaN; as an unsigned integer it is the largest.
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF if IS_SIGNED else bits
        largest = _largest(magnitude.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)
        scale_bits = _scale_bits(largest)
        inverse = _inverse_of(scale_bits)
        ratio = product_without_subnormals(tl.abs(x) if IS_SIGNED else x, tl.broadcast_to(inverse, x.shape))
        smallest = _smallest(ratio)
        largest_ratio = largest.to(tl.float32, bitcast=True) * inverse
        is_odd = (largest >= INFINITY) | (largest < 0)
        LARGEST: tl.constexpr = _E4M3_LARGEST if FRACTION == 3 else _E5M2_LARGEST
        LOG2_LARGEST: tl.constexpr = _E4M3_LOG2_LARGEST if FRACTION == 3 else _E5M2_LOG2_LARGEST
        if EXPAND:
            is_odd = is_odd | ((smallest == 0) & (largest_ratio > 0))
            power = _power_of(smallest, largest_ratio, least, FRACTION)
            k = tl.broadcast_to(look_up(exponents, power, 1, tl.zeros(power.shape, tl.int32)), ratio.shape)
            low = exp2(tl.fma(log2(ratio), k, LOG2_LARGEST + _LOG2_BELOW))
        else:
            low = ratio * (LARGEST * _BELOW)
        if IS_SIGNED:
            low = (low.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)
        code, differs = _codes_of_both(low, low * _ABOVE, FRACTION)
        differs = tl.reduce(tl.reduce(differs, 1, _either, keep_dims=True), 2, _either, keep_dims=True)
        is_odd = is_odd | (differs != 0)
        # Axis by axis: reduced all at once, groups would first be moved to other threads.
        if tl.max(tl.max(tl.max(is_odd.to(tl.int32), axis=2), axis=1), axis=0) > 0:
            _encode_exactly(
                x, codes, scales, powers, uppers, least, exponents, offset, is_real, row, is_row,
                MASKED, EXPAND, FRACTION,
            )  # fmt: skip
        else:
            put(scales + row, scale_bits >> 16, _PUT_16)
            if EXPAND:
                put(powers + row, power, _PUT_8)
            store(codes + offset, code, is_real, MASKED)
    else:
        _encode_exactly(
            x, codes, scales, powers, uppers, least, exponents, offset, is_real, row, is_row, MASKED, EXPAND, FRACTION
        )


@triton.jit(do_not_specialize=["first_program", "count", *NUMBERS])
def step_kernel(
    weights, gradients, first_codes, first_scales, first_powers, first_values, first_uppers, first_least,
    first_exponents, second_codes, second_scales, second_powers, second_values, second_uppers, second_least,
    second_exponents, first_program, count, beta1, rest1, beta2, rest2, decay, rate, root_factor, epsilon,
    FIRST_EXPAND: tl.constexpr, FIRST_FRACTION: tl.constexpr, SECOND_EXPAND: tl.constexpr,
    SECOND_FRACTION: tl.constexpr, MASKED: tl.constexpr, FAST: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One step of R groups; `AdamwNumbers` defines the numbers."""
    # A program may begin beyond 2³¹; offsets within it do not exceed that.
    program = tl.program_id(0) + first_program
    start = program.to(tl.int64) * (R * _GROUP)
    first_row = program * R
    left = tl.minimum(count - start, R * _GROUP).to(tl.int32)
    row = tl.arange(0, R)[:, None, None]
    run = tl.arange(0, _GROUP // _RUN)[None, :, None] * _RUN + tl.arange(0, _RUN)[None, None, :]
    # Threads are assigned in the order of these numbers: eight per run, then other groups, then other runs. The 2 is
    # not true; it only ranks dimensions.
    offset = tl.max_contiguous(tl.multiple_of(row * _GROUP + run, [1, 1, 4]), [2, 1, 4])
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
    weight = load_once(weights + offset, is_real, 0, MASKED)
    gradient = load_once(gradients + offset, is_real, 0, MASKED)
    m = _decode(
        first_codes, first_scales, first_powers, first_values, offset, is_real, row, is_row, MASKED, FIRST_EXPAND
    )
    v = _decode(
        second_codes, second_scales, second_powers, second_values, offset, is_real, row, is_row, MASKED, SECOND_EXPAND
    )
    m = m + (gradient - m) * rest1
    v = v * beta2 + (gradient * rest2) * gradient
    store(weights + offset, _moved_weight(weight, m, v, decay, rate, root_factor, epsilon), is_real, MASKED)
    _encode(
        m, first_codes, first_scales, first_powers, first_uppers, first_least, first_exponents,
        offset, is_real, row, is_row, MASKED, FIRST_EXPAND, FIRST_FRACTION, FAST, True,
    )  # fmt: skip
    _encode(
        v, second_codes, second_scales, second_powers, second_uppers, second_least, second_exponents,
        offset, is_real, row, is_row, MASKED, SECOND_EXPAND, SECOND_FRACTION, FAST, False,
    )  # fmt: skip


def bind_step(weights: torch.Tensor, gradients: torch.Tensor, moments: Moments) -> BoundLaunches | None:
    """Launches of a step on these tensors and any gradient like this one; None if a tensor is not aligned."""
    tensors = _tensors(weights, gradients, moments)
    if any(tensor.data_ptr() % ALIGNMENT for tensor in tensors):
        return None
    return BoundLaunches(_launches(weights.numel(), *_kinds(moments)), tensors, moving=1)


def _tensors(weights: torch.Tensor, gradients: torch.Tensor, moments: Moments) -> list[torch.Tensor]:
    tensors = [weights, gradients]
    for codes, scales, powers, by in moments:
        powers = codes if powers is None else powers
        tensors += [codes, scales.view(torch.int16), powers, by.values, by.uppers, by.least, by.exponents]
    return tensors


def _kinds(moments: Moments) -> tuple[Kinds, bool]:
    fast = bool(IS_INTERPRETED.value) or has_fp8_units(moments[0].codes.device)
    return tuple((each.by.expand, FRACTION_BITS[each.by.fp8]) for each in moments), fast


@lru_cache(maxsize=4096)
def _launches(count: int, kinds: Kinds, fast: bool) -> tuple[Launch, ...]:
    """The full programs, and the last one if it is partial."""
    constants: dict[str, int | bool] = {"R": ROWS, "num_warps": 1, **EXACT}
    for name, (expand, fraction) in zip(("FIRST", "SECOND"), kinds, strict=True):
        constants |= {f"{name}_EXPAND": expand, f"{name}_FRACTION": fraction}
    whole, left = divmod(count, ROWS * GROUP)
    parts = ((0, whole, False), (whole, int(left > 0), True))
    return tuple(
        Launch(
            step_kernel, (programs, 1, 1), (first, count), constants | {"MASKED": masked, "FAST": fast and not masked}
        )
        for first, programs, masked in parts
        if programs
    )
