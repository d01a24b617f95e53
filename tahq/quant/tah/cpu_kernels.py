"""TAH-Quant on the CPU over ranges of tiles: write a stream's sections, check them, read them.

A range of `write_tiles` starts at a multiple of TILES_A_BYTE, so that threads never share a byte of the pivots.
`read_tiles` runs on sections that `is_sound` has passed: what it does with them stays inside of them.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tahq.quant.cpu.hadamard import hadamard
from tahq.quant.cpu.kernel import kernel
from tahq.quant.cpu.numbers import (
    FP16,
    FP32,
    INFINITY_BITS,
    MAGNITUDE,
    Fp32Array,
    Integer,
    Values,
    bits_of,
    float_of,
    float_to_half,
    half_to_float,
    write_nan,
    write_scaled,
)
from tahq.quant.cpu.planes import ByteArray, read_number, write_number
from tahq.quant.cpu.tiles import Grid, Int32Array, place_of_tile, read_tile
from tahq.quant.stream import CANONICAL_NAN
from tahq.quant.tah.cpu_lanes import Extent, Line, Planes, Steps, is_scannable, pack, read_values, scan, scan_values
from tahq.quant.tah.reference import EPSILON
from tahq.quant.tah.stream import TahLayout

_EPSILON = np.float32(EPSILON)
_SURELY_BEYOND = np.float32(1.000001)
"""1 + 2^−20, above all that three roundings of 2^−24 can take."""


@kernel
def least_second(largest: np.float32, tau: np.float32) -> np.int32:
    """Bits of a magnitude; where two exceed it, a₂ is one of them, and the tile has no outlier."""
    return bits_of((largest / tau) * _SURELY_BEYOND)


@kernel
def is_outlier(y: Fp32Array, largest: np.float32, beyond: int, tau: np.float32) -> bool | np.bool_:
    """Whether a₁/(a₂ + 1e-12) > tau (§3.3, Eq. 3), a₁ being `largest`, the tile's largest magnitude.

    The ratio falls as a₂ grows, so two magnitudes `beyond` that of `least_second` settle the question without a₂.
    """
    if largest == _ZERO:
        return False
    if largest / (largest + _EPSILON) > tau:
        return True
    return beyond < 2 and largest / (_second_largest(y) + _EPSILON) > tau


@kernel
def _second_largest(y: Fp32Array) -> np.float32:
    first, second = np.int32(0), np.int32(0)
    for i in range(y.size):
        magnitude = np.int32(bits_of(y[i]) & MAGNITUDE)
        second = max(second, min(first, magnitude))
        first = max(first, magnitude)
    return float_of(second)


@kernel
def suppress_outlier(y: Fp32Array, largest: np.float32, norm: np.float32) -> int:
    """Swap the pivot, the lowest index of magnitude `largest`, with channel 0, transform (§3.3, Eq. 4); returns it."""
    pivot = 0
    while abs(y[pivot]) != largest:
        pivot += 1
    _exchange(y, pivot)
    hadamard(y, norm)
    return pivot


@kernel
def _exchange(y: Fp32Array, pivot: Integer) -> None:
    first = y[0]
    y[0] = y[pivot]
    y[pivot] = first


@kernel
def extremes(y: Fp32Array, extent: Extent) -> tuple[np.float32, np.float32]:
    """Minimum and maximum of y, which holds no NaN and whose extent is known; of zeros, −0 is the smaller."""
    if extent.largest >= 0 and extent.negative > MAGNITUDE:
        return float_of(np.int32(extent.negative)), float_of(extent.largest)
    return extremes_of(y)


@kernel
def extremes_of(y: Fp32Array) -> tuple[np.float32, np.float32]:
    """`extremes`, of any y."""
    smallest, largest = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for i in range(y.size):
        bits = bits_of(y[i])
        ordered = np.int32(bits ^ np.int32((bits >> 31) & MAGNITUDE))
        smallest = min(smallest, ordered)
        largest = max(largest, ordered)
    return _from_ordered(smallest), _from_ordered(largest)


@kernel
def _from_ordered(ordered: np.int32) -> np.float32:
    return float_of(np.int32(ordered ^ np.int32((ordered >> 31) & MAGNITUDE)))


TILES_A_BYTE = 8
_TRANSFORMED = 0x8000
"""The scale's sign bit."""
_SCALE = 0x7FFF
_HALF_INFINITY = 0x7C00
_MINUS_ZERO = 0x8000
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_INFINITY = np.float32(np.inf)
_LARGEST = np.finfo(np.float32).max


