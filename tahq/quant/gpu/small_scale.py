"""`gaussian.small_scale` in Triton, to the bit: scales of 8 bits and the fp32 numbers they stand for."""

import triton
import triton.language as tl

from tahq.quant.gaussian.small_scale import DROPPED_BITS, LARGEST_CODE, NOT_FINITE, OFFSET

_OFFSET, _DROPPED = tl.constexpr(OFFSET), tl.constexpr(DROPPED_BITS)
_HALF = tl.constexpr(1 << (DROPPED_BITS - 1))
_LARGEST_CODE, _NOT_FINITE = tl.constexpr(LARGEST_CODE), tl.constexpr(NOT_FINITE)


@triton.jit
def code_of_bits(bits):
    """Codes of scales, int32, of fp32's bits to which what rounds them was added."""
    return tl.minimum(tl.maximum((bits >> _DROPPED) - _OFFSET, 0), _LARGEST_CODE)


@triton.jit
def nearest_code(value):
    """Codes, int32, of the scales nearest to fp32 values, of two as near the larger."""
    return code_of_bits(value.to(tl.int32, bitcast=True) + _HALF)


@triton.jit
def scale_value(code):
    """fp32 scales of codes int32: 0 of code 0, NaN of 255."""
    value = ((code + _OFFSET) << _DROPPED).to(tl.float32, bitcast=True)
    return tl.where(code == _NOT_FINITE, float("nan"), tl.where(code == 0, 0.0, value))
