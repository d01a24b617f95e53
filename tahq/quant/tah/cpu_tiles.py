"""One tile of TAH-Quant on the CPU: outlier test, transform and its inverse, extremes.

Written so that LLVM turns every inner loop into vector code: minimum and maximum run on integers that are in the
order of the floats (a float's own comparisons keep their order for the sake of NaN). All is equal to `tah.reference`
to the bit.
"""

import numpy as np

from tahq.quant.cpu.hadamard import hadamard
from tahq.quant.cpu.kernel import kernel
from tahq.quant.cpu.numbers import MAGNITUDE, Fp32Array, Integer, bits_of, float_of
from tahq.quant.tah.cpu_packing import Extent
from tahq.quant.tah.reference import EPSILON

_EPSILON = np.float32(EPSILON)
_ZERO = np.float32(0.0)
_SURELY_BEYOND = np.float32(1.000001)
"""1 + 2^−20, above all that three roundings of 2^−24 can take."""


@kernel
def least_second(largest: np.float32, tau: np.float32) -> np.int32:
    """Bits of a magnitude; where two exceed it, a₂ is one of them, and the tile has no outlier."""
    return bits_of((largest / tau) * _SURELY_BEYOND)


@kernel
def is_outlier(y: Fp32Array, largest: np.float32, beyond: int, tau: np.float32) -> bool | np.bool_:
    """Whether a₁/(a₂ + 1e-12) > tau (§3.3, Eq. 3), a₁ being `largest`, the tile's largest magnitude.

    The ratio falls as a₂ grows, so two magnitudes `beyond` that of `least_second` settle the question without a₂.
    """
    if largest == _ZERO:
        return False
    if largest / (largest + _EPSILON) > tau:
        return True
    return beyond < 2 and largest / (_second_largest(y) + _EPSILON) > tau


@kernel
def _second_largest(y: Fp32Array) -> np.float32:
    first, second = np.int32(0), np.int32(0)
    for i in range(y.size):
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
def extremes(y: Fp32Array, extent: Extent) -> tuple[np.float32, np.float32]:
    """Minimum and maximum of y, which holds no NaN and whose extent is known; of zeros, −0 is the smaller.

    As signed numbers, the bits of positive floats exceed those of negative ones; as unsigned ones, it is the
    other way round, and of negative floats the smallest has the largest bits.
    """
    if extent.largest >= 0 and extent.negative > MAGNITUDE:
        return float_of(np.int32(extent.negative)), float_of(extent.largest)
    return extremes_of(y)


@kernel
def extremes_of(y: Fp32Array) -> tuple[np.float32, np.float32]:
    """`extremes`, of any y."""
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
