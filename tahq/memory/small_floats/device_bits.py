"""Device functions of kernels that code small floating-point numbers: codes, scales, maxima that keep NaN.

Devices with FP8 conversions use them (`NATIVE`); elsewhere, for other formats and in the interpreter, the same rounding
is written out. A format has e bits of exponent (EXPONENT), m of fraction (MANTISSA), and bias 2^(e − 1) − 1.
"""

import triton
import triton.language as tl

from tahq.memory.small_floats.block_codes import SMALLEST_SCALE
from tahq.quant.gpu.tiles import INFINITY, IS_INTERPRETED, magnitude_bits

_SMALLEST = tl.constexpr(SMALLEST_SCALE)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_NAN_BF16 = tl.constexpr(0x7FC0)
_LOOK_UP = tl.constexpr(
    "{ .reg .b64 place; mad.wide.u32 place, $2, 4, $1; ld.global.nc.L1::evict_last.f32 $0, [place]; }"
)
_FOUR = """{
    .reg .b16 low, high;
    cvt.rn.satfinite.FORMAT.f32 low, $2, $1;
    cvt.rn.satfinite.FORMAT.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}"""
_FOUR_E4M3 = tl.constexpr(_FOUR.replace("FORMAT", "e4m3x2"))
_FOUR_E5M2 = tl.constexpr(_FOUR.replace("FORMAT", "e5m2x2"))


@triton.jit
def scale_of(largest_bits, RECIPROCAL: tl.constexpr):
    """max|x|/Δmax, at least the smallest scale; NaN stays NaN."""
    scale = largest_bits.to(tl.float32, bitcast=True) * RECIPROCAL
    return tl.where(scale < _SMALLEST, _SMALLEST, scale)


@triton.jit
def to_bf16_bits(scale):
    """Bits of fp32 scales, rounded to bf16, to nearest even, as int16."""
    bits = scale.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & _MAGNITUDE) > INFINITY, _NAN_BF16, rounded).to(tl.int16)


