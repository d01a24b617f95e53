"""`fixed` on CUDA in Triton: a launch plan for every shape, and the kernels.

Streams and decoded values equal the reference's to the bit. Encoding is two kernels and never synchronises;
decoding is one, then waits for the verdict. Kernels are specialised on the spec, on types and on whether
tiles are padded, never on data or the key.
"""

from functools import lru_cache

import triton
import triton.language as tl

from tahq.quant.fixed.stream import TOP_EXPONENT, FixedLayout
from tahq.quant.gpu import launch
from tahq.quant.gpu.launch import Launch
from tahq.quant.gpu.tiles import (
    DAMAGED,
    INFINITY,
    MARKED,
    MAX_MEASURED,
    ROUNDING,
    ROUNDING_BITS,
    any_of,
    as_halves,
    fill_gap,
    hash_words,
    header_verdict,
    is_gap_dirty,
    locate_eights,
    locate_tiles,
    magnitude_bits,
    pack_bits,
    place_planes,
    plane_bytes,
    plane_words,
    power_of_two,
    store_header,
    store_measured,
    store_values,
    store_verdict,
    tensor_exponent,
    unpack_bits,
)

_TOP = tl.constexpr(TOP_EXPONENT)
_MIN_EXPONENT = tl.constexpr(FixedLayout.min_exponent)
_DAMAGED, _MARKED = tl.constexpr(DAMAGED), tl.constexpr(MARKED)
_LARGEST_FP32 = tl.constexpr(3.4028234663852886e38)


@triton.jit(do_not_specialize=["num_tiles", "channels", "tiles_per_token"])
def measure_kernel(
    x, work, num_tiles, channels, tiles_per_token, G: tl.constexpr, TILES: tl.constexpr, PADDED: tl.constexpr
):
    """Largest magnitude of every program."""
    largest_seen = tl.zeros([TILES], tl.int32)
    largest_finite = tl.zeros([TILES], tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(num_tiles, TILES), tl.num_programs(0)):
        pointers, is_real = locate_tiles(x, block, num_tiles, channels, tiles_per_token, TILES, G, PADDED)
        largest = tl.max(magnitude_bits(tl.load(pointers, mask=is_real, other=0.0).to(tl.float32)), axis=1)
        largest_seen = tl.maximum(largest_seen, largest)
        largest_finite = tl.maximum(largest_finite, tl.where(largest < INFINITY, largest, 0))
    store_measured(work, largest_seen, largest_finite)


@triton.jit
def _ceil_to_half(values):
    """Bits, as int32, of the least fp16 number not below each of values [T], which are not negative."""
    nearest = values.to(tl.float16)
    is_short = nearest.to(tl.float32) < values
    return nearest.to(tl.int16, bitcast=True).to(tl.int32) + is_short.to(tl.int32)


@triton.jit
def _step(scale, BITS: tl.constexpr):
    """fp32(scale)/Q of scales [T] (bits)."""
    magnitude = scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.div_rn(magnitude, tl.full(magnitude.shape, (1 << (BITS - 1)) - 1.0, tl.float32))


@triton.jit
def _divide(y, step):
    divisor = tl.where(step == 0, float("inf"), step)
    return tl.div_rn(y, tl.broadcast_to(divisor[:, None], y.shape))


@triton.jit
def _round_nearest(y, step, NEAR: tl.constexpr):
    """round-half-even(y / step), int32 [T, G]; exact division only where the middle of two codes is NEAR.

    No quotient exceeds Q, the scale being no less than the largest magnitude, by as much as a half.
    """
    quotient = y * tl.where(step == 0, 0.0, 1.0 / step)[:, None]
    rounded = quotient + ROUNDING
    farthest = tl.max(tl.abs(quotient - (rounded - ROUNDING)), axis=1)
    if any_of(farthest > 0.5 - NEAR):
        rounded = _divide(y, step) + ROUNDING
    return rounded.to(tl.int32, bitcast=True) - ROUNDING_BITS


@triton.jit
def _round_stochastic(y, step, element, key_low, key_high, BITS: tl.constexpr):
    """⌊y/step⌋ or one more, by the draw for each element, `stochastic_rounding.draws`: int32 [T, G]."""
    quotient = _divide(y, step)
    floor = tl.floor(quotient)
    draw = (hash_words(element, key_low, key_high) >> 8).to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-24
    code = (floor + (quotient - floor > draw).to(tl.float32)).to(tl.int32)
    LARGEST: tl.constexpr = (1 << (BITS - 1)) - 1
    return tl.minimum(tl.maximum(code, -LARGEST), LARGEST)


