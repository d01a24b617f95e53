"""`blockwise8` in Triton, for two tensors, one signed and one not: codes and values are bit-equal to the reference.

Encoding does not search: an estimate (`blockwise8._estimated_place`) finds the one border that decides, by
|x| > border · scale as in the reference. So the estimate and its quotient may be rounded in whatever way is fastest:
fp16 on a device, fp32 in the interpreter. Both give the same codes, though not always by the same border: an element
between two borders gets the same place from either.

Blocks that are zero or not finite get the factors 0, for the estimate, and NaN, for the decision: all their elements
are at place 0 and above no border.

Two parts are inline PTX, because Triton has no operations on pairs of halves and on bytes:

*Places.* `blockwise8._estimated_place` is the lowest of seven lines. So it is the sum of one step per decade,
F_i·min(max(x_i, 0), 1) with x_i = (10^(6−i)·a − 0.1)/0.9, and a saturating multiply-add makes such a step in one
instruction, for two fp16 elements. A sum begins at 1536, above which fp16 has whole numbers only: each step is rounded
to one as it is added, and at most one of them is neither 0 nor F_i. Eleven bits are enough, since a place may be taken
for either of two; in the lowest decades, whose cells are wide, steps serve the few borders there instead of decades.
For every fp16 quotient, and all numbers rounded to it, the border at that place decides correctly:
`tests/memory/test_blockwise8_ptx.py` checks all of them.

*Codes.* Four elements are assembled from bytes: places, a bit for being above the border, a sign.

Shape letters: R blocks, each H rows of C elements.
"""

import struct

import triton
import triton.language as tl

from tahq.quant.gpu.tiles import INFINITY, IS_INTERPRETED, ROUNDING, ROUNDING_BITS, magnitude_bits

FACTOR = 4.0
"""Factor of quotients |x|/s, so that in fp16 the lowest are not too coarse nor the slopes too large."""
STEPS: dict[bool, tuple[tuple[float, float, int], ...]] = {
    True: ((1e6 / 9, 1 / 18, 3), *((10.0 ** (6 - i) / 0.9, -1 / 9, 1 << i) for i in range(2, 7))),
    False: (
        (0.25e6 / 1.2, 0.125 - 0.25 / 12, 4),
        (0.5e6 / 2.6, 0.25 - 3.3 / 2.6, 2),
        *((10.0 ** (6 - i) / 0.9, -1 / 9, 2 << i) for i in range(2, 7)),
    ),
}
"""By sign: slope and offset of each x, and the factor of its step. Borders 0 and up are at 0.275, 1.9, 5.5 and
14.5·10⁻⁶ with signs, 0, 0.55, 1.45, 3.25, 5.5, 7.75 and 12.2·10⁻⁶ without; steps take the place from k to k + 1 between
the kth and the next: 4 and 7, and 0.1, 1.3, 2.5, 3.7, 6.6 and 9.2·10⁻⁶ of the scale.
"""


def places_ptx(signed: bool) -> str:
    """PTX for the indices of the borders to compare for four quotients times FACTOR, also as bytes.

    Operands: $0–$3 places; $4 the bytes; $5–$8 the quotients, fp32.
    """
    lines = [".reg .b32 low, high, a, b, step, slope, offset, weight;"]
    lines += ["cvt.rn.f16x2.f32 low, $6, $5;", "cvt.rn.f16x2.f32 high, $8, $7;"]
    lines += [f"mov.b32 a, {twice(1536.0)};", "mov.b32 b, a;"]
    for slope, offset, weight in STEPS[signed]:
        constants = zip(("slope", "offset", "weight"), (slope / FACTOR, offset, weight), strict=True)
        lines += [f"mov.b32 {name}, {twice(value)};" for name, value in constants]
        for sum, quotients in (("a", "low"), ("b", "high")):
            lines += [
                f"fma.rn.sat.f16x2 step, {quotients}, slope, offset;",
                f"fma.rn.f16x2 {sum}, step, weight, {sum};",
            ]
    for first, sum in ((0, "a"), (2, "b")):
        lines += [f"and.b32 ${first}, {sum}, 0xff;", f"prmt.b32 ${first + 1}, {sum}, 0, 0x4442;"]
    return _block([*lines, "prmt.b32 $4, a, b, 0x6420;"])


