"""`fixed` on the CPU in numba: two readings of the tensor, one of the stream, nothing of their size in between.

Encoding reads the tensor for its largest magnitudes, which decide the power of two and every scale, and again to
round and pack. Threads share ranges of groups. Streams and values equal the reference's to the bit.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tahq.quant.cpu.kernel import Team, kernel
from tahq.quant.cpu.numbers import (
    HALF_INFINITY,
    INFINITY_BITS,
    Fp32Array,
    Key,
    Values,
    float_of,
    float_to_half,
    half_to_float,
    hash_of,
    round_half_even,
    write_nan,
    write_scaled,
)
from tahq.quant.cpu.planes import ByteArray, read_planes, write_planes
from tahq.quant.cpu.tiles import Grid, Int32Array, measure, place_of_tile, power_of_two, read_tile, top_exponent
from tahq.quant.fixed.reference import largest_code
from tahq.quant.fixed.stream import TOP_EXPONENT, FixedLayout
from tahq.quant.stream import CANONICAL_NAN

_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_DRAW_UNIT = np.float32(2.0**-24)
_LARGEST = np.finfo(np.float32).max


class Rule(NamedTuple):
    """What the kernels need of the spec and the key; `largest` is Q = 2^(bits − 1) − 1."""

    bits: int
    largest: int
    is_random: bool
    key: Key

    @classmethod
    def of(cls, layout: FixedLayout, key: int) -> "Rule":
        """The rule of a layout."""
        spec = layout.spec
        return cls(spec.bits, largest_code(spec.bits), spec.round == "stochastic", Key.of(key))


class Sections(NamedTuple):
    """The sections of a stream, sharing its memory."""

    scale: NDArray[np.uint16]
    whole: ByteArray
    planes: ByteArray

    @classmethod
    def of(cls, layout: FixedLayout, buf: torch.Tensor) -> "Sections":
        """Of an aligned buffer that has the layout's length."""
        scale, whole, planes = (layout.sections.view(buf, name).numpy() for name in ("scale", "bytes", "planes"))
        return cls(scale.view(np.uint16), whole, planes)


class Scratch(NamedTuple):
    """Room for one group: values [G], codes [G], what codes have above whole bytes [G], and that as words [G/8]."""

    y: Fp32Array
    codes: Int32Array
    rest: ByteArray
    words: NDArray[np.uint64]

    @classmethod
    def of(cls, group: int) -> "Scratch":
        """Fresh memory, for one thread."""
        rest = np.empty(group, np.uint8)
        return cls(np.empty(group, np.float32), np.empty(group, np.int32), rest, rest.view(np.uint64))


@kernel
def write_groups(
    values: Values,
    grid: Grid,
    rule: Rule,
    factor: np.float32,
    magnitudes: Int32Array,
    first: int,
    stop: int,
    sections: Sections,
    scratch: Scratch,
) -> None:
    """Quantise and pack groups."""
    for tile in range(first, stop):
        is_finite = magnitudes[tile] < INFINITY_BITS
        read_tile(values, grid, tile, factor, magnitudes[tile], scratch.y)
        scale = _ceil_to_half(float_of(magnitudes[tile]) * factor) if is_finite else np.int32(0)
        step = half_to_float(scale) / np.float32(rule.largest) if scale != 0 else np.float32(np.inf)
        if rule.is_random:
            _round_stochastic(scratch.y, step, rule, tile * grid.group, scratch.codes)
        else:
            _round_nearest(scratch.y, step, rule.largest, scratch.codes)
        sections.scale[tile] = scale if is_finite else CANONICAL_NAN
        _write_codes(scratch, rule.bits, tile, sections)


@kernel
def _ceil_to_half(value: np.float32) -> np.int32:
    """fp16 bits of the least number not below `value`, which is not negative."""
    nearest = float_to_half(value)
    return np.int32(nearest + 1) if half_to_float(nearest) < value else nearest


@kernel
def _round_nearest(y: Fp32Array, step: np.float32, largest: int, codes: Int32Array) -> None:
    top = np.float32(largest)
    for i in range(y.size):
        codes[i] = round_half_even(min(max(y[i] / step, -top), top)) + largest


@kernel
def _round_stochastic(y: Fp32Array, step: np.float32, rule: Rule, index: int, codes: Int32Array) -> None:
    top = np.float32(rule.largest)
    for i in range(y.size):
        ratio = y[i] / step
        floor = np.floor(ratio)
        rounded = floor + (_ONE if ratio - floor > draw(index + i, rule.key) else _ZERO)
        codes[i] = np.int32(min(max(rounded, -top), top)) + rule.largest


