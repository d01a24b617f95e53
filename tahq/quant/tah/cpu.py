"""`tah` on the CPU in numba: two passes over the tensor, one over the stream, no temporaries of their size.

Encoding reads the tensor for its largest magnitudes and the sums from which entropies follow, and again to transform,
round and pack, each tile while it is in the first-level cache. The largest magnitude of every tile, which the first
pass stores, tells the second which tiles are not finite. Threads share ranges of tiles.

Streams equal those of `tah.reference` to the bit, except where two entropies at the border of the selection differ by
less than rounding; decoded values are always equal, NaN being NaN.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tahq.quant.cpu.hadamard import hadamard
from tahq.quant.cpu.kernel import Team, kernel
from tahq.quant.cpu.numbers import (
    FP16,
    FP32,
    HALF_INFINITY,
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
from tahq.quant.cpu.tiles import (
    Grid,
    Int32Array,
    place_of_tile,
    power_of_two,
    read_tile,
    top_exponent,
)
from tahq.quant.stream import CANONICAL_NAN
from tahq.quant.tah.cpu_lanes import (
    AffineMap,
    Extent,
    Planes,
    Steps,
    is_scannable,
    pack,
    read_values,
    scan,
    scan_values,
)
from tahq.quant.tah.cpu_select import select, survey
from tahq.quant.tah.reference import EPSILON
from tahq.quant.tah.stream import TahLayout
from tahq.quant.tiling import TOP_EXPONENT

_CPU = torch.device("cpu")
_TILES_A_BYTE = 8
"""Ranges of tiles start at multiples of it, so that threads never share a byte of the pivots."""
_TRANSFORMED = 0x8000
"""The scale's sign bit."""
_MINUS_ZERO = 0x8000
_ZERO, _ONE, _INFINITY = np.float32(0.0), np.float32(1.0), np.float32(np.inf)
_LARGEST, _EPSILON = np.finfo(np.float32).max, np.float32(EPSILON)
_SURELY_BEYOND = np.float32(1.000001)
"""About 1 + 2^−20, more than three roundings of 2^−24 can add."""


class TahField(NamedTuple):
    """A tensor in memory, and how it is coded: L, H, R, τ and fp32(1/√G).

    `factor` is 2^e in encoding and 2^−e in decoding.
    """

    values: Values
    grid: Grid
    factor: np.float32
    low: int
    high: int
    tiles_per_alloc: int
    tau: np.float32
    norm: np.float32

    @classmethod
    def of(cls, layout: TahLayout, values: Values, exponent: int) -> "TahField":
        """A tensor that is multiplied by 2^exponent; a τ beyond fp32's largest is infinite."""
        spec, tiling = layout.spec, layout.tiling
        tau, norm = np.float32(spec.tau if spec.tau <= _LARGEST else np.inf), np.float32(tiling.group**-0.5)
        factor = power_of_two(exponent)
        return cls(values, Grid.of(tiling), factor, spec.low, spec.high, layout.tiles_per_alloc, tau, norm)


class TahSections(NamedTuple):
    """The sections of a stream, sharing its memory."""

    bit_map: ByteArray
    scale: NDArray[np.uint16]
    zero_point: NDArray[np.uint16]
    pivot: ByteArray
    low_planes: ByteArray
    high_planes: ByteArray

    @classmethod
    def of(cls, layout: TahLayout, buf: torch.Tensor) -> "TahSections":
        """Views of an aligned buffer that has the layout's length."""
        names = ("bit map", "scale", "zero-point", "pivot", "low planes", "high planes")
        bit_map, scale, zero_point, *rest = (layout.sections.view(buf, name).numpy() for name in names)
        return cls(bit_map, scale.view(np.uint16), zero_point.view(np.uint16), *rest)


