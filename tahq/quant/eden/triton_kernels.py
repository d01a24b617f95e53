"""`eden` on CUDA: the kernels of its own; `gpu.allocation` runs between the first two.

Measuring reads every tile once, before the tensor's exponent is known. The transform keeps energies, so the level of a
tile, a logarithm of its magnitude, is taken before it, relative to the exponent to come. Quantising reads the tensor
again, transforms it, and writes all of the stream but the widths.

Shape letters: T tiles of a block, G channels a tile.
"""

import triton
import triton.language as tl

from tahq.quant.gaussian.small_scale import DROPPED_BITS, NOT_FINITE
from tahq.quant.gpu.allocation import load_widths
from tahq.quant.gpu.hash import flip_signs, hash_words
from tahq.quant.gpu.levels import load_levels, quantize, signed_codes, store_codes
from tahq.quant.gpu.small_scale import code_of_bits, scale_value
from tahq.quant.gpu.tile_stream import SLOTS, finish, load_exponent, tile_verdict
from tahq.quant.gpu.tiles import (
    INFINITY,
    from_eights,
    hadamard,
    locate_eights,
    locate_tiles,
    magnitude_bits,
    power_of_two,
    store_measured,
    store_values,
    store_verdict,
    tensor_exponent,
    to_eights,
)
from tahq.quant.tah.reference import TOP_EXPONENT

_TOP = tl.constexpr(TOP_EXPONENT)
_DROPPED, _HALF = tl.constexpr(DROPPED_BITS), tl.constexpr(1 << (DROPPED_BITS - 1))
_NOT_FINITE, _SLOTS = tl.constexpr(NOT_FINITE), tl.constexpr(SLOTS)
_LOWEST = tl.constexpr(-(1 << 20))
"""Level of tiles that are not finite, below that of any other."""
_SCALES = tl.constexpr(-0x80000000)
"""Where the counters of the scales' draws begin, 2^31, as a signed number."""
_EXPONENT_PLACE = tl.constexpr(3)


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
    x,
    work,
    num_tiles,
    channels,
    tiles_per_token,
    levels_at,
    G: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Level of every tile, largest magnitude of every program."""
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
def _unbiased_codes(z, level, energy, tiles, key_low, key_high):
    """Codes of Σz²/Σ|z|·level, rounded stochastically, [T]."""
    projection = tl.sum(tl.abs(z) * level, axis=1)
    scale = tl.div_rn(energy, tl.where(projection == 0, 1.0, projection))
    draw = hash_words(tiles ^ _SCALES, key_low, key_high) >> (32 - _DROPPED)
    bits = tl.where(projection == 0, 0.0, scale).to(tl.int32, bitcast=True)
    return code_of_bits(bits + draw.to(tl.int32, bitcast=True))


@triton.jit(
    do_not_specialize=[
        "num_measured",
        "num_tiles",
        "num_planes",
        "channels",
        "tiles_per_token",
        "key_low",
        "key_high",
    ]
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
    levels_at,
    starts_at,
    scale_at,
    codes_at,
    key_low,
    key_high,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
    NORM: tl.constexpr,
):
    """All of the stream but the widths. WIDTH is log2 G, NORM 1/√G."""
    exponent, is_flagged = tensor_exponent(work, num_measured, _TOP)
    factor = power_of_two(exponent)
    for block in range(tl.program_id(0), tl.cdiv(num_tiles, TILES), tl.num_programs(0)):
        tiles = block * TILES + tl.arange(0, TILES)
        is_tile = tiles < num_tiles
        start, width = load_widths(work + starts_at, tiles, is_tile)
        is_finite = tl.load(work + levels_at + tiles, mask=is_tile, other=0) != _LOWEST
        pointers, is_real = locate_tiles(x, block, num_tiles, channels, tiles_per_token, TILES, G, PADDED)
        y = tl.load(pointers, mask=is_real, other=0.0).to(tl.float32) * factor
        y = flip_signs(tl.where(is_finite[:, None], y, 0.0), tiles, key_low, key_high, TILES, G)
        z = hadamard(y, NORM, TILES, G, WIDTH)
        energy = tl.sum(z * z, axis=1)
        index, level = quantize(tl.abs(z), tl.sqrt_rn(energy * (1.0 / G)), width, table)
        scale = _unbiased_codes(z, level, energy, tiles, key_low, key_high)
        scale = tl.where(is_finite, scale, _NOT_FINITE)
        tl.store(buf + scale_at + tiles, scale.to(tl.uint8), mask=is_tile)
        codes = tl.where(is_finite[:, None], signed_codes(z, index, width), 0)
        store_codes(buf + codes_at, codes, start, width, TILES, G)
    if tl.program_id(0) == 0:
        finish(
            buf,
            exponent,
            is_flagged,
            num_tiles,
            num_planes,
            channels,
            scale_at,
            0,
            codes_at,
            G,
            WIDTH,
            0,
            _EXPONENT_PLACE,
        )


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
    codes_at,
    key_low,
    key_high,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
    NORM: tl.constexpr,
):
    """Values of all tiles, and the rest of the verdict."""
    factor = power_of_two(-load_exponent(buf, _EXPONENT_PLACE))
    verdict = tl.zeros([TILES], tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(num_tiles, TILES), tl.num_programs(0)):
        tiles = block * TILES + tl.arange(0, TILES)
        is_tile = tiles < num_tiles
        start, width = load_widths(work + _SLOTS, tiles, is_tile)
        scale = tl.load(buf + scale_at + tiles, mask=is_tile, other=0).to(tl.int32)
        verdict |= tile_verdict(work, scale, is_tile)
        y = load_levels(buf + codes_at, start, width, table, TILES, G) * scale_value(scale)[None, None, :]
        y = hadamard(from_eights(y, TILES, G), NORM, TILES, G, WIDTH)
        y = to_eights(flip_signs(y, tiles, key_low, key_high, TILES, G), TILES, G)
        pointers, is_real = locate_eights(x, block, num_tiles, channels, tiles_per_token, TILES, G, PADDED)
        store_values(pointers, y * factor, is_real)
    store_verdict(work, verdict)
