"""`eden` on the CPU in numba: three readings of the tensor, one of the stream, nothing of their size in between.

Encoding reads the tensor for its largest magnitudes, transforms it tile by tile for the energies that bits are
allocated by, and transforms it again to quantise and pack. Threads share ranges of tiles.

Streams equal the reference's but where a sum (a tile's energy, its projection) rounds differently, which may move a
width, a scale by one code, or the code of a value at a threshold; decoded values are equal always, NaN being NaN.
"""

import numpy as np
import torch

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
    stochastic_code,
    sum_of_products,
    sum_of_squares,
    take_magnitudes,
)
from tahq.quant.cpu.numbers import (
    INFINITY_BITS,
    Fp32Array,
    Key,
    Values,
    bits_of,
    float_of,
    hash_of,
    write_nan,
    write_scaled,
)
from tahq.quant.cpu.tiles import Int32Array, measure, place_of_tile, read_tile, top_exponent
from tahq.quant.eden.reference import SCALE_COUNTER
from tahq.quant.gaussian.small_scale import DROPPED_BITS, NOT_FINITE
from tahq.quant.gaussian.tile_stream import TileLayout
from tahq.quant.transforms import TOP_EXPONENT

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_SIGNS_A_WORD = 32


@kernel
def measure_tiles(
    field: Field,
    key: Key,
    magnitudes: Int32Array,
    first: int,
    stop: int,
    energies: Fp32Array,
    levels: Int32Array,
    z: Fp32Array,
) -> None:
    """‖z‖² of tiles and the code of their root mean square, by which bits are allocated; 0 where not finite."""
    for tile in range(first, stop):
        energies[tile] = _ZERO
        if magnitudes[tile] < INFINITY_BITS:
            _transform(field, key, tile, z)
            energies[tile] = sum_of_squares(z)
        levels[tile] = nearest_code(_step(energies[tile], z.size))


@kernel
def write_tiles(
    field: Field,
    key: Key,
    magnitudes: Int32Array,
    energies: Fp32Array,
    starts: Int64Array,
    first: int,
    stop: int,
    sections: Sections,
    levels: Levels,
    scratch: Scratch,
) -> None:
    """Scales and codes of tiles; codes of those that are not finite must be zeros already."""
    for tile in range(first, stop):
        if magnitudes[tile] >= INFINITY_BITS:
            sections.scale[tile] = NOT_FINITE
            continue
        bits = starts[tile + 1] - starts[tile]
        _transform(field, key, tile, scratch.z)
        projection = _project(levels, bits, _step(energies[tile], scratch.z.size), scratch)
        scale = energies[tile] / projection if projection > _ZERO else _ZERO
        draw = hash_of(SCALE_COUNTER + tile, key) >> np.uint32(32 - DROPPED_BITS)
        sections.scale[tile] = stochastic_code(scale, draw)
        encode_planes(scratch, bits, sections.codes, starts[tile])


@kernel
def _transform(field: Field, key: Key, tile: int, z: Fp32Array) -> None:
    """z = the Hadamard transform of a finite tile times the field's factor, with random signs."""
    read_tile(field.values, field.grid, tile, field.factor, np.int32(0), z)
    _flip_signs(key, tile * z.size, z)
    hadamard(z, field.norm)


@kernel
def _flip_signs(key: Key, index: int, z: Fp32Array) -> None:
    """Change the signs that the key says, z[0] being element `index` of the filled tensor."""
    for start in range(0, z.size, _SIGNS_A_WORD):
        part = z[start : start + _SIGNS_A_WORD]
        first = index + start
        signs = hash_of(first // _SIGNS_A_WORD, key) >> np.uint32(first % _SIGNS_A_WORD)
        for i in range(part.size):
            sign = np.int32(np.uint32(signs >> np.uint32(i)) << np.uint32(31))
            part[i] = float_of(np.int32(bits_of(part[i]) ^ sign))


@kernel
def _step(energy: np.float32, group: int) -> np.float32:
    """√(‖z‖²/G), to which thresholds are scaled."""
    return np.float32(np.sqrt(energy / np.float32(group)))


@kernel
def _project(levels: Levels, bits: int, step: np.float32, scratch: Scratch) -> np.float32:
    """Find each element's level; returns Σ |z|·level."""
    take_magnitudes(scratch.z, scratch.magnitudes)
    scale_ladder(levels, bits, step, _ONE, scratch.ladder)
    find_level(levels, bits, step, scratch.magnitudes, scratch.ladder)
    find_index(levels, bits, step, scratch.magnitudes, scratch.ladder)
    return sum_of_products(scratch.magnitudes, scratch.ladder.level)


@kernel
def read_tiles(
    field: Field,
    key: Key,
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
        _flip_signs(key, tile * scratch.z.size, scratch.z)
        write_scaled(scratch.z[:count], field.factor, field.values, start)


def encode(layout: TileLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """The stream that `eden.reference` writes; x has at least one element."""
    values, group, num_tiles = Values.of(x), layout.tiling.group, layout.tiling.num_tiles
    energies, tile_levels, halves = np.empty(num_tiles, np.float32), np.empty(num_tiles, np.int32), Key.of(key)
    with Team(threads, x.numel()) as team:
        magnitudes = measure(values, layout.tiling, team)
        exponent = top_exponent(magnitudes.overall, TOP_EXPONENT)
        field, of_tiles = Field.of(values, layout.tiling, exponent), magnitudes.of_tiles

        def measure_energies(first: int, stop: int) -> None:
            z = np.empty(group, np.float32)
            measure_tiles(field, halves, of_tiles, first, stop, energies, tile_levels, z)

        team.share(num_tiles, measure_energies)
        buf = layout.new_stream(not magnitudes.all_finite, exponent, x.device)
        sections = Sections.of(layout, buf)
        starts = allocate(tile_levels, layout.num_planes, sections.width)

        def write(first: int, stop: int) -> None:
            scratch = Scratch.of(group)
            write_tiles(field, halves, of_tiles, energies, starts, first, stop, sections, levels(), scratch)

        team.share(num_tiles, write)
    return buf


def decode(
    layout: TileLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor | None:
    """The tensor of an accepted stream; None if the stream is damaged."""
    opened = open_stream(layout, buf)
    if opened is None:
        return None
    x = torch.empty(layout.tiling.shape, dtype=dtype)
    field, halves = Field.of(Values.of(x), layout.tiling, -opened.exponent), Key.of(key)

    def read(first: int, stop: int) -> None:
        scratch = Scratch.of(layout.tiling.group)
        read_tiles(field, halves, opened.starts, first, stop, opened.sections, levels(), scratch)

    with Team(threads, x.numel()) as team:
        team.share(layout.tiling.num_tiles, read)
    return x