def encode(layout: TahLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """The stream that `tah.reference` writes; x has at least one element."""
    values, group = Values.of(x), layout.tiling.group
    with Team(threads, x.numel()) as team:
        magnitudes, sums = survey(layout, values, team)
        exponent = top_exponent(magnitudes.overall, TOP_EXPONENT)
        is_high = select(layout, sums, exponent, team)
        buf = layout.new_stream(not magnitudes.all_finite, exponent, _CPU)
        field, sections = TahField.of(layout, values, exponent), TahSections.of(layout, buf)
        sections.bit_map[:] = np.packbits(is_high, bitorder="little")

        def write(first: int, stop: int) -> None:
            write_tiles(field, magnitudes.of_tiles, is_high, first, stop, sections, np.empty(group, np.float32))

        team.share(layout.tiling.num_tiles, write, multiple_of=_TILES_A_BYTE)
    return buf


def decode(
    layout: TahLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor | None:
    """The tensor of an accepted stream; None if the stream is damaged."""
    is_flagged, exponent = layout.read_header(buf)
    sections = TahSections.of(layout, buf)
    is_high = np.unpackbits(sections.bit_map, bitorder="little")
    samples, per_sample = layout.tiling.num_samples, layout.allocs_per_sample
    num_high = per_sample - layout.num_low
    is_good = is_sound(Grid.of(layout.tiling), sections, is_high, samples, per_sample, num_high, is_flagged)
    if not is_good or layout.sections.has_dirty_filling(buf):
        return None
    x = torch.empty(layout.tiling.shape, dtype=dtype)
    field = TahField.of(layout, Values.of(x), -exponent)

    def read(first: int, stop: int) -> None:
        read_tiles(field, is_high, first, stop, sections, np.empty(field.grid.group, np.float32))

    with Team(threads, x.numel()) as team:
        team.share(layout.tiling.num_tiles, read)
    return x


@kernel
def write_tiles(
    field: TahField,
    magnitudes: Int32Array,
    is_high: ByteArray,
    first: int,
    stop: int,
    sections: TahSections,
    y: Fp32Array,
) -> None:
    """Transform, quantise and pack tiles: all sections except the bit map. The pivots must be zeros before.

    `y`, fp32 [G], is room for one tile.
    """
    grid, high_tiles = field.grid, _count_high(is_high, field.tiles_per_alloc, first)
    for tile in range(first, stop):
        has_high_bits = is_high[tile // field.tiles_per_alloc]
        planes = _planes_of(sections, field, tile, has_high_bits, high_tiles)
        is_finite = magnitudes[tile] < INFINITY_BITS
        largest = float_of(magnitudes[tile]) * field.factor if is_finite else _ZERO
        count, extent = _read(field, magnitudes[tile], tile, y)
        is_transformed = is_outlier(y, largest, extent.beyond, field.tau)
        if is_transformed:
            write_number(_suppress_outlier(y, largest, field.norm), tile, grid.log2_group, sections.pivot)
            count, extent = grid.group, scan(y, 0, _ONE, np.int32(0), y)
        scale, zero_point = _quantize(y, count, extent, field.high if has_high_bits else field.low, planes)
        sections.scale[tile] = scale | (_TRANSFORMED if is_transformed else 0)
        sections.zero_point[tile] = zero_point if is_finite else CANONICAL_NAN
        high_tiles += has_high_bits


@kernel
def _read(field: TahField, magnitude: np.int32, tile: int, y: Fp32Array) -> tuple[int, Extent]:
    """`read_tile`, and the extent of y."""
    start, count = place_of_tile(field.grid, tile)
    limit = least_second(float_of(magnitude) * field.factor, field.tau)
    if magnitude < INFINITY_BITS and is_scannable(field.values, count, field.grid.group):
        return count, scan_values(field.values, start, field.factor, limit, y)
    read_tile(field.values, field.grid, tile, field.factor, magnitude, y)
    return count, scan(y, 0, _ONE, limit, y)


@kernel
def least_second(largest: np.float32, tau: np.float32) -> np.int32:
    """Bits of a magnitude such that a tile with two magnitudes above it has no outlier."""
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
def _suppress_outlier(y: Fp32Array, largest: np.float32, norm: np.float32) -> int:
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
def _quantize(y: Fp32Array, count: int, extent: Extent, bits: int, planes: Planes) -> tuple[Integer, Integer]:
    """Write codes of the first `count` channels, and zeros behind them; fp16 bits of scale and zero-point."""
    smallest, largest = _extremes(y, extent) if count == y.size else _extremes_of(y[:count])
    levels = np.float32((1 << bits) - 1)
    scale, zero_point = float_to_half((largest - smallest) / levels), float_to_half(smallest)
    if zero_point == _MINUS_ZERO:
        zero_point = np.int32(0)
    steps = Steps(half_to_float(zero_point), half_to_float(scale) if scale != 0 else _INFINITY, levels)
    y[count:] = steps.zero_point
    pack(y, steps, planes)
    return scale, zero_point


@kernel
def _extremes(y: Fp32Array, extent: Extent) -> tuple[np.float32, np.float32]:
    """Minimum and maximum of y, which holds no NaN and whose extent is known; of zeros, −0 is the smaller."""
    if extent.largest >= 0 and extent.negative > MAGNITUDE:
        return float_of(np.int32(extent.negative)), float_of(extent.largest)
    return _extremes_of(y)


@kernel
def _extremes_of(y: Fp32Array) -> tuple[np.float32, np.float32]:
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
    grid: Grid,
    sections: TahSections,
    is_high: ByteArray,
    samples: int,
    per_sample: int,
    num_high: int,
    is_flagged: bool,
) -> bool:
    """Whether `tah.stream.unpack` accepts the sections, apart from the padding behind them.

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
        is_infinite = np.int32((z & 0x7FFF) == HALF_INFINITY)
        is_mark = np.int32((z & 0x7FFF) > HALF_INFINITY)
        is_bad_scale = np.int32((s & HALF_INFINITY) == HALF_INFINITY)
        wrong = np.int32(wrong | is_infinite | is_bad_scale | np.int32(is_mark & np.int32(s != 0)))
        marks = np.int32(marks | is_mark)
    return wrong == 0, marks != 0


@kernel
def read_tiles(field: TahField, is_high: ByteArray, first: int, stop: int, sections: TahSections, y: Fp32Array) -> None:
    """Write the values of tiles, times the field's factor; of marked ones, NaN. `y`, fp32 [G], is room for one tile.

    The sections have passed `is_sound`, so no access leaves them.
    """
    grid, values, high_tiles = field.grid, field.values, _count_high(is_high, field.tiles_per_alloc, first)
    for tile in range(first, stop):
        start, count = place_of_tile(grid, tile)
        has_high_bits = is_high[tile // field.tiles_per_alloc]
        planes = _planes_of(sections, field, tile, has_high_bits, high_tiles)
        is_transformed = sections.scale[tile] >= _TRANSFORMED
        if (sections.zero_point[tile] & HALF_INFINITY) == HALF_INFINITY:
            write_nan(values, start, count)
        elif is_transformed or count < grid.group or values.kind == FP16:
            read_values(planes, _map_of(sections, tile, _ONE, _LARGEST), y, 0)
            if is_transformed:
                hadamard(y, field.norm)
                _exchange(y, read_number(tile, grid.log2_group, sections.pivot))
            write_scaled(y[:count], field.factor, values, start)
        elif values.kind == FP32:
            read_values(planes, _map_of(sections, tile, field.factor, values.largest), values.wide, start)
        else:
            read_values(planes, _map_of(sections, tile, field.factor, values.largest), values.narrow, start)
        high_tiles += has_high_bits


@kernel
def _planes_of(sections: TahSections, field: TahField, tile: int, has_high_bits: int, high_tiles: int) -> Planes:
    nbytes, extra = field.grid.group >> 3, field.high - field.low
    low_at, high_at = tile * field.low * nbytes, high_tiles * extra * nbytes
    num_high = extra if has_high_bits else 0
    return Planes(sections.low_planes, low_at, field.low, sections.high_planes, high_at, num_high, nbytes)


@kernel
def _map_of(sections: TahSections, tile: int, factor: np.float32, largest: np.float32) -> AffineMap:
    scale = half_to_float(np.int32(sections.scale[tile] & 0x7FFF))
    return AffineMap(scale, half_to_float(np.int32(sections.zero_point[tile])), factor, largest)
