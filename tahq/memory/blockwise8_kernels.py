"""`blockwise8` in Triton: codes and values equal to the reference's, bit for bit.

Encoding searches nothing: see `blockwise8._estimated_place`. The estimate may be off by another 1/4 of a place, and
is by less than 10⁻⁴, so it and the quotient it is computed from are rounded as is fastest; the one border that it
leads to decides as in the reference.
"""

import triton
import triton.language as tl

from tahq.quant.gpu.tiles import INFINITY, ROUNDING, ROUNDING_BITS, magnitude_bits

ZERO = tl.constexpr(127)
"""The code of 0 with signs."""
TABLE = tl.constexpr(256)
"""Entries of each table: the maps with signs and without, and the borders of either."""
_SMALLEST_NORMAL = tl.constexpr(0x00800000)
_NOT_A_NUMBER = tl.constexpr(0x7FC00000)


@triton.jit
def decode_block(codes, scales, tables, SIGNED: tl.constexpr):
    """Values fp32 [H, R, C] of codes uint8 [H, R, C] and scales fp32 [1, R, 1]."""
    START: tl.constexpr = 0 if SIGNED else TABLE
    return tl.load(tables + START + codes.to(tl.int32)) * scales


@triton.jit
def scales_of(largest):
    """Scales, fp32, of blocks' largest magnitudes, int32 (bits): 0 below normal numbers, NaN if not finite."""
    bits = tl.where(largest < _SMALLEST_NORMAL, 0, tl.where(largest >= INFINITY, _NOT_A_NUMBER, largest))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _estimate(quotients, SIGNED: tl.constexpr):
    """min_i u_i; a multiply-add may be fused here or not."""
    WIDTH: tl.constexpr = 1.0 if SIGNED else 2.0
    FIRST: tl.constexpr = 0.0 if SIGNED else 1.0
    lowest = tl.fma(quotients, WIDTH * 1e6 / 0.9, WIDTH - FIRST - WIDTH / 9)
    lowest = tl.minimum(lowest, tl.fma(quotients, 2 * WIDTH * 1e5 / 0.9, 2 * WIDTH - FIRST - 2 * WIDTH / 9))
    lowest = tl.minimum(lowest, tl.fma(quotients, 4 * WIDTH * 1e4 / 0.9, 4 * WIDTH - FIRST - 4 * WIDTH / 9))
    lowest = tl.minimum(lowest, tl.fma(quotients, 8 * WIDTH * 1e3 / 0.9, 8 * WIDTH - FIRST - 8 * WIDTH / 9))
    lowest = tl.minimum(lowest, tl.fma(quotients, 16 * WIDTH * 1e2 / 0.9, 16 * WIDTH - FIRST - 16 * WIDTH / 9))
    lowest = tl.minimum(lowest, tl.fma(quotients, 32 * WIDTH * 1e1 / 0.9, 32 * WIDTH - FIRST - 32 * WIDTH / 9))
    return tl.minimum(lowest, tl.fma(quotients, 64 * WIDTH / 0.9, 64 * WIDTH - FIRST - 64 * WIDTH / 9))


@triton.jit
def encode_block(values, largest, tables, SIGNED: tl.constexpr):
    """Codes uint8 [H, R, C] of values fp32; `largest`: the largest magnitude of each block, int32 [1, R, 1] (bits).

    Without signs, no value is negative. The bits that rounding leaves above a place are never taken off: those of
    an address have their negative in the table's, and a code is its lowest byte, where ROUNDING has zeros.
    """
    START: tl.constexpr = 2 * TABLE if SIGNED else 3 * TABLE
    is_plain = (largest >= _SMALLEST_NORMAL) & (largest < INFINITY)
    scale = tl.where(is_plain, largest, 0x3F800000).to(tl.float32, bitcast=True)
    values = tl.where(is_plain, values, 0.0)
    magnitudes = tl.abs(values) if SIGNED else values
    upper = (_estimate(magnitudes * (1.0 / scale), SIGNED) + ROUNDING).to(tl.int32, bitcast=True)
    border = tl.load(tables + (START - 1 - ROUNDING_BITS) + upper) * scale
    place = tl.where(magnitudes > border, upper, upper - 1)
    if SIGNED:
        place = tl.where(values < 0, -tl.minimum(place, ROUNDING_BITS + ZERO), place) + ZERO
    return place.to(tl.uint8)


@triton.jit
def largest_of(values):
    """Bits of the largest magnitude of each block of values [H, R, C], int32 [1, R, 1]; a NaN is the largest."""
    return tl.max(tl.max(magnitude_bits(values), axis=0, keep_dims=True), axis=2, keep_dims=True)