@kernel
def draw(index: int, key: Key) -> np.float32:
    """u in [0, 1), a function of the element's index and the key; see `stochastic_rounding.draws`."""
    return np.float32(np.int32(hash_of(index, key) >> 8)) * _DRAW_UNIT


@kernel
def _write_codes(scratch: Scratch, bits: int, tile: int, sections: Sections) -> None:
    codes, rest, group = scratch.codes, scratch.rest, scratch.codes.size
    stride = sections.scale.size * group
    for place in range(bits // 8):
        whole = sections.whole[place * stride + tile * group : place * stride + (tile + 1) * group]
        for i in range(group):
            whole[i] = np.uint8(codes[i] >> (8 * place))
    if bits & 7:
        for i in range(group):
            rest[i] = np.uint8(codes[i] >> (bits & 8))
        write_planes(scratch.words, 0, bits & 7, sections.planes, tile * (bits & 7) * scratch.words.size)


@kernel
def is_sound(scale: NDArray[np.uint16], is_flagged: bool) -> bool:
    """Whether `fixed.stream.unpack` takes the scales: none negative or infinite, NaN where and only where flagged."""
    wrong, marks = np.int32(0), np.int32(0)
    for tile in range(scale.size):
        bits = np.int32(scale[tile])
        wrong = np.int32(wrong | np.int32(bits == HALF_INFINITY) | np.int32(bits & 0x8000))
        marks = np.int32(marks | np.int32(bits > HALF_INFINITY))
    has_marks = marks != 0
    return bool(wrong == 0 and has_marks == is_flagged)


@kernel
def read_groups(
    values: Values,
    grid: Grid,
    rule: Rule,
    factor: np.float32,
    first: int,
    stop: int,
    sections: Sections,
    scratch: Scratch,
) -> None:
    """Write the values of groups, times factor; of marked ones, NaN."""
    for tile in range(first, stop):
        start, count = place_of_tile(grid, tile)
        scale = np.int32(sections.scale[tile])
        if scale > HALF_INFINITY:
            write_nan(values, start, count)
            continue
        step = half_to_float(scale) / np.float32(rule.largest) * factor
        _read_codes(sections, rule.bits, tile, scratch)
        step = min(step, _LARGEST)
        for i in range(grid.group):
            scratch.y[i] = np.float32(np.int32(scratch.codes[i] - rule.largest)) * step
        write_scaled(scratch.y[:count], _ONE, values, start)


@kernel
def _read_codes(sections: Sections, bits: int, tile: int, scratch: Scratch) -> None:
    codes, rest, group = scratch.codes, scratch.rest, scratch.codes.size
    stride = sections.scale.size * group
    codes[:] = 0
    for place in range(bits // 8):
        whole = sections.whole[place * stride + tile * group : place * stride + (tile + 1) * group]
        for i in range(group):
            codes[i] |= np.int32(whole[i]) << (8 * place)
    if bits & 7:
        scratch.words[:] = 0
        read_planes(sections.planes, tile * (bits & 7) * scratch.words.size, 0, bits & 7, scratch.words)
        for i in range(group):
            codes[i] |= np.int32(rest[i]) << (bits & 8)


def encode(layout: FixedLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """The stream that `fixed.reference` writes; x has at least one element."""
    values, grid, rule = Values.of(x), Grid.of(layout.tiling), Rule.of(layout, key)
    with Team(threads, x.numel()) as team:
        magnitudes = measure(values, layout.tiling, team)
        exponent = top_exponent(magnitudes.overall, TOP_EXPONENT)
        buf = layout.new_stream(not magnitudes.all_finite, exponent, x.device)
        sections, factor = Sections.of(layout, buf), power_of_two(exponent)

        def write(first: int, stop: int) -> None:
            of_tiles, scratch = magnitudes.of_tiles, Scratch.of(grid.group)
            write_groups(values, grid, rule, factor, of_tiles, first, stop, sections, scratch)

        team.share(layout.tiling.num_tiles, write)
    return buf


def decode(
    layout: FixedLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor | None:
    """The tensor of an accepted stream; None if the stream is damaged."""
    is_flagged, exponent = layout.read_header(buf)
    sections = Sections.of(layout, buf)
    if not is_sound(sections.scale, is_flagged) or layout.sections.has_dirty_filling(buf):
        return None
    x = torch.empty(layout.tiling.shape, dtype=dtype)
    values, grid, rule, factor = Values.of(x), Grid.of(layout.tiling), Rule.of(layout, key), power_of_two(-exponent)

    def read(first: int, stop: int) -> None:
        read_groups(values, grid, rule, factor, first, stop, sections, Scratch.of(grid.group))

    with Team(threads, x.numel()) as team:
        team.share(layout.tiling.num_tiles, read)
    return x
