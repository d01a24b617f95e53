"""Which entries of a row are its k smallest, in linear time: a radix selection on the bits of floats.

Equal values keep their order: of those at the border, the lower indices are taken, as a stable sort would.
"""

import numpy as np
from numpy.typing import NDArray

from tahq.quant.cpu.kernel import kernel
from tahq.quant.cpu.numbers import MAGNITUDE, Fp32Array, Integer, bits_of

_DIGIT_BITS = 11
NUM_COUNTS = 1 << _DIGIT_BITS
_ZERO = np.float32(0.0)
_LEVELS = 3
"""Of digits, from the highest: 33 bits hold the 32 of a float."""


@kernel
def mark_smallest(
    values: Fp32Array,
    length: int,
    count: int,
    first: int,
    stop: int,
    is_larger: NDArray[np.uint8],
    counts: NDArray[np.int64],
) -> None:
    """For each row from `first` to `stop − 1`, 0 for its `count` smallest values, 1 for the others.

    Args:
        values: fp32 [rows · length], no NaN.
        length: entries of a row.
        count: at most length.
        first: row to begin with.
        stop: row to stop before.
        is_larger: uint8 [rows · length], written.
        counts: int64 [NUM_COUNTS], room for counting.
    """
    for row in range(first, stop):
        start = row * length
        border, ties = _border(values, start, length, count, counts)
        for i in range(start, start + length):
            key = _ordered(values[i])
            is_tie = key == border and ties > 0
            is_larger[i] = 0 if key < border or is_tie else 1
            ties -= is_tie


@kernel
def _border(values: Fp32Array, start: int, length: int, count: int, counts: NDArray[np.int64]) -> tuple[int, int]:
    """The key of the first value that does not all belong to the smallest, and how many equal to it still do."""
    prefix, left = 0, count
    for level in range(_LEVELS):
        shift = (_LEVELS - 1 - level) * _DIGIT_BITS
        counts[:] = 0
        for i in range(start, start + length):
            key = _ordered(values[i])
            if key >> (shift + _DIGIT_BITS) == prefix:
                counts[(key >> shift) & (counts.size - 1)] += 1
        digit = 0
        while digit < counts.size - 1 and counts[digit] <= left:
            left -= counts[digit]
            digit += 1
        prefix = (prefix << _DIGIT_BITS) | digit
    return prefix, left


@kernel
def _ordered(value: np.float32) -> Integer:
    """A whole number from 0 to 2^32 − 1, in the order of the floats; −0 is 0."""
    bits = np.int64(bits_of(value + _ZERO))
    return (bits ^ ((bits >> 31) & MAGNITUDE)) + 0x80000000
