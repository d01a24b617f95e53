"""Magnitudes against the levels of a Gaussian quantiser: which level each gets, scales of tiles, and their widths.

The index of a magnitude is the number of thresholds below it, thresholds scaled to the tile in fp32 (t·s, rounded
once). Two methods give it, equal to the bit:
- a sweep over the tile for every four thresholds, in vector code: fewest steps up to 6 bits;
- a table of buckets, each of which holds at most one threshold, so that one comparison settles an index: from 7 bits.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tahq.quant.cpu.kernel import estimate, kernel
from tahq.quant.cpu.numbers import Fp32Array, Integer, bits_of, float_of
from tahq.quant.cpu.planes import ByteArray, read_number, write_number
from tahq.quant.cpu.tiles import Int32Array
from tahq.quant.gaussian.bit_allocation import NUM_LEVELS, STEPS
from tahq.quant.gaussian.levels import MAX_MAGNITUDES, level_table, magnitude_table, threshold_table
from tahq.quant.gaussian.small_scale import DROPPED_BITS, LARGEST_CODE, OFFSET
from tahq.quant.gaussian.tile_stream import WIDTH_BITS

Int64Array = NDArray[np.int64]

_PER_SWEEP = 4
_MIN_SEARCHED_BITS = 7
"""From this width on, buckets are faster than sweeps."""
_BUCKETS_PER_UNIT = 128
"""A bucket is narrower than the least distance of two thresholds, which is 0.0169, at 8 bits."""
_NUM_BUCKETS = 5 * _BUCKETS_PER_UNIT
"""No threshold lies beyond 5."""
_MARGIN = 1e-3
"""Of a bucket's width; far above the error of two roundings of 2^−24 at 5 units, 1.5e-4."""
_LEAST_SEARCHED = np.float32(2.0**-100)
"""Below this scale, its reciprocal may be infinite."""
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


class Levels(NamedTuple):
    """Tables with a row for each number of bits, 0 to 8; row 0 is never read.

    Magnitudes [9, 128] ascend, then zeros; thresholds [9, 127] lie between them, then numbers above any magnitude;
    `signed` [9, 256] has the level of every code; `first` [9, buckets], how many thresholds surely lie below a bucket.
    """

    magnitudes: Fp32Array
    thresholds: Fp32Array
    signed: Fp32Array
    first: ByteArray


@cache
def levels() -> Levels:
    """The tables, made once; do not write to them."""
    bucket_starts = (np.arange(_NUM_BUCKETS) - _MARGIN) / _BUCKETS_PER_UNIT
    thresholds = threshold_table()
    first = np.stack([np.searchsorted(row, bucket_starts) for row in thresholds]).astype(np.uint8)
    return Levels(magnitude_table(), thresholds, level_table(), first)


class ScaledLevels(NamedTuple):
    """Thresholds, then infinities, and magnitudes of one width, fp32 [128], scaled to a tile.

    `indices` and `level`, [G], are room for each element's index and magnitude.
    """

    steps: Fp32Array
    values: Fp32Array
    indices: Int32Array
    level: Fp32Array

    @classmethod
    def of(cls, group: int) -> "ScaledLevels":
        """Fresh memory, for one thread."""
        steps, values = np.empty(MAX_MAGNITUDES, np.float32), np.empty(MAX_MAGNITUDES, np.float32)
        return cls(steps, values, np.empty(group, np.int32), np.empty(group, np.float32))


@kernel
def scale_levels(levels: Levels, bits: int, scale: np.float32, unit: np.float32, scaled: ScaledLevels) -> None:
    """steps = thresholds·scale, values = magnitudes·unit, of `bits` bits."""
    count = max(1 << (bits - 1), _PER_SWEEP)
    for j in range(count):
        scaled.steps[j] = levels.thresholds[bits, j] * scale if j < (1 << (bits - 1)) - 1 else np.float32(np.inf)
        scaled.values[j] = levels.magnitudes[bits, j] * unit


