"""`eden` and `wf` on the CPU in numba: three or four readings of the tensor, one of the stream, no large temporaries.

Encoding reads the tensor for its largest magnitudes (and for the channels' means, if they are centred), transforms it
tile by tile for the energies that bits are allocated by, and transforms it again to quantise and pack. Threads share
ranges of tiles; for the means ranges of channels, so that the number of threads does not show.

Streams equal the reference's except where a sum (a mean, an energy, a projection, an error) rounds differently, which
may move a width, a scale or the code of a value at a threshold; decoded values are always equal, NaN being NaN.
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
    stochastic_code,
    sum_of_products,
    sum_of_squares,
    take_magnitudes,
)
from tahq.quant.cpu.numbers import (
    INFINITY_BITS,
    Fp32Array,
    Integer,
    Key,
    Values,
    bits_of,
    float_of,
    hash_of,
    write_nan,
    write_scaled,
)
from tahq.quant.cpu.tiles import Int32Array, measure, place_of_tile, read_tile, top_exponent
from tahq.quant.gaussian.reference import CANDIDATES, SAME_LEVEL, SCALE_COUNTER
from tahq.quant.gaussian.small_scale import DROPPED_BITS, LARGEST_CODE, NOT_FINITE
from tahq.quant.gaussian.tile_stream import TileLayout
from tahq.quant.transforms import TOP_EXPONENT

_ZERO, _ONE, _INFINITY = np.float32(0.0), np.float32(1.0), np.float32(np.inf)
_SIGNS_A_WORD = 32


@kernel
def sum_channels(
    field: Field, magnitudes: Int32Array, first: int, stop: int, totals: NDArray[np.float64], y: Fp32Array
) -> None:
    """Σ x·2^e over all tokens, for channels of the columns of tiles `first` to `stop − 1`.

    Tiles that are not finite count as zeros. `totals`, fp64 [M·G], starts as zeros; `y`, fp32 [G], is scratch.
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
    field: Field, magnitudes: Int32Array, first: int, stop: int, energies: Fp32Array, z: Fp32Array
) -> None:
    """‖z‖² of tiles after their transform; 0 where not finite."""
    for tile in range(first, stop):
        energies[tile] = _ZERO
        if magnitudes[tile] < INFINITY_BITS:
            _transform(field, tile, z)
            energies[tile] = sum_of_squares(z)


@kernel
def level_tiles(field: Field, energies: Fp32Array, levels: Int32Array) -> None:
    """Levels by which bits are allocated, in eighths of an octave: of a tile, or of a tile within its token."""
    group, per_token = np.float32(field.grid.group), field.grid.tiles_per_token
    for start in range(0, energies.size, per_token):
        offset = np.int32(0)
        if not field.is_random:
            total = _ZERO
            for tile in range(start, start + per_token):
                total += energies[tile] / group
            offset = SAME_LEVEL - nearest_code(np.sqrt(total / np.float32(per_token)))
        for tile in range(start, start + per_token):
            levels[tile] = nearest_code(_root_mean_square(energies[tile], field.grid.group)) + offset


@kernel
def _root_mean_square(energy: np.float32, group: int) -> np.float32:
    return np.float32(np.sqrt(energy / np.float32(group)))


@kernel
def write_tiles(
    field: Field,
    magnitudes: Int32Array,
    energies: Fp32Array,
    starts: Int64Array,
    first: int,
    stop: int,
    sections: Sections,
    levels: Levels,
    scratch: Scratch,
) -> None:
    """Scales and codes of tiles; codes of tiles without any must be zeros already."""
    for tile in range(first, stop):
        step = _root_mean_square(energies[tile], scratch.z.size)
        if magnitudes[tile] >= INFINITY_BITS:
            sections.scale[tile] = NOT_FINITE
            continue
        if not field.is_random and nearest_code(step) == 0:
            sections.scale[tile] = 0
            continue
        bits = starts[tile + 1] - starts[tile]
        _transform(field, tile, scratch.z)
        take_magnitudes(scratch.z, scratch.magnitudes)
        if field.is_random:
            projection = _project(levels, bits, step, scratch)
            scale = energies[tile] / projection if projection > _ZERO else _ZERO
            draw = hash_of(SCALE_COUNTER + tile, field.key) >> np.uint32(32 - DROPPED_BITS)
            sections.scale[tile] = stochastic_code(scale, draw)
        else:
            code = _best_scale(levels, bits, nearest_code(step), scratch)
            scale_ladder(levels, bits, scale_of(code), scale_of(code), scratch.ladder)
            find_index(levels, bits, scale_of(code), scratch.magnitudes, scratch.ladder)
            sections.scale[tile] = code
        encode_planes(scratch, bits, sections.codes, starts[tile])


@kernel
def _transform(field: Field, tile: int, z: Fp32Array) -> None:
    """z = the Hadamard transform of a finite tile times the field's factor, with random signs or without the means."""
    read_tile(field.values, field.grid, tile, field.factor, np.int32(0), z)
    if field.is_random:
        _flip_signs(field.key, tile * z.size, z)
    elif field.means.size > 0:
        start = tile % field.grid.tiles_per_token * z.size
        of_tile = field.means[start : start + z.size]
        for i in range(z.size):
            z[i] -= of_tile[i]
    hadamard(z, field.norm)


@kernel
def _transform_back(field: Field, tile: int, z: Fp32Array) -> None:
    hadamard(z, field.norm)
    if field.is_random:
        _flip_signs(field.key, tile * z.size, z)
    elif field.means.size > 0:
        start = tile % field.grid.tiles_per_token * z.size
        of_tile = field.means[start : start + z.size]
        for i in range(z.size):
            z[i] += of_tile[i]


