"""`tah` on CUDA, the two kernels of an encoder that read the tensor; `tah.triton_select` runs between them.

Measuring reads every tile once, before the tensor's exponent is known: largest magnitude, entropy, ‖α‖₁. It
marks a tile that is not finite with an entropy of −1.
Quantising reads it again and writes all of the stream. Its programs are of one warp: a warp whose tiles
have no outlier skips the transform, and one with no quotient near the middle of two codes the exact division.

Shape letters: T tiles of a block, G channels a tile.
"""

import triton
import triton.language as tl

from tahq.quant.gpu.tiles import (
    INFINITY,
    ROUNDING,
    ROUNDING_BITS,
    any_of,
    as_halves,
    exchange,
    fill_gap,
    from_half,
    hadamard,
    locate_tiles,
    log2,
    magnitude_bits,
    pack_bits,
    place_planes,
    plane_bytes,
    power_of_two,
    store_header,
    store_measured,
    tensor_exponent,
)
from tahq.quant.tah.reference import TOP_EXPONENT
from tahq.quant.tah.triton_select import entropies_in, places_in

_TOP = tl.constexpr(TOP_EXPONENT)
_EPSILON = tl.constexpr(1e-12)
_LN_2 = tl.constexpr(0.6931471805599453)
_SMALL = tl.constexpr((127 - 64) << 23)
_LARGE = tl.constexpr((127 + 64) << 23)
_DOWN = tl.constexpr(2.0**-64)
_UP = tl.constexpr(2.0**64)


@triton.jit
def _entropy(values, largest):
    """Entropy [T] of tiles, in nats, and ‖α‖₁, negative where it stands for 2^64 times its magnitude.

    Sums of very large or very small magnitudes are taken of 2^±64 times them. ϵ is left to the selection.
    """
    is_small, is_large = largest < _SMALL, largest >= _LARGE
    magnitude = tl.abs(values)
    if any_of(is_small | is_large):
        magnitude *= tl.where(is_large, _DOWN, tl.where(is_small, _UP, 1.0))[:, None]
    mass = tl.sum(magnitude, axis=1)
    share = magnitude * tl.where(mass > 0, 1.0 / mass, 0.0)[:, None]
    entropy = -_LN_2 * tl.sum(share * log2(tl.maximum(share, 1e-37)), axis=1)
    return entropy, tl.where(is_large, -mass, tl.where(is_small, mass * _DOWN, mass))


