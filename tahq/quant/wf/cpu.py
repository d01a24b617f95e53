"""`wf` on the CPU in numba: four readings of the tensor, one of the stream, nothing of their size in between.

Encoding reads the tensor for its largest magnitudes, then for the channels' means, transforms it tile by tile for the
energies that bits are allocated by, and transforms it again to choose steps, quantise and pack. Threads share ranges
of tiles; for the means, ranges of channels, so that their number shows nowhere.

Streams equal the reference's but where a sum (a mean, an energy, an error) rounds differently, which may move a
width, a step or a code; decoded values are equal always, NaN being NaN.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from tahq.quant.cpu.gaussian import (
    Field,
    Int64Array,
    Scratch,
    Sections,
    allocate,
    decode_planes,
    encode_planes,
    open_stream,
)
from tahq.quant.cpu.hadamard import hadamard
from tahq.quant.cpu.kernel import Team, kernel
from tahq.quant.cpu.levels import (
    Levels,
    find_index,
    find_level,
    levels,
    nearest_code,
    scale_ladder,
    scale_of,
    squared_distance,
    sum_of_squares,
    take_magnitudes,
)
from tahq.quant.cpu.numbers import INFINITY_BITS, Fp32Array, Integer, Values, write_nan, write_scaled
from tahq.quant.cpu.tiles import Int32Array, measure, place_of_tile, read_tile, top_exponent
from tahq.quant.gaussian.small_scale import LARGEST_CODE, NOT_FINITE
from tahq.quant.gaussian.tile_stream import TileLayout
from tahq.quant.transforms import TOP_EXPONENT
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


HalfArray = NDArray[np.float16]


def encode(layout: TileLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """The stream that `wf.reference` writes; x has at least one element."""
    values, num_tiles = Values.of(x), layout.tiling.num_tiles
    with Team(threads, x.numel()) as team:
        magnitudes = measure(values, layout.tiling, team)
        exponent = top_exponent(magnitudes.overall, TOP_EXPONENT)
        field, of_tiles = Field.of(values, layout.tiling, exponent), magnitudes.of_tiles
        buf = layout.new_stream(not magnitudes.all_finite, exponent, x.device)
        means = _center(layout, field, of_tiles, buf, team)
        energies = _measure_energies(layout, field, means, of_tiles, team)
        tile_levels = np.empty(num_tiles, np.int32)
        level_tiles(energies, layout.tiling.tiles_per_token, tile_levels)
        sections = Sections.of(layout, buf)
        starts = allocate(tile_levels, layout.num_planes, sections.width)

        def write(first: int, stop: int) -> None:
            scratch = Scratch.of(layout.tiling.group)
            write_tiles(field, means, of_tiles, energies, starts, first, stop, sections, levels(), scratch)

        team.share(num_tiles, write)
    return buf


def decode(
    layout: TileLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor | None:
    """The tensor of an accepted stream; None if the stream is damaged."""
    opened, stored = open_stream(layout, buf), _stored_means(layout, buf)
    if opened is None or not np.isfinite(stored).all():
        return None
    x = torch.empty(layout.tiling.shape, dtype=dtype)
    field = Field.of(Values.of(x), layout.tiling, -opened.exponent)
    means = _filled_up(layout, stored)

    def read(first: int, stop: int) -> None:
        scratch = Scratch.of(layout.tiling.group)
        read_tiles(field, means, opened.starts, first, stop, opened.sections, levels(), scratch)

    with Team(threads, x.numel()) as team:
        team.share(layout.tiling.num_tiles, read)
    return x


def _center(layout: TileLayout, field: Field, of_tiles: Int32Array, buf: torch.Tensor, team: Team) -> Fp32Array:
    """Write the channels' means to the stream, if it has them; fp32 [M·G] as the receiver will have them, or empty."""
    stored = _stored_means(layout, buf)
    if stored.size:
        totals = np.zeros(field.grid.tiles_per_token * field.grid.group, np.float64)

        def add_up(first: int, stop: int) -> None:
            sum_channels(field, of_tiles, first, stop, totals, np.empty(field.grid.group, np.float32))

        team.share(field.grid.tiles_per_token, add_up)
        num_tokens = layout.tiling.num_tiles // layout.tiling.tiles_per_token
        means = (totals[: stored.size] / num_tokens).astype(np.float32).astype(np.float16)
        stored[:] = means + np.float16(0.0)  # −0 becomes +0
    return _filled_up(layout, stored)


def _stored_means(layout: TileLayout, buf: torch.Tensor) -> HalfArray:
    """The section of means, fp16 [C] in the stream's memory; empty without centering."""
    if not layout.has_mean:
        return np.empty(0, np.float16)
    return layout.sections.view(buf, "mean").view(torch.float16).numpy()


def _filled_up(layout: TileLayout, stored: HalfArray) -> Fp32Array:
    """Means in fp32, with zeros for the filling of a token's last tile."""
    return np.pad(stored.astype(np.float32), (0, layout.tiling.padding if stored.size else 0))


def _measure_energies(
    layout: TileLayout, field: Field, means: Fp32Array, of_tiles: Int32Array, team: Team
) -> Fp32Array:
    energies = np.empty(layout.tiling.num_tiles, np.float32)

    def measure_range(first: int, stop: int) -> None:
        z = np.empty(layout.tiling.group, np.float32)
        measure_tiles(field, means, of_tiles, first, stop, energies, z)

    team.share(layout.tiling.num_tiles, measure_range)
    return energies
