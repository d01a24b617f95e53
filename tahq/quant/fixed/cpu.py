"""`fixed` on the CPU in numba: two passes over the tensor, one over the stream, no temporaries of their size.

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
from tahq.quant.fixed.stream import TOP_EXPONENT, FixedLayout, largest_code
from tahq.quant.stream import CANONICAL_NAN

_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_DRAW_UNIT = np.float32(2.0**-24)
_LARGEST = np.finfo(np.float32).max


class FixedField(NamedTuple):
    """A tensor in memory, and how it is coded; Q = 2^(bits − 1) − 1.

    `factor` is 2^e in encoding and 2^−e in decoding.
    """

    values: Values
    grid: Grid
    factor: np.float32
    bits: int
    largest_code: int
    is_random: bool
    key: Key

    @classmethod
    def of(cls, layout: FixedLayout, values: Values, exponent: int, key: int) -> "FixedField":
        """A tensor that is multiplied by 2^exponent."""
        spec, factor = layout.spec, power_of_two(exponent)
        rule = (spec.bits, largest_code(spec.bits), spec.round == "stochastic", Key.of(key))
        return cls(values, Grid.of(layout.tiling), factor, *rule)


class FixedSections(NamedTuple):
    """The sections of a stream, sharing its memory."""

    scale: NDArray[np.uint16]
    whole: ByteArray
    planes: ByteArray

    @classmethod
    def of(cls, layout: FixedLayout, buf: torch.Tensor) -> "FixedSections":
        """Views of an aligned buffer that has the layout's length."""
        scale, whole, planes = (layout.sections.view(buf, name).numpy() for name in ("scale", "bytes", "planes"))
        return cls(scale.view(np.uint16), whole, planes)


class GroupScratch(NamedTuple):
    """Room for one group: values [G], codes [G], the bits of codes above whole bytes [G], and these as words [G/8]."""

    y: Fp32Array
    codes: Int32Array
    rest: ByteArray
    words: NDArray[np.uint64]

    @classmethod
    def of(cls, group: int) -> "GroupScratch":
        """Fresh memory, for one thread."""
        rest = np.empty(group, np.uint8)
        return cls(np.empty(group, np.float32), np.empty(group, np.int32), rest, rest.view(np.uint64))


def encode(layout: FixedLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """The stream that `fixed.reference` writes; x has at least one element."""
    values, group = Values.of(x), layout.tiling.group
    with Team(threads, x.numel()) as team:
        magnitudes = measure(values, layout.tiling, team)
        exponent = top_exponent(magnitudes.overall, TOP_EXPONENT)
        buf = layout.new_stream(not magnitudes.all_finite, exponent, x.device)
        field, sections = FixedField.of(layout, values, exponent, key), FixedSections.of(layout, buf)

        def write(first: int, stop: int) -> None:
            write_groups(field, magnitudes.of_tiles, first, stop, sections, GroupScratch.of(group))

        team.share(layout.tiling.num_tiles, write)
    return buf


def decode(
    layout: FixedLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor | None:
    """The tensor of an accepted stream; None if the stream is damaged."""
    is_flagged, exponent = layout.read_header(buf)
    sections = FixedSections.of(layout, buf)
    if not is_sound(sections.scale, is_flagged) or layout.sections.has_dirty_filling(buf):
        return None
    x = torch.empty(layout.tiling.shape, dtype=dtype)
    field = FixedField.of(layout, Values.of(x), -exponent, key)

    def read(first: int, stop: int) -> None:
        read_groups(field, first, stop, sections, GroupScratch.of(field.grid.group))

    with Team(threads, x.numel()) as team:
        team.share(layout.tiling.num_tiles, read)
    return x


@kernel
def write_groups(
    field: FixedField, magnitudes: Int32Array, first: int, stop: int, sections: FixedSections, scratch: GroupScratch
) -> None:
    """Quantise and pack groups."""
    for tile in range(first, stop):
        is_finite = magnitudes[tile] < INFINITY_BITS
        read_tile(field.values, field.grid, tile, field.factor, magnitudes[tile], scratch.y)
        scale = _ceil_to_half(float_of(magnitudes[tile]) * field.factor) if is_finite else np.int32(0)
        step = half_to_float(scale) / np.float32(field.largest_code) if scale != 0 else np.float32(np.inf)
        if field.is_random:
            _round_stochastic(scratch.y, step, field, tile * field.grid.group, scratch.codes)
        else:
            _round_nearest(scratch.y, step, field.largest_code, scratch.codes)
        sections.scale[tile] = scale if is_finite else CANONICAL_NAN
        _write_codes(scratch, field.bits, tile, sections)


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
def _round_stochastic(y: Fp32Array, step: np.float32, field: FixedField, index: int, codes: Int32Array) -> None:
    top = np.float32(field.largest_code)
    for i in range(y.size):
        ratio = y[i] / step
        floor = np.floor(ratio)
        rounded = floor + (_ONE if ratio - floor > draw(index + i, field.key) else _ZERO)
        codes[i] = np.int32(min(max(rounded, -top), top)) + field.largest_code


@kernel
def draw(index: int, key: Key) -> np.float32:
    """u in [0, 1), a function of the element's index and the key; see `stochastic_rounding.draws`."""
    return np.float32(np.int32(hash_of(index, key) >> 8)) * _DRAW_UNIT


@kernel
def _write_codes(scratch: GroupScratch, bits: int, tile: int, sections: FixedSections) -> None:
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
    """Whether `fixed.stream.unpack` accepts the scales: none negative or infinite, some NaN if and only if flagged."""
    wrong, marks = np.int32(0), np.int32(0)
    for tile in range(scale.size):
        bits = np.int32(scale[tile])
        wrong = np.int32(wrong | np.int32(bits == HALF_INFINITY) | np.int32(bits & 0x8000))
        marks = np.int32(marks | np.int32(bits > HALF_INFINITY))
    has_marks = marks != 0
    return bool(wrong == 0 and has_marks == is_flagged)


@kernel
def read_groups(field: FixedField, first: int, stop: int, sections: FixedSections, scratch: GroupScratch) -> None:
    """Write the values of groups, times the field's factor; of marked ones, NaN."""
    for tile in range(first, stop):
        start, count = place_of_tile(field.grid, tile)
        scale = np.int32(sections.scale[tile])
        if scale > HALF_INFINITY:
            write_nan(field.values, start, count)
            continue
        step = half_to_float(scale) / np.float32(field.largest_code) * field.factor
        _read_codes(sections, field.bits, tile, scratch)
        step = min(step, _LARGEST)
        for i in range(field.grid.group):
            scratch.y[i] = np.float32(np.int32(scratch.codes[i] - field.largest_code)) * step
        write_scaled(scratch.y[:count], _ONE, field.values, start)


@kernel
def _read_codes(sections: FixedSections, bits: int, tile: int, scratch: GroupScratch) -> None:
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
