"""`blockwise8` in Triton, of two tensors, with signs and without: codes and values are the reference's, bit for bit.

Encoding searches nothing: an estimate, see `blockwise8._estimated_place`, leads to the one border that decides, by
|x| > border · scale as in the reference. So the estimate, and the quotient it is computed from, are rounded as is
fastest: on a device in fp16, see `blockwise8_ptx`, in the interpreter in fp32. Both lead to the same codes, if not
always by the same border: an element between two borders gets the same place from either.

Blocks that are zeros or not finite have the factors 0, to estimate by, and NaN, to decide by: all their elements are at
place 0, and above no border.

Shape letters: R blocks, each H rows of C elements.
"""

import triton
import triton.language as tl

from tahq.memory.adam import blockwise8_ptx as ptx
from tahq.quant.gpu.tiles import INFINITY, IS_INTERPRETED, ROUNDING, ROUNDING_BITS, magnitude_bits

ZERO = tl.constexpr(127)
"""The code of 0 with signs."""
TABLE = tl.constexpr(256)
"""Entries of each table: the maps with signs and without, and the borders of either."""
_HAS_GATHER = tl.constexpr(hasattr(tl, "gather"))
"""Triton 3.2 has none."""
_FACTOR = tl.constexpr(ptx.FACTOR)
_SMALLEST_NORMAL = tl.constexpr(0x00800000)
_NOT_A_NUMBER = tl.constexpr(0x7FC00000)
_SIGNED_PLACES, _PLACES = tl.constexpr(ptx.places(True)), tl.constexpr(ptx.places(False))
_SIGNED_CODES, _CODES = tl.constexpr(ptx.codes(True)), tl.constexpr(ptx.codes(False))


@triton.jit
def decode_blocks(m_codes, v_codes, m_scales, v_scales, tables):
    """Values fp32 [R, H, C], with signs and without, of codes uint8 [R, H, C] and scales fp32 [R, 1, 1]."""
    m, v = _look_up(tables, m_codes.to(tl.int32), v_codes.to(tl.int32))
    return m * m_scales, v * v_scales


@triton.jit
def encode_blocks(m, v, m_largest, v_largest, tables):
    """Codes uint8 [R, H, C] of values fp32, with signs and without, none of which is negative.

    Their largest magnitudes of each block are int32 [R, 1, 1] (bits).
    """
    m_scale, m_inverse = _factors(m_largest)
    v_scale, v_inverse = _factors(v_largest)
    magnitudes = tl.abs(m)
    m_place, m_bytes = _places(magnitudes * m_inverse, True)
    v_place, v_bytes = _places(v * v_inverse, False)
    m_border, v_border = _look_up(tables + 2 * TABLE, m_place, v_place)
    # A difference has the sign that a comparison finds, subnormal ones included, and a NaN has none.
    m_codes = _signed_codes(m_bytes, m_border * m_scale - magnitudes, m)
    return m_codes, _codes(v_bytes, v_border * v_scale - v)


@triton.jit
def scales_of(largest):
    """Scales, fp32, of blocks' largest magnitudes, int32 (bits): 0 below normal numbers, NaN if not finite."""
    bits = tl.where(largest < _SMALLEST_NORMAL, 0, tl.where(largest >= INFINITY, _NOT_A_NUMBER, largest))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def largest_of(values, SIGNED: tl.constexpr):
    """Bits of the largest magnitude of each block of values [R, H, C], int32 [R, 1, 1]; a NaN is the largest.

    Without signs, there is none to take off: not even that of a NaN, which comes of arithmetic, on a device.
    """
    bits = magnitude_bits(values) if SIGNED or IS_INTERPRETED else values.to(tl.int32, bitcast=True)
    return tl.max(tl.max(bits, axis=1, keep_dims=True), axis=2, keep_dims=True)