@triton.jit
def _store_codes(
    buf, codes, is_tile, block, num_tiles, bytes_at, planes_at, G: tl.constexpr, TILES: tl.constexpr, BITS: tl.constexpr
):
    """Store codes int32 [T, G]: their whole bytes, all codes' lowest first, then planes of the remaining bits."""
    first = tl.cast(block, tl.int64) * (TILES * G)
    within = tl.arange(0, TILES)[:, None] * G + tl.arange(0, G)[None, :]
    for place in tl.static_range(BITS // 8):
        part = buf + bytes_at + place * num_tiles.to(tl.int64) * G + first
        tl.store(part + within, (codes >> (8 * place)).to(tl.uint8), mask=is_tile[:, None] & (within >= 0))
    REST: tl.constexpr = BITS % 8
    if REST > 0:
        NUM_PLANES: tl.constexpr = 4 if REST <= 4 else 8
        rest = codes >> (8 * (BITS // 8))
        words = pack_bits(rest, 0, REST <= 4, TILES, G)
        planes = plane_bytes(words, pack_bits(rest, 4, False, TILES, G), NUM_PLANES)
        plane, tile, offset = place_planes(0, NUM_PLANES, TILES, G)
        own = buf + planes_at + tl.cast(block, tl.int64) * (TILES * REST * G // 8)
        is_real = (tile < num_tiles - block * TILES) & (plane < REST)
        tl.store(own + (tile * (REST * G // 8) + offset), planes, mask=is_real)


@triton.jit(do_not_specialize=["num_measured", "num_tiles", "channels", "tiles_per_token", "key_low", "key_high"])
def quantize_kernel(
    x,
    work,
    buf,
    num_measured,
    num_tiles,
    channels,
    tiles_per_token,
    scale_at,
    bytes_at,
    planes_at,
    key_low,
    key_high,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PADDED: tl.constexpr,
):
    """All of the stream: every byte of `buf` is written. WIDTH is log2 G."""
    exponent, is_flagged = tensor_exponent(work, num_measured, _TOP)
    factor = power_of_two(exponent)
    LARGEST: tl.constexpr = (1 << (BITS - 1)) - 1
    for block in range(tl.program_id(0), tl.cdiv(num_tiles, TILES), tl.num_programs(0)):
        tiles = block * TILES + tl.arange(0, TILES)
        is_tile = tiles < num_tiles
        pointers, is_real = locate_tiles(x, block, num_tiles, channels, tiles_per_token, TILES, G, PADDED)
        y = tl.load(pointers, mask=is_real, other=0.0).to(tl.float32) * factor
        largest = tl.max(magnitude_bits(y), axis=1)
        is_finite = largest < INFINITY
        scale = tl.where(is_finite, _ceil_to_half(largest.to(tl.float32, bitcast=True)), 0)
        step = _step(scale, BITS)
        if STOCHASTIC:
            element = tiles[:, None] * G + tl.arange(0, G)[None, :]
            codes = _round_stochastic(y, step, element, key_low, key_high, BITS)
        else:
            codes = _round_nearest(y, step, 2.0 ** (BITS - 22))
        codes = tl.where(is_finite[:, None], codes, 0) + LARGEST
        scale = tl.where(is_finite, scale, 0x7E00)
        tl.store(as_halves(buf + scale_at) + tiles, scale.to(tl.int16), mask=is_tile)
        _store_codes(buf, codes, is_tile, block, num_tiles, bytes_at, planes_at, G, TILES, BITS)
    if tl.program_id(0) == 0:
        count = num_tiles.to(tl.int64)
        store_header(buf, exponent, is_flagged, WIDTH, BITS, 0, 4)
        fill_gap(buf, scale_at + 2 * count)
        fill_gap(buf, bytes_at + count * (BITS // 8 * G))
        fill_gap(buf, planes_at + count * (BITS % 8 * G // 8))


@triton.jit
def _load_codes(buf, block, num_tiles, bytes_at, planes_at, G: tl.constexpr, TILES: tl.constexpr, BITS: tl.constexpr):
    """Codes int32 [8, G/8, T]."""
    tile = tl.arange(0, TILES)[None, None, :]
    channel = tl.arange(0, 8)[:, None, None] + 8 * tl.arange(0, G // 8)[None, :, None]
    num_left = num_tiles - block * TILES
    codes = tl.zeros([8, G // 8, TILES], tl.int32)
    for place in tl.static_range(BITS // 8):
        part = buf + bytes_at + place * num_tiles.to(tl.int64) * G + tl.cast(block, tl.int64) * (TILES * G)
        is_real = (tile < num_left) & (channel < G)
        codes |= tl.load(part + (tile * G + channel), mask=is_real, other=0).to(tl.int32) << (8 * place)
    REST: tl.constexpr = BITS % 8
    if REST > 0:
        NUM_PLANES: tl.constexpr = 4 if REST <= 4 else 8
        plane, row, offset = place_planes(0, NUM_PLANES, TILES, G)
        own = buf + planes_at + tl.cast(block, tl.int64) * (TILES * REST * G // 8)
        is_real = (row < num_left) & (plane < REST)
        planes = tl.load(own + (row * (REST * G // 8) + offset), mask=is_real, other=0)
        codes |= unpack_bits(plane_words(planes, 0, NUM_PLANES)) << (8 * (BITS // 8))
        if REST > 4:
            codes |= unpack_bits(plane_words(planes, 4, NUM_PLANES)) << (8 * (BITS // 8) + 4)
    return codes


@triton.jit
def _scale_verdict(scale, is_tile):
    """The verdict on scales [T] (bits)."""
    is_wrong = (scale == 0x7C00) | (scale > 0x7FFF)
    return tl.where(is_tile, tl.where(is_wrong, _DAMAGED, 0) | tl.where((scale & 0x7FFF) > 0x7C00, _MARKED, 0), 0)


@triton.jit(do_not_specialize=["num_tiles", "channels", "tiles_per_token"])
def values_kernel(
    buf,
    work,
    x,
    num_tiles,
    channels,
    tiles_per_token,
    scale_at,
    bytes_at,
    planes_at,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    BITS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Values of all tiles, and the verdict in `work`, a word that was 0."""
    factor = power_of_two(-tl.load(buf + 4).to(tl.int8, bitcast=True).to(tl.int32))
    verdict = tl.zeros([TILES], tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(num_tiles, TILES), tl.num_programs(0)):
        tiles = block * TILES + tl.arange(0, TILES)
        is_tile = tiles < num_tiles
        scale = tl.load(as_halves(buf + scale_at) + tiles, mask=is_tile, other=0).to(tl.int32) & 0xFFFF
        verdict |= _scale_verdict(scale, is_tile)
        step = _step(scale, BITS) * factor
        step = tl.where(step > _LARGEST_FP32, _LARGEST_FP32, step)
        codes = _load_codes(buf, block, num_tiles, bytes_at, planes_at, G, TILES, BITS)
        values = (codes - ((1 << (BITS - 1)) - 1)).to(tl.float32) * step[None, None, :]
        pointers, is_real = locate_eights(x, block, num_tiles, channels, tiles_per_token, TILES, G, PADDED)
        store_values(pointers, values, is_real)
    if tl.program_id(0) == 0:
        count = num_tiles.to(tl.int64)
        is_dirty = is_gap_dirty(buf, scale_at + 2 * count)
        is_dirty |= is_gap_dirty(buf, bytes_at + count * (BITS // 8 * G))
        is_dirty |= is_gap_dirty(buf, planes_at + count * (BITS % 8 * G // 8))
        header = header_verdict(buf, WIDTH, BITS, 0, 4, _MIN_EXPONENT)
        tl.atomic_or(work, header | tl.where(is_dirty, _DAMAGED, 0), sem="relaxed")
    store_verdict(work, verdict)


@lru_cache(maxsize=256)
def plan(layout: FixedLayout) -> launch.LaunchPlan:
    """The launches for a layout."""
    tiling, spec = layout.tiling, layout.spec
    num_measured = launch.measuring_programs(tiling.num_tiles, tiling.group)
    starts = tuple(section.start for section in layout.sections.by_name.values())
    numbers = (tiling.num_tiles, tiling.channels, tiling.tiles_per_token)
    measuring = {
        "G": tiling.group,
        "TILES": launch.measuring_tiles(tiling.group),
        "PADDED": tiling.padding > 0,
        "num_warps": launch.MEASURING_WARPS,
        "num_stages": 1,
    }
    grid = (launch.programs(tiling.num_tiles, tiling.group), 1, 1)
    coding = {
        "G": tiling.group,
        "WIDTH": tiling.log2_group,
        "TILES": launch.tiles_per_block(tiling.group, launch.ELEMENTS_PER_WARP),
        "BITS": spec.bits,
        "PADDED": tiling.padding > 0,
        "num_warps": launch.warps_per_block(tiling.group, launch.ELEMENTS_PER_WARP),
        **launch.EXACT,
    }
    rounding = coding | {"STOCHASTIC": spec.round == "stochastic"}
    return launch.LaunchPlan(
        encode_words=MAX_MEASURED,
        encode=(
            ("x work", Launch(measure_kernel, (num_measured, 1, 1), numbers, measuring)),
            ("x work buf key", Launch(quantize_kernel, grid, (num_measured, *numbers, *starts), rounding)),
        ),
        decode_words=1,
        decode=(("buf work x", Launch(values_kernel, grid, (*numbers, *starts), coding)),),
        is_zeroed=True,
    )


encode, decode = launch.backend(plan)
