"""`tah` on CUDA, an encoder's first and last kernel: one measures tiles, the other writes the whole stream.

Most tiles have no outlier, and no quotient near the middle of two codes. A block's tiles of that kind are coded
together, a thread having whole words of planes for itself, by one fused multiply-add per channel; the others one after
the other, exactly (`tah.triton_tile`). Which path a tile takes changes no bit of the stream.

Shape letters: T tiles of a block, G channels per tile. Of a block [BYTES, T, words, 8], see `gpu.words.locate_words`.
"""

import triton
import triton.language as tl

from tahq.quant.gpu.tiles import (
    INFINITY,
    ROUNDING,
    any_of,
    as_halves,
    fill_gap,
    from_half,
    locate_tiles,
    log2,
    only,
    power_of_two,
    store_header,
    store_measured,
)
from tahq.quant.gpu.words import (
    approximate_inverse,
    as_words,
    halves,
    locate_words,
    over_block,
    pack_codes,
    planes_of,
    range_of,
    sum_of,
    weights,
)
from tahq.quant.tah.triton_select import NOT_FINITE, load_exponent, locate_measured, places_in
from tahq.quant.tah.triton_tile import encode_tile, scale_and_zero_point

_LN_2 = tl.constexpr(0.6931471805599453)
_LARGE = tl.constexpr(127 + 64)
_TINY = tl.constexpr(1e-37)


@triton.jit
def _entropy(magnitude, exponent):
    """Entropy [TILES] of tiles, in nats, and ‖α‖₁, negative where it stands for 2^64 times its magnitude.

    Of magnitudes in units of 2^(exponent − 127), the largest of a tile being from 1 to 2, so that no logarithm that
    counts is far from 0. With m = Σ|α|, entropy is log m − Σ|α| log|α| / m. ϵ is left to the selection.
    """
    mass = sum_of(magnitude)
    spread = sum_of(magnitude * log2(magnitude + _TINY))
    known = tl.maximum(mass, _TINY)
    entropy = _LN_2 * (log2(known) - spread / known)
    is_large = exponent >= _LARGE
    mass *= power_of_two(tl.minimum(tl.where(is_large, exponent - _LARGE, exponent - 127), 127))
    return tl.maximum(entropy, 0.0), tl.where(is_large, -mass, mass)


