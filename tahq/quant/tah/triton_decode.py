"""`tah` on CUDA, the two kernels of a decoder. Neither trusts the stream.

The first counts the bits of the bit map, so that every allocation tile knows its place among those with H
bits, and looks at what is outside of the tiles. The second turns tiles into values. What they find wrong they
leave in `work`, whose first word is the verdict. Whatever the buffer holds, no byte outside it is read: places beyond
the number of H-bit tiles are taken for L bits, and nothing else in a stream is an address.

`work` holds the verdict, a word a sample that is not 0 where its bit map is wrong, and the places.
"""

import triton
import triton.language as tl

from tahq.quant.gpu.tiles import (
    DAMAGED,
    MARKED,
    any_of,
    as_halves,
    exchange,
    from_eights,
    hadamard,
    header_verdict,
    is_gap_dirty,
    is_left_over,
    locate_eights,
    place_planes,
    plane_words,
    power_of_two,
    store_values,
    store_verdict,
    to_eights,
    unpack_bits,
)
from tahq.quant.tah.reference import TOP_EXPONENT

ALLOCS_PER_PROGRAM = 2048
_DAMAGED, _MARKED = tl.constexpr(DAMAGED), tl.constexpr(MARKED)
_ALLOCS = tl.constexpr(ALLOCS_PER_PROGRAM)
_BYTES = tl.constexpr(4096)
_MIN_EXPONENT = tl.constexpr(TOP_EXPONENT - 127)


@triton.jit
def _count_ones(bit_map, skipped, count):
    """How many of `count` bits behind the first `skipped` ones (0 to 7) are set."""
    ones = tl.zeros([_BYTES], tl.int32)
    stop = skipped + count
    for first in range(0, (stop + 7) // 8, _BYTES):
        byte = first + tl.arange(0, _BYTES)
        bits = tl.load(bit_map + byte, mask=byte < (stop + 7) // 8, other=0).to(tl.int32)
        leading = tl.minimum(tl.maximum(skipped - 8 * byte, 0), 8)
        trailing = tl.minimum(tl.maximum(stop - 8 * byte, 0), 8)
        bits &= ((1 << trailing) - 1) & ~((1 << leading) - 1)
        bits -= (bits >> 1) & 0x55
        bits = (bits & 0x33) + ((bits >> 2) & 0x33)
        ones += (bits + (bits >> 4)) & 0x0F
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
    counted = _count_ones(buf + bit_map_at + sample_first // 8, (sample_first % 8).to(tl.int32), first)
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
def _load_planes(
    low_buf,
    high_buf,
    high_place,
    num_left,
    TILES: tl.constexpr,
    G: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Codes fp32 [8, G/8, TILES]; the arguments are those of the encoder's `_store_planes`."""
    NUM_PLANES: tl.constexpr = 4 if HIGH <= 4 else 8
    plane, tile, within = place_planes(0, NUM_PLANES, TILES, G)
    is_low_plane = (tile < num_left) & (plane < LOW)
    planes = tl.load(low_buf + (tile * (LOW * G // 8) + within), mask=is_low_plane, other=0)
    if HIGH > LOW:
        _, _, within = place_planes(LOW, NUM_PLANES, TILES, G)
        place = high_place.to(tl.int64)[None, :, None] * ((HIGH - LOW) * G // 8)
        is_high_plane = (high_place >= 0)[None, :, None] & (plane >= LOW) & (plane < HIGH)
        planes |= tl.load(high_buf + (place + within), mask=is_high_plane, other=0)
    codes = unpack_bits(plane_words(planes, 0, NUM_PLANES))
    if HIGH > 4:
        codes |= unpack_bits(plane_words(planes, 4, NUM_PLANES)) << 4
    return codes.to(tl.float32)


@triton.jit
def _pivots(buf, tiles, is_tile, num_tiles, WIDTH: tl.constexpr):
    """Pivots [TILES]: WIDTH bits each, which lie in two bytes at most."""
    bit = tiles.to(tl.int64) * WIDTH
    last_byte = (num_tiles.to(tl.int64) * WIDTH - 1) // 8
    low = tl.load(buf + bit // 8, mask=is_tile, other=0).to(tl.int32)
    high = tl.load(buf + bit // 8 + 1, mask=is_tile & (bit // 8 < last_byte), other=0).to(tl.int32)
    return ((low | (high << 8)) >> (bit % 8).to(tl.int32)) & ((1 << WIDTH) - 1)


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
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    IS_SINGLE: tl.constexpr,
    PADDED: tl.constexpr,
    NORM: tl.constexpr,
):
    """Values of all tiles, and the rest of the verdict."""
    exponent = tl.load(buf + 5).to(tl.int8, bitcast=True).to(tl.int32)
    factor = power_of_two(-exponent)
    places = work + sample_slots
    verdict = tl.zeros([TILES], tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(num_tiles, TILES), tl.num_programs(0)):
        tiles = block * TILES + tl.arange(0, TILES)
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
        num_left = num_tiles - block * TILES
        codes = _load_planes(low_buf, buf + high_planes_at, place, num_left, TILES, G, LOW, HIGH)
        step = (scale & 0x7FFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        start = zero_point.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        y = codes * step[None, None, :] + start[None, None, :]
        is_transformed = scale > 0x7FFF
        if any_of(is_transformed):
            pivot = _pivots(buf + pivot_at, tiles, is_tile, num_tiles, WIDTH)
            back = exchange(hadamard(from_eights(y, TILES, G), NORM, TILES, G, WIDTH), pivot, G)
            y = tl.where(is_transformed[None, None, :], to_eights(back, TILES, G), y)
        pointers, is_real = locate_eights(x, block, num_tiles, channels, tiles_per_token, TILES, G, PADDED)
        store_values(pointers, y * factor, is_real)
    store_verdict(work, verdict)
