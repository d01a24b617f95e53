"""Which allocation tiles get H bits, on the CPU: entropies from one pass, which also finds the magnitudes.

H = −Σ p·log2(p + 1e-12), p = |a|/(S + 1e-12), S = Σ|a| (TAH-Quant §3.2, Eqs. 1 and 2; in bits here, as only the
order matters) is r·(log2 S − Σ|a|·log2|a| / S − log2 r) with r = S/(S + 1e-12), up to less than 1e-12 per value. Both
sums are taken of a tile that is scaled by its own power of two, so they need not wait for that of the tensor, which
enters with r; the rest, a few logarithms per tile, is done for many tiles at once.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tahq.quant.cpu.kernel import Team, estimate, kernel
from tahq.quant.cpu.numbers import (
    INFINITY_BITS,
    MAGNITUDE,
    Fp32Array,
    Integer,
    Values,
    bits_of,
    float_of,
    largest_magnitude,
)
from tahq.quant.cpu.tiles import Grid, Int32Array, Magnitudes, measure, place_of_tile, read_tile
from tahq.quant.tah.cpu_lanes import is_scannable, magnitude_of, scan_values
from tahq.quant.tah.reference import EPSILON, spread_high
from tahq.quant.tah.stream import TahLayout

_EPSILON = np.float32(EPSILON)
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)
_STEPS_A_BIT = np.float32(2.0**20)
_LARGEST_POWER = 126
"""2^−126 is the least power of two that is a normal number."""
_ROOT_HALF_BITS = 0x3F3504F3
"""√½ as fp32: significands are taken from [√½, √2)."""

# log2(1 + f)/f on [√½ − 1, √2 − 1], to 5e-8 of log2(1 + f): a minimax fit.
_C0, _C1 = np.float32(1.4426947832107544), np.float32(-0.7213571667671204)
_C2, _C3 = np.float32(0.48093944787979126), np.float32(-0.36008721590042114)
_C4, _C5 = np.float32(0.28670746088027954), np.float32(-0.2500690519809723)
_C6, _C7 = np.float32(0.23689036071300507), np.float32(-0.14574438333511353)


class Sums(NamedTuple):
    """Σ|a| and Σ|a|·log2|a| of each allocation tile a, fp32 [B·n], scaled by 2^−power.

    `power`, int32, is ⌊log2 max|x|⌋, at most 126; −127 where that is subnormal or 0.
    """

    total: Fp32Array
    weighted: Fp32Array
    power: Int32Array

    @classmethod
    def room(cls, num_allocs: int) -> "Sums":
        """Fresh memory."""
        return cls(np.empty(num_allocs, np.float32), np.empty(num_allocs, np.float32), np.empty(num_allocs, np.int32))


def survey(layout: TahLayout, values: Values, team: Team) -> tuple[Magnitudes, Sums | None]:
    """Magnitudes of the tiles, and, if the selection looks at the data, the sums of the allocation tiles."""
    if layout.spec.adaptive == "off":
        return measure(values, layout.tiling, team), None
    grid, per_alloc = Grid.of(layout.tiling), layout.tiles_per_alloc
    of_tiles, sums = np.empty(layout.tiling.num_tiles, np.int32), Sums.room(layout.num_allocs)

    def work(first: int, stop: int) -> tuple[np.int32, bool]:
        y = np.empty(per_alloc * grid.group, np.float32)
        return measure_and_sum(values, grid, per_alloc, first, stop, of_tiles, sums, y)

    return Magnitudes.of(of_tiles, team.share(layout.num_allocs, work)), sums


def select(layout: TahLayout, sums: Sums | None, exponent: int, team: Team) -> NDArray[np.uint8]:
    """1 for each allocation tile [B·n] that gets H bits, else 0: by entropy, or spread evenly without sums."""
    if sums is None:
        of_sample = spread_high(layout.even_share, layout.allocs_per_sample, torch.device("cpu"))
        return np.tile(of_sample.numpy().view(np.uint8), layout.tiling.num_samples)
    ranks, is_high = np.empty(layout.num_allocs, np.float32), np.empty(layout.num_allocs, np.uint8)
    entropies(sums, exponent, ranks)
    if layout.spec.select == "low":
        np.negative(ranks, out=ranks)

    def work(first: int, stop: int) -> None:
        room = np.empty(NUM_COUNTS, np.int64)
        mark_smallest(ranks, layout.allocs_per_sample, layout.num_low, first, stop, is_high, room)

    team.share(layout.tiling.num_samples, work)
    return is_high


@estimate
def log2_of(value: np.float32) -> np.float32:
    """log2 of a normal, positive number, within 1e-7 of itself or 1e-7; something finite of 0 and subnormals."""
    offset = np.int32(bits_of(value) - _ROOT_HALF_BITS)
    f = float_of(np.int32(np.int32(offset & 0x7FFFFF) + _ROOT_HALF_BITS)) - _ONE
    low = _C0 + f * (_C1 + f * (_C2 + f * _C3))
    high = _C4 + f * (_C5 + f * (_C6 + f * _C7))
    return np.float32(np.int32(offset >> 23)) + f * (low + (f * f) * (f * f) * high)


@estimate
def sum_magnitudes(y: Fp32Array, factor: np.float32) -> tuple[np.float32, np.float32]:
    """Σ|a| and Σ|a|·log2|a| of a = y·factor."""
    total, weighted = _ZERO, _ZERO
    for i in range(y.size):
        magnitude = abs(y[i] * factor)
        total += magnitude
        weighted += magnitude * log2_of(magnitude)
    return total, weighted


@kernel
def read_and_measure(values: Values, grid: Grid, tile: int, y: Fp32Array) -> np.int32:
    """y = the tile as `tiles.read_tile` gives it; its largest magnitude, as `numbers.largest_magnitude` does."""
    start, count = place_of_tile(grid, tile)
    if is_scannable(values, count, grid.group):
        magnitude = magnitude_of(scan_values(values, start, _ONE, np.int32(0), y))
    else:
        magnitude = largest_magnitude(values, start, count)
        read_tile(values, grid, tile, _ONE, magnitude, y)
    if magnitude >= INFINITY_BITS:
        y[:] = _ZERO
    return magnitude


@kernel
def measure_and_sum(
    values: Values,
    grid: Grid,
    tiles_per_alloc: int,
    first: int,
    stop: int,
    of_tiles: Int32Array,
    sums: Sums,
    y: Fp32Array,
) -> tuple[np.int32, bool]:
    """`tiles.measure_tiles` over the tiles of a range of allocation tiles, whose sums are written too.

    `of_tiles`, int32 [T], and `sums` are written; `y`, fp32 [R·G], is scratch.
    """
    overall, all_finite = np.int32(0), True
    for alloc in range(first, stop):
        largest = np.int32(0)
        for part in range(tiles_per_alloc):
            tile = alloc * tiles_per_alloc + part
            magnitude = read_and_measure(values, grid, tile, y[part * grid.group : (part + 1) * grid.group])
            of_tiles[tile] = magnitude
            if magnitude < INFINITY_BITS:
                largest = max(largest, magnitude)
            else:
                all_finite = False
        power = min(np.int32(np.int32(largest >> 23) - 127), np.int32(_LARGEST_POWER))
        sums.total[alloc], sums.weighted[alloc] = sum_magnitudes(y, float_of(np.int32(np.int32(127 - power) << 23)))
        sums.power[alloc] = power
        overall = max(overall, largest)
    return overall, all_finite


@estimate
def entropies(sums: Sums, exponent: int, out: Fp32Array) -> None:
    """H of each allocation tile times 2^exponent, as it is coded (no value reaches 2^11), in bits, rounded to 2^−20.

    Owing to the rounding, tiles that differ only by a factor rank as equals.
    """
    for i in range(out.size):
        total = sums.total[i]
        biased = np.int32(np.int32(sums.power[i] + np.int32(exponent)) + 127)
        coded = total * float_of(np.int32(max(biased, np.int32(0)) << 23))
        share = coded / (coded + _EPSILON)
        bits = share * (log2_of(total) - sums.weighted[i] / total - log2_of(share))
        out[i] = np.rint(bits * _STEPS_A_BIT) / _STEPS_A_BIT if total > _ZERO else _ZERO


_DIGIT_BITS = 11
NUM_COUNTS = 1 << _DIGIT_BITS
_LEVELS = 3
"""Digits of a key, highest first: 33 bits hold the 32 of a float."""


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

    `values`, fp32 [rows · length], holds no NaN; `counts`, int64 [NUM_COUNTS], is scratch.
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
    """The key at the border (the value of rank `count`), and how many values equal to it belong to the smallest."""
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