@kernel
def find_index(levels: Levels, bits: int, scale: np.float32, magnitudes: Fp32Array, scaled: ScaledLevels) -> None:
    """indices = how many thresholds, scaled by `scale` as `scaled` are, each magnitude exceeds."""
    if bits >= _MIN_SEARCHED_BITS and scale >= _LEAST_SEARCHED:
        _search_index(levels.first[bits], scale, magnitudes, scaled)
    else:
        _sweep_index(bits, magnitudes, scaled)


@kernel
def find_level(levels: Levels, bits: int, scale: np.float32, magnitudes: Fp32Array, scaled: ScaledLevels) -> None:
    """level = the scaled value at the index that `find_index` would give; may overwrite `indices`."""
    if bits >= _MIN_SEARCHED_BITS and scale >= _LEAST_SEARCHED:
        _search_index(levels.first[bits], scale, magnitudes, scaled)
        for i in range(magnitudes.size):
            scaled.level[i] = scaled.values[scaled.indices[i]]
    else:
        _sweep_level(bits, magnitudes, scaled)


@kernel
def _search_index(first: ByteArray, scale: np.float32, magnitudes: Fp32Array, scaled: ScaledLevels) -> None:
    factor = np.float32(_BUCKETS_PER_UNIT) / scale
    top = np.float32(first.size - 1)
    for i in range(magnitudes.size):
        bucket = np.int32(min(magnitudes[i] * factor, top))
        below = np.int32(first[bucket])
        scaled.indices[i] = np.int32(below + np.int32(magnitudes[i] > scaled.steps[below]))


@kernel
def _sweep_index(bits: int, magnitudes: Fp32Array, scaled: ScaledLevels) -> None:
    indices, steps = scaled.indices, scaled.steps
    indices[:] = 0
    for j in range(0, (1 << (bits - 1)) - 1, _PER_SWEEP):
        a, b, c, d = steps[j], steps[j + 1], steps[j + 2], steps[j + 3]
        for i in range(magnitudes.size):
            x = magnitudes[i]
            low, high = np.int32(np.int32(x > a) + np.int32(x > b)), np.int32(np.int32(x > c) + np.int32(x > d))
            indices[i] = np.int32(indices[i] + np.int32(low + high))


@kernel
def _sweep_level(bits: int, magnitudes: Fp32Array, scaled: ScaledLevels) -> None:
    level, steps, values = scaled.level, scaled.steps, scaled.values
    level[:] = values[0]
    for j in range(0, (1 << (bits - 1)) - 1, _PER_SWEEP):
        a, b, c, d = steps[j], steps[j + 1], steps[j + 2], steps[j + 3]
        p, q, r, s = values[j + 1], values[j + 2], values[j + 3], values[min(j + 4, values.size - 1)]
        for i in range(magnitudes.size):
            x, y = magnitudes[i], level[i]
            y = p if x > a else y
            y = q if x > b else y
            y = r if x > c else y
            level[i] = s if x > d else y


@kernel
def write_codes(z: Fp32Array, bits: int, indices: Int32Array, codes: ByteArray) -> None:
    """codes = 2^(b−1) + m where z ≥ 0 (−0 is), 2^(b−1) − 1 − m where z < 0."""
    half = np.int32(1 << (bits - 1))
    for i in range(z.size):
        flip = np.int32(-np.int32(z[i] < _ZERO))
        codes[i] = np.uint8(np.int32(half + np.int32(indices[i] ^ flip)))


@kernel
def read_levels(signed: Fp32Array, codes: ByteArray, scale: np.float32, y: Fp32Array) -> None:
    """y = scale·level of each code, `signed` being the row of its width."""
    for i in range(y.size):
        y[i] = signed[codes[i]] * scale


@kernel
def take_magnitudes(z: Fp32Array, magnitudes: Fp32Array) -> None:
    """magnitudes = |z|."""
    for i in range(z.size):
        magnitudes[i] = abs(z[i])


