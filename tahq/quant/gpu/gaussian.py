"""Common parts of `eden` and `wf` on CUDA: where tiles begin, the header, padding, refusals; and how kernels launch.

A decoder's first kernel sums the widths, which nothing says beforehand, into `starts` as `gpu.allocation` has
them, and looks at what is outside of the tiles. Whatever a buffer holds, `starts` ascend and end at K planes at most,
so no byte outside the buffer is ever read. Each of its programs counts for itself what the ones before it have: three
bits per tile are few.

`work` of a decoder: the verdict, a word that is not 0 where the widths do not sum to K, and from SLOTS on `starts`.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tahq.errors import CodecError
from tahq.quant.gaussian.bit_allocation import NUM_LEVELS
from tahq.quant.gaussian.small_scale import NOT_FINITE
from tahq.quant.gaussian.tile_stream import TileLayout
from tahq.quant.gpu import allocation, launch
from tahq.quant.gpu.launch import Launch
from tahq.quant.gpu.tiles import (
    DAMAGED,
    MARKED,
    MAX_MEASURED,
    any_of,
    as_halves,
    fill_gap,
    header_verdict,
    is_gap_dirty,
    is_left_over,
    store_header,
)
from tahq.quant.tiling import Tiling

TILES_PER_PROGRAM = 4096
SLOTS = 16
"""Words before `starts`."""
_EIGHTS = tl.constexpr(TILES_PER_PROGRAM // 8)
_EIGHTS_AT_ONCE = tl.constexpr(4096)
_CHANNELS_AT_ONCE = tl.constexpr(2048)
_SLOTS, _MIN_EXPONENT = tl.constexpr(SLOTS), tl.constexpr(TileLayout.min_exponent)
_DAMAGED, _MARKED, _NOT_FINITE = tl.constexpr(DAMAGED), tl.constexpr(MARKED), tl.constexpr(NOT_FINITE)


@triton.jit
def finish(
    buf,
    exponent,
    is_flagged,
    num_tiles,
    num_planes,
    channels,
    scale_at,
    mean_at,
    codes_at,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    CENTER: tl.constexpr,
    PLACE: tl.constexpr,
):
    """The header, with e in byte PLACE, and zeros behind all sections but the widths'."""
    store_header(buf, exponent, is_flagged, WIDTH, CENTER, 0, PLACE)
    fill_gap(buf, scale_at + num_tiles)
    if CENTER:
        fill_gap(buf, mean_at + 2 * channels)
    fill_gap(buf, codes_at + num_planes.to(tl.int64) * (G // 8))


@triton.jit
def _load_eights(widths, eight, num_tiles):
    """Words int32 of 24 bits: the bits less one of eight tiles, three bits each."""
    byte, stop = 3 * eight, (num_tiles * 3 + 7) // 8
    word = tl.load(widths + byte, mask=byte < stop, other=0).to(tl.int32)
    word |= tl.load(widths + byte + 1, mask=byte + 1 < stop, other=0).to(tl.int32) << 8
    return word | (tl.load(widths + byte + 2, mask=byte + 2 < stop, other=0).to(tl.int32) << 16)


@triton.jit
def _sum_before(widths, first_eight, num_tiles):
    """Sum of the widths of all tiles before those of `first_eight`."""
    total = tl.zeros([_EIGHTS_AT_ONCE], tl.int32)
    for first in range(0, first_eight, _EIGHTS_AT_ONCE):
        eight = first + tl.arange(0, _EIGHTS_AT_ONCE)
        word = tl.where(eight < first_eight, _load_eights(widths, eight, num_tiles), 0)
        fours = (word & 0x1C71C7) + ((word >> 3) & 0x1C71C7)  # four sums of six bits
        twos = (fours & 0x03F03F) + ((fours >> 6) & 0x03F03F)
        total += (twos & 0xFFF) + (twos >> 12)
    return tl.sum(total, axis=0) + 8 * first_eight


@triton.jit
def _are_means_wrong(means, channels):
    """Whether one of the means (fp16 bits) is infinite or NaN."""
    is_wrong = tl.zeros([_CHANNELS_AT_ONCE], tl.int32)
    for first in range(0, channels, _CHANNELS_AT_ONCE):
        channel = first + tl.arange(0, _CHANNELS_AT_ONCE)
        mean = tl.load(means + channel, mask=channel < channels, other=0).to(tl.int32)
        is_wrong |= ((mean & 0x7C00) == 0x7C00).to(tl.int32)
    return any_of(is_wrong)


@triton.jit
def _verdict(
    buf,
    num_tiles,
    num_planes,
    channels,
    scale_at,
    width_at,
    mean_at,
    codes_at,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    CENTER: tl.constexpr,
    PLACE: tl.constexpr,
):
    """The verdict on all but widths, scales and codes."""
    is_wrong = is_left_over(buf, width_at, num_tiles * 3)
    is_wrong |= is_gap_dirty(buf, scale_at + num_tiles)
    is_wrong |= is_gap_dirty(buf, width_at + (num_tiles * 3 + 7) // 8)
    is_wrong |= is_gap_dirty(buf, codes_at + num_planes.to(tl.int64) * (G // 8))
    if CENTER:
        is_wrong |= is_gap_dirty(buf, mean_at + 2 * channels)
        is_wrong |= _are_means_wrong(as_halves(buf + mean_at), channels)
    return header_verdict(buf, WIDTH, CENTER, 0, PLACE, _MIN_EXPONENT) | tl.where(is_wrong, _DAMAGED, 0)


@triton.jit(do_not_specialize=["num_tiles", "num_planes", "channels"])
def starts_kernel(
    buf,
    work,
    num_tiles,
    num_planes,
    channels,
    scale_at,
    width_at,
    mean_at,
    codes_at,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    CENTER: tl.constexpr,
    PLACE: tl.constexpr,
):
    """The plane at which each tile begins, at most K, and a first verdict."""
    first_eight = tl.program_id(0) * _EIGHTS
    eight = first_eight + tl.arange(0, _EIGHTS)
    tiles = eight[:, None] * 8 + tl.arange(0, 8)[None, :]
    less_one = (_load_eights(buf + width_at, eight, num_tiles)[:, None] >> (3 * tl.arange(0, 8))[None, :]) & 7
    width = tl.reshape(tl.where(tiles < num_tiles, less_one + 1, 0), [_EIGHTS * 8])
    stop = _sum_before(buf + width_at, first_eight, num_tiles) + tl.cumsum(width, axis=0)
    tile = first_eight * 8 + tl.arange(0, _EIGHTS * 8)
    tl.store(work + _SLOTS + 1 + tile, tl.minimum(stop, num_planes), mask=tile < num_tiles)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(work + 1, (tl.max(stop, axis=0) != num_planes).to(tl.int32))
    if tl.program_id(0) == 0:
        tl.store(work + _SLOTS, 0)
        verdict = _verdict(
            buf, num_tiles, num_planes, channels, scale_at, width_at, mean_at, codes_at, G, WIDTH, CENTER, PLACE
        )
        tl.store(work, verdict)


@triton.jit
def load_exponent(buf, PLACE: tl.constexpr):
    """e of a stream's header, int32."""
    return tl.load(buf + PLACE).to(tl.int8, bitcast=True).to(tl.int32)


@triton.jit
def tile_verdict(work, scale, is_tile):
    """The verdict [TILES] on scales, int32, and on the widths' sum."""
    marked = tl.where(is_tile & (scale == _NOT_FINITE), _MARKED, 0)
    return marked | tl.where(tl.load(work + 1) != 0, _DAMAGED, 0)


MAX_TILES = 1 << 28
"""Eight bits of each are counted in 32-bit numbers."""
MAX_PROGRAMS = 4 * launch.MAX_PROGRAMS
"""Of the kernels that code: four times what a device holds at a time, as blocks take as long as their widest tile."""


@dataclass(frozen=True, slots=True)
class Work:
    """Words of 32 bits of an encoder's work buffer, by what begins there.

    Attributes:
        levels: of tiles, behind the programs' largest magnitudes.
        counts: histograms of levels, one per program.
        starts: the plane at which each tile begins, and their number.
        end: where a codec may keep more; a multiple of 16.
    """

    levels: int
    counts: int
    starts: int
    end: int

    @classmethod
    def of(cls, num_tiles: int) -> "Work":
        """For this many tiles.

        Raises:
            CodecError: more than can be counted.
        """
        if num_tiles >= MAX_TILES:
            raise CodecError(f"backend triton codes fewer than {MAX_TILES} tiles; got {num_tiles}: use reference")
        counts = MAX_MEASURED + launch.slots(num_tiles)
        starts = counts + NUM_LEVELS * _programs(num_tiles)
        return cls(MAX_MEASURED, counts, starts, starts + launch.slots(num_tiles + 1))


def decode_words(num_tiles: int) -> int:
    """Words of a decoder's work buffer."""
    return SLOTS + num_tiles + 1


def allocate(layout: TileLayout, work: Work, num_measured: int, *, is_relative: bool) -> tuple[Launch, Launch]:
    """The kernels that count levels (it takes the work buffer) and allocate bits (the stream, too)."""
    num_tiles = layout.tiling.num_tiles
    grid = (_programs(num_tiles), 1, 1)
    constants = {"RELATIVE": is_relative, "num_warps": 8, "num_stages": 1}
    counted = (num_measured, num_tiles, work.levels, work.counts)
    width_at = layout.sections.by_name["width"].start
    numbers = (num_measured, num_tiles, layout.num_planes - num_tiles, work.levels, work.counts, work.starts, width_at)
    return (
        Launch(allocation.count_kernel, grid, counted, constants),
        Launch(allocation.allocate_kernel, grid, numbers, constants),
    )


def starts(layout: TileLayout, *, exponent_place: int) -> Launch:
    """A decoder's first kernel; it takes the stream and the work buffer."""
    tiling = layout.tiling
    numbers = (tiling.num_tiles, layout.num_planes, tiling.channels, *section_starts(layout))
    constants = {
        "G": tiling.group,
        "WIDTH": tiling.log2_group,
        "CENTER": int(layout.has_mean),
        "PLACE": exponent_place,
        "num_warps": 8,
        "num_stages": 1,
    }
    grid = (-(-tiling.num_tiles // TILES_PER_PROGRAM), 1, 1)
    return Launch(starts_kernel, grid, numbers, constants)


def section_starts(layout: TileLayout) -> tuple[int, int, int, int]:
    """Where scales, widths, means (0 without) and codes begin."""
    sections = layout.sections.by_name
    mean_at = sections["mean"].start if "mean" in sections else 0
    return sections["scale"].start, sections["width"].start, mean_at, sections["codes"].start


def coding_constants(tiling: Tiling) -> dict[str, Any]:
    """What the kernels that code are compiled for, one warp a block."""
    return {
        "G": tiling.group,
        "WIDTH": tiling.log2_group,
        "TILES": _tiles_per_block(tiling.group),
        "PADDED": tiling.padding > 0,
        "NORM": tiling.group**-0.5,
        "num_warps": 1,
        **launch.EXACT,
    }


def coding_grid(tiling: Tiling) -> tuple[int, int, int]:
    """Of the kernels that code."""
    return (min(-(-tiling.num_tiles // _tiles_per_block(tiling.group)), MAX_PROGRAMS), 1, 1)


def _tiles_per_block(group: int) -> int:
    return launch.ELEMENTS_PER_WARP // group


def _programs(num_tiles: int) -> int:
    """Of the kernels that allocate bits."""
    return -(-num_tiles // allocation.TILES_PER_PROGRAM)
