"""`eden` on CUDA in Triton: a launch plan for every shape, and the kernels one after the other.

Streams equal the reference's but where a sum (a tile's energy, its projection) rounds differently, which may move a
width, a scale by one code, or the code of a value at a threshold; decoded values are equal to the bit. Encoding is four
kernels and never synchronises. Decoding is two, then waits for the verdict. Kernels are specialised on types, the size
of tiles and whether they are filled up, never on bits, data or the key.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from tahq.quant.gaussian.small_scale import DROPPED_BITS, NOT_FINITE
from tahq.quant.gaussian.tile_stream import TileLayout
from tahq.quant.gpu import gaussian, launch
from tahq.quant.gpu.allocation import load_widths
from tahq.quant.gpu.gaussian import SLOTS, finish, load_exponent, tile_verdict
from tahq.quant.gpu.hash import flip_signs, hash_words
from tahq.quant.gpu.launch import Launch
from tahq.quant.gpu.levels import code_of_bits, load_levels, quantize, scale_value, signed_codes, store_codes, tables
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
from tahq.quant.spec import EdenSpec
from tahq.quant.tiling import Tiling
from tahq.quant.transforms import TOP_EXPONENT

_TOP = tl.constexpr(TOP_EXPONENT)
_DROPPED, _HALF = tl.constexpr(DROPPED_BITS), tl.constexpr(1 << (DROPPED_BITS - 1))
_NOT_FINITE, _SLOTS = tl.constexpr(NOT_FINITE), tl.constexpr(SLOTS)
_LOWEST = tl.constexpr(-(1 << 20))
"""Level of tiles that are not finite, below that of any other."""
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


EXPONENT_PLACE = 3
"""Of e in the header."""
_EXPONENT_PLACE = tl.constexpr(EXPONENT_PLACE)


def encode(layout: TileLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """The stream of x, which is on a CUDA device and not empty."""
    return launch.run_encoder(_plan(layout.spec, layout.tiling), layout, x, key=key, table=tables(x.device))


def decode(
    layout: TileLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor | None:
    """The tensor of an accepted stream; None if the stream is damaged."""
    return launch.run_decoder(_plan(layout.spec, layout.tiling), layout, buf, dtype, key=key, table=tables(buf.device))


@lru_cache(maxsize=256)
def _plan(spec: EdenSpec, tiling: Tiling) -> launch.LaunchPlan:
    layout = TileLayout.of(spec, tiling.shape)
    work = gaussian.Work.of(tiling.num_tiles)
    num_measured = launch.measuring_programs(tiling.num_tiles, tiling.group)
    count, allocate = gaussian.allocate(layout, work, num_measured, is_relative=True)
    return launch.LaunchPlan(
        encode_words=work.end,
        encode=(
            ("x work", _measure(tiling, work, num_measured)),
            ("work", count),
            ("work buf", allocate),
            ("x work table buf key", _quantize(layout, work, num_measured)),
        ),
        decode_words=gaussian.decode_words(tiling.num_tiles),
        decode=(
            ("buf work", gaussian.starts(layout, exponent_place=EXPONENT_PLACE)),
            ("buf work table x key", _values(layout)),
        ),
    )


def _measure(tiling: Tiling, work: gaussian.Work, num_measured: int) -> Launch:
    constants = {
        "G": tiling.group,
        "TILES": launch.measuring_tiles(tiling.group),
        "PADDED": tiling.padding > 0,
        "num_warps": launch.MEASURING_WARPS,
        **launch.EXACT,
    }
    numbers = (tiling.num_tiles, tiling.channels, tiling.tiles_per_token, work.levels)
    return Launch(measure_kernel, (num_measured, 1, 1), numbers, constants)


def _quantize(layout: TileLayout, work: gaussian.Work, num_measured: int) -> Launch:
    tiling = layout.tiling
    scale_at, _, _, codes_at = gaussian.section_starts(layout)
    shape = (tiling.num_tiles, layout.num_planes, tiling.channels, tiling.tiles_per_token)
    numbers = (num_measured, *shape, work.levels, work.starts, scale_at, codes_at)
    constants = gaussian.coding_constants(tiling)
    return Launch(quantize_kernel, gaussian.coding_grid(tiling), numbers, constants)


def _values(layout: TileLayout) -> Launch:
    tiling = layout.tiling
    scale_at, _, _, codes_at = gaussian.section_starts(layout)
    numbers = (tiling.num_tiles, tiling.channels, tiling.tiles_per_token, scale_at, codes_at)
    return Launch(values_kernel, gaussian.coding_grid(tiling), numbers, gaussian.coding_constants(tiling))
