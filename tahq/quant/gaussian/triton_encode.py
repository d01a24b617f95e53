"""The kernels of an encoder of `eden` and `wf` on CUDA: means, energies and levels for the allocation; the stream.

Shape letters: T tiles of a block, G channels per tile.
"""

import triton
import triton.language as tl

from tahq.quant.gaussian.reference import CANDIDATES, SAME_LEVEL
from tahq.quant.gaussian.small_scale import DROPPED_BITS, LARGEST_CODE, NOT_FINITE
from tahq.quant.gaussian.triton_allocation import load_widths
from tahq.quant.gpu.levels import code_of_bits, nearest_code, quantize, scale_value, signed_codes, store_codes
from tahq.quant.gpu.tiles import (
    INFINITY,
    as_floats,
    as_halves,
    fill_gap,
    flip_signs,
    from_half,
    hadamard,
    hash_words,
    locate_tiles,
    magnitude_bits,
    power_of_two,
    store_header,
    store_measured,
    tensor_exponent,
)
from tahq.quant.tiling import TOP_EXPONENT

TOKENS_PER_PROGRAM = 8
"""Tokens per program of the kernel that turns energies into levels."""
_TOKENS = tl.constexpr(TOKENS_PER_PROGRAM)
_TILES_AT_ONCE = tl.constexpr(128)
_SUMS_AT_ONCE = tl.constexpr(4096)
_TOP, _SAME_LEVEL = tl.constexpr(TOP_EXPONENT), tl.constexpr(SAME_LEVEL)
_LARGEST_CODE, _NOT_FINITE = tl.constexpr(LARGEST_CODE), tl.constexpr(NOT_FINITE)
_DROPPED, _HALF = tl.constexpr(DROPPED_BITS), tl.constexpr(1 << (DROPPED_BITS - 1))
_NUM_CANDIDATES = tl.constexpr(len(CANDIDATES))
_LOWEST = tl.constexpr(-(1 << 20))
"""`eden`'s level of tiles that are not finite, below that of any other."""
_SCALES = tl.constexpr(-0x80000000)
"""Where the counters of the scales' draws begin, 2^31, as a signed number."""


@triton.jit
def _relative_levels(values, largest, G: tl.constexpr):
    """Levels [T] of tiles [T, G], less 8·e − OFFSET; `largest` has the bits of their largest magnitudes.

    Tiles are taken to magnitudes below 2 first: squares of others might not fit fp32.
    """
    exponent = (largest >> 23) - 127
    near_one = values * power_of_two(-exponent)[:, None]
    size = tl.sqrt_rn(tl.sum(near_one * near_one, axis=1) * (1.0 / G))
    return ((size.to(tl.int32, bitcast=True) + _HALF) >> _DROPPED) + 8 * exponent


@triton.jit(do_not_specialize=["num_tiles", "channels", "tiles_per_token"])
def measure_kernel(
    x, work, num_tiles, channels, tiles_per_token, levels_at, G: tl.constexpr, TILES: tl.constexpr, PADDED: tl.constexpr
):
    """`eden`: level of every tile, largest magnitude of every program."""
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
        level = tl.where(is_finite, _relative_levels(values, tl.where(is_finite, largest, 0), G), _LOWEST)
        tl.store(work + levels_at + tiles, level, mask=tiles < num_tiles)
    store_measured(work, largest_seen, largest_finite)


@triton.jit
def _as_doubles(pointer):
    """A pointer to words of 32 bits as one to fp64."""
    return pointer.to(tl.pointer_type(tl.float64), bitcast=True)


