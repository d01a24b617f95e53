"""`eden` and `wf` on CUDA in Triton: the launches for every shape, and the kernels of a decoder.

Streams equal the reference's except where a sum (a mean, an energy, a projection, an error) rounds differently, which
may move a width, a scale or a code; decoded values are equal to the bit. Encoding is four kernels (`eden`) or six
(`wf`) and never synchronises. Decoding is two, then waits for the verdict. Kernels are specialised on types, the size
of tiles, whether they are padded and whether means are taken out, never on bits, data or the key.

A decoder's first kernel sums the widths into `starts`, as in `gaussian.triton_allocation`, and checks what is outside
the tiles. Whatever a buffer holds, `starts` ascend and end at K planes at most, so no byte outside the buffer is ever
read. Each of its programs sums the widths before its own tiles by itself, as three bits per tile are little to read.
`work` holds the verdict, a word that is not 0 where the widths do not sum to K, and from SLOTS on `starts`.
"""

from dataclasses import dataclass
from functools import lru_cache

import triton
import triton.language as tl

from tahq.errors import CodecError
from tahq.quant.gaussian import triton_encode as encoding
from tahq.quant.gaussian.bit_allocation import NUM_LEVELS
from tahq.quant.gaussian.small_scale import NOT_FINITE
from tahq.quant.gaussian.tile_stream import TileLayout
from tahq.quant.gaussian.triton_allocation import TILES_PER_PROGRAM, allocate_kernel, count_kernel, load_widths
from tahq.quant.gaussian.triton_encode import load_means
from tahq.quant.gpu import launch
from tahq.quant.gpu.launch import EXACT, Launch, Steps
from tahq.quant.gpu.levels import load_levels, scale_value, tables
from tahq.quant.gpu.tiles import (
    DAMAGED,
    MARKED,
    MAX_MEASURED,
    any_of,
    as_halves,
    flip_signs,
    from_eights,
    hadamard,
    header_verdict,
    is_gap_dirty,
    is_left_over,
    locate_eights,
    power_of_two,
    store_values,
    store_verdict,
    to_eights,
)
from tahq.quant.spec import EdenSpec
from tahq.quant.tiling import Tiling