@triton.jit
def _look_up(tables, first, second):
    """Entries, fp32 [R, H, C], at places, int32 [R, H, C], of a table and of the next one.

    Through shared memory, where an address takes one instruction, not two, and lines of the cache don't matter. Nor
    does the layout that Triton would choose for a load like this, and bring all other tensors to. For both tables at
    once: threads wait for each other once.
    """
    if not _HAS_GATHER:
        return tl.load(tables + first), tl.load(tables + TABLE + second)
    R: tl.constexpr = first.shape[0]
    H: tl.constexpr = first.shape[1]
    C: tl.constexpr = first.shape[2]
    entries = tl.load(tables + tl.arange(0, 2 * TABLE))
    places = tl.reshape(tl.join(first, second + TABLE), [R * H * C * 2])
    return tl.split(tl.reshape(tl.gather(entries, places, 0), [R, H, C, 2]))


@triton.jit
def _factors(largest):
    """What to multiply borders, and magnitudes, by: s, and FACTOR/s to 2⁻²⁰, both fp32 [R, 1, 1].

    Of s, finite and normal, FACTOR/s is normal, too. Its fraction, in [1, 2), is inverted by itself; with a low bit set
    it is above 1, and the inverse is below 1.
    """
    fraction = ((largest & 0x007FFFFF) | 0x3F800004).to(tl.float32, bitcast=True)
    if IS_INTERPRETED:
        inverse = 1.0 / fraction
    else:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [fraction], dtype=tl.float32, is_pure=True, pack=1
        )
    bits = inverse.to(tl.int32, bitcast=True) + 0x40800000 - (largest & 0x7F800000)
    is_plain = (largest >= _SMALLEST_NORMAL) & (largest < INFINITY)
    scale = tl.where(is_plain, largest, _NOT_A_NUMBER).to(tl.float32, bitcast=True)
    return scale, tl.where(is_plain, bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def _places(quotients, SIGNED: tl.constexpr):
    """The numbers, from 0, of the borders to look at for quotients times FACTOR: int32, and uint8. A NaN is at 0."""
    if IS_INTERPRETED:
        place = _interpreted_place(quotients * (1.0 / _FACTOR), SIGNED)
        return place, place.to(tl.uint8)
    return tl.inline_asm_elementwise(
        _SIGNED_PLACES if SIGNED else _PLACES,
        "=r,=r,=r,=r,=r,f,f,f,f",
        [quotients],
        dtype=(tl.int32, tl.uint8),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _interpreted_place(quotients, SIGNED: tl.constexpr):
    """⌊min_i u_i + ½⌋ − 1"""
    WIDTH: tl.constexpr = 1.0 if SIGNED else 2.0
    FIRST: tl.constexpr = 0.0 if SIGNED else 1.0
    a = tl.where(quotients >= 0, quotients, 0.0)
    lowest = a * (WIDTH * 1e6 / 0.9) + (WIDTH - FIRST - WIDTH / 9)
    for i in tl.static_range(1, 7):
        CELLS: tl.constexpr = WIDTH * 2**i
        lowest = tl.minimum(lowest, a * (CELLS * 10 ** (6 - i) / 0.9) + (CELLS - FIRST - CELLS / 9))
    return (lowest + ROUNDING).to(tl.int32, bitcast=True) - (ROUNDING_BITS + 1)


@triton.jit
def _signed_codes(places, below, values):
    """127 ± p, uint8, of places uint8, p being one more where `below`, fp32, is negative."""
    if IS_INTERPRETED:
        place = places.to(tl.int32) + (below < 0).to(tl.int32)
        return tl.where(values < 0, ZERO - tl.minimum(place, ZERO), ZERO + place).to(tl.uint8)
    return tl.inline_asm_elementwise(
        _SIGNED_CODES,
        "=r,r,r,r,r,r,r,r,r,r",
        [places, below.to(tl.int32, bitcast=True), values.to(tl.int32, bitcast=True)],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _codes(places, below):
    """p, likewise."""
    if IS_INTERPRETED:
        return (places.to(tl.int32) + (below < 0).to(tl.int32)).to(tl.uint8)
    below = below.to(tl.int32, bitcast=True)
    return tl.inline_asm_elementwise(_CODES, "=r,r,r,r,r,r", [places, below], dtype=tl.uint8, is_pure=True, pack=4)
