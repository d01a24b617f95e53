"""`blockwise8` in Triton: codes and values equal to the reference's, bit for bit.

Encoding searches nothing: an estimate, see `blockwise8._estimated_place`, leads to the one border that decides, by
|x| > border · scale as in the reference. So the estimate, and the quotient it is computed from, are rounded as is
fastest: on a device in fp16, see `blockwise8_ptx`, in the interpreter in fp32. Both lead to the same codes, if not
always by the same border: an element between two borders gets the same place from either.

Blocks that are zeros or not finite have the factors 0, to estimate by, and NaN, to decide by: all their elements are at
place 0, and above no border.
"""

import triton
import triton.language as tl

from tahq.memory import blockwise8_ptx as ptx
from tahq.quant.gpu.tiles import INFINITY, IS_INTERPRETED, ROUNDING, ROUNDING_BITS, magnitude_bits

ZERO = tl.constexpr(127)
"""The code of 0 with signs."""
TABLE = tl.constexpr(256)
"""Entries of each table: the maps with signs and without, and the borders of either."""
_FACTOR = tl.constexpr(ptx.FACTOR)
_SMALLEST_NORMAL = tl.constexpr(0x00800000)
_NOT_A_NUMBER = tl.constexpr(0x7FC00000)
_SIGNED_VALUES, _VALUES = tl.constexpr(ptx.look_up(0)), tl.constexpr(ptx.look_up(256))
_SIGNED_BORDERS, _BORDERS = (tl.constexpr(ptx.look_up(first - ptx.START)) for first in (512, 768))
_SIGNED_PLACES, _PLACES = tl.constexpr(ptx.places(True)), tl.constexpr(ptx.places(False))
_SIGNED_CODES, _CODES = tl.constexpr(ptx.codes(True)), tl.constexpr(ptx.codes(False))


@triton.jit
def decode_block(codes, scales, tables, SIGNED: tl.constexpr):
    """Values fp32 [R, H, C] of codes uint8 [R, H, C] and scales fp32 [R, 1, 1]."""
    if IS_INTERPRETED:
        return tl.load(tables + (0 if SIGNED else TABLE) + codes.to(tl.int32)) * scales
    return _look_up(codes.to(tl.int32), tables, _SIGNED_VALUES if SIGNED else _VALUES) * scales


@triton.jit
def _look_up(places, tables, ASM: tl.constexpr):
    """Entries of a table, without a layout of their own, to which a load by Triton would bring all other tensors."""
    return tl.inline_asm_elementwise(
        ASM, "=f,r,l", [places, tables.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def scales_of(largest):
    """Scales, fp32, of blocks' largest magnitudes, int32 (bits): 0 below normal numbers, NaN if not finite."""
    bits = tl.where(largest < _SMALLEST_NORMAL, 0, tl.where(largest >= INFINITY, _NOT_A_NUMBER, largest))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_block(values, largest, tables, SIGNED: tl.constexpr):
    """Codes uint8 [R, H, C] of values fp32; `largest`: the largest magnitude of each block, int32 [R, 1, 1] (bits).

    Without signs, no value is negative.
    """
    is_plain = (largest >= _SMALLEST_NORMAL) & (largest < INFINITY)
    scale = tl.where(is_plain, largest, _NOT_A_NUMBER).to(tl.float32, bitcast=True)
    inverse = tl.where(is_plain, _inverse_bits(largest), 0).to(tl.float32, bitcast=True)
    magnitudes = tl.abs(values) if SIGNED else values
    if IS_INTERPRETED:
        place = _place(magnitudes * inverse, SIGNED)
        border = tl.load(tables + (2 if SIGNED else 3) * TABLE + place)
        place += (magnitudes > border * scale).to(tl.int32)
        if SIGNED:
            place = tl.where(values < 0, ZERO - tl.minimum(place, ZERO), ZERO + place)
        return place.to(tl.uint8)
    p0, p1 = tl.inline_asm_elementwise(
        _SIGNED_PLACES if SIGNED else _PLACES,
        "=r,=r,=r,=r,=r,f,f,f,f",
        [magnitudes * inverse],
        dtype=(tl.int32, tl.uint8),
        is_pure=True,
        pack=4,
    )
    border = _look_up(p0, tables, _SIGNED_BORDERS if SIGNED else _BORDERS)
    # A difference has the sign that a comparison finds, subnormal ones included, and a NaN has none.
    below = (border * scale - magnitudes).to(tl.int32, bitcast=True)
    if SIGNED:
        bits = values.to(tl.int32, bitcast=True)
        return tl.inline_asm_elementwise(
            _SIGNED_CODES, "=r,r,r,r,r,r,r,r,r,r", [p1, below, bits], dtype=tl.uint8, is_pure=True, pack=4
        )
    return tl.inline_asm_elementwise(_CODES, "=r,r,r,r,r,r", [p1, below], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def _inverse_bits(largest):
    """Bits of FACTOR/s, to 2⁻²⁰, of the bits of a finite normal number s: such a number, too, whatever s is.

    The fraction, in [1, 2), is inverted by itself; with a low bit set it is above 1, and the inverse is below 1.
    """
    fraction = ((largest & 0x007FFFFF) | 0x3F800004).to(tl.float32, bitcast=True)
    if IS_INTERPRETED:
        inverse = 1.0 / fraction
    else:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [fraction], dtype=tl.float32, is_pure=True, pack=1
        )
    return inverse.to(tl.int32, bitcast=True) + 0x40800000 - (largest & 0x7F800000)


@triton.jit
def _place(quotients, SIGNED: tl.constexpr):
    """The number, from 0, of the border to look at, int32: ⌊min_i u_i + ½⌋ − 1. A NaN is at 0. In the interpreter."""
    WIDTH: tl.constexpr = 1.0 if SIGNED else 2.0
    FIRST: tl.constexpr = 0.0 if SIGNED else 1.0
    a = tl.where(quotients >= 0, quotients * (1.0 / _FACTOR), 0.0)
    lowest = a * (WIDTH * 1e6 / 0.9) + (WIDTH - FIRST - WIDTH / 9)
    for i in tl.static_range(1, 7):
        CELLS: tl.constexpr = WIDTH * 2**i
        lowest = tl.minimum(lowest, a * (CELLS * 10 ** (6 - i) / 0.9) + (CELLS - FIRST - CELLS / 9))
    return (lowest + ROUNDING).to(tl.int32, bitcast=True) - (ROUNDING_BITS + 1)


@triton.jit
def largest_of(values, SIGNED: tl.constexpr):
    """Bits of the largest magnitude of each block of values [R, H, C], int32 [R, 1, 1]; a NaN is the largest.

    Without signs, there is none to take off: not even that of a NaN, which comes of arithmetic, on a device.
    """
    bits = magnitude_bits(values) if SIGNED or IS_INTERPRETED else values.to(tl.int32, bitcast=True)
    return tl.max(tl.max(bits, axis=1, keep_dims=True), axis=2, keep_dims=True)