@kernel
def _flip_signs(key: Key, index: int, z: Fp32Array) -> None:
    """Change the signs that the key says, z[0] being element `index` of the padded tensor."""
    for start in range(0, z.size, _SIGNS_A_WORD):
        part = z[start : start + _SIGNS_A_WORD]
        first = index + start
        signs = hash_of(first // _SIGNS_A_WORD, key) >> np.uint32(first % _SIGNS_A_WORD)
        for i in range(part.size):
            sign = np.int32(np.uint32(signs >> np.uint32(i)) << np.uint32(31))
            part[i] = float_of(np.int32(bits_of(part[i]) ^ sign))


@kernel
def _project(levels: Levels, bits: int, step: np.float32, scratch: Scratch) -> np.float32:
    """Find each element's level; returns Σ |z|·level."""
    scale_ladder(levels, bits, step, _ONE, scratch.ladder)
    find_level(levels, bits, step, scratch.magnitudes, scratch.ladder)
    find_index(levels, bits, step, scratch.magnitudes, scratch.ladder)
    return sum_of_products(scratch.magnitudes, scratch.ladder.level)


@kernel
def _best_scale(levels: Levels, bits: int, middle: Integer, scratch: Scratch) -> int:
    """The candidate code around `middle` with the least Σ(|z| − s·level)², the first of equals."""
    best, least = int(middle), _INFINITY
    for candidate in CANDIDATES:
        code = min(max(int(middle) + candidate, 1), LARGEST_CODE)
        scale_ladder(levels, bits, scale_of(code), scale_of(code), scratch.ladder)
        find_level(levels, bits, scale_of(code), scratch.magnitudes, scratch.ladder)
        error = squared_distance(scratch.magnitudes, scratch.ladder.level)
        if error < least:
            best, least = code, error
    return best


@kernel
def read_tiles(
    field: Field, starts: Int64Array, first: int, stop: int, sections: Sections, levels: Levels, scratch: Scratch
) -> None:
    """Write the values of tiles, times the field's factor; NaN for marked tiles."""
    for tile in range(first, stop):
        start, count = place_of_tile(field.grid, tile)
        scale = sections.scale[tile]
        if scale == NOT_FINITE:
            write_nan(field.values, start, count)
            continue
        decode_planes(sections.codes, starts[tile], starts[tile + 1] - starts[tile], scale, levels, scratch)
        _transform_back(field, tile, scratch.z)
        write_scaled(scratch.z[:count], field.factor, field.values, start)


def encode(layout: TileLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """The stream that the reference writes; x has at least one element."""
    values, group, num_tiles = Values.of(x), layout.tiling.group, layout.tiling.num_tiles
    energies, tile_levels = np.empty(num_tiles, np.float32), np.empty(num_tiles, np.int32)
    with Team(threads, x.numel()) as team:
        magnitudes = measure(values, layout.tiling, team)
        of_tiles, exponent = magnitudes.of_tiles, top_exponent(magnitudes.overall, TOP_EXPONENT)
        buf = layout.new_stream(not magnitudes.all_finite, exponent, x.device)
        field = Field.of(layout, values, exponent, key)
        if layout.has_mean:
            field = field._replace(means=_write_means(layout, field, of_tiles, buf, team))
        team.share(
            num_tiles,
            lambda first, stop: measure_tiles(field, of_tiles, first, stop, energies, np.empty(group, np.float32)),
        )
        level_tiles(field, energies, tile_levels)
        sections = Sections.of(layout, buf)
        starts = allocate(tile_levels, layout.num_planes, sections.width)

        def write(first: int, stop: int) -> None:
            write_tiles(field, of_tiles, energies, starts, first, stop, sections, levels(), Scratch.of(group))

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
    field = Field.of(layout, Values.of(x), -opened.exponent, key)._replace(means=_padded(layout, stored))

    def read(first: int, stop: int) -> None:
        scratch = Scratch.of(layout.tiling.group)
        read_tiles(field, opened.starts, first, stop, opened.sections, levels(), scratch)

    with Team(threads, x.numel()) as team:
        team.share(layout.tiling.num_tiles, read)
    return x


def _write_means(layout: TileLayout, field: Field, of_tiles: Int32Array, buf: torch.Tensor, team: Team) -> Fp32Array:
    """Write the channels' means to the stream; fp32 [M·G] as the receiver will have them."""
    totals = np.zeros(field.grid.tiles_per_token * field.grid.group, np.float64)

    def add_up(first: int, stop: int) -> None:
        sum_channels(field, of_tiles, first, stop, totals, np.empty(field.grid.group, np.float32))

    team.share(field.grid.tiles_per_token, add_up)
    stored = _stored_means(layout, buf)
    num_tokens = layout.tiling.num_tiles // layout.tiling.tiles_per_token
    means = (totals[: stored.size] / num_tokens).astype(np.float32).astype(np.float16)
    stored[:] = means + np.float16(0.0)  # −0 becomes +0
    return _padded(layout, stored)


def _stored_means(layout: TileLayout, buf: torch.Tensor) -> NDArray[np.float16]:
    """The section of means, fp16 [C] in the stream's memory; empty without centring."""
    if not layout.has_mean:
        return np.empty(0, np.float16)
    return layout.sections.view(buf, "mean").view(torch.float16).numpy()


def _padded(layout: TileLayout, stored: NDArray[np.float16]) -> Fp32Array:
    """Means in fp32, with zeros for the padding of a token's last tile."""
    return np.pad(stored.astype(np.float32), (0, layout.tiling.padding if stored.size else 0))
