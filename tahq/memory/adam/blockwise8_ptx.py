"""What the kernels of `blockwise8` say in PTX, because Triton has no words for it: halves and bytes, side by side.

*Places.* `blockwise8._estimated_place` is the lowest of seven lines. So it is the sum of one step for each decade,
F_i·min(max(x_i, 0), 1) with x_i = (10^(6−i)·a − 0.1)/0.9, and a multiply-add that saturates makes such a step in one
instruction, of two elements where they are fp16. A sum begins at 1536, above which fp16 has whole numbers only: each
step is rounded to one as it is added, and no more than one of them is neither 0 nor F_i. Eleven bits are enough, as a
place may be taken for either of two; in the lowest decades, whose cells are wide, steps are not those of decades but
the few that serve their borders. For every fp16 quotient, and all that are rounded to it, the border at that place
decides right: `tests/memory/test_blockwise8_ptx.py` goes through them.

*Codes.* Four elements are put together from bytes: places, a bit for what is above its border, a sign.
"""

import struct

FACTOR = 4.0
"""What quotients |x|/s are multiplied by, so that in fp16 the lowest are not too coarse nor the slopes too large."""
STEPS: dict[bool, tuple[tuple[float, float, int], ...]] = {
    True: ((1e6 / 9, 1 / 18, 3), *((10.0 ** (6 - i) / 0.9, -1 / 9, 1 << i) for i in range(2, 7))),
    False: (
        (0.25e6 / 1.2, 0.125 - 0.25 / 12, 4),
        (0.5e6 / 2.6, 0.25 - 3.3 / 2.6, 2),
        *((10.0 ** (6 - i) / 0.9, -1 / 9, 2 << i) for i in range(2, 7)),
    ),
}
"""By sign: slope and offset of each x, and what the step is multiplied by. Borders 0 and up are at 0.275, 1.9, 5.5 and
14.5·10⁻⁶ with signs, 0, 0.55, 1.45, 3.25, 5.5, 7.75 and 12.2·10⁻⁶ without; steps take the place from k to k + 1 between
the kth and the next: 4 and 7, and 0.1, 1.3, 2.5, 3.7, 6.6 and 9.2·10⁻⁶ of the scale.
"""


def places(signed: bool) -> str:
    """Numbers, from 0, of the borders to look at for four quotients times FACTOR; and the same four as bytes.

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


def codes(signed: bool) -> str:
    """Four codes, as bytes.

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