class Rule(NamedTuple):
    """What the kernels need of the spec: L, H, R, τ and fp32(1/√G)."""

    low: int
    high: int
    tiles_per_alloc: int
    tau: np.float32
    norm: np.float32

    @classmethod
    def of(cls, layout: TahLayout) -> "Rule":
        """The rule of a layout; a τ beyond fp32's largest is infinite."""
        spec = layout.spec
        tau = np.float32(spec.tau if spec.tau <= np.finfo(np.float32).max else np.inf)
        return cls(spec.low, spec.high, layout.tiles_per_alloc, tau, np.float32(layout.tiling.group**-0.5))


class Sections(NamedTuple):
    """The sections of a stream, sharing its memory."""

    bit_map: ByteArray
    scale: NDArray[np.uint16]
    zero_point: NDArray[np.uint16]
    pivot: ByteArray
    low_planes: ByteArray
    high_planes: ByteArray

    @classmethod
    def of(cls, layout: TahLayout, buf: torch.Tensor) -> "Sections":
        """Of an aligned buffer that has the layout's length."""
        names = ("bit map", "scale", "zero-point", "pivot", "low planes", "high planes")
        bit_map, scale, zero_point, *rest = (layout.sections.view(buf, name).numpy() for name in names)
        return cls(bit_map, scale.view(np.uint16), zero_point.view(np.uint16), *rest)


