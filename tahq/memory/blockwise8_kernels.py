"""`blockwise8` in Triton: codes and values equal to the reference's, bit for bit.

Encoding searches nothing. In terms of the place p of a magnitude among its map's, each decade i is a straight line,
u_i(a) = first_i + (10^(6−i)·a − 0.1)·F_i/0.9, flatter from one to the next and meeting the one before where they
join; so the place is near min_i u_i(a). The border between two places lies at a whole u, or within 0.25 of one,
so of the rounded u one look at the table of borders decides between two places, exactly: u itself may be off
by another 0.25, and is by less than 10⁻⁴.
"""

import triton
import triton.language as tl

from tahq.quant.gpu.tiles import INFINITY, ROUNDING, ROUNDING_BITS, magnitude_bits, power_of_two

ZERO = tl.constexpr(127)
"""The code of 0 with signs."""
TABLE = tl.constexpr(256)
"""Entries of each table: the maps with signs and without, and the borders of either."""
_SMALLEST_NORMAL = tl.constexpr(0x00800000)
_NOT_A_NUMBER = tl.constexpr(0x7FC00000)


@triton.jit
def decode_block(codes, scales, tables, SIGNED: tl.constexpr):
    """Values fp32 [R, B] of codes uint8 [R, B] and scales fp32 [R]."""
    START: tl.constexpr = 0 if SIGNED else TABLE
    return tl.load(tables + START + codes.to(tl.int32)) * scales[:, None]


@triton.jit
def scales_of(largest):
    """Scales fp32 [R] of blocks' largest magnitudes, int32 [R] (bits): 0 below normal numbers, NaN if not finite."""
    bits = tl.where(largest < _SMALLEST_NORMAL, 0, tl.where(largest >= INFINITY, _NOT_A_NUMBER, largest))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _quotients(magnitudes, largest):
    """|x| / scale [R, B], correctly rounded but where it is below 2^-40; 0 in blocks that are zeros or not finite.

    The reciprocal of the scale, rounded, times x, then corrected by its remainder, which a fused multiply-add gives
    exactly (Markstein 1990): a division a block. Both are first brought near 1 by a power of two.
    """
    is_plain = (largest >= _SMALLEST_NORMAL) & (largest < INFINITY)
    usual = tl.where(is_plain, largest, 0x3F800000)
    factor = power_of_two(127 - (usual >> 23))
    scale = usual.to(tl.float32, bitcast=True) * factor
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    wide_scale = tl.broadcast_to(scale[:, None], magnitudes.shape)
    wide_inverse = tl.broadcast_to(inverse[:, None], magnitudes.shape)
    x = tl.where(is_plain[:, None], magnitudes * factor[:, None], 0.0)
    quotient = x * wide_inverse
    remainder = tl.fma(-quotient, wide_scale, x)
    return tl.fma(remainder, wide_inverse, quotient)


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
    """Codes int32 [R, B] of values fp32 [R, B]; `largest`: the largest magnitude of each block, int32 [R] (bits).

    Without signs, no value is negative.
    """
    START: tl.constexpr = 2 * TABLE if SIGNED else 3 * TABLE
    quotients = _quotients(tl.abs(values), largest)
    upper = (_estimate(quotients, SIGNED) + ROUNDING).to(tl.int32, bitcast=True) - ROUNDING_BITS
    border = tl.load(tables + START + upper - 1)
    place = tl.where(quotients > border, upper, upper - 1)
    if SIGNED:
        place = tl.where(values < 0, -tl.minimum(place, ZERO), place) + ZERO
    return place


@triton.jit
def largest_of(values):
    """Bits of the largest magnitude of each row, int32 [R]; a NaN is the largest."""
    return tl.max(magnitude_bits(values), axis=1)
