"""Tiles on the CPU, for all framed codecs: where a tile lies, its largest magnitude, its exponent."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tahq.quant.cpu.kernel import Team, kernel
from tahq.quant.cpu.numbers import INFINITY_BITS, Fp32Array, Values, largest_magnitude, read_scaled
from tahq.quant.tiling import MAX_EXPONENT, Tiling

Int32Array = NDArray[np.int32]


class Grid(NamedTuple):
    """Where the tiles of a tensor lie: G, log2 G, M and C."""

    group: int
    log2_group: int
    tiles_per_token: int
    channels: int

    @classmethod
    def of(cls, tiling: Tiling) -> "Grid":
        """The grid of a tiling."""
        return cls(tiling.group, tiling.group.bit_length() - 1, tiling.tiles_per_token, tiling.channels)


class Magnitudes(NamedTuple):
    """Largest magnitudes, found in one pass over a tensor.

    Those of tiles are fp32 bits, int32 [T], INFINITY_BITS or above where a tile is not finite; `overall` is that of the
    finite tiles.
    """

    of_tiles: Int32Array
    overall: float
    all_finite: bool

    @classmethod
    def of(cls, of_tiles: Int32Array, parts: Sequence[tuple[np.int32, bool]]) -> "Magnitudes":
        """Combine the results of `measure_tiles` for the parts."""
        overall = np.int32(max(largest for largest, _ in parts))
        return cls(of_tiles, float(overall.view(np.float32)), all(finite for _, finite in parts))


@kernel
def place_of_tile(grid: Grid, tile: int) -> tuple[int, int]:
    """Index of the tile's first element, and how many of its channels are not padding."""
    token, column = tile // grid.tiles_per_token, tile % grid.tiles_per_token
    channel = column * grid.group
    return token * grid.channels + channel, min(grid.group, grid.channels - channel)


@kernel
def read_tile(values: Values, grid: Grid, tile: int, factor: np.float32, magnitude: np.int32, y: Fp32Array) -> int:
    """y = the tile times factor, padded with zeros, all zeros if it is not finite; returns how many channels it has."""
    start, count = place_of_tile(grid, tile)
    known = count if magnitude < INFINITY_BITS else 0
    read_scaled(values, start, factor, y[:known])
    y[known:] = np.float32(0.0)
    return count


@kernel
def measure_tiles(values: Values, grid: Grid, first: int, stop: int, of_tiles: Int32Array) -> tuple[np.int32, bool]:
    """Write the magnitudes of a range of tiles; return the largest of the finite ones, and whether all are."""
    overall, all_finite = np.int32(0), True
    for tile in range(first, stop):
        start, count = place_of_tile(grid, tile)
        magnitude = largest_magnitude(values, start, count)
        of_tiles[tile] = magnitude
        if magnitude < INFINITY_BITS:
            overall = max(overall, magnitude)
        else:
            all_finite = False
    return overall, all_finite


def measure(values: Values, tiling: Tiling, team: Team) -> Magnitudes:
    """Largest magnitudes of all tiles and of the tensor, in one pass."""
    grid, of_tiles = Grid.of(tiling), np.empty(tiling.num_tiles, np.int32)
    parts = team.share(tiling.num_tiles, lambda first, stop: measure_tiles(values, grid, first, stop, of_tiles))
    return Magnitudes.of(of_tiles, parts)


def top_exponent(largest: float, top: int) -> int:
    """e = top − ⌊log2 largest⌋, at most 127, and 0 where largest is 0; see `tiling.top_exponent`."""
    return min(top + 1 - math.frexp(largest)[1], MAX_EXPONENT) if largest > 0 else 0


def power_of_two(exponent: int) -> np.float32:
    """2^exponent in fp32, exactly, for exponents from −127 (which is subnormal) to 127."""
    return np.float32(math.ldexp(1.0, exponent))