@triton.jit
def _load_column(x, token, stop, column, channels, tiles_per_token, G: tl.constexpr, PADDED: tl.constexpr):
    """fp32 [R, G] of a column's tiles for tokens [R] up to `stop`, and the bits of their largest magnitudes [R]."""
    channel = tl.arange(0, G)[None, :]
    if PADDED:
        pointers = x + (token.to(tl.int64) * channels + column * G)[:, None] + channel
        is_real = (token < stop)[:, None] & (column * G + channel < channels)
    else:
        pointers = x + ((token.to(tl.int64) * tiles_per_token + column) * G)[:, None] + channel
        is_real = (token < stop)[:, None] & (channel < G)
    values = tl.load(pointers, mask=is_real, other=0.0).to(tl.float32)
    return values, tl.max(magnitude_bits(values), axis=1)


@triton.jit(do_not_specialize=["num_tokens", "channels", "tiles_per_token", "num_parts", "tokens_per_part"])
def sum_kernel(
    x,
    work,
    num_tokens,
    channels,
    tiles_per_token,
    num_parts,
    tokens_per_part,
    sums_at,
    G: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    CENTER: tl.constexpr,
):
    """`wf`: sums of channels over parts of the tokens, fp64, without tiles that are not finite; largest magnitudes."""
    largest_seen = tl.zeros([TOKENS], tl.int32)
    largest_finite = tl.zeros([TOKENS], tl.int32)
    for item in range(tl.program_id(0), tiles_per_token * num_parts, tl.num_programs(0)):
        part = item // tiles_per_token
        column = item - part * tiles_per_token
        stop = tl.minimum((part + 1) * tokens_per_part, num_tokens)
        total = tl.zeros([TOKENS, G], tl.float64)
        for first in range(part * tokens_per_part, stop, TOKENS):
            token = first + tl.arange(0, TOKENS)
            values, largest = _load_column(x, token, stop, column, channels, tiles_per_token, G, PADDED)
            is_finite = largest < INFINITY
            largest_seen = tl.maximum(largest_seen, largest)
            largest_finite = tl.maximum(largest_finite, tl.where(is_finite, largest, 0))
            if CENTER:
                total += tl.where(is_finite[:, None], values, 0.0).to(tl.float64)
        if CENTER:
            own = _as_doubles(work + sums_at) + (part.to(tl.int64) * tiles_per_token + column) * G
            tl.store(own + tl.arange(0, G), tl.sum(total, axis=0))
    store_measured(work, largest_seen, largest_finite)


@triton.jit
def _half_means(sums, exponent, column, num_tokens, tiles_per_token, num_parts, G: tl.constexpr):
    """Means [G] of a column's channels times 2^e, as bits of fp16 (int32), never −0."""
    PARTS: tl.constexpr = _SUMS_AT_ONCE // G
    channel = tl.arange(0, G)[None, :]
    total = tl.zeros([G], tl.float64)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        own = sums + (part.to(tl.int64) * tiles_per_token + column) * G + channel
        total += tl.sum(tl.load(own, mask=(part < num_parts) & (channel < G), other=0.0), axis=0)
    mean = total * power_of_two(exponent).to(tl.float64) / num_tokens.to(tl.float64)
    bits = mean.to(tl.float32).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return tl.where(bits == 0x8000, 0, bits)


