"""`tah` on CUDA in Triton: the launches for every shape, and the kernels of a decoder.

Streams equal the reference's except for which of two allocation tiles gets H bits where their entropies lie
within 1e-5 of each other; decoded values are equal to the bit. Encoding is five kernels (seven, where a sample
has more than 32,768 allocation tiles) and never synchronises. Decoding is two, then waits for the verdict.
Kernels are specialised on the spec, on types, on whether tiles are padded and on the size class of a
sample, never on data.

A decoder trusts nothing. Its first kernel counts the bits of the bit map, so that every allocation tile knows its place
among those with H bits, and checks what is outside the tiles. The second turns tiles into values. `work` holds the
verdict, a word per sample that is not 0 where its bit map is wrong, and the places. Whatever the buffer holds, no byte
outside it is read: places beyond the number of H-bit tiles are taken for L bits, and nothing else in a stream is an
address.
"""

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl

from tahq.quant.gpu import launch
from tahq.quant.gpu.launch import Launch
from tahq.quant.gpu.tiles import (
    DAMAGED,
    MARKED,
    as_halves,
    from_half,
    header_verdict,
    is_gap_dirty,
    is_left_over,
    locate_tiles,
    only,
    popcount,
    power_of_two,
    store_values,
    store_verdict,
)
from tahq.quant.gpu.words import as_floats, as_words, locate_words, over_block, unpack_codes, words_of
from tahq.quant.tah import triton_encode as encoding
from tahq.quant.tah import triton_select as selection
from tahq.quant.tah.stream import TahLayout
from tahq.quant.tah.triton_tile import decode_tile
from tahq.quant.tiling import TOP_EXPONENT

ENCODED_PER_WARP = 1024
"""Elements of a warp of the kernels that code: two threads have a tile of 64."""
MEASURED_ELEMENTS, MEASURING_WARPS = 4096, 4
"""Elements and warps of a program of the encoder's first kernel."""
MOST_REGISTERS = 80
"""Per thread in kernels for up to four bits: they would use a few more, but with fewer, more of them run at a time."""
ALLOCS_PER_PROGRAM = 2048
_DAMAGED, _MARKED = tl.constexpr(DAMAGED), tl.constexpr(MARKED)
_ALLOCS = tl.constexpr(ALLOCS_PER_PROGRAM)
_WORDS = tl.constexpr(4096)
_SAFE_EXPONENT = tl.constexpr(60)
_MIN_EXPONENT = tl.constexpr(TOP_EXPONENT - 127)


@triton.jit
def _below(place):
    """int32 with the lowest `place` bits set, of −∞ to 31; all of them from 32."""
    return tl.where(place >= 32, -1, (1 << tl.maximum(tl.minimum(place, 31), 0)) - 1)


