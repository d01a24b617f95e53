"""`wf` on CUDA, the kernels that code: quantising, which chooses steps and writes most of the stream, and values.

Shape letters: T tiles of a block, G channels a tile.
"""

import triton
import triton.language as tl

from tahq.quant.gaussian.small_scale import LARGEST_CODE, NOT_FINITE
from tahq.quant.gpu.allocation import load_widths
from tahq.quant.gpu.levels import load_levels, quantize, signed_codes, store_codes
from tahq.quant.gpu.small_scale import nearest_code, scale_value
from tahq.quant.gpu.tile_stream import SLOTS, finish, load_exponent, tile_verdict
from tahq.quant.gpu.tiles import (
    as_floats,
    as_halves,
    from_eights,
    from_half,
    hadamard,
    locate_eights,
    locate_tiles,
    power_of_two,
    store_values,
    store_verdict,
    tensor_exponent,
    to_eights,
)
from tahq.quant.tah.reference import TOP_EXPONENT
from tahq.quant.wf.reference import CANDIDATES

_TOP = tl.constexpr(TOP_EXPONENT)
_LARGEST_CODE, _NOT_FINITE, _SLOTS = tl.constexpr(LARGEST_CODE), tl.constexpr(NOT_FINITE), tl.constexpr(SLOTS)
_NUM_CANDIDATES = tl.constexpr(len(CANDIDATES))
_EXPONENT_PLACE = tl.constexpr(4)


@triton.jit
def _load_means(means, tiles, channel, is_real, tiles_per_token, G: tl.constexpr):
    """fp32 means, fp16 in the stream, for tiles and channels that are broadcast against each other."""
    in_token = (tiles % tiles_per_token) * G + channel
    return from_half(tl.load(as_halves(means) + in_token, mask=is_real, other=0))


@triton.jit
def _best_scale(magnitude, energy, width, table):
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


@triton.jit(do_not_specialize=["num_measured", "num_tiles", "num_planes", "channels", "tiles_per_token"])
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
    energies_at,
    starts_at,
    scale_at,
    mean_at,
    codes_at,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
    CENTER: tl.constexpr,
    NORM: tl.constexpr,
):
    """All of the stream but widths and means. WIDTH is log2 G, NORM 1/√G."""
    exponent, is_flagged = tensor_exponent(work, num_measured, _TOP)
    factor = power_of_two(exponent)
    for block in range(tl.program_id(0), tl.cdiv(num_tiles, TILES), tl.num_programs(0)):
        tiles = block * TILES + tl.arange(0, TILES)
        is_tile = tiles < num_tiles
        start, width = load_widths(work + starts_at, tiles, is_tile)
        is_finite = tl.load(as_floats(work + energies_at) + tiles, mask=is_tile, other=0.0) >= 0
        pointers, is_real = locate_tiles(x, block, num_tiles, channels, tiles_per_token, TILES, G, PADDED)
        y = tl.load(pointers, mask=is_real, other=0.0).to(tl.float32) * factor
        if CENTER:
            channel = tl.arange(0, G)[None, :]
            y -= _load_means(buf + mean_at, tiles[:, None], channel, is_real, tiles_per_token, G)
        z = hadamard(tl.where(is_finite[:, None], y, 0.0), NORM, TILES, G, WIDTH)
        scale = _best_scale(tl.abs(z), tl.sum(z * z, axis=1) * (1.0 / G), width, table)
        index, _ = quantize(tl.abs(z), scale_value(scale), width, table)
        codes = tl.where((scale > 0)[:, None], signed_codes(z, index, width), 0)
        scale = tl.where(is_finite, scale, _NOT_FINITE)
        tl.store(buf + scale_at + tiles, scale.to(tl.uint8), mask=is_tile)
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
            mean_at,
            codes_at,
            G,
            WIDTH,
            CENTER,
            _EXPONENT_PLACE,
        )


@triton.jit(do_not_specialize=["num_tiles", "channels", "tiles_per_token"])
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
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
    CENTER: tl.constexpr,
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
        y = to_eights(hadamard(from_eights(y, TILES, G), NORM, TILES, G, WIDTH), TILES, G)
        pointers, is_real = locate_eights(x, block, num_tiles, channels, tiles_per_token, TILES, G, PADDED)
        if CENTER:
            channel = tl.arange(0, 8)[:, None, None] + 8 * tl.arange(0, G // 8)[None, :, None]
            y += _load_means(buf + mean_at, tiles[None, None, :], channel, is_real, tiles_per_token, G)
        store_values(pointers, y * factor, is_real)
    store_verdict(work, verdict)
