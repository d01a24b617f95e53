"""`tah` on CUDA, one tile at a time: the tiles that the fast paths of encoder and decoder leave out.

For an encoder these are tiles that may have an outlier; tiles with a quotient so near the middle of two codes that only
the exact division decides, or that must be clamped; and tiles that are not finite or not full. For a decoder they are
the transformed tiles. All threads of a program work on one tile, [1, G].
"""

import triton
import triton.language as tl

from tahq.quant.gpu.tiles import (
    ROUNDING,
    ROUNDING_BITS,
    exchange,
    from_eights,
    from_half,
    hadamard,
    pack_bits,
    place_planes,
    plane_bytes,
    plane_words,
    unpack_bits,
)

_EPSILON = tl.constexpr(1e-12)


@triton.jit
def _range(y, is_hidden, PADDED: tl.constexpr):
    """Minimum and maximum [T] of tiles [T, G], without the hidden channels."""
    if PADDED:
        smallest = tl.min(tl.where(is_hidden, float("inf"), y), axis=1)
        return smallest, tl.max(tl.where(is_hidden, float("-inf"), y), axis=1)
    return tl.min(y, axis=1), tl.max(y, axis=1)


@triton.jit
def scale_and_zero_point(smallest, largest, is_high, LOW: tl.constexpr, HIGH: tl.constexpr):
    """fp16 bits [T], as int32, of (max − min)/(2^b − 1) and of the minimum; neither is ever −0.

    A product with the inverse, corrected once by what is left over, is the correctly rounded quotient for every
    dividend and every divisor of 2 to 8 bits (a test tries all of them), as long as nothing is subnormal: then the
    scale is 0 anyway.
    """
    LOW_LEVELS: tl.constexpr = (1 << LOW) - 1.0
    HIGH_LEVELS: tl.constexpr = (1 << HIGH) - 1.0
    inverse = tl.where(is_high, 1.0 / HIGH_LEVELS, 1.0 / LOW_LEVELS)
    size = largest - smallest
    quotient = size * inverse
    left_over = tl.fma(-quotient, tl.where(is_high, HIGH_LEVELS, LOW_LEVELS), size)
    scale = tl.fma(left_over, inverse, quotient).to(tl.float16).to(tl.int16, bitcast=True)
    zero_point = smallest.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return scale.to(tl.int32) & 0x7FFF, tl.where(zero_point == 0x8000, 0, zero_point)


@triton.jit
def _codes(y, scale, zero_point, levels):
    """clamp(round-half-even((y − z)/s), 0, 2^b − 1), int32 [T, G]; 0 where s = 0."""
    offset = y - zero_point[:, None]
    divisor = tl.where(scale == 0, float("inf"), scale)
    quotient = tl.div_rn(offset, tl.broadcast_to(divisor[:, None], offset.shape))
    rounded = tl.minimum(tl.maximum(quotient, 0.0), levels[:, None]) + ROUNDING
    return rounded.to(tl.int32, bitcast=True) - ROUNDING_BITS


@triton.jit
def _place_high(place, LOW: tl.constexpr, HIGH: tl.constexpr, NUM_PLANES: tl.constexpr, G: tl.constexpr):
    """Offsets of a tile's planes among the high ones, and which of them it has there."""
    plane, _, within = place_planes(LOW, NUM_PLANES, 1, G)
    first = place.to(tl.int64)[None, :, None] * ((HIGH - LOW) * G // 8)
    return first + within, (place >= 0)[None, :, None] & (plane >= LOW) & (plane < HIGH)


@triton.jit
def encode_tile(
    y,
    is_hidden,
    is_finite,
    place,
    tau,
    low_buf,
    high_buf,
    G: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Write the planes of a tile y [1, G]; return fp16 bits of scale and zero-point, and its pivot.

    They are returned as scalars, so that the layout of one tile does not become that of the block's. `is_hidden` [1, G]
    are padding channels. `low_buf` is the tile's place; `high_buf` that of the tensor's first tile with H bits, from
    which `place` counts; negative for L bits.
    """
    smallest, largest = _range(y, is_hidden, PADDED)
    magnitude, size = tl.maximum(largest, -smallest), tl.abs(y)
    is_largest = size == magnitude[:, None]
    next_largest = tl.max(tl.where(is_largest, 0.0, size), axis=1)
    second = tl.where(tl.sum(is_largest.to(tl.int32), axis=1) == 1, next_largest, magnitude)
    is_transformed = is_finite & (tl.div_rn(magnitude, second + _EPSILON) > tau)
    pivot = tl.where(is_transformed, tl.min(tl.where(is_largest, tl.arange(0, G)[None, :], G), axis=1), 0)
    y = tl.where(is_transformed[:, None], hadamard(exchange(y, pivot, G), 1, G), y)
    smallest, largest = _range(y, is_hidden & ~is_transformed[:, None], PADDED)
    levels = tl.where(place >= 0, (1 << HIGH) - 1.0, (1 << LOW) - 1.0)
    scale, zero_point = scale_and_zero_point(smallest, largest, place >= 0, LOW, HIGH)
    codes = _codes(y, from_half(scale), from_half(zero_point), levels)
    if PADDED:
        codes = tl.where(is_hidden & ~is_transformed[:, None], 0, codes)
    NUM_PLANES: tl.constexpr = 4 if HIGH <= 4 else 8
    words = tl.where(is_finite[:, None], pack_bits(codes, 0, HIGH <= 4, 1, G), 0)
    words_above = words
    if HIGH > 4:
        words_above = tl.where(is_finite[:, None], pack_bits(codes, 4, False, 1, G), 0)
    planes = plane_bytes(words, words_above, NUM_PLANES)
    plane, _, within = place_planes(0, NUM_PLANES, 1, G)
    tl.store(low_buf + within, planes, mask=plane < LOW)
    if HIGH > LOW:
        within, is_high = _place_high(place, LOW, HIGH, NUM_PLANES, G)
        tl.store(high_buf + within, planes, mask=is_high)
    scale = tl.where(is_finite, scale | (is_transformed.to(tl.int32) << 15), 0)
    zero_point = tl.where(is_finite, zero_point, 0x7E00)
    return tl.sum(scale, axis=0), tl.sum(zero_point, axis=0), tl.sum(pivot, axis=0)


@triton.jit
def decode_tile(
    scale, zero_point, place, pivot, factor, low_buf, high_buf, G: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr
):
    """Values [1, G] of a transformed tile, times `factor`; scale (sign ignored) and zero-point are fp16 bits."""
    NUM_PLANES: tl.constexpr = 4 if HIGH <= 4 else 8
    plane, _, within = place_planes(0, NUM_PLANES, 1, G)
    planes = tl.load(low_buf + within, mask=plane < LOW, other=0)
    if HIGH > LOW:
        within, is_high = _place_high(place, LOW, HIGH, NUM_PLANES, G)
        planes |= tl.load(high_buf + within, mask=is_high, other=0)
    codes = unpack_bits(plane_words(planes, 0, NUM_PLANES))
    if HIGH > 4:
        codes |= unpack_bits(plane_words(planes, 4, NUM_PLANES)) << 4
    step, start = from_half(scale & 0x7FFF) * factor, from_half(zero_point) * factor
    y = from_eights(codes, 1, G).to(tl.float32) * step[:, None] + start[:, None]
    return exchange(hadamard(y, 1, G), pivot, G)