@triton.jit
def _count_ones(bit_map, first, count):
    """How many of `count` bits from `first` on are set; words of 32 bits are read, inside the section."""
    words = bit_map.to(tl.pointer_type(tl.int32), bitcast=True) + first // 32
    start = (first % 32).to(tl.int32)
    stop = start + count
    ones = tl.zeros([_WORDS], tl.int32)
    for begin in range(0, (stop + 31) // 32, _WORDS):
        word = begin + tl.arange(0, _WORDS)
        bits = tl.load(words + word, mask=word < (stop + 31) // 32, other=0)
        ones += popcount(bits & _below(stop - 32 * word) & ~_below(start - 32 * word))
    return tl.sum(ones, axis=0)


@triton.jit(do_not_specialize=["num_tiles", "num_allocs", "num_high", "allocs_per_sample", "num_low"])
def place_kernel(
    buf,
    work,
    sample_slots,
    num_tiles,
    num_allocs,
    num_high,
    allocs_per_sample,
    num_low,
    bit_map_at,
    scale_at,
    zero_point_at,
    pivot_at,
    low_planes_at,
    high_planes_at,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Place of every allocation tile among those with H bits, −1 for L; a first verdict. Grid [blocks, samples]."""
    first = tl.program_id(0) * _ALLOCS
    sample_first = tl.program_id(1).to(tl.int64) * allocs_per_sample
    index = first + tl.arange(0, _ALLOCS)
    is_real = index < allocs_per_sample
    bit = sample_first + index
    byte = tl.load(buf + bit_map_at + bit // 8, mask=is_real, other=0).to(tl.int32)
    is_high = (byte >> (bit % 8).to(tl.int32)) & 1
    counted = _count_ones(buf + bit_map_at, sample_first, first)
    num_high_allocs = allocs_per_sample - num_low
    rank = counted + tl.cumsum(is_high, axis=0) - is_high
    place = tl.where((is_high > 0) & (rank < num_high_allocs), tl.program_id(1) * num_high_allocs + rank, -1)
    tl.store(work + sample_slots + bit, place, mask=is_real)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        is_wrong = counted + tl.sum(is_high, axis=0) != num_high_allocs
        tl.store(work + 1 + tl.program_id(1), is_wrong.to(tl.int32))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        count = num_tiles.to(tl.int64)
        verdict = header_verdict(buf, WIDTH, LOW, HIGH, 5, _MIN_EXPONENT)
        is_dirty = is_left_over(buf, bit_map_at, num_allocs.to(tl.int64))
        is_dirty |= is_left_over(buf, pivot_at, count * WIDTH)
        is_dirty |= is_gap_dirty(buf, bit_map_at + (num_allocs + 7) // 8)
        is_dirty |= is_gap_dirty(buf, scale_at + 2 * count)
        is_dirty |= is_gap_dirty(buf, zero_point_at + 2 * count)
        is_dirty |= is_gap_dirty(buf, pivot_at + (count * WIDTH + 7) // 8)
        is_dirty |= is_gap_dirty(buf, low_planes_at + count * (LOW * G // 8))
        is_dirty |= is_gap_dirty(buf, high_planes_at + num_high.to(tl.int64) * ((HIGH - LOW) * G // 8))
        tl.store(work, verdict | is_dirty.to(tl.int32))


@triton.jit
def _tile_verdict(scale, zero_point, is_tile):
    """DAMAGED and MARKED by scale and zero-point [TILES] (bits)."""
    size = zero_point & 0x7FFF
    is_nan = size > 0x7C00
    is_wrong = ((scale & 0x7FFF) >= 0x7C00) | (size == 0x7C00) | (is_nan & (scale != 0))
    verdict = tl.where(is_wrong, _DAMAGED, 0) | tl.where(is_nan, _MARKED, 0)
    return tl.where(is_tile, verdict, 0)


@triton.jit
def _load_plane(
    low_words,
    high_words,
    place,
    is_wanted,
    PLANE: tl.constexpr,
    T: tl.constexpr,
    WORDS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Words int32 [T, words] of one plane of tiles; zeros where it has none."""
    tile, word = tl.arange(0, T)[:, None], tl.arange(0, WORDS)[None, :]
    if PLANE < LOW:
        at = tile * (LOW * WORDS) + (PLANE * WORDS + word)
        words = tl.load(low_words + at, mask=is_wanted[:, None], other=0).to(tl.int32)
    elif PLANE < HIGH:
        at = place.to(tl.int64)[:, None] * ((HIGH - LOW) * WORDS) + ((PLANE - LOW) * WORDS + word)
        words = tl.load(high_words + at, mask=(is_wanted & (place >= 0))[:, None], other=0).to(tl.int32)
    else:
        words = tl.zeros([T, WORDS], tl.int32)
    return words


@triton.jit
def _load_four(
    low_buf,
    high_buf,
    place,
    is_wanted,
    FIRST: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    BYTES: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Bits FIRST to FIRST + 3 of the codes of tiles, int32 [BYTES, T, words, 8]."""
    WORDS: tl.constexpr = G // 8 // BYTES
    low, high = as_words(low_buf, BYTES), as_words(high_buf, BYTES)
    words = words_of(
        _load_plane(low, high, place, is_wanted, FIRST, T, WORDS, LOW, HIGH),
        _load_plane(low, high, place, is_wanted, FIRST + 1, T, WORDS, LOW, HIGH),
        _load_plane(low, high, place, is_wanted, FIRST + 2, T, WORDS, LOW, HIGH),
        _load_plane(low, high, place, is_wanted, FIRST + 3, T, WORDS, LOW, HIGH),
        BYTES,
        T,
        WORDS,
    )
    return unpack_codes(words)


@triton.jit
def _load_codes(
    low_buf,
    high_buf,
    place,
    is_wanted,
    T: tl.constexpr,
    G: tl.constexpr,
    BYTES: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Codes fp32 [BYTES, T, words, 8] of the tiles `is_wanted` [T], 0 of others; see `triton_encode._store_words`."""
    codes = _load_four(low_buf, high_buf, place, is_wanted, 0, T, G, BYTES, LOW, HIGH)
    if HIGH > 4:
        codes |= _load_four(low_buf, high_buf, place, is_wanted, 4, T, G, BYTES, LOW, HIGH) << 4
    return as_floats(codes)


@triton.jit
def _pivots(buf, tiles, num_tiles, WIDTH: tl.constexpr):
    """Pivots of tiles: WIDTH bits each, which lie in two bytes at most."""
    bit = tiles.to(tl.int64) * WIDTH
    last_byte = (num_tiles.to(tl.int64) * WIDTH - 1) // 8
    low = tl.load(buf + bit // 8).to(tl.int32)
    high = tl.load(buf + bit // 8 + 1, mask=bit // 8 < last_byte, other=0).to(tl.int32)
    return ((low | (high << 8)) >> (bit % 8).to(tl.int32)) & ((1 << WIDTH) - 1)


@triton.jit
def _store(pointers, y, is_real, after, is_safe):
    """Store values times `after`; where that is 1 (`is_safe`), no value is too large for bf16 or fp32."""
    if is_safe and pointers.dtype.element_ty != tl.float16:
        tl.store(pointers, y.to(pointers.dtype.element_ty), mask=is_real)
    else:
        store_values(pointers, y * after, is_real)


@triton.jit(do_not_specialize=["num_samples", "num_tiles", "tiles_per_alloc", "channels", "tiles_per_token"])
def values_kernel(
    buf,
    work,
    x,
    sample_slots,
    num_samples,
    num_tiles,
    tiles_per_alloc,
    channels,
    tiles_per_token,
    scale_at,
    zero_point_at,
    pivot_at,
    low_planes_at,
    high_planes_at,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    BYTES: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    IS_SINGLE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Values of all tiles, and the rest of the verdict.

    Except in very large and very small tensors, steps and zero-points are multiplied by the power of two, not values:
    that rounds nothing, and no value is too large for fp32 and bf16.
    """
    exponent = tl.load(buf + 5).to(tl.int8, bitcast=True).to(tl.int32)
    is_safe = tl.abs(exponent) <= _SAFE_EXPONENT
    before = power_of_two(tl.where(is_safe, -exponent, 0))
    after = power_of_two(tl.where(is_safe, 0, -exponent))
    tile = tl.arange(0, TILES)
    places = work + sample_slots
    verdict = tl.zeros([TILES], tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(num_tiles, TILES), tl.num_programs(0)):
        tiles = block * TILES + tile
        is_tile = tiles < num_tiles
        if IS_SINGLE:
            place = tl.load(places + tiles, mask=is_tile, other=-1)
        else:
            alloc = tiles // tiles_per_alloc
            place = tl.load(places + alloc, mask=is_tile, other=-1)
            place = tl.where(place >= 0, place * tiles_per_alloc + (tiles - alloc * tiles_per_alloc), -1)
        scale = tl.load(as_halves(buf + scale_at) + tiles, mask=is_tile, other=0).to(tl.int32) & 0xFFFF
        zero_point = tl.load(as_halves(buf + zero_point_at) + tiles, mask=is_tile, other=0).to(tl.int32) & 0xFFFF
        verdict |= _tile_verdict(scale, zero_point, is_tile)
        verdict |= tl.load(work + 1 + tiles, mask=tiles < num_samples, other=0)
        low_buf = buf + low_planes_at + tl.cast(block, tl.int64) * (TILES * LOW * G // 8)
        is_transformed = scale > 0x7FFF
        is_plain = is_tile & (scale <= 0x7FFF)
        codes = _load_codes(low_buf, buf + high_planes_at, place, is_plain, TILES, G, BYTES, LOW, HIGH)
        step, start = from_half(scale & 0x7FFF) * before, from_half(zero_point) * before
        y = tl.fma(codes, over_block(step), over_block(start))
        pointers, is_real = locate_words(x, block, num_tiles, channels, tiles_per_token, TILES, G, BYTES, PADDED)
        rows = tl.broadcast_to(is_plain.to(tl.int32)[None, :, None], [BYTES, TILES, G // 8 // BYTES])
        is_real &= (tl.reshape(rows, [BYTES * TILES * (G // 8 // BYTES)]) > 0)[:, None]
        _store(pointers, tl.reshape(y, pointers.shape), is_real, after, is_safe)
        waiting = tl.where(is_transformed, tile, TILES)
        first = tl.min(waiting, axis=0)
        while first < TILES:
            is_own = tile == first
            own_y = decode_tile(
                only(scale, is_own),
                only(zero_point, is_own),
                only(place, is_own),
                _pivots(buf + pivot_at, block * TILES + first + tl.arange(0, 1), num_tiles, WIDTH),
                before,
                low_buf + first * (LOW * G // 8),
                buf + high_planes_at,
                G,
                LOW,
                HIGH,
            )
            own, is_there = locate_tiles(x, block * TILES + first, num_tiles, channels, tiles_per_token, 1, G, PADDED)
            _store(own, own_y, is_there, after, is_safe)
            waiting = tl.where(is_own, TILES, waiting)
            first = tl.min(waiting, axis=0)
    store_verdict(work, verdict)


@lru_cache(maxsize=256)
def plan(layout: TahLayout) -> launch.LaunchPlan:
    """The launches for a layout."""
    tiling, spec, group = layout.tiling, layout.spec, layout.tiling.group
    tile_slots, sample_slots = launch.slots(tiling.num_tiles), launch.slots(1 + tiling.num_samples)
    num_measured = min(-(-tiling.num_tiles * group // MEASURED_ELEMENTS), selection.MAX_MEASURED)
    select, num_tallies, num_counts = selection.launches(layout, tile_slots, num_measured)
    counts_at = selection.WORDS_BEFORE_TILES + 4 * tile_slots + 2 * launch.slots(layout.num_allocs) + num_tallies
    starts = tuple(section.start for section in layout.sections.by_name.values())
    shape = (tiling.channels, tiling.tiles_per_token)
    # a word of a plane has four bytes, or all that a tile has
    common = {"G": group, "BYTES": min(4, group // 8), "PADDED": tiling.padding > 0}
    measuring = common | {
        "TILES": MEASURED_ELEMENTS // group,
        "ENTROPY": spec.adaptive == "on",
        "num_warps": MEASURING_WARPS,
        "num_stages": 1,
    }
    # Two magnitudes of at least this share of a tile's largest prove that it has no outlier.
    most_second = (1 + 2.0**-20) / spec.tau if spec.tau >= 1 else 2.0
    measured = (tiling.num_tiles, *shape, most_second, counts_at, num_counts)
    planes = {"WIDTH": tiling.log2_group, "LOW": spec.low, "HIGH": spec.high}
    tiles_per_block = launch.tiles_per_block(group, ENCODED_PER_WARP)
    coding_grid = (min(-(-tiling.num_tiles // tiles_per_block), launch.MAX_CODING_PROGRAMS), 1, 1)
    coding = (
        common
        | planes
        | {
            "TILES": tiles_per_block,
            "IS_SINGLE": layout.tiles_per_alloc == 1,
            "num_warps": launch.warps_per_block(group, ENCODED_PER_WARP),
            **launch.EXACT,
        }
    )
    tau = spec.tau if spec.tau <= torch.finfo(torch.float32).max else math.inf
    sizes = (tiling.num_tiles, tile_slots, layout.num_allocs, layout.num_high, layout.tiles_per_alloc)
    registers = {"maxnreg": MOST_REGISTERS} if spec.high <= 4 else {}
    placing_grid = (-(-layout.allocs_per_sample // ALLOCS_PER_PROGRAM), tiling.num_samples, 1)
    counts = (tiling.num_tiles, layout.num_allocs, layout.num_high, layout.allocs_per_sample, layout.num_low)
    placing = {"G": group, "num_warps": 4, "num_stages": 1} | planes
    read = (sample_slots, tiling.num_samples, tiling.num_tiles, layout.tiles_per_alloc, *shape, *starts[1:])
    return launch.LaunchPlan(
        encode_words=counts_at + num_counts,
        encode=(
            ("x work", Launch(encoding.measure_kernel, (num_measured, 1, 1), measured, measuring)),
            *(("work", kernel) for kernel in select),
            (
                "x work buf",
                Launch(encoding.quantize_kernel, coding_grid, (*sizes, *shape, tau, *starts), coding | registers),
            ),
        ),
        decode_words=sample_slots + layout.num_allocs,
        decode=(
            ("buf work", Launch(place_kernel, placing_grid, (sample_slots, *counts, *starts), placing)),
            ("buf work x", Launch(values_kernel, coding_grid, read, coding)),
        ),
    )


encode, decode = launch.backend(plan)
