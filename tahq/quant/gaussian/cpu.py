"""`eden` and `wf` on the CPU in numba: three or four passes over the tensor, one over the stream, little memory.

Encoding reads the tensor for its largest magnitudes (and for the channels' means, if they are centred), transforms it
tile by tile for the energies by which bits are allocated, and transforms it again to quantise and pack. Threads share
ranges of tiles; for the means ranges of channels, so that results do not depend on the number of threads.

Streams equal the reference's except where a sum (a mean, an energy, a projection, an error) rounds differently, which
may move a width, a scale or the code of a value at a threshold; decoded values are always equal, NaN being NaN.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tahq.quant.cpu.hadamard import hadamard
from tahq.quant.cpu.kernel import Team, kernel
from tahq.quant.cpu.levels import (
    Int64Array,
    Levels,
    ScaledLevels,
    allocate,
    find_index,
    find_level,
    levels,
    nearest_code,
    read_levels,
    read_widths,
    scale_levels,
    scale_of,
    squared_distance,
    stochastic_code,
    sum_of_products,
    sum_of_squares,
    take_magnitudes,
    write_codes,
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
from tahq.quant.cpu.planes import ByteArray, read_planes, write_planes
from tahq.quant.cpu.tiles import Grid, Int32Array, measure, place_of_tile, power_of_two, read_tile, top_exponent
from tahq.quant.gaussian.reference import CANDIDATES, SAME_LEVEL, SCALE_COUNTER
from tahq.quant.gaussian.small_scale import DROPPED_BITS, LARGEST_CODE, NOT_FINITE
from tahq.quant.gaussian.tile_stream import WIDTH_BITS, TileLayout
from tahq.quant.spec import EdenSpec
from tahq.quant.tiling import TOP_EXPONENT

_ZERO, _ONE, _INFINITY = np.float32(0.0), np.float32(1.0), np.float32(np.inf)
_SIGNS_A_WORD = 32


class TileField(NamedTuple):
    """A tensor in memory, and how its values are transformed.

    `factor` is 2^e in encoding and 2^−e in decoding, `norm` fp32(1/√G). `is_random` means random signs by `key` and
    stochastic rounding (`eden`). `means`, fp32 [M·G], has the channels' means; empty if they are not subtracted.
    """

    values: Values
    grid: Grid
    factor: np.float32
    norm: np.float32
    is_random: bool
    key: Key
    means: Fp32Array

    @classmethod
    def of(cls, layout: TileLayout, values: Values, exponent: int, key: int) -> "TileField":
        """A tensor that is multiplied by 2^exponent, without means."""
        tiling, none = layout.tiling, np.empty(0, np.float32)
        norm, is_random = np.float32(tiling.group**-0.5), isinstance(layout.spec, EdenSpec)
        return cls(values, Grid.of(tiling), power_of_two(exponent), norm, is_random, Key.of(key), none)


class TileSections(NamedTuple):
    """The sections that both codecs' streams have, sharing the stream's memory."""

    scale: ByteArray
    width: ByteArray
    codes: ByteArray

    @classmethod
    def of(cls, layout: TileLayout, buf: torch.Tensor) -> "TileSections":
        """Views of an aligned buffer that has the layout's length."""
        scale, width, codes = (layout.sections.view(buf, name).numpy() for name in ("scale", "width", "codes"))
        return cls(scale, width, codes)


class TileScratch(NamedTuple):
    """Room for one tile: values z and |z|, thresholds and levels of its width, codes [G] and their memory as words."""

    z: Fp32Array
    magnitudes: Fp32Array
    scaled: ScaledLevels
    codes: ByteArray
    words: NDArray[np.uint64]

    @classmethod
    def of(cls, group: int) -> "TileScratch":
        """Fresh memory, for one thread."""
        codes = np.empty(group, np.uint8)
        z, magnitudes = np.empty(group, np.float32), np.empty(group, np.float32)
        return cls(z, magnitudes, ScaledLevels.of(group), codes, codes.view(np.uint64))


