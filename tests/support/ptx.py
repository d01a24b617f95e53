"""A few instructions of PTX, carried out on arrays: enough for straight lines of inline assembly.

Words are uint32, fp16 in pairs of halves. Products and sums of fp16 are exact in fp64 as far as they matter: what has
more than 53 bits is beyond what saturates.
"""

import re

import numpy as np

Words = np.ndarray


def run(text: str, num_results: int, *operands: Words) -> list[Words]:
    """The results $0, … of a text in braces, of `operands`, uint32 [N] each, which are $num_results, …"""
    registers = {f"${num_results + place}": words.astype(np.uint32) for place, words in enumerate(operands)}
    for line in text.strip("{}\n").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, target, *sources = re.findall(r"[\w.$]+", line)
        values = [registers[each] if each in registers else np.array([int(each, 0)], np.uint32) for each in sources]
        registers[target] = INSTRUCTIONS[name](*values)
    return [registers[f"${place}"] for place in range(num_results)]


def halves(words: Words) -> np.ndarray:
    """fp16 pairs, lower half first, as fp64 [2, N]."""
    return np.stack([words & 0xFFFF, words >> 16]).astype(np.uint16).view(np.float16).astype(np.float64)


def words(halves: np.ndarray) -> Words:
    """The inverse, each number rounded to the nearest fp16."""
    with np.errstate(over="ignore"):
        bits = halves.astype(np.float16).view(np.uint16).astype(np.uint32)
    return bits[0] | bits[1] << 16


def _convert(upper: Words, lower: Words) -> Words:
    return words(np.stack([each.view(np.float32).astype(np.float64) for each in (lower, upper)]))


def _saturate(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), 0.0, x.clip(0.0, 1.0))


def _fma(a: Words, b: Words, c: Words) -> Words:
    return words(halves(a) * halves(b) + halves(c))


def _fma_sat(a: Words, b: Words, c: Words) -> Words:
    return words(_saturate(halves(a) * halves(b) + halves(c)))


def _permute(a: Words, b: Words, selector: Words) -> Words:
    """Byte k is that of a's four and b's four which digit k of the selector names; 8 more: its sign, eight times."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(both)
    for k in range(4):
        digit = selector.item() >> 4 * k & 15
        byte = both >> np.uint64(8 * (digit & 7)) & np.uint64(255)
        byte = np.where(byte > 127, 255, 0).astype(np.uint64) if digit & 8 else byte
        result |= byte << np.uint64(8 * k)
    return result.astype(np.uint32)


INSTRUCTIONS = {
    "cvt.rn.f16x2.f32": _convert,
    "fma.rn.f16x2": _fma,
    "fma.rn.sat.f16x2": _fma_sat,
    "mov.b32": lambda a: a,
    "and.b32": np.bitwise_and,
    "xor.b32": np.bitwise_xor,
    "shr.u32": np.right_shift,
    "add.u32": np.add,
    "sub.u32": np.subtract,
    "prmt.b32": _permute,
}