@triton.jit(do_not_specialize=["num_tiles", "channels", "tiles_per_token", "most_second", "num_counts"])
def measure_kernel(
    x,
    work,
    num_tiles,
    channels,
    tiles_per_token,
    most_second,
    counts_at,
    num_counts,
    G: tl.constexpr,
    BYTES: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Four numbers per tile, see `triton_select.locate_measured`; largest magnitude of every program; no counts yet.

    A tile has no outlier if two of its magnitudes are at least `most_second` of the largest: a little more than 1/τ,
    and 2 where τ < 1, so that every tile is looked at. The sign of its entropy says that it may have one.
    """
    largest_seen = tl.zeros([TILES], tl.int32)
    largest_finite = tl.zeros([TILES], tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(num_tiles, TILES), tl.num_programs(0)):
        tiles = block * TILES + tl.arange(0, TILES)
        is_tile = tiles < num_tiles
        pointers, is_real = locate_words(x, block, num_tiles, channels, tiles_per_token, TILES, G, BYTES, PADDED)
        rows = tl.load(pointers, mask=is_real, other=0.0)
        values = tl.reshape(rows.to(tl.float32), [BYTES, TILES, G // 8 // BYTES, 8])
        lowest, highest, largest = range_of(values)
        is_finite = largest < INFINITY
        largest_seen = tl.maximum(largest_seen, largest)
        largest_finite = tl.maximum(largest_finite, tl.where(is_finite, largest, 0))
        exponent = largest >> 23
        unit = power_of_two(tl.maximum(127 - exponent, -127))
        magnitude = tl.abs(values) * over_block(unit)
        border = largest.to(tl.float32, bitcast=True) * unit * most_second
        below = (magnitude - over_block(border)).to(tl.int32, bitcast=True)
        is_plain = sum_of((below >> 31) & 1) <= G - 2
        entropy, mass = tl.zeros([TILES], tl.float32), tl.zeros([TILES], tl.float32)
        if ENTROPY:
            entropy, mass = _entropy(magnitude, exponent)
            mass = tl.where(is_finite, mass, 0.0)
        negated = (entropy.to(tl.int32, bitcast=True) | -0x80000000).to(tl.float32, bitcast=True)  # of 0, too
        entropy = tl.where(is_finite, tl.where(is_plain, entropy, negated), NOT_FINITE)
        measured = tl.reshape(tl.join(tl.join(entropy, lowest), tl.join(mass, highest)), [TILES, 4])
        tl.store(locate_measured(work, tiles), measured, mask=is_tile[:, None])
    store_measured(work, largest_seen, largest_finite)
    for start in range(tl.program_id(0) * 1024, num_counts, tl.num_programs(0) * 1024):
        count = start + tl.arange(0, 1024)
        tl.store(work + counts_at + count, tl.zeros([1024], tl.int32), mask=count < num_counts)


_MOST_EXPONENT = tl.constexpr(90)
"""The largest |e| of tensors for the fast path: the product of 2^e and 1/s stays finite."""


@triton.jit
def _of_tiles(numbers):
    """[T] as [1, T, 1, 1]; the reverse of how `_codes` reduces a block, which keeps numbers of tiles in one layout."""
    return numbers[:, None][:, :, None][None, :, :, :]


@triton.jit
def _codes(values, smallest, largest, scale, zero_point, levels, factor, HIGH: tl.constexpr):
    """round((x·2^e − z)/s)·weight, fp32 [BYTES, T, words, 8], and which tiles [T] are not to be trusted.

    One fused multiply-add of x, weighted, rounded where the weight's last bit is. For a zero-point below 2^H steps,
    the product errs from the quotient, as correctly rounded division gives it, by less than NEAR: 2^-21 of |x·2^e/s|,
    which is below 2·2^H, and of |z/s|, and 2^-24 of either for every rounding. A tile is not trusted where the product
    lies that close to the middle of two codes, where a code would have to be clamped, or where |z/s| is larger.
    """
    FAR: tl.constexpr = 2.0**HIGH
    NEAR: tl.constexpr = 2.0 ** (HIGH - 19)
    inverse = tl.where(scale == 0, 0.0, approximate_inverse(scale))
    shift = zero_point * inverse
    weight = weights()[None, None, None, :]
    slope, start = _of_tiles(factor * inverse) * weight, _of_tiles(-shift) * weight
    quotient = tl.fma(values, slope, start)
    rounding = weight * ROUNDING
    codes = (quotient + rounding) - rounding
    distance = quotient - codes
    farthest = tl.max(tl.max(tl.max(tl.abs(distance), axis=0) * (1.0 / weights())[None, None, :], axis=2), axis=1)
    is_clamped = ((smallest - zero_point) * inverse < -0.25) | ((largest - zero_point) * inverse > levels + 0.25)
    return codes, is_clamped | (farthest > 0.5 - NEAR) | (tl.abs(shift) > FAR)


@triton.jit
def _store_words(
    low_buf,
    high_buf,
    codes,
    place,
    is_low,
    T: tl.constexpr,
    G: tl.constexpr,
    BYTES: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Planes of weighted codes [BYTES, T, words, 8] of the tiles `is_low`: L, and the others of those with a place."""
    WORDS: tl.constexpr = G // 8 // BYTES
    low_words, high_words = as_words(low_buf, BYTES), as_words(high_buf, BYTES)
    word = tl.arange(0, WORDS)[None, :]
    low_at = tl.arange(0, T)[:, None] * (LOW * WORDS) + word
    high_at = place.to(tl.int64)[:, None] * ((HIGH - LOW) * WORDS) + word
    is_high = (is_low & (place >= 0))[:, None]
    for half in tl.static_range((HIGH + 3) // 4):
        codes_of_half = halves(codes)[half] if HIGH > 4 else codes
        planes = planes_of(pack_codes(codes_of_half, BYTES, T, WORDS), BYTES, T, WORDS)
        for number in tl.static_range(4):
            bits = planes[number].to(low_words.dtype.element_ty)
            if 4 * half + number < LOW:
                tl.store(low_words + (low_at + (4 * half + number) * WORDS), bits, mask=is_low[:, None])
            elif 4 * half + number < HIGH:
                tl.store(high_words + (high_at + (4 * half + number - LOW) * WORDS), bits, mask=is_high)


@triton.jit
def _store_bit_map(buf, place, block, num_allocs, TILES: tl.constexpr):
    """The block's bytes of the bit map: of as many allocation tiles as the block has tiles."""
    bits = tl.reshape((place >= 0).to(tl.int32), [TILES // 8, 8]) << tl.arange(0, 8)[None, :]
    byte = block * (TILES // 8) + tl.arange(0, TILES // 8)
    tl.store(buf + byte, tl.sum(bits, axis=1).to(tl.uint8), mask=byte < (num_allocs + 7) // 8)


@triton.jit
def _store_pivots(buf, eights, block, num_tiles, TILES: tl.constexpr, WIDTH: tl.constexpr):
    """Eight pivots of WIDTH bits are WIDTH bytes."""
    part = tl.arange(0, 8)[None, :]
    place = tl.arange(0, TILES // 8)[:, None] * WIDTH + part
    own = tl.cast(block, tl.int64) * (TILES // 8 * WIDTH)
    is_real = (part < WIDTH) & (place < (num_tiles.to(tl.int64) * WIDTH + 7) // 8 - own)
    tl.store(buf + own + place, (eights[:, None] >> (8 * part)).to(tl.uint8), mask=is_real)


@triton.jit(
    do_not_specialize=["num_tiles", "num_allocs", "num_high", "tiles_per_alloc", "channels", "tiles_per_token", "tau"]
)
def quantize_kernel(
    x,
    work,
    buf,
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
    BYTES: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    IS_SINGLE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Every byte of `buf`. WIDTH is log2 G."""
    exponent, is_flagged = load_exponent(work)
    factor, is_extreme = power_of_two(exponent), tl.abs(exponent) > _MOST_EXPONENT
    places = places_in(work, tile_slots)
    tile = tl.arange(0, TILES)
    for block in range(tl.program_id(0), tl.cdiv(num_tiles, TILES), tl.num_programs(0)):
        tiles = block * TILES + tile
        is_tile = tiles < num_tiles
        pointers, is_real = locate_words(x, block, num_tiles, channels, tiles_per_token, TILES, G, BYTES, PADDED)
        rows = tl.load(pointers, mask=is_real, other=0.0)
        values = tl.reshape(rows.to(tl.float32), [BYTES, TILES, G // 8 // BYTES, 8])
        place_of_alloc = tl.load(places + tiles, mask=tiles < num_allocs, other=-1)
        place = place_of_alloc
        if not IS_SINGLE:
            alloc = tiles // tiles_per_alloc
            place = tl.load(places + alloc, mask=is_tile, other=-1)
            place = tl.where(place >= 0, place * tiles_per_alloc + (tiles - alloc * tiles_per_alloc), -1)
        measured = tl.load(locate_measured(work, tiles), mask=is_tile[:, None], other=0.0)
        entropies_and_lowest, masses_and_highest = tl.split(tl.reshape(measured, [TILES, 2, 2]))
        entropy, lowest = tl.split(entropies_and_lowest)
        _, highest = tl.split(masses_and_highest)
        smallest, largest = lowest * factor, highest * factor
        levels = tl.where(place >= 0, (1 << HIGH) - 1.0, (1 << LOW) - 1.0)
        scale, zero_point = scale_and_zero_point(smallest, largest, place >= 0, LOW, HIGH)
        codes, is_awkward = _codes(
            values, smallest, largest, from_half(scale), from_half(zero_point), levels, factor, HIGH
        )
        is_awkward |= (entropy.to(tl.int32, bitcast=True) < 0) | is_extreme
        if PADDED:
            is_awkward |= (tiles % tiles_per_token + 1) * G > channels
        waiting = tl.where(is_tile & is_awkward, tile, TILES)
        pivots = tl.zeros([TILES], tl.int32)
        low_buf = buf + low_planes_at + tl.cast(block, tl.int64) * (TILES * LOW * G // 8)
        high_buf = buf + high_planes_at
        _store_words(low_buf, high_buf, codes, place, is_tile & (waiting == TILES), TILES, G, BYTES, LOW, HIGH)
        first = tl.min(waiting, axis=0)
        while first < TILES:
            is_own = tile == first
            own, is_shown = locate_tiles(x, block * TILES + first, num_tiles, channels, tiles_per_token, 1, G, PADDED)
            y = tl.load(own, mask=is_shown, other=0.0).to(tl.float32) * factor
            own_scale, own_zero_point, own_pivot = encode_tile(
                y,
                ~is_shown,
                only((entropy == NOT_FINITE).to(tl.int32), is_own) == 0,
                only(place, is_own),
                tau,
                low_buf + first * (LOW * G // 8),
                high_buf,
                G,
                LOW,
                HIGH,
                PADDED,
            )
            scale = tl.where(is_own, own_scale, scale)
            zero_point = tl.where(is_own, own_zero_point, zero_point)
            pivots = tl.where(is_own, own_pivot, pivots)
            waiting = tl.where(is_own, TILES, waiting)
            first = tl.min(waiting, axis=0)
        eights = tl.zeros([TILES // 8], tl.int64)
        if any_of(pivots):
            by_eights = tl.reshape(pivots.to(tl.int64), [TILES // 8, 8])
            eights = tl.sum(by_eights << (WIDTH * tl.arange(0, 8))[None, :], axis=1)
        if block * TILES < num_allocs:
            _store_bit_map(buf + bit_map_at, place_of_alloc, block, num_allocs, TILES)
        _store_pivots(buf + pivot_at, eights, block, num_tiles, TILES, WIDTH)
        tl.store(as_halves(buf + scale_at) + tiles, scale.to(tl.int16), mask=is_tile)
        tl.store(as_halves(buf + zero_point_at) + tiles, zero_point.to(tl.int16), mask=is_tile)
    if tl.program_id(0) == 0:
        store_header(buf, exponent, is_flagged, WIDTH, LOW, HIGH, 5)
        count = num_tiles.to(tl.int64)
        fill_gap(buf, bit_map_at + (num_allocs + 7) // 8)
        fill_gap(buf, scale_at + 2 * count)
        fill_gap(buf, zero_point_at + 2 * count)
        fill_gap(buf, pivot_at + (count * WIDTH + 7) // 8)
        fill_gap(buf, low_planes_at + count * (LOW * G // 8))
        fill_gap(buf, high_planes_at + num_high.to(tl.int64) * ((HIGH - LOW) * G // 8))
