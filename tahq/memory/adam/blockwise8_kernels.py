"""A step of AdamW with 8-bit moments as one kernel per parameter: `blockwise8` in Triton, bit-equal to the reference.

Encoding does not search: an estimate (`blockwise8._estimated_place`) finds the one border that decides, by
|x| > border · scale as in the reference. So the estimate and its quotient may use the fastest rounding:
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
`tests/memory/test_blockwise8.py` checks all of them.

*Codes.* Four elements are assembled from bytes: places, a bit for being above the border, a sign.

Shape letters: R blocks per program, each B elements in H rows of C.
"""

import struct
from functools import lru_cache

import torch
import triton
import triton.language as tl

from tahq.memory.adam.blockwise8 import BLOCK, borders, dynamic_map
from tahq.memory.adam.kernels import NUMBERS, advance, load_once, rounded, store
from tahq.quant.gpu.launch import EXACT, BoundLaunches, Launch
from tahq.quant.gpu.tiles import INFINITY, IS_INTERPRETED, ROUNDING, ROUNDING_BITS, magnitude_bits
from tahq.quant.gpu.words import approximate_inverse

_ELEMENTS = 1024
"""Per program, of several warps: a single warp would look up tables by shuffles, at three times the instructions."""
_ELEMENTS_PER_WARP = 256  # Eight per thread
_ROW = 128  # Elements of a block that a warp reads at a time
FACTOR = 4.0  # Factor of quotients |x|/s, so that in fp16 the lowest are not too coarse nor the slopes too large
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

    With signs, a code is 127 + p or 127 − p; values nearest to −1 also have p = 128, which is replaced by 127.

    Operands: $0 the codes; $1 bytes of places; $2–$5 fp32, negative for elements above the border at their place; with
    signs, $6–$9 the elements, fp32.
    """
    lines = [".reg .b32 a, b, p;", *_signs(2), "and.b32 a, a, 0x01010101;"]
    if not signed:
        return _block([*lines, "add.u32 $0, $1, a;"])
    lines += ["add.u32 p, $1, a;", *_signs(6)]
    # p above 127, and negative: less 1
    lines += ["and.b32 b, p, a;", "and.b32 b, b, 0x80808080;", "shr.u32 b, b, 7;", "sub.u32 p, p, b;"]
    # 127 − p is p with seven bits inverted
    lines += ["and.b32 b, a, 0x7f7f7f7f;", "xor.b32 p, p, b;", "xor.b32 b, b, 0x7f7f7f7f;", "add.u32 $0, p, b;"]
    return _block(lines)


def twice(number: float) -> str:
    """fp16 of a number, in both halves of a word."""
    (bits,) = struct.unpack("<H", struct.pack("<e", number))
    return f"0x{bits:04x}{bits:04x}"


def _signs(first: int) -> list[str]:
    """Put into `a` four bytes, each 255 where the operand, from `first` on, is negative, and 0 elsewhere."""
    return [
        f"prmt.b32 a, ${first}, ${first + 1}, 0xfb;",
        f"prmt.b32 b, ${first + 2}, ${first + 3}, 0xfb;",
        "prmt.b32 a, a, b, 0x5410;",
    ]


def _block(lines: list[str]) -> str:
    return "\n".join(["{", *lines, "}"])


ZERO = tl.constexpr(127)  # The code of 0 with signs
TABLE = tl.constexpr(256)  # Entries of each table: the maps with signs and without, and the borders of either
_HAS_GATHER = tl.constexpr(hasattr(tl, "gather"))  # Triton 3.2 has none
_FACTOR = tl.constexpr(FACTOR)
_SMALLEST_NORMAL = tl.constexpr(0x00800000)
_NOT_A_NUMBER = tl.constexpr(0x7FC00000)
_SIGNED_PLACES, _PLACES = tl.constexpr(places_ptx(True)), tl.constexpr(places_ptx(False))
_SIGNED_CODES, _CODES = tl.constexpr(codes_ptx(True)), tl.constexpr(codes_ptx(False))


@triton.jit
def _decode_blocks(m_codes, v_codes, m_scales, v_scales, tables):
    """Values fp32 [R, H, C], with signs and without, of codes uint8 [R, H, C] and scales fp32 [R, 1, 1]."""
    m, v = _look_up(tables, m_codes.to(tl.int32), v_codes.to(tl.int32))
    return m * m_scales, v * v_scales


@triton.jit
def _encode_blocks(m, v, m_largest, v_largest, tables):
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
def _scales_of(largest):
    """Scales, fp32, of blocks' largest magnitudes, int32 (bits): 0 below normal numbers, NaN if not finite."""
    bits = tl.where(largest < _SMALLEST_NORMAL, 0, tl.where(largest >= INFINITY, _NOT_A_NUMBER, largest))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _largest_of(values, SIGNED: tl.constexpr):
    """Bits of the largest magnitude of each block of values [R, H, C], int32 [R, 1, 1]; a NaN is the largest.

    Unsigned values have no sign bit to remove: on a device, arithmetic makes no NaN with a sign.
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
    bits = approximate_inverse(fraction).to(tl.int32, bitcast=True) + 0x40800000 - (largest & 0x7F800000)
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


@triton.jit(do_not_specialize=["first_program", "num_elements", *NUMBERS])
def adamw8bit_kernel(
    weights, m_codes, v_codes, m_scales, v_scales, tables, gradients, first_program, num_elements, beta1, rest1,
    beta2, rest2, decay, rate, root_factor, epsilon,
    R: tl.constexpr, B: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """R blocks of a parameter with 8-bit moments.

    A block is H rows of C elements, one warp wide if B allows it, four elements per thread: so a warp finds a block's
    largest magnitudes alone, and a thread reads and writes 16 contiguous bytes of weights and gradients.
    """
    H: tl.constexpr = B // C
    program = tl.program_id(0) + first_program
    # A program may begin beyond 2³¹; offsets within it do not exceed that.
    start = program.to(tl.int64) * (R * B)
    left = tl.minimum(num_elements - start, R * B).to(tl.int32)
    block = tl.arange(0, R)[:, None, None]
    within = tl.arange(0, H)[None, :, None] * C + tl.arange(0, C)[None, None, :]
    # At most four elements per thread at a time, although sixteen codes could be read at once. The 2 is not true; it
    # only ranks dimensions, so that threads left over by a row take other blocks, not other rows.
    at = tl.max_contiguous(tl.multiple_of(block * B + within, [1, 1, 4]), [2, 1, 4])
    is_real, is_block = at < left, block * B < left
    weights += start
    gradients += start
    m_codes += start
    v_codes += start
    m_scales += program.to(tl.int64) * R
    v_scales += program.to(tl.int64) * R
    gradient = load_once(gradients + at, is_real, 0.0, MASKED).to(tl.float32)
    weight = load_once(weights + at, is_real, 0.0, MASKED)
    m_code = load_once(m_codes + at, is_real, 127, MASKED)
    v_code = load_once(v_codes + at, is_real, 0, MASKED)
    m_scale = load_once(m_scales + block, is_block, 0.0, MASKED)
    v_scale = load_once(v_scales + block, is_block, 0.0, MASKED)
    m, v = _decode_blocks(m_code, v_code, m_scale, v_scale, tables)
    moved, m, v = advance(
        weight.to(tl.float32), gradient, m, v, beta1, rest1, beta2, rest2, decay, rate, root_factor, epsilon
    )
    store(weights + at, rounded(moved, weight), is_real, MASKED)
    m_largest, v_largest = _largest_of(m, True), _largest_of(v, False)
    _store_by_all(m_scales + block, _scales_of(m_largest), is_block, MASKED)
    _store_by_all(v_scales + block, _scales_of(v_largest), is_block, MASKED)
    m_code, v_code = _encode_blocks(m, v, m_largest, v_largest, tables)
    store(m_codes + at, m_code, is_real, MASKED)
    store(v_codes + at, v_code, is_real, MASKED)


@triton.jit
def _store_by_all(pointers, values, is_real, MASKED: tl.constexpr):
    """Store from all threads with a value: Triton would first move it to other threads, which wait for each other."""
    if IS_INTERPRETED:
        tl.store(pointers, values, mask=is_real)
    else:
        is_real = is_real if MASKED else tl.full(values.shape, 1, tl.int1)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p st.global.f32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,f,r",
            [pointers.to(tl.int64), values, is_real.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def bind_adamw8bit(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    m_codes: torch.Tensor,
    v_codes: torch.Tensor,
    m_scales: torch.Tensor,
    v_scales: torch.Tensor,
    block: int = BLOCK,
) -> BoundLaunches:
    """Launches of a step with 8-bit moments on these tensors and any gradient of the same shape and dtype.

    All are contiguous and aligned to 16 bytes.
    """
    tensors = (weight, m_codes, v_codes, m_scales, v_scales, _tables(weight.device), gradient)
    return BoundLaunches(_plans(weight.numel(), block), tensors, moving=6)


@lru_cache(maxsize=1024)
def _plans(num_elements: int, block: int) -> tuple[Launch, ...]:
    """The full programs, which need no masks, and the last one if it is partial."""
    elements = max(block, _ELEMENTS)
    constants = {
        "R": elements // block,
        "B": block,
        "C": min(block, _ROW),
        "num_warps": elements // _ELEMENTS_PER_WARP,
        **EXACT,
    }
    whole, left = divmod(num_elements, elements)
    parts = ((0, whole, False), (whole, int(left > 0), True))
    return tuple(
        Launch(adamw8bit_kernel, (programs, 1, 1), (first, num_elements), constants | {"MASKED": is_masked})
        for first, programs, is_masked in parts
        if programs
    )


@lru_cache(maxsize=32)
def _tables(device: torch.device) -> torch.Tensor:
    """Both maps and both tables of borders, 256 entries each."""
    tables = torch.zeros(4, 256)
    for row, values in enumerate((dynamic_map(True), dynamic_map(False), borders(True), borders(False))):
        tables[row, : len(values)] = values
    return tables.to(device)
