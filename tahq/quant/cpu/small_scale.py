"""The 8-bit scale of `gaussian.small_scale` inside kernels, equal to it to the bit."""

import numpy as np

from tahq.quant.cpu.kernel import kernel
from tahq.quant.cpu.numbers import Integer, bits_of, float_of
from tahq.quant.gaussian.small_scale import DROPPED_BITS, LARGEST_CODE, OFFSET

_HALF = 1 << (DROPPED_BITS - 1)
_ZERO = np.float32(0.0)


@kernel
def scale_of(code: Integer) -> np.float32:
    """The value of a code from 0 to 254."""
    return float_of(np.int32(np.int32(code + OFFSET) << DROPPED_BITS)) if code > 0 else _ZERO


@kernel
def nearest_code(value: np.float32) -> np.int32:
    """The code of the nearest scale, of two as near the larger; `value` is not negative, and finite."""
    return _code_of_bits(np.int32(bits_of(value) + _HALF))


@kernel
def stochastic_code(value: np.float32, draw: Integer) -> np.int32:
    """The code above or below, by a draw from 0 to 2^20 − 1; `value` is not negative, and finite."""
    return _code_of_bits(np.int32(bits_of(value) + np.int32(draw)))


@kernel
def _code_of_bits(bits: np.int32) -> np.int32:
    code = np.int32(np.int32(bits >> DROPPED_BITS) - OFFSET)
    return np.int32(min(max(code, np.int32(0)), np.int32(LARGEST_CODE)))