def codes_ptx(signed: bool) -> str:
    """PTX for four codes, as bytes.

    With signs, a code is 127 + p or 127 − p; p is 128 for what is nearest to −1, too, and then taken for 127.

    Operands: $0 the codes; $1 bytes of places; $2–$5 fp32, negative for what is above the border at its place; with
    signs, $6–$9 the elements, fp32.
    """
    lines = [".reg .b32 a, b, p;", *_signs("a", 2), "and.b32 a, a, 0x01010101;"]
    if not signed:
        return _block([*lines, "add.u32 $0, $1, a;"])
    lines += ["add.u32 p, $1, a;", *_signs("a", 6)]
    # p above 127, and negative: less 1
    lines += ["and.b32 b, p, a;", "and.b32 b, b, 0x80808080;", "shr.u32 b, b, 7;", "sub.u32 p, p, b;"]
    # 127 − p is p with seven bits inverted
    lines += ["and.b32 b, a, 0x7f7f7f7f;", "xor.b32 p, p, b;", "xor.b32 b, b, 0x7f7f7f7f;", "add.u32 $0, p, b;"]
    return _block(lines)


def twice(number: float) -> str:
    """fp16 of a number, in both halves of a word."""
    (bits,) = struct.unpack("<H", struct.pack("<e", number))
    return f"0x{bits:04x}{bits:04x}"


def _signs(name: str, first: int) -> list[str]:
    """Four bytes, each 255 where the operand, from `first` on, is negative, and 0 elsewhere."""
    return [
        f"prmt.b32 {name}, ${first}, ${first + 1}, 0xfb;",
        f"prmt.b32 b, ${first + 2}, ${first + 3}, 0xfb;",
        f"prmt.b32 {name}, {name}, b, 0x5410;",
    ]


def _block(lines: list[str]) -> str:
    return "\n".join(["{", *lines, "}"])


ZERO = tl.constexpr(127)
"""The code of 0 with signs."""
TABLE = tl.constexpr(256)
"""Entries of each table: the maps with signs and without, and the borders of either."""
_HAS_GATHER = tl.constexpr(hasattr(tl, "gather"))
"""Triton 3.2 has none."""
_FACTOR = tl.constexpr(FACTOR)
_SMALLEST_NORMAL = tl.constexpr(0x00800000)
_NOT_A_NUMBER = tl.constexpr(0x7FC00000)
_SIGNED_PLACES, _PLACES = tl.constexpr(places_ptx(True)), tl.constexpr(places_ptx(False))
_SIGNED_CODES, _CODES = tl.constexpr(codes_ptx(True)), tl.constexpr(codes_ptx(False))


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

    Unsigned values need no sign removed: on a device not even a NaN from arithmetic has one.
    """
    bits = magnitude_bits(values) if SIGNED or IS_INTERPRETED else values.to(tl.int32, bitcast=True)
    return tl.max(tl.max(bits, axis=1, keep_dims=True), axis=2, keep_dims=True)


@triton.jit
def _look_up(tables, first, second):
    """Entries, fp32 [R, H, C], at places, int32 [R, H, C], of a table and of the next one.

    Through shared memory, where an address takes one instruction instead of two and cache lines do not matter, and
    which avoids the layout that Triton would choose for such a load and convert all other tensors to. Both tables at
    once, so that threads wait for each other once.
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
    """The factors of borders and of magnitudes: s, and FACTOR/s to 2⁻²⁰, both fp32 [R, 1, 1].

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
    """The indices of the borders to compare for quotients times FACTOR: int32, and uint8; 0 for NaN."""
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
