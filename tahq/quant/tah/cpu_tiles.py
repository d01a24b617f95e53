"""One tile of TAH-Quant on the CPU: outlier test, transform, quantiser, their inverses.

Written so that LLVM turns every inner loop into vector code: minimum and maximum run on integers that are in the
order of the floats (a float's own comparisons keep their order for the sake of NaN), and rounding is an addition.
All is equal to `tah.reference` to the bit.
"""

import numpy as np

from tahq.quant.cpu.hadamard import hadamard
from tahq.quant.cpu.kernel import kernel
from tahq.quant.cpu.numbers import MAGNITUDE, Fp32Array, Integer, bits_of, float_of, round_half_even
from tahq.quant.cpu.planes import ByteArray
from tahq.quant.tah.reference import EPSILON

_EPSILON = np.float32(EPSILON)
_ZERO = np.float32(0.0)
_SURELY_BEYOND = np.float32(1.000001)
"""1 + 2^−20, above all that three roundings of 2^−24 can take."""


@kernel
def is_outlier(y: Fp32Array, group: int, largest: np.float32, tau: np.float32) -> bool | np.bool_:
    """Whether a₁/(a₂ + 1e-12) > tau (§3.3, Eq. 3), a₁ being `largest`, the tile's largest magnitude.

    The ratio falls as a₂ grows, so two magnitudes for which it cannot exceed tau settle the question without a₂.
    """
    if largest == _ZERO:
        return False
    if largest / (largest + _EPSILON) > tau:
        return True
    limit = bits_of((largest / tau) * _SURELY_BEYOND)
    beyond = np.int32(0)
    for i in range(group):
        magnitude = np.int32(bits_of(y[i]) & MAGNITUDE)
        beyond = np.int32(beyond + np.int32(magnitude > limit))
    return beyond < 2 and largest / (_second_largest(y, group) + _EPSILON) > tau


@kernel
def _second_largest(y: Fp32Array, group: int) -> np.float32:
    first, second = np.int32(0), np.int32(0)
    for i in range(group):
        magnitude = np.int32(bits_of(y[i]) & MAGNITUDE)
        second = max(second, min(first, magnitude))
        first = max(first, magnitude)
    return float_of(second)


@kernel
def suppress_outlier(y: Fp32Array, largest: np.float32, norm: np.float32) -> int:
    """Swap the pivot, the lowest index of magnitude `largest`, with channel 0, and transform (§3.3, Eq. 4).

    Returns:
        The pivot.
    """
    pivot = 0
    while abs(y[pivot]) != largest:
        pivot += 1
    _exchange(y, pivot)
    hadamard(y, norm)
    return pivot


@kernel
def restore_outlier(y: Fp32Array, pivot: Integer, norm: np.float32) -> None:
    """The inverse of `suppress_outlier`."""
    hadamard(y, norm)
    _exchange(y, pivot)


@kernel
def _exchange(y: Fp32Array, pivot: Integer) -> None:
    first = y[0]
    y[0] = y[pivot]
    y[pivot] = first


@kernel
def extremes(y: Fp32Array) -> tuple[np.float32, np.float32]:
    """Minimum and maximum of y, which holds no NaN; of zeros, −0 is the smaller.

    As signed numbers, the bits of positive floats exceed those of negative ones; as unsigned ones, it is the
    other way round, and of negative floats the smallest has the largest bits.
    """
    largest, negative = np.int32(-0x80000000), np.uint32(0)
    for i in range(y.size):
        bits = bits_of(y[i])
        largest = max(largest, bits)
        negative = max(negative, np.uint32(bits))
    if largest >= 0 and negative > MAGNITUDE:
        return float_of(np.int32(negative)), float_of(largest)
    return _extremes_of_one_sign(y)


@kernel
def _extremes_of_one_sign(y: Fp32Array) -> tuple[np.float32, np.float32]:
    smallest, largest = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for i in range(y.size):
        bits = bits_of(y[i])
        ordered = np.int32(bits ^ np.int32((bits >> 31) & MAGNITUDE))
        smallest = min(smallest, ordered)
        largest = max(largest, ordered)
    return _from_ordered(smallest), _from_ordered(largest)


@kernel
def _from_ordered(ordered: np.int32) -> np.float32:
    return float_of(np.int32(ordered ^ np.int32((ordered >> 31) & MAGNITUDE)))


@kernel
def quantize(y: Fp32Array, scale: np.float32, zero_point: np.float32, levels: np.float32, codes: ByteArray) -> None:
    """codes = clamp(round-half-even((y − z)/s), 0, levels) for each y, 0 where s = 0."""
    divisor = scale if scale != _ZERO else np.float32(np.inf)
    for i in range(y.size):
        kept = min(max((y[i] - zero_point) / divisor, _ZERO), levels)
        codes[i] = np.uint8(round_half_even(kept))