@triton.jit(
    do_not_specialize=["num_measured", "num_tokens", "channels", "tiles_per_token", "num_parts", "tokens_per_part"]
)
def energy_kernel(
    x,
    work,
    buf,
    num_measured,
    num_tokens,
    channels,
    tiles_per_token,
    num_parts,
    tokens_per_part,
    sums_at,
    energies_at,
    mean_at,
    G: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    CENTER: tl.constexpr,
):
    """`wf`: means, in the stream, and the mean square of every centered tile, −1 of one that is not finite."""
    exponent, _ = tensor_exponent(work, num_measured, _TOP)
    factor = power_of_two(exponent)
    for item in range(tl.program_id(0), tiles_per_token * num_parts, tl.num_programs(0)):
        part = item // tiles_per_token
        column = item - part * tiles_per_token
        stop = tl.minimum((part + 1) * tokens_per_part, num_tokens)
        mean = tl.zeros([G], tl.float32)
        if CENTER:
            sums = _as_doubles(work + sums_at)
            bits = _half_means(sums, exponent, column, num_tokens, tiles_per_token, num_parts, G)
            channel = column * G + tl.arange(0, G)
            if part == 0:
                tl.store(as_halves(buf + mean_at) + channel, bits.to(tl.int16), mask=channel < channels)
            mean = from_half(bits)
        for first in range(part * tokens_per_part, stop, TOKENS):
            token = first + tl.arange(0, TOKENS)
            values, largest = _load_column(x, token, stop, column, channels, tiles_per_token, G, PADDED)
            is_finite = largest < INFINITY
            y = tl.where(is_finite[:, None], values * factor - mean[None, :], 0.0)
            energy = tl.where(is_finite, tl.sum(y * y, axis=1) * (1.0 / G), -1.0)
            tl.store(as_floats(work + energies_at) + token * tiles_per_token + column, energy, mask=token < stop)


@triton.jit
def _own_energies(energies, token, first, num_tokens, tiles_per_token):
    """Energies [tokens, tiles] from tile `first` of each token on, where they are, and which there are."""
    tile = first + tl.arange(0, _TILES_AT_ONCE)[None, :]
    is_real = (token[:, None] < num_tokens) & (tile < tiles_per_token)
    place = token[:, None] * tiles_per_token + tile
    return tl.maximum(tl.load(energies + place, mask=is_real, other=0.0), 0.0), place, is_real


@triton.jit(do_not_specialize=["num_tokens", "tiles_per_token"])
def level_kernel(work, num_tokens, tiles_per_token, energies_at, levels_at):
    """`wf`: levels of tiles in their tokens: code(√E) − code(√F) + 255, F being the mean of the token's E."""
    energies = as_floats(work + energies_at)
    token = tl.program_id(0) * _TOKENS + tl.arange(0, _TOKENS)
    total = tl.zeros([_TOKENS, _TILES_AT_ONCE], tl.float32)
    for first in range(0, tiles_per_token, _TILES_AT_ONCE):
        energy, _, _ = _own_energies(energies, token, first, num_tokens, tiles_per_token)
        total += energy
    sums = tl.sum(total, axis=1)
    of_token = nearest_code(tl.sqrt_rn(tl.div_rn(sums, tl.zeros_like(sums) + tiles_per_token.to(tl.float32))))
    for first in range(0, tiles_per_token, _TILES_AT_ONCE):
        energy, place, is_real = _own_energies(energies, token, first, num_tokens, tiles_per_token)
        level = nearest_code(tl.sqrt_rn(energy)) - of_token[:, None] + _SAME_LEVEL
        tl.store(work + levels_at + place, level, mask=is_real)


@triton.jit
def load_means(means, tiles, channel, is_real, tiles_per_token, G: tl.constexpr):
    """fp32 means, fp16 in the stream, for tiles and channels that are broadcast against each other."""
    in_token = (tiles % tiles_per_token) * G + channel
    return from_half(tl.load(as_halves(means) + in_token, mask=is_real, other=0))


@triton.jit
def _best_scales(magnitude, energy, width, table):
    """Of five codes around that of √E the first with the least Σ(|z| − s·level)², [T]; 0 where √E's is 0."""
    middle = nearest_code(tl.sqrt_rn(energy))
    best, least = middle, tl.full(energy.shape, float("inf"), tl.float32)
    for place in range(_NUM_CANDIDATES):
        candidate = (place + 1) // 2 * (1 - place % 2 * 2)  # 0, −1, 1, −2, 2
        code = tl.minimum(tl.maximum(middle + candidate, 1), _LARGEST_CODE)
        step = scale_value(code)
        _, level = quantize(magnitude, step, width, table)
        difference = level * step[:, None] - magnitude
        error = tl.sum(difference * difference, axis=1)
        best = tl.where(error < least, code, best)
        least = tl.minimum(error, least)
    return tl.where(middle > 0, best, 0)