@triton.jit(do_not_specialize=["num_tiles", "channels", "tiles_per_token", "num_counts"])
def measure_kernel(
    x,
    work,
    num_tiles,
    tile_slots,
    channels,
    tiles_per_token,
    counts_at,
    num_counts,
    G: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Entropy and mass of every tile, largest magnitude of every program; clears the selection's counts."""
    largest_seen = tl.zeros([TILES], tl.int32)
    largest_finite = tl.zeros([TILES], tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(num_tiles, TILES), tl.num_programs(0)):
        tiles = block * TILES + tl.arange(0, TILES)
        pointers, is_real = locate_tiles(x, block, num_tiles, channels, tiles_per_token, TILES, G, PADDED)
        values = tl.load(pointers, mask=is_real, other=0.0).to(tl.float32)
        largest = tl.max(magnitude_bits(values), axis=1)
        is_finite = largest < INFINITY
        largest_seen = tl.maximum(largest_seen, largest)
        largest_finite = tl.maximum(largest_finite, tl.where(is_finite, largest, 0))
        entropy = tl.zeros([TILES], tl.float32)
        entropies = entropies_in(work) + tiles
        if ENTROPY:
            entropy, mass = _entropy(values, largest)
            tl.store(entropies + tile_slots, tl.where(is_finite, mass, 0.0), mask=tiles < num_tiles)
        tl.store(entropies, tl.where(is_finite, tl.maximum(entropy, 0.0), -1.0), mask=tiles < num_tiles)
    store_measured(work, largest_seen, largest_finite)
    for start in range(tl.program_id(0) * 1024, num_counts, tl.num_programs(0) * 1024):
        count = start + tl.arange(0, 1024)
        tl.store(work + counts_at + count, tl.zeros([1024], tl.int32), mask=count < num_counts)


@triton.jit
def _range(y, is_hidden, PADDED: tl.constexpr):
    """Minimum and maximum [T] of tiles [T, G], without the hidden channels."""
    if PADDED:
        smallest = tl.min(tl.where(is_hidden, float("inf"), y), axis=1)
        return smallest, tl.max(tl.where(is_hidden, float("-inf"), y), axis=1)
    return tl.min(y, axis=1), tl.max(y, axis=1)


@triton.jit
def _transform(
    y, largest, next_largest, is_finite, tau, NORM: tl.constexpr, T: tl.constexpr, G: tl.constexpr, WIDTH: tl.constexpr
):
    """Swap and transform the outliers among tiles [T, G]; `next_largest` is without those equal to the largest.

    Returns y, and of each tile whether it was transformed, and its pivot: the lowest channel of the largest.
    """
    channel = tl.arange(0, G)[None, :]
    is_largest = tl.abs(y) == largest[:, None]
    second = tl.where(tl.sum(is_largest.to(tl.int32), axis=1) == 1, next_largest, largest)
    is_transformed = is_finite & (tl.div_rn(largest, second + _EPSILON) > tau)
    pivot = tl.where(is_transformed, tl.min(tl.where(is_largest, channel, G), axis=1), 0)
    y = tl.where(is_transformed[:, None], hadamard(exchange(y, pivot, G), NORM, T, G, WIDTH), y)
    return y, is_transformed, pivot


@triton.jit
def _scale_and_zero_point(smallest, largest, levels):
    """fp16 bits [T], as int32, of (max − min)/(2^b − 1) and of the minimum; neither is ever −0."""
    scale = tl.div_rn(largest - smallest, levels).to(tl.float16).to(tl.int16, bitcast=True)
    zero_point = smallest.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return scale.to(tl.int32) & 0x7FFF, tl.where(zero_point == 0x8000, 0, zero_point)


@triton.jit
def _codes(y, smallest, largest, scale, zero_point, levels, NEAR: tl.constexpr):
    """clamp(round-half-even((y − z)/s), 0, 2^b − 1), int32 [T, G]; 0 where s = 0.

    Multiplying by 1/s errs by less than NEAR from the quotient, as correctly rounded division gives it: the
    rounded number can differ only where the product lies that close to the middle of two codes. Neither
    division nor clamping is done unless a tile of the block needs one.
    """
    inverse = tl.where(scale == 0, 0.0, 1.0 / scale)
    offset = y - zero_point[:, None]
    quotient = offset * inverse[:, None]
    rounded = quotient + ROUNDING
    farthest = tl.max(tl.abs(quotient - (rounded - ROUNDING)), axis=1)
    is_below = (smallest - zero_point) * inverse < -0.25
    is_above = (largest - zero_point) * inverse > levels + 0.25
    if any_of((farthest > 0.5 - NEAR) | is_below | is_above):
        divisor = tl.where(scale == 0, float("inf"), scale)
        quotient = tl.div_rn(offset, tl.broadcast_to(divisor[:, None], offset.shape))
        rounded = tl.minimum(tl.maximum(quotient, 0.0), levels[:, None]) + ROUNDING
    return rounded.to(tl.int32, bitcast=True) - ROUNDING_BITS


@triton.jit
def _store_bit_map(buf, place, block, num_allocs, TILES: tl.constexpr):
    """The block's bytes of the bit map: of as many allocation tiles as the block has tiles."""
    bits = tl.reshape((place >= 0).to(tl.int32), [TILES // 8, 8]) << tl.arange(0, 8)[None, :]
    byte = block * (TILES // 8) + tl.arange(0, TILES // 8)
    tl.store(buf + byte, tl.sum(bits, axis=1).to(tl.uint8), mask=byte < (num_allocs + 7) // 8)


@triton.jit
def _eights(pivot, TILES: tl.constexpr, WIDTH: tl.constexpr):
    """Pivots of WIDTH bits, eight in a word: int64 [TILES/8]."""
    return tl.sum(tl.reshape(pivot.to(tl.int64), [TILES // 8, 8]) << (WIDTH * tl.arange(0, 8))[None, :], axis=1)


@triton.jit
def _store_pivots(buf, eights, block, num_tiles, TILES: tl.constexpr, WIDTH: tl.constexpr):
    """Eight pivots of WIDTH bits are WIDTH bytes."""
    part = tl.arange(0, 8)[None, :]
    place = tl.arange(0, TILES // 8)[:, None] * WIDTH + part
    own = tl.cast(block, tl.int64) * (TILES // 8 * WIDTH)
    is_real = (part < WIDTH) & (place < (num_tiles.to(tl.int64) * WIDTH + 7) // 8 - own)
    tl.store(buf + own + place, (eights[:, None] >> (8 * part)).to(tl.uint8), mask=is_real)


@triton.jit
def _store_planes(
    low_buf,
    high_buf,
    codes,
    is_coded,
    high_place,
    num_left,
    TILES: tl.constexpr,
    G: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Planes of codes [T, G], zero where `is_coded` [T] is false, of the first `num_left` tiles.

    Args:
        low_buf: where the first tile's low planes go.
        high_buf: where the high planes of the first tile with H bits in the tensor go.
        codes: int32.
        is_coded: bool [T].
        high_place: of each tile [T] among those with H bits, negative for L bits.
        num_left: tiles.
    """
    NUM_PLANES: tl.constexpr = 4 if HIGH <= 4 else 8
    words = tl.where(is_coded[:, None], pack_bits(codes, 0, HIGH <= 4, TILES, G), 0)
    words_above = words
    if HIGH > 4:
        words_above = tl.where(is_coded[:, None], pack_bits(codes, 4, False, TILES, G), 0)
    planes = plane_bytes(words, words_above, NUM_PLANES)
    plane, tile, within = place_planes(0, NUM_PLANES, TILES, G)
    tl.store(low_buf + (tile * (LOW * G // 8) + within), planes, mask=(tile < num_left) & (plane < LOW))
    if HIGH > LOW:
        _, _, within = place_planes(LOW, NUM_PLANES, TILES, G)
        place = high_place.to(tl.int64)[None, :, None] * ((HIGH - LOW) * G // 8)
        is_high_plane = (high_place >= 0)[None, :, None] & (plane >= LOW) & (plane < HIGH)
        tl.store(high_buf + (place + within), planes, mask=is_high_plane)


@triton.jit
def _finish(
    buf,
    exponent,
    is_flagged,
    num_tiles,
    num_allocs,
    num_high,
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
    """The header, and zeros behind every section."""
    store_header(buf, exponent, is_flagged, WIDTH, LOW, HIGH, 5)
    count = num_tiles.to(tl.int64)
    fill_gap(buf, bit_map_at + (num_allocs + 7) // 8)
    fill_gap(buf, scale_at + 2 * count)
    fill_gap(buf, zero_point_at + 2 * count)
    fill_gap(buf, pivot_at + (count * WIDTH + 7) // 8)
    fill_gap(buf, low_planes_at + count * (LOW * G // 8))
    fill_gap(buf, high_planes_at + num_high.to(tl.int64) * ((HIGH - LOW) * G // 8))


@triton.jit(
    do_not_specialize=[
        "num_measured",
        "num_tiles",
        "num_allocs",
        "num_high",
        "tiles_per_alloc",
        "channels",
        "tiles_per_token",
        "tau",
    ]
)
def quantize_kernel(
    x,
    work,
    buf,
    num_measured,
    num_tiles,
    tile_slots,
    num_allocs,
    num_high,
    tiles_per_alloc,
    channels,
    tiles_per_token,
    tau,
    bit_map_at,
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
    """All of the stream, but for nothing: every byte of `buf` is written. WIDTH is log2 G, NORM 1/√G."""
    exponent, is_flagged = tensor_exponent(work, num_measured, _TOP)
    factor, almost_tau = power_of_two(exponent), tau * (1 - 2.0**-20)
    places, entropies = places_in(work, tile_slots), entropies_in(work)
    for block in range(tl.program_id(0), tl.cdiv(num_tiles, TILES), tl.num_programs(0)):
        tiles = block * TILES + tl.arange(0, TILES)
        is_tile = tiles < num_tiles
        pointers, is_real = locate_tiles(x, block, num_tiles, channels, tiles_per_token, TILES, G, PADDED)
        y = tl.load(pointers, mask=is_real, other=0.0).to(tl.float32) * factor
        place = tl.load(places + tiles, mask=tiles < num_allocs, other=-1)
        if block * TILES < num_allocs:
            _store_bit_map(buf + bit_map_at, place, block, num_allocs, TILES)
        if not IS_SINGLE:
            alloc = tiles // tiles_per_alloc
            place = tl.load(places + alloc, mask=is_tile, other=-1)
            place = tl.where(place >= 0, place * tiles_per_alloc + (tiles - alloc * tiles_per_alloc), -1)
        is_finite = tl.load(entropies + tiles, mask=is_tile, other=0.0) >= 0
        smallest, largest = _range(y, ~is_real, PADDED)
        magnitude, size = tl.maximum(largest, -smallest), tl.abs(y)
        next_largest = tl.max(tl.where(size == magnitude[:, None], 0.0, size), axis=1)
        is_transformed = is_finite & (magnitude > (next_largest + _EPSILON) * almost_tau)
        eights = tl.zeros([TILES // 8], tl.int64)
        if any_of(is_transformed):
            y, is_transformed, pivot = _transform(y, magnitude, next_largest, is_finite, tau, NORM, TILES, G, WIDTH)
            eights = _eights(pivot, TILES, WIDTH)
            smallest, largest = _range(y, ~is_real & ~is_transformed[:, None], PADDED)
        _store_pivots(buf + pivot_at, eights, block, num_tiles, TILES, WIDTH)
        levels = tl.where(place >= 0, (1 << HIGH) - 1.0, (1 << LOW) - 1.0)
        scale, zero_point = _scale_and_zero_point(smallest, largest, levels)
        codes = _codes(y, smallest, largest, from_half(scale), from_half(zero_point), levels, 2.0 ** (HIGH - 21))
        if PADDED:
            codes = tl.where(~is_real & ~is_transformed[:, None], 0, codes)
        scale = tl.where(is_finite, scale | (is_transformed.to(tl.int32) << 15), 0)
        zero_point = tl.where(is_finite, zero_point, 0x7E00)
        tl.store(as_halves(buf + scale_at) + tiles, scale.to(tl.int16), mask=is_tile)
        tl.store(as_halves(buf + zero_point_at) + tiles, zero_point.to(tl.int16), mask=is_tile)
        low_buf = buf + low_planes_at + tl.cast(block, tl.int64) * (TILES * LOW * G // 8)
        high_buf = buf + high_planes_at
        num_left = num_tiles - block * TILES
        _store_planes(low_buf, high_buf, codes, is_finite, place, num_left, TILES, G, LOW, HIGH)
    if tl.program_id(0) == 0:
        _finish(
            buf,
            exponent,
            is_flagged,
            num_tiles,
            num_allocs,
            num_high,
            bit_map_at,
            scale_at,
            zero_point_at,
            pivot_at,
            low_planes_at,
            high_planes_at,
            G,
            WIDTH,
            LOW,
            HIGH,
        )