@estimate
def sum_of_squares(z: Fp32Array) -> np.float32:
    """Σ z²."""
    total = _ZERO
    for i in range(z.size):
        total += z[i] * z[i]
    return total


@estimate
def sum_of_products(a: Fp32Array, b: Fp32Array) -> np.float32:
    """Σ a·b."""
    total = _ZERO
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@estimate
def squared_distance(a: Fp32Array, b: Fp32Array) -> np.float32:
    """Σ (a − b)²."""
    total = _ZERO
    for i in range(a.size):
        total += (a[i] - b[i]) * (a[i] - b[i])
    return total


_HALF = 1 << (DROPPED_BITS - 1)


@kernel
def scale_of(code: Integer) -> np.float32:
    """The value of a code from 0 to 254."""
    return float_of(np.int32(np.int32(code + OFFSET) << DROPPED_BITS)) if code > 0 else _ZERO


@kernel
def nearest_code(value: np.float32) -> np.int32:
    """The code of the nearest scale, of two equally near the larger; `value` is finite and not negative."""
    return _code_of_bits(np.int32(bits_of(value) + _HALF))


@kernel
def stochastic_code(value: np.float32, draw: Integer) -> np.int32:
    """The code above or below, by a draw from 0 to 2^20 − 1; `value` is finite and not negative."""
    return _code_of_bits(np.int32(bits_of(value) + np.int32(draw)))


@kernel
def _code_of_bits(bits: np.int32) -> np.int32:
    code = np.int32(np.int32(bits >> DROPPED_BITS) - OFFSET)
    return np.int32(min(max(code, np.int32(0)), np.int32(LARGEST_CODE)))


def allocate(levels: Int32Array, budget: int, packed: ByteArray) -> Int64Array:
    """Write widths, allocated as by `bit_allocation.allocate`, to `packed`, which must be zeros.

    Returns where each tile's planes start, and the last end: int64 [T + 1], in planes.
    """
    starts = np.empty(levels.size + 1, np.int64)
    _write_widths(levels, budget - levels.size, np.zeros(NUM_LEVELS, np.int64), packed, starts)
    return starts


@kernel
def _write_widths(
    levels: Int32Array, num_steps: int, counts: Int64Array, packed: ByteArray, starts: Int64Array
) -> None:
    border, num_on_border = _border(levels, num_steps, counts)
    starts[0] = 0
    for tile in range(levels.size):
        above = int(levels[tile]) - border
        width = 1
        for step in STEPS:
            is_granted = above > step or (above == step and num_on_border > 0)
            width += is_granted
            num_on_border -= is_granted and above == step
        write_number(width - 1, tile, WIDTH_BITS, packed)
        starts[tile + 1] = starts[tile] + width


@kernel
def _border(levels: Int32Array, num_steps: int, counts: Int64Array) -> tuple[int, int]:
    """θ, the rank at which the steps from above reach `num_steps`, and how many of that rank are granted."""
    for tile in range(levels.size):
        counts[levels[tile]] += 1
    rank, left = NUM_LEVELS - 1, num_steps
    while rank > -STEPS[-1]:
        num_of_rank = _steps_of_rank(counts, rank)
        if num_of_rank >= left:
            break
        left -= num_of_rank
        rank -= 1
    return rank, left


@kernel
def _steps_of_rank(counts: Int64Array, rank: int) -> int:
    total = 0
    for step in STEPS:
        level = rank + step
        if 0 <= level < counts.size:
            total += counts[level]
    return total


@kernel
def read_widths(packed: ByteArray, starts: Int64Array) -> None:
    """Write where each tile's planes start, and the last end, to `starts` [T + 1]; widths are 1 to 8 for any bytes."""
    starts[0] = 0
    for tile in range(starts.size - 1):
        starts[tile + 1] = starts[tile] + read_number(tile, WIDTH_BITS, packed) + 1