@triton.jit
def from_bf16_bits(bits):
    """fp32 of bf16 bits, int16."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(x):
    """1/x, correctly rounded."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def encode(y, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, NATIVE: tl.constexpr):
    """Codes, uint8, of fp32 numbers that are within a rounding of Δmax, or NaN: E4M3, E5M2, or E2M1 to E2M3.

    NATIVE: for the first two. E2M1 to E2M3 have no NaN.
    """
    if NATIVE:
        # Four at a time, and only used together: ptxas 12.8 (Triton 3.6) merges pairs and reads a pair's register
        # before it is written.
        if MANTISSA == 3:
            return tl.inline_asm_elementwise(_FOUR_E4M3, "=r,f,f,f,f", [y], dtype=tl.uint8, is_pure=True, pack=4)
        return tl.inline_asm_elementwise(_FOUR_E5M2, "=r,f,f,f,f", [y], dtype=tl.uint8, is_pure=True, pack=4)
    SHIFT: tl.constexpr = 23 - MANTISSA
    BIAS: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    NAN: tl.constexpr = (1 << (EXPONENT + MANTISSA)) - 1
    # All ones where there is no NaN, one less in E4M3; E5M2 has an infinity too.
    LARGEST: tl.constexpr = NAN - (0 if EXPONENT == 2 else 1 if EXPONENT == 4 else 4)
    SMALLEST_NORMAL: tl.constexpr = (128 - BIAS) << 23
    # Added to a number below the normal ones, it leaves their spacing as that of the sum.
    ANCHOR: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    ANCHOR_BITS: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    bits = magnitude_bits(y)
    normal = ((bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    below = (bits.to(tl.float32, bitcast=True) + ANCHOR).to(tl.int32, bitcast=True) - ANCHOR_BITS
    code = tl.minimum(tl.where(bits < SMALLEST_NORMAL, below, normal), LARGEST)
    code = tl.where(bits > INFINITY, NAN, code)
    sign = (y.to(tl.int32, bitcast=True) >> (31 - EXPONENT - MANTISSA)) & (NAN + 1)
    return (code | sign).to(tl.uint8)


@triton.jit
def decode(codes, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 of codes in E4M3 (NATIVE: for it only) or E2M1 to E2M3."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    LARGEST: tl.constexpr = (1 << (EXPONENT + MANTISSA)) - 1
    # Between the exponents of fp32 and of the format, whose bias is 2^(e − 1) − 1.
    TOO_SMALL: tl.constexpr = 2.0 ** (128 - (1 << (EXPONENT - 1)))
    wide = codes.to(tl.int32)
    magnitude, sign = wide & LARGEST, (wide & (LARGEST + 1)) << (31 - EXPONENT - MANTISSA)
    # Exponent and fraction where fp32 has them: a number that much too small, below the normal ones too.
    number = (magnitude << (23 - MANTISSA) | sign).to(tl.float32, bitcast=True) * TOO_SMALL
    if EXPONENT == 4:
        number = tl.where(magnitude == LARGEST, float("nan"), number)
    return number


@triton.jit
def _larger(left, right):
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_magnitude(x, AXIS: tl.constexpr):
    """max |x|, fp32, NaN if there is one; one instruction per element, which compares without the sign."""
    if IS_INTERPRETED:
        return tl.max(magnitude_bits(x), axis=AXIS).to(tl.float32, bitcast=True)
    return tl.reduce(tl.abs(x), AXIS, _larger)


@triton.jit
def code_groups(x, NATIVE: tl.constexpr):
    """Code groups x [G, 16] fp32: codes uint8 [G, 16], scales as bf16 bits [G]; and the values of either, fp32."""
    largest = largest_magnitude(x, 1)
    scale_bits = to_bf16_bits(scale_of(largest.to(tl.int32, bitcast=True), 1 / 448.0))
    scale = from_bf16_bits(scale_bits)
    codes = encode(x * reciprocal(scale)[:, None], 4, 3, NATIVE)
    return codes, scale_bits, decode(codes, 4, 3, NATIVE), scale


@triton.jit
def inverse_root(x):
    """1/√x of a normal number, to 2 ulp; to 1 in the interpreter."""
    if IS_INTERPRETED:
        return tl.div_rn(1.0, tl.sqrt_rn(x))
    return tl.rsqrt(x)


@triton.jit
def sigmoid(x):
    """1/(1 + e⁻ˣ)."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def exp2(x):
    """2^x to some 10⁻⁷; 0 where that is subnormal."""
    if IS_INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal_ftz(x):
    """1/x of x from 2⁻¹²⁶ to 2¹²⁶, or ∞; correctly rounded."""
    if IS_INTERPRETED:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    return tl.inline_asm_elementwise("rcp.rn.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def product_without_subnormals(x, y):
    """x·y with subnormal x and product replaced by 0; y must be normal."""
    if IS_INTERPRETED:
        product = tl.where(x < _SMALLEST_NORMAL, 0.0, x) * y
        return tl.where(product < _SMALLEST_NORMAL, 0.0, product)
    return tl.inline_asm_elementwise(
        "mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def look_up(table, row, LENGTH: tl.constexpr, place):
    """table[row, place] of a read-only fp32 [rows, LENGTH].

    Triton would give an unordered load another layout, and convert all numbers to it and back.
    """
    if IS_INTERPRETED:
        return tl.load(table + row * LENGTH + place)
    start = table.to(tl.int64) + row.to(tl.int64) * (4 * LENGTH)
    return tl.inline_asm_elementwise(
        _LOOK_UP, "=f,l,r", [tl.broadcast_to(start, place.shape), place], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def store_rounded(out, at, values, is_real):
    """Rounded to out's type, half to even; for bf16 in integers, since the interpreter would truncate."""
    if out.dtype.element_ty == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        values = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=is_real)


@triton.jit
def put(pointers, numbers, ASM: tl.constexpr):
    """Store one number per group, the same from all threads of the group.

    For its own store Triton would redistribute the groups and compute everything that leads to the number twice.
    """
    if IS_INTERPRETED:
        tl.store(pointers, numbers.to(pointers.dtype.element_ty))
    else:
        tl.inline_asm_elementwise(
            ASM, "=r,l,r", [pointers.to(tl.int64), numbers], dtype=tl.int32, is_pure=False, pack=1
        )
