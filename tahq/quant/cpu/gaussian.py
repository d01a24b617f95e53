"""Streams of `eden` and `wf` as the CPU's kernels see them: sections in place, and where each tile's planes start.

A stream is opened only if the reference would take it; kernels that read it then need no checks of their own, as the
starts end with what the section of codes holds.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tahq.quant.cpu.kernel import kernel
from tahq.quant.cpu.levels import Ladder, Levels, read_levels, scale_of, write_codes
from tahq.quant.cpu.numbers import Fp32Array, Key, Values
from tahq.quant.cpu.planes import ByteArray, read_number, read_planes, write_number, write_planes
from tahq.quant.cpu.tiles import Grid, Int32Array, power_of_two
from tahq.quant.gaussian.bit_allocation import NUM_LEVELS, STEPS
from tahq.quant.gaussian.small_scale import NOT_FINITE
from tahq.quant.gaussian.tile_stream import WIDTH_BITS, TileLayout
from tahq.quant.spec import EdenSpec

Int64Array = NDArray[np.int64]


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
    """Where each tile's planes start, and the last end: `starts`, [T + 1]; whatever the bytes, widths are 1 to 8."""
    starts[0] = 0
    for tile in range(starts.size - 1):
        starts[tile + 1] = starts[tile] + read_number(tile, WIDTH_BITS, packed) + 1


class Sections(NamedTuple):
    """The sections that both codecs' streams have, sharing the stream's memory."""

    scale: ByteArray
    width: ByteArray
    codes: ByteArray

    @classmethod
    def of(cls, layout: TileLayout, buf: torch.Tensor) -> "Sections":
        """Of an aligned buffer that is as long as the layout says."""
        scale, width, codes = (layout.sections.view(buf, name).numpy() for name in ("scale", "width", "codes"))
        return cls(scale, width, codes)


class OpenStream(NamedTuple):
    """A stream that may be read; `starts`, int64 [T + 1], says where each tile's planes start, and the last end."""

    sections: Sections
    starts: Int64Array
    exponent: int


def open_stream(layout: TileLayout, buf: torch.Tensor) -> OpenStream | None:
    """An accepted stream if the reference would take it, means aside; else None. A wrong header raises CodecError."""
    is_flagged, exponent = layout.read_header(buf)
    sections = Sections.of(layout, buf)
    starts = np.empty(layout.tiling.num_tiles + 1, np.int64)
    read_widths(sections.width, starts)
    used = layout.tiling.num_tiles * WIDTH_BITS % 8
    is_sound = (
        starts[-1] == layout.num_planes
        and (used == 0 or sections.width[-1] >> used == 0)
        and (sections.scale == NOT_FINITE).any() == is_flagged
        and not layout.sections.has_dirty_filling(buf)
    )
    return OpenStream(sections, starts, exponent) if is_sound else None


class Field(NamedTuple):
    """A tensor in memory, and how its values are transformed.

    `factor` is 2^e in encoding and 2^−e in decoding, `norm` fp32(1/√G). `is_random` means random signs by `key` and
    stochastic rounding (`eden`). `means`, fp32 [M·G], has each channel's; empty if they are not taken out.
    """

    values: Values
    grid: Grid
    factor: np.float32
    norm: np.float32
    is_random: bool
    key: Key
    means: Fp32Array

    @classmethod
    def of(cls, layout: TileLayout, values: Values, exponent: int, key: int) -> "Field":
        """A tensor that is multiplied by 2^exponent, without means."""
        tiling, none = layout.tiling, np.empty(0, np.float32)
        norm, is_random = np.float32(tiling.group**-0.5), isinstance(layout.spec, EdenSpec)
        return cls(values, Grid.of(tiling), power_of_two(exponent), norm, is_random, Key.of(key), none)


class Scratch(NamedTuple):
    """Room for one tile: values z and |z|, thresholds and levels of its width, codes [G] and their memory as words."""

    z: Fp32Array
    magnitudes: Fp32Array
    ladder: Ladder
    codes: ByteArray
    words: NDArray[np.uint64]

    @classmethod
    def of(cls, group: int) -> "Scratch":
        """Fresh memory, for one thread."""
        codes = np.empty(group, np.uint8)
        z, magnitudes = np.empty(group, np.float32), np.empty(group, np.float32)
        return cls(z, magnitudes, Ladder.of(group), codes, codes.view(np.uint64))


@kernel
def encode_planes(scratch: Scratch, bits: int, codes: ByteArray, start: int) -> None:
    """Codes of a tile from `scratch.z` and the ladder's indices, as `bits` planes from plane `start` on."""
    write_codes(scratch.z, bits, scratch.ladder.indices, scratch.codes)
    write_planes(scratch.words, 0, bits, codes, start * scratch.words.size)


@kernel
def decode_planes(codes: ByteArray, start: int, bits: int, scale: int, levels: Levels, scratch: Scratch) -> None:
    """scratch.z = the level of each code times the value of `scale`, which is finite."""
    scratch.words[:] = 0
    read_planes(codes, start * scratch.words.size, 0, bits, scratch.words)
    read_levels(levels.signed[bits], scratch.codes, scale_of(scale), scratch.z)
