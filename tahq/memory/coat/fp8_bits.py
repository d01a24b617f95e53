"""What the FP8 kernels share: numbers to FP8 codes and back, scales of groups, maxima that keep NaN.

Devices with FP8 conversions use them (`NATIVE`); elsewhere, and in the interpreter, the same rounding is written out.
"""

import triton
import triton.language as tl

from tahq.memory.coat.fp8_codes import SMALLEST_SCALE
from tahq.quant.gpu.tiles import IS_INTERPRETED

_SMALLEST = tl.constexpr(SMALLEST_SCALE)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_NAN_BF16 = tl.constexpr(0x7FC0)
_FOUR = """{
    .reg .b16 low, high;
    cvt.rn.satfinite.FORMAT.f32 low, $2, $1;
    cvt.rn.satfinite.FORMAT.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}"""
_FOUR_E4M3 = tl.constexpr(_FOUR.replace("FORMAT", "e4m3x2"))
_FOUR_E5M2 = tl.constexpr(_FOUR.replace("FORMAT", "e5m2x2"))


@triton.jit
def magnitude_bits(x):
    """Bits of |x|, fp32, as int32: they are ordered as the magnitudes are, infinity and NaN above all."""
    return x.to(tl.int32, bitcast=True) & _MAGNITUDE


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
    return tl.where((bits & _MAGNITUDE) > _INFINITY, _NAN_BF16, rounded).to(tl.int16)


@triton.jit
def from_bf16_bits(bits):
    """fp32 of bf16 bits, int16."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(x):
    """1/x, rounded as IEEE has it."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def encode(y, MANTISSA: tl.constexpr, NATIVE: tl.constexpr):
    """FP8 codes, uint8, of fp32 numbers that are within a rounding of Δmax, or NaN: E4M3 (MANTISSA 3) or E5M2 (2)."""
    if NATIVE:
        # Four at a time, and used by nobody but as these four: ptxas 12.8, Triton 3.6's, uses the register of a pair
        # that it has merged with another one before it has written it.
        if MANTISSA == 3:
            return tl.inline_asm_elementwise(_FOUR_E4M3, "=r,f,f,f,f", [y], dtype=tl.uint8, is_pure=True, pack=4)
        return tl.inline_asm_elementwise(_FOUR_E5M2, "=r,f,f,f,f", [y], dtype=tl.uint8, is_pure=True, pack=4)
    SHIFT: tl.constexpr = 23 - MANTISSA
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    LARGEST: tl.constexpr = 0x7E if MANTISSA == 3 else 0x7B
    NAN: tl.constexpr = 0x7F
    SMALLEST_NORMAL: tl.constexpr = (128 - BIAS) << 23
    # Added to a number below the normal ones, it leaves their spacing as that of the sum.
    ANCHOR: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    ANCHOR_BITS: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    bits = magnitude_bits(y)
    normal = ((bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    below = (bits.to(tl.float32, bitcast=True) + ANCHOR).to(tl.int32, bitcast=True) - ANCHOR_BITS
    code = tl.minimum(tl.where(bits < SMALLEST_NORMAL, below, normal), LARGEST)
    code = tl.where(bits > _INFINITY, NAN, code)
    sign = (y.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def decode(codes, NATIVE: tl.constexpr):
    """fp32 of E4M3 codes, uint8."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = codes.to(tl.int32)
    # Exponent and fraction where fp32 has them: a number 2¹²⁰ times too small, below the normal ones too.
    number = ((wide & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    number = tl.where((wide & 0x7F) == 0x7F, float("nan"), number)
    return tl.where((wide & 0x80) != 0, -number, number)


@triton.jit
def _larger(left, right):
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_magnitude(x, AXIS: tl.constexpr):
    """max |x|, fp32, NaN if there is one; one instruction an element, which takes the sign off as it compares."""
    if IS_INTERPRETED:
        return tl.max(magnitude_bits(x), axis=AXIS).to(tl.float32, bitcast=True)
    return tl.reduce(tl.abs(x), AXIS, _larger)


@triton.jit
def code_groups(x, NATIVE: tl.constexpr):
    """Code groups x [G, 16] fp32: codes uint8 [G, 16], scales as bf16 bits [G]; and the values of either, fp32."""
    largest = largest_magnitude(x, 1)
    scale_bits = to_bf16_bits(scale_of(largest.to(tl.int32, bitcast=True), 1 / 448.0))
    scale = from_bf16_bits(scale_bits)
    codes = encode(x * reciprocal(scale)[:, None], 3, NATIVE)
    return codes, scale_bits, decode(codes, NATIVE), scale


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