ELEMENTS_PER_BLOCK = 4096
"""Elements of a block of the kernels that walk down columns of tiles."""
MAX_PARTS = 128
"""The most parts of the tokens that are summed separately."""
MAX_TILES = 1 << 28
"""Eight bits of each are counted in 32-bit numbers."""
TILES_COUNTED = 4096
"""Tiles per program of a decoder's first kernel."""
SLOTS = 16
"""Words before `starts`."""
_EIGHTS = tl.constexpr(TILES_COUNTED // 8)
_EIGHTS_AT_ONCE = tl.constexpr(4096)
_CHANNELS_AT_ONCE = tl.constexpr(2048)
_SLOTS, _MIN_EXPONENT = tl.constexpr(SLOTS), tl.constexpr(TileLayout.min_exponent)
_DAMAGED, _MARKED, _NOT_FINITE = tl.constexpr(DAMAGED), tl.constexpr(MARKED), tl.constexpr(NOT_FINITE)


@dataclass(frozen=True, slots=True)
class Columns:
    """How programs share the columns of tiles: each has one column of one part of the tokens at a time."""

    num_tokens: int
    tokens_per_block: int
    num_parts: int
    tokens_per_part: int
    num_programs: int

    @classmethod
    def of(cls, tiling: Tiling) -> "Columns":
        """Parts of whole blocks, as many as keep all programs busy."""
        num_tokens = tiling.num_tiles // tiling.tiles_per_token
        block = ELEMENTS_PER_BLOCK // tiling.group
        num_blocks = -(-num_tokens // block)
        most = max(1, min(MAX_PARTS, MAX_MEASURED // tiling.tiles_per_token, num_blocks))
        per_part = -(-num_blocks // most)
        num_parts = -(-num_blocks // per_part)
        programs = min(tiling.tiles_per_token * num_parts, MAX_MEASURED)
        return cls(num_tokens, block, num_parts, per_part * block, programs)


@dataclass(frozen=True, slots=True)
class Work:
    """Words of 32 bits of an encoder's work buffer, by what begins there.

    Behind the programs' largest magnitudes lie the tiles' levels, a histogram of levels per program, and the plane at
    which each tile begins; from `end`, a multiple of 16, `wf` has energies.
    """

    levels: int
    counts: int
    starts: int
    end: int

    @classmethod
    def of(cls, num_tiles: int) -> "Work":
        """For this many tiles; CodecError for more than can be counted."""
        if num_tiles >= MAX_TILES:
            raise CodecError(f"backend triton codes fewer than {MAX_TILES} tiles; got {num_tiles}: use reference")
        counts = MAX_MEASURED + launch.slots(num_tiles)
        starts = counts + NUM_LEVELS * -(-num_tiles // TILES_PER_PROGRAM)
        return cls(MAX_MEASURED, counts, starts, starts + launch.slots(num_tiles + 1))


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
    """The plane at which each tile begins, at most K, and the verdict on all except widths, scales and codes.

    WIDTH is log2 G, PLACE that of e in the header.
    """
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
        is_wrong = is_left_over(buf, width_at, num_tiles * 3)
        is_wrong |= is_gap_dirty(buf, scale_at + num_tiles)
        is_wrong |= is_gap_dirty(buf, width_at + (num_tiles * 3 + 7) // 8)
        is_wrong |= is_gap_dirty(buf, codes_at + num_planes.to(tl.int64) * (G // 8))
        if CENTER:
            is_wrong |= is_gap_dirty(buf, mean_at + 2 * channels)
            is_wrong |= _are_means_wrong(as_halves(buf + mean_at), channels)
        header = header_verdict(buf, WIDTH, CENTER, 0, PLACE, _MIN_EXPONENT)
        tl.store(work, header | tl.where(is_wrong, _DAMAGED, 0))


@triton.jit(do_not_specialize=["num_tiles", "channels", "tiles_per_token", "key_low", "key_high"])
def values_kernel(
    buf,
    work,
    table,
    x,
    num_tiles,
    channels,
    tiles_per_token,
    scale_at,
    mean_at,
    codes_at,
    key_low,
    key_high,
    G: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
    RANDOM: tl.constexpr,
    CENTER: tl.constexpr,
):
    """Values of all tiles, and the rest of the verdict."""
    EXPONENT_AT: tl.constexpr = 3 if RANDOM else 4
    factor = power_of_two(-tl.load(buf + EXPONENT_AT).to(tl.int8, bitcast=True).to(tl.int32))
    verdict = tl.zeros([TILES], tl.int32) + tl.where(tl.load(work + 1) != 0, _DAMAGED, 0)
    for block in range(tl.program_id(0), tl.cdiv(num_tiles, TILES), tl.num_programs(0)):
        tiles = block * TILES + tl.arange(0, TILES)
        is_tile = tiles < num_tiles
        start, width = load_widths(work + _SLOTS, tiles, is_tile)
        scale = tl.load(buf + scale_at + tiles, mask=is_tile, other=0).to(tl.int32)
        verdict |= tl.where(is_tile & (scale == _NOT_FINITE), _MARKED, 0)
        y = load_levels(buf + codes_at, start, width, table, TILES, G) * scale_value(scale)[None, None, :]
        y = hadamard(from_eights(y, TILES, G), TILES, G)
        if RANDOM:
            y = flip_signs(y, tiles, key_low, key_high, TILES, G)
        y = to_eights(y, TILES, G)
        pointers, is_real = locate_eights(x, block, num_tiles, channels, tiles_per_token, TILES, G, PADDED)
        if CENTER:
            channel = tl.arange(0, 8)[:, None, None] + 8 * tl.arange(0, G // 8)[None, :, None]
            y += load_means(buf + mean_at, tiles[None, None, :], channel, is_real, tiles_per_token, G)
        store_values(pointers, y * factor, is_real)
    store_verdict(work, verdict)


@lru_cache(maxsize=256)
def plan(layout: TileLayout) -> launch.LaunchPlan:
    """The launches for a layout."""
    tiling, num_tiles, work = layout.tiling, layout.tiling.num_tiles, Work.of(layout.tiling.num_tiles)
    is_random = isinstance(layout.spec, EdenSpec)
    sections = layout.sections.by_name
    scale_at, width_at, codes_at = (sections[name].start for name in ("scale", "width", "codes"))
    mean_at = sections["mean"].start if layout.has_mean else 0
    if is_random:
        num_measured, marks_at, words = launch.measuring_programs(num_tiles, tiling.group), work.levels, work.end
        levels = _levels_of_tiles(tiling, work, num_measured)
    else:
        num_measured, marks_at = Columns.of(tiling).num_programs, work.end
        levels, words = _levels_in_tokens(layout, work, mean_at)
    tiles_per_block = launch.ELEMENTS_PER_WARP // tiling.group
    coding_grid = (min(-(-num_tiles // tiles_per_block), launch.MAX_CODING_PROGRAMS), 1, 1)
    centered, width = {"CENTER": int(layout.has_mean)}, {"WIDTH": tiling.log2_group}
    padded, eight_warps = tiling.padding > 0, {"num_warps": 8, "num_stages": 1}
    coding = {"G": tiling.group, "TILES": tiles_per_block, "PADDED": padded, "RANDOM": is_random, "num_warps": 1}
    coding |= {**centered, **EXACT}
    first = {"G": tiling.group, "PLACE": len(layout.header)} | width | centered | eight_warps
    counting, counting_grid = {"RELATIVE": is_random} | eight_warps, (-(-num_tiles // TILES_PER_PROGRAM), 1, 1)
    counted, shape = (work.levels, work.counts), (tiling.channels, tiling.tiles_per_token)
    allocated = (num_measured, num_tiles, layout.num_planes - num_tiles, *counted, work.starts, width_at)
    written = (marks_at, work.starts, scale_at, mean_at, codes_at)
    quantized = (num_measured, num_tiles, layout.num_planes, *shape, *written)
    started = (num_tiles, layout.num_planes, tiling.channels, scale_at, width_at, mean_at, codes_at)
    read = (num_tiles, *shape, scale_at, mean_at, codes_at)
    return launch.LaunchPlan(
        encode_words=words,
        encode=(
            *levels,
            ("work", Launch(count_kernel, counting_grid, (num_measured, num_tiles, *counted), counting)),
            ("work buf", Launch(allocate_kernel, counting_grid, allocated, counting)),
            ("x work table buf key", Launch(encoding.quantize_kernel, coding_grid, quantized, coding | width)),
        ),
        decode_words=SLOTS + num_tiles + 1,
        decode=(
            ("buf work", Launch(starts_kernel, (-(-num_tiles // TILES_COUNTED), 1, 1), started, first)),
            ("buf work table x key", Launch(values_kernel, coding_grid, read, coding)),
        ),
    )


def _levels_of_tiles(tiling: Tiling, work: Work, num_measured: int) -> Steps:
    """`eden`: one kernel."""
    constants = {
        "G": tiling.group,
        "TILES": launch.measuring_tiles(tiling.group),
        "PADDED": tiling.padding > 0,
        "num_warps": launch.MEASURING_WARPS,
        **EXACT,
    }
    numbers = (tiling.num_tiles, tiling.channels, tiling.tiles_per_token, work.levels)
    return (("x work", Launch(encoding.measure_kernel, (num_measured, 1, 1), numbers, constants)),)


def _levels_in_tokens(layout: TileLayout, work: Work, mean_at: int) -> tuple[Steps, int]:
    """`wf`: three kernels, and the words of the work buffer, which holds energies and sums of channels besides."""
    tiling, columns = layout.tiling, Columns.of(layout.tiling)
    energies_at = work.end
    sums_at = energies_at + launch.slots(tiling.num_tiles)
    num_sums = columns.num_parts * tiling.tiles_per_token * tiling.group if layout.has_mean else 0
    constants = {
        "G": tiling.group,
        "TOKENS": columns.tokens_per_block,
        "PADDED": tiling.padding > 0,
        "CENTER": int(layout.has_mean),
        "num_warps": launch.MEASURING_WARPS,
        **EXACT,
    }
    grid, programs = (columns.num_programs, 1, 1), columns.num_programs
    shape = (columns.num_tokens, tiling.channels, tiling.tiles_per_token, columns.num_parts, columns.tokens_per_part)
    leveled = (columns.num_tokens, tiling.tiles_per_token, energies_at, work.levels)
    level_grid = (-(-columns.num_tokens // encoding.TOKENS_PER_PROGRAM), 1, 1)
    energy_numbers = (programs, *shape, sums_at, energies_at, mean_at)
    return (
        ("x work", Launch(encoding.sum_kernel, grid, (*shape, sums_at), constants)),
        ("x work buf", Launch(encoding.energy_kernel, grid, energy_numbers, constants)),
        ("work", Launch(encoding.level_kernel, level_grid, leveled, {"num_warps": 4, **EXACT})),
    ), sums_at + 2 * num_sums


encode, decode = launch.backend(plan, tables)