@triton.jit
def _unbiased_scales(z, level, energy, tiles, key_low, key_high):
    """Codes of Σz²/Σ|z|·level, rounded stochastically, [T]."""
    projection = tl.sum(tl.abs(z) * level, axis=1)
    scale = tl.div_rn(energy, tl.where(projection == 0, 1.0, projection))
    draw = hash_words(tiles ^ _SCALES, key_low, key_high) >> (32 - _DROPPED)
    bits = tl.where(projection == 0, 0.0, scale).to(tl.int32, bitcast=True)
    return code_of_bits(bits + draw.to(tl.int32, bitcast=True))


@triton.jit(
    do_not_specialize=["num_measured", "num_tiles", "num_planes", "channels", "tiles_per_token", "key_low", "key_high"]
)
def quantize_kernel(
    x,
    work,
    table,
    buf,
    num_measured,
    num_tiles,
    num_planes,
    channels,
    tiles_per_token,
    marks_at,
    starts_at,
    scale_at,
    mean_at,
    codes_at,
    key_low,
    key_high,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
    RANDOM: tl.constexpr,
    CENTER: tl.constexpr,
):
    """All of the stream except widths and means. WIDTH is log2 G; at `marks_at` are levels (`eden`) or energies."""
    exponent, is_flagged = tensor_exponent(work, num_measured, _TOP)
    factor = power_of_two(exponent)
    for block in range(tl.program_id(0), tl.cdiv(num_tiles, TILES), tl.num_programs(0)):
        tiles = block * TILES + tl.arange(0, TILES)
        is_tile = tiles < num_tiles
        start, width = load_widths(work + starts_at, tiles, is_tile)
        if RANDOM:
            is_finite = tl.load(work + marks_at + tiles, mask=is_tile, other=0) != _LOWEST
        else:
            is_finite = tl.load(as_floats(work + marks_at) + tiles, mask=is_tile, other=0.0) >= 0
        pointers, is_real = locate_tiles(x, block, num_tiles, channels, tiles_per_token, TILES, G, PADDED)
        y = tl.load(pointers, mask=is_real, other=0.0).to(tl.float32) * factor
        if CENTER:
            channel = tl.arange(0, G)[None, :]
            y -= load_means(buf + mean_at, tiles[:, None], channel, is_real, tiles_per_token, G)
        y = tl.where(is_finite[:, None], y, 0.0)
        if RANDOM:
            y = flip_signs(y, tiles, key_low, key_high, TILES, G)
        z = hadamard(y, TILES, G)
        energy = tl.sum(z * z, axis=1)
        if RANDOM:
            index, level = quantize(tl.abs(z), tl.sqrt_rn(energy * (1.0 / G)), width, table)
            scale = _unbiased_scales(z, level, energy, tiles, key_low, key_high)
            has_codes = is_finite
        else:
            scale = _best_scales(tl.abs(z), energy * (1.0 / G), width, table)
            index, _ = quantize(tl.abs(z), scale_value(scale), width, table)
            has_codes = scale > 0
        codes = tl.where(has_codes[:, None], signed_codes(z, index, width), 0)
        scale = tl.where(is_finite, scale, _NOT_FINITE)
        tl.store(buf + scale_at + tiles, scale.to(tl.uint8), mask=is_tile)
        store_codes(buf + codes_at, codes, start, width, TILES, G)
    if tl.program_id(0) == 0:
        PLACE: tl.constexpr = 3 if RANDOM else 4
        store_header(buf, exponent, is_flagged, WIDTH, CENTER, 0, PLACE)
        fill_gap(buf, scale_at + num_tiles)
        if CENTER:
            fill_gap(buf, mean_at + 2 * channels)
        fill_gap(buf, codes_at + num_planes.to(tl.int64) * (G // 8))
