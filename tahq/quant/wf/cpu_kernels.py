"""`wf` on the CPU over ranges of tiles: sum channels, measure energies, write a stream's sections, read them."""

import numpy as np
from numpy.typing import NDArray

from tahq.quant.cpu.allocation import Int64Array
from tahq.quant.cpu.gaussian_tiles import Field, Scratch, decode_planes, encode_planes
from tahq.quant.cpu.hadamard import hadamard
from tahq.quant.cpu.kernel import kernel
from tahq.quant.cpu.levels import (
    Levels,
    find_index,
    find_level,
    scale_ladder,
    squared_distance,
    sum_of_squares,
    take_magnitudes,
)
from tahq.quant.cpu.numbers import INFINITY_BITS, Fp32Array, Integer, write_nan, write_scaled
from tahq.quant.cpu.small_scale import nearest_code, scale_of
from tahq.quant.cpu.tile_stream import Sections
from tahq.quant.cpu.tiles import Int32Array, place_of_tile, read_tile
from tahq.quant.gaussian.small_scale import LARGEST_CODE, NOT_FINITE
from tahq.quant.wf.reference import CANDIDATES, SAME_LEVEL

Fp64Array = NDArray[np.float64]

_ZERO, _INFINITY = np.float32(0.0), np.float32(np.inf)


@kernel
def sum_channels(field: Field, magnitudes: Int32Array, first: int, stop: int, totals: Fp64Array, y: Fp32Array) -> None:
    """Σ x·2^e over all tokens, for the channels of the tiles `first` to `stop − 1` of every token.

    Args:
        field: the tensor.
        magnitudes: int32 [T]; tiles that are not finite count as zeros.
        first: column of tiles to begin with.
        stop: column to stop before.
        totals: fp64 [M·G], zeros; written.
        y: fp32 [G], room for one tile.
    """
    per_token = field.grid.tiles_per_token
    for token in range(magnitudes.size // per_token):
        for column in range(first, stop):
            tile = token * per_token + column
            read_tile(field.values, field.grid, tile, field.factor, magnitudes[tile], y)
            part = totals[column * y.size : (column + 1) * y.size]
            for i in range(y.size):
                part[i] += np.float64(y[i])


@kernel
def measure_tiles(
    field: Field, means: Fp32Array, magnitudes: Int32Array, first: int, stop: int, energies: Fp32Array, z: Fp32Array
) -> None:
    """Mean squares of tiles after their transform; 0 where not finite."""
    for tile in range(first, stop):
        energies[tile] = _ZERO
        if magnitudes[tile] < INFINITY_BITS:
            _transform(field, means, tile, z)
            energies[tile] = sum_of_squares(z) / np.float32(z.size)


@kernel
def level_tiles(energies: Fp32Array, tiles_per_token: int, levels: Int32Array) -> None:
    """Levels by which bits are allocated: how far each tile is above its token, in eighths of an octave."""
    for start in range(0, energies.size, tiles_per_token):
        total = _ZERO
        for tile in range(start, start + tiles_per_token):
            total += energies[tile]
        of_token = nearest_code(np.sqrt(total / np.float32(tiles_per_token)))
        for tile in range(start, start + tiles_per_token):
            levels[tile] = nearest_code(np.sqrt(energies[tile])) - of_token + SAME_LEVEL


@kernel
def write_tiles(
    field: Field,
    means: Fp32Array,
    magnitudes: Int32Array,
    energies: Fp32Array,
    starts: Int64Array,
    first: int,
    stop: int,
    sections: Sections,
    levels: Levels,
    scratch: Scratch,
) -> None:
    """Scales and codes of tiles; of scale 0 and of those that are not finite codes must be zeros already."""
    for tile in range(first, stop):
        middle = nearest_code(np.sqrt(energies[tile]))
        if middle == 0:
            sections.scale[tile] = NOT_FINITE if magnitudes[tile] >= INFINITY_BITS else 0
            continue
        bits = starts[tile + 1] - starts[tile]
        _transform(field, means, tile, scratch.z)
        take_magnitudes(scratch.z, scratch.magnitudes)
        code = _best_scale(levels, bits, middle, scratch)
        _fit_ladder(levels, bits, scale_of(code), scratch)
        find_index(levels, bits, scale_of(code), scratch.magnitudes, scratch.ladder)
        encode_planes(scratch, bits, sections.codes, starts[tile])
        sections.scale[tile] = code


@kernel
def _transform(field: Field, means: Fp32Array, tile: int, z: Fp32Array) -> None:
    """z = the Hadamard transform of a finite tile times the field's factor, less the channels' means, if any."""
    read_tile(field.values, field.grid, tile, field.factor, np.int32(0), z)
    if means.size > 0:
        start = tile % field.grid.tiles_per_token * z.size
        of_tile = means[start : start + z.size]
        for i in range(z.size):
            z[i] -= of_tile[i]
    hadamard(z, field.norm)


@kernel
def _best_scale(levels: Levels, bits: int, middle: Integer, scratch: Scratch) -> int:
    """The candidate code around `middle` with the least Σ(|z| − s·level)², of equals the first."""
    best, least = int(middle), _INFINITY
    for candidate in CANDIDATES:
        code = min(max(int(middle) + candidate, 1), LARGEST_CODE)
        _fit_ladder(levels, bits, scale_of(code), scratch)
        find_level(levels, bits, scale_of(code), scratch.magnitudes, scratch.ladder)
        error = squared_distance(scratch.magnitudes, scratch.ladder.level)
        if error < least:
            best, least = code, error
    return best


@kernel
def _fit_ladder(levels: Levels, bits: int, scale: np.float32, scratch: Scratch) -> None:
    scale_ladder(levels, bits, scale, scale, scratch.ladder)


@kernel
def read_tiles(
    field: Field,
    means: Fp32Array,
    starts: Int64Array,
    first: int,
    stop: int,
    sections: Sections,
    levels: Levels,
    scratch: Scratch,
) -> None:
    """Write the values of tiles, times the field's factor; of marked ones, NaN."""
    for tile in range(first, stop):
        start, count = place_of_tile(field.grid, tile)
        scale = sections.scale[tile]
        if scale == NOT_FINITE:
            write_nan(field.values, start, count)
            continue
        bits = starts[tile + 1] - starts[tile]
        decode_planes(sections.codes, starts[tile], bits, scale, levels, scratch)
        hadamard(scratch.z, field.norm)
        _add_means(means, tile % field.grid.tiles_per_token * scratch.z.size, scratch.z)
        write_scaled(scratch.z[:count], field.factor, field.values, start)


@kernel
def _add_means(means: Fp32Array, start: int, z: Fp32Array) -> None:
    if means.size > 0:
        of_tile = means[start : start + z.size]
        for i in range(z.size):
            z[i] += of_tile[i]