@kernel
def write_tiles(
    values: Values,
    grid: Grid,
    rule: Rule,
    factor: np.float32,
    magnitudes: Int32Array,
    is_high: ByteArray,
    first: int,
    stop: int,
    sections: Sections,
    y: Fp32Array,
) -> None:
    """Transform, quantise and pack tiles; all sections but the bit map, of which the pivots must be zeros.

    `y`, fp32 [G], is room for one tile.
    """
    high_tiles = _count_high(is_high, rule.tiles_per_alloc, first)
    for tile in range(first, stop):
        has_high_bits = is_high[tile // rule.tiles_per_alloc]
        planes = _planes_of(sections, grid, rule, tile, has_high_bits, high_tiles)
        is_finite = magnitudes[tile] < INFINITY_BITS
        largest = float_of(magnitudes[tile]) * factor if is_finite else _ZERO
        count, extent = _read(values, grid, rule, factor, magnitudes[tile], tile, y)
        is_transformed = is_outlier(y, largest, extent.beyond, rule.tau)
        if is_transformed:
            write_number(suppress_outlier(y, largest, rule.norm), tile, grid.log2_group, sections.pivot)
            count, extent = grid.group, scan(y, 0, _ONE, np.int32(0), y)
        scale, zero_point = _quantize(y, count, extent, rule.high if has_high_bits else rule.low, planes)
        sections.scale[tile] = scale | (_TRANSFORMED if is_transformed else 0)
        sections.zero_point[tile] = zero_point if is_finite else CANONICAL_NAN
        high_tiles += has_high_bits


@kernel
def _read(
    values: Values, grid: Grid, rule: Rule, factor: np.float32, magnitude: np.int32, tile: int, y: Fp32Array
) -> tuple[int, Extent]:
    """`read_tile`, and the extent of y."""
    start, count = place_of_tile(grid, tile)
    limit = least_second(float_of(magnitude) * factor, rule.tau)
    if magnitude < INFINITY_BITS and is_scannable(values, count, grid.group):
        return count, scan_values(values, start, factor, limit, y)
    read_tile(values, grid, tile, factor, magnitude, y)
    return count, scan(y, 0, _ONE, limit, y)


@kernel
def _quantize(y: Fp32Array, count: int, extent: Extent, bits: int, planes: Planes) -> tuple[Integer, Integer]:
    """Write codes of the first `count` channels, and zeros behind them; fp16 bits of scale and zero-point."""
    smallest, largest = extremes(y, extent) if count == y.size else extremes_of(y[:count])
    levels = np.float32((1 << bits) - 1)
    scale, zero_point = float_to_half((largest - smallest) / levels), float_to_half(smallest)
    if zero_point == _MINUS_ZERO:
        zero_point = np.int32(0)
    steps = Steps(half_to_float(zero_point), half_to_float(scale) if scale != 0 else _INFINITY, levels)
    y[count:] = steps.zero_point
    pack(y, steps, planes)
    return scale, zero_point


@kernel
def _count_high(is_high: ByteArray, tiles_per_alloc: int, stop: int) -> int:
    """How many of the tiles before `stop` have H bits."""
    whole, part = stop // tiles_per_alloc, stop % tiles_per_alloc
    count = 0
    for alloc in range(whole):
        count += is_high[alloc]
    return count * tiles_per_alloc + (part * is_high[whole] if part else 0)


@kernel
def is_sound(
    grid: Grid, sections: Sections, is_high: ByteArray, samples: int, per_sample: int, num_high: int, is_flagged: bool
) -> bool:
    """Whether `tah.stream.unpack` takes what the sections say, padding behind them aside.

    `is_high` has all bits of the bit map; `num_high` of the n = `per_sample` of each of the B samples must be set.
    """
    used = sections.scale.size * grid.log2_group & 7
    wrong = used != 0 and (sections.pivot[-1] >> used) != 0
    for i in range(samples * per_sample, is_high.size):
        wrong |= is_high[i] != 0
    for sample in range(samples):
        count = 0
        for i in range(sample * per_sample, (sample + 1) * per_sample):
            count += is_high[i]
        wrong |= count != num_high
    sound, has_marks = _are_finite_or_marked(sections.scale, sections.zero_point)
    return sound and not wrong and has_marks == is_flagged


@kernel
def _are_finite_or_marked(scale: NDArray[np.uint16], zero_point: NDArray[np.uint16]) -> tuple[bool, bool]:
    """Whether every tile has finite metadata or the mark (scale +0, zero-point NaN), and whether any has the mark."""
    wrong, marks = np.int32(0), np.int32(0)
    for tile in range(scale.size):
        s, z = np.int32(scale[tile]), np.int32(zero_point[tile])
        is_infinite = np.int32((z & 0x7FFF) == _HALF_INFINITY)
        is_mark = np.int32((z & 0x7FFF) > _HALF_INFINITY)
        is_bad_scale = np.int32((s & _HALF_INFINITY) == _HALF_INFINITY)
        wrong = np.int32(wrong | is_infinite | is_bad_scale | np.int32(is_mark & np.int32(s != 0)))
        marks = np.int32(marks | is_mark)
    return wrong == 0, marks != 0


@kernel
def read_tiles(
    values: Values,
    grid: Grid,
    rule: Rule,
    factor: np.float32,
    is_high: ByteArray,
    first: int,
    stop: int,
    sections: Sections,
    y: Fp32Array,
) -> None:
    """Write the values of tiles, times factor; of marked ones, NaN. `y`, fp32 [G], is room for one tile."""
    high_tiles = _count_high(is_high, rule.tiles_per_alloc, first)
    for tile in range(first, stop):
        start, count = place_of_tile(grid, tile)
        has_high_bits = is_high[tile // rule.tiles_per_alloc]
        planes = _planes_of(sections, grid, rule, tile, has_high_bits, high_tiles)
        is_transformed = sections.scale[tile] >= _TRANSFORMED
        if (sections.zero_point[tile] & _HALF_INFINITY) == _HALF_INFINITY:
            write_nan(values, start, count)
        elif is_transformed or count < grid.group or values.kind == FP16:
            read_values(planes, _line_of(sections, tile, _ONE, _LARGEST), y, 0)
            if is_transformed:
                hadamard(y, rule.norm)
                _exchange(y, read_number(tile, grid.log2_group, sections.pivot))
            write_scaled(y[:count], factor, values, start)
        elif values.kind == FP32:
            read_values(planes, _line_of(sections, tile, factor, values.largest), values.wide, start)
        else:
            read_values(planes, _line_of(sections, tile, factor, values.largest), values.narrow, start)
        high_tiles += has_high_bits


@kernel
def _planes_of(sections: Sections, grid: Grid, rule: Rule, tile: int, has_high_bits: int, high_tiles: int) -> Planes:
    nbytes, extra = grid.group >> 3, rule.high - rule.low
    low_at, high_at = tile * rule.low * nbytes, high_tiles * extra * nbytes
    num_high = extra if has_high_bits else 0
    return Planes(sections.low_planes, low_at, rule.low, sections.high_planes, high_at, num_high, nbytes)


@kernel
def _line_of(sections: Sections, tile: int, factor: np.float32, largest: np.float32) -> Line:
    scale = half_to_float(np.int32(sections.scale[tile] & _SCALE))
    return Line(scale, half_to_float(np.int32(sections.zero_point[tile])), factor, largest)