def encode(layout: TileLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """The reference's stream, except where sums round differently; x has at least one element."""
    values, group, num_tiles = Values.of(x), layout.tiling.group, layout.tiling.num_tiles
    energies, tile_levels = np.empty(num_tiles, np.float32), np.empty(num_tiles, np.int32)
    with Team(threads, x.numel()) as team:
        magnitudes = measure(values, layout.tiling, team)
        of_tiles, exponent = magnitudes.of_tiles, top_exponent(magnitudes.overall, TOP_EXPONENT)
        buf = layout.new_stream(not magnitudes.all_finite, exponent, x.device)
        field = TileField.of(layout, values, exponent, key)
        if layout.has_mean:
            field = field._replace(means=_write_means(layout, field, of_tiles, buf, team))
        team.share(
            num_tiles,
            lambda first, stop: measure_tiles(field, of_tiles, first, stop, energies, np.empty(group, np.float32)),
        )
        level_tiles(field, energies, tile_levels)
        sections = TileSections.of(layout, buf)
        starts = allocate(tile_levels, layout.num_planes, sections.width)

        def write(first: int, stop: int) -> None:
            write_tiles(field, of_tiles, energies, starts, first, stop, sections, levels(), TileScratch.of(group))

        team.share(num_tiles, write)
    return buf


def decode(
    layout: TileLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor | None:
    """The tensor of an accepted stream; None if the stream is damaged."""
    is_flagged, exponent = layout.read_header(buf)
    sections, stored = TileSections.of(layout, buf), _stored_means(layout, buf)
    starts = np.empty(layout.tiling.num_tiles + 1, np.int64)
    read_widths(sections.width, starts)
    used = layout.tiling.num_tiles * WIDTH_BITS % 8
    # As in the reference; afterwards the starts of tiles' planes need no further check.
    is_sound = (
        starts[-1] == layout.num_planes
        and (used == 0 or sections.width[-1] >> used == 0)
        and (sections.scale == NOT_FINITE).any() == is_flagged
        and not layout.sections.has_dirty_filling(buf)
        and np.isfinite(stored).all()
    )
    if not is_sound:
        return None
    x = torch.empty(layout.tiling.shape, dtype=dtype)
    field = TileField.of(layout, Values.of(x), -exponent, key)._replace(means=_padded(layout, stored))

    def read(first: int, stop: int) -> None:
        read_tiles(field, starts, first, stop, sections, levels(), TileScratch.of(layout.tiling.group))

    with Team(threads, x.numel()) as team:
        team.share(layout.tiling.num_tiles, read)
    return x


def _write_means(
    layout: TileLayout, field: TileField, of_tiles: Int32Array, buf: torch.Tensor, team: Team
) -> Fp32Array:
    """Write the channels' means to the stream; returns them as the receiver will have them, fp32 [M·G]."""
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


@kernel
def sum_channels(
    field: TileField, magnitudes: Int32Array, first: int, stop: int, totals: NDArray[np.float64], y: Fp32Array
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
    field: TileField, magnitudes: Int32Array, first: int, stop: int, energies: Fp32Array, z: Fp32Array
) -> None:
    """‖z‖² of tiles after their transform; 0 where not finite."""
    for tile in range(first, stop):
        energies[tile] = _ZERO
        if magnitudes[tile] < INFINITY_BITS:
            _transform(field, tile, z)
            energies[tile] = sum_of_squares(z)


@kernel
def level_tiles(field: TileField, energies: Fp32Array, levels: Int32Array) -> None:
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
    field: TileField,
    magnitudes: Int32Array,
    energies: Fp32Array,
    starts: Int64Array,
    first: int,
    stop: int,
    sections: TileSections,
    levels: Levels,
    scratch: TileScratch,
) -> None:
    """Write scales and codes of tiles. Codes of non-finite tiles and of zeros are not written, and must be zeros."""
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
            scale_levels(levels, bits, scale_of(code), scale_of(code), scratch.scaled)
            find_index(levels, bits, scale_of(code), scratch.magnitudes, scratch.scaled)
            sections.scale[tile] = code
        write_codes(scratch.z, bits, scratch.scaled.indices, scratch.codes)
        write_planes(scratch.words, 0, bits, sections.codes, starts[tile] * scratch.words.size)


@kernel
def _transform(field: TileField, tile: int, z: Fp32Array) -> None:
    """z = the Hadamard transform of a finite tile times the field's factor, with random signs or without the means."""
    read_tile(field.values, field.grid, tile, field.factor, np.int32(0), z)
    _flip_or_shift(field, tile, -_ONE, z)
    hadamard(z, field.norm)


@kernel
def _flip_or_shift(field: TileField, tile: int, sign: np.float32, z: Fp32Array) -> None:
    """Flip the random signs of a tile, or add `sign` (1 or −1) times its channels' means."""
    if field.is_random:
        _flip_signs(field.key, tile * z.size, z)
    elif field.means.size > 0:
        start = tile % field.grid.tiles_per_token * z.size
        of_tile = field.means[start : start + z.size]
        for i in range(z.size):
            z[i] += sign * of_tile[i]


@kernel
def _flip_signs(key: Key, index: int, z: Fp32Array) -> None:
    """Change the signs that the key selects, z[0] being element `index` of the padded tensor."""
    for start in range(0, z.size, _SIGNS_A_WORD):
        part = z[start : start + _SIGNS_A_WORD]
        first = index + start
        signs = hash_of(first // _SIGNS_A_WORD, key) >> np.uint32(first % _SIGNS_A_WORD)
        for i in range(part.size):
            sign = np.int32(np.uint32(signs >> np.uint32(i)) << np.uint32(31))
            part[i] = float_of(np.int32(bits_of(part[i]) ^ sign))


@kernel
def _project(levels: Levels, bits: int, step: np.float32, scratch: TileScratch) -> np.float32:
    """Find each element's level; returns Σ |z|·level."""
    scale_levels(levels, bits, step, _ONE, scratch.scaled)
    find_level(levels, bits, step, scratch.magnitudes, scratch.scaled)
    find_index(levels, bits, step, scratch.magnitudes, scratch.scaled)
    return sum_of_products(scratch.magnitudes, scratch.scaled.level)


@kernel
def _best_scale(levels: Levels, bits: int, middle: Integer, scratch: TileScratch) -> int:
    """The candidate code around `middle` with the least Σ(|z| − s·level)², the first of equals."""
    best, least = int(middle), _INFINITY
    for candidate in CANDIDATES:
        code = min(max(int(middle) + candidate, 1), LARGEST_CODE)
        scale_levels(levels, bits, scale_of(code), scale_of(code), scratch.scaled)
        find_level(levels, bits, scale_of(code), scratch.magnitudes, scratch.scaled)
        error = squared_distance(scratch.magnitudes, scratch.scaled.level)
        if error < least:
            best, least = code, error
    return best


@kernel
def read_tiles(
    field: TileField,
    starts: Int64Array,
    first: int,
    stop: int,
    sections: TileSections,
    levels: Levels,
    scratch: TileScratch,
) -> None:
    """Write the values of tiles, times the field's factor; NaN for marked tiles."""
    for tile in range(first, stop):
        start, count = place_of_tile(field.grid, tile)
        scale = sections.scale[tile]
        if scale == NOT_FINITE:
            write_nan(field.values, start, count)
            continue
        bits = starts[tile + 1] - starts[tile]
        scratch.words[:] = 0
        read_planes(sections.codes, starts[tile] * scratch.words.size, 0, bits, scratch.words)
        read_levels(levels.signed[bits], scratch.codes, scale_of(scale), scratch.z)
        hadamard(scratch.z, field.norm)
        _flip_or_shift(field, tile, _ONE, scratch.z)
        write_scaled(scratch.z[:count], field.factor, field.values, start)
