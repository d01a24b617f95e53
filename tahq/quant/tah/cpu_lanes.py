"""A tile's planes to its values and back, 64, 32 or 8 codes at a time, with everything between them in registers.

Separate loops over the codes of a tile (gather them from the planes, convert, round) are so short that most of their
time is overhead. Here the number of lanes is known at compile time. The code is written as LLVM vectors, so that any
processor runs it. Equal to `tah.reference` to the bit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from tahq.quant.cpu.kernel import kernel
from tahq.quant.cpu.numbers import FP16, FP32, MAGNITUDE, TO_WHOLE, Fp32Array, Int16Array, Values
from tahq.quant.cpu.planes import ByteArray, address, splat

_BIT, _BYTE, _HALF_WORD, _WORD = ir.IntType(1), ir.IntType(8), ir.IntType(16), ir.IntType(32)
_control: Any = cgutils  # neither of these two has types
_make: Any = intrinsic


class Planes(NamedTuple):
    """Where the planes of one tile lie: arrays, starts and numbers of the low and the high ones; G/8 bytes each."""

    low: ByteArray
    low_at: int
    num_low: int
    high: ByteArray
    high_at: int
    num_high: int
    nbytes: int


class AffineMap(NamedTuple):
    """The value of a code q: (q·scale + zero_point)·factor, clamped to ±largest."""

    scale: np.float32
    zero_point: np.float32
    factor: np.float32
    largest: np.float32


Numbers = Fp32Array | Int16Array
Reader = Callable[[Planes, int, AffineMap, Numbers, int], None]


@kernel
def read_values(planes: Planes, affine: AffineMap, out: Numbers, start: int) -> None:
    """Write the values of a tile's G codes from out[start] on: fp32, or bits of bf16, to nearest even.

    No bounds are checked.
    """
    if planes.nbytes >= 8:
        for byte in range(0, planes.nbytes, 8):
            _read_64(planes, byte, affine, out, start + 8 * byte)
    elif planes.nbytes == 4:
        _read_32(planes, 0, affine, out, start)
    else:
        for byte in range(planes.nbytes):
            _read_8(planes, byte, affine, out, start + 8 * byte)


def _reader(lanes: int) -> Reader:
    """reader(planes, byte, affine, out, start): of each plane, the `lanes` bits from its byte `byte` on."""

    def declare(typing_context: Any, planes: Any, byte: Any, affine: Any, out: Any, start: Any) -> Any:
        return types.void(planes, types.intp, affine, out, types.intp), build

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        planes_type, _, _, out_type, _ = signature.args
        planes, byte, affine, out, start = arguments
        codes = _gather(context, builder, planes_type, planes, byte, lanes)
        values = _numbers_of(builder, codes, affine)
        if out_type.dtype == types.int16:
            values = _to_bf16(builder, values)
        target = address(context, builder, out_type, out, start, values.type)
        builder.store(values, target, align=out_type.dtype.bitwidth // 8)
        return context.get_dummy_value()

    reader: Reader = _make(declare)
    return reader


def _gather(context: Any, builder: Any, planes_type: Any, planes: Any, byte: Any, lanes: int) -> Any:
    """Codes, a byte each; the k-th plane is their bit k."""
    low_type, _, _, high_type, *_ = planes_type.types
    low, low_at, num_low, high, high_at, num_high, nbytes = _control.unpack_tuple(builder, planes)
    zeros = ir.Constant(ir.VectorType(_BYTE, lanes), None)
    codes = _control.alloca_once_value(builder, zeros)
    weight = _control.alloca_once_value(builder, _BYTE(1))
    for array_type, array, at, count in ((low_type, low, low_at, num_low), (high_type, high, high_at, num_high)):
        with _control.for_range(builder, count) as loop:
            place = builder.add(builder.add(at, byte), builder.mul(loop.index, nbytes))
            bits = builder.load(address(context, builder, array_type, array, place, ir.IntType(lanes)), align=1)
            single = builder.load(weight)
            flags = builder.bitcast(bits, ir.VectorType(_BIT, lanes))
            added = builder.select(flags, splat(builder, single, lanes), zeros)
            builder.store(builder.or_(builder.load(codes), added), codes)
            builder.store(builder.add(single, single), weight)
    return builder.load(codes)


def _numbers_of(builder: Any, codes: Any, affine: Any) -> Any:
    """fp32, each operation rounded by itself."""
    lanes = codes.type.count
    scale, zero_point, factor, largest = (
        splat(builder, value, lanes) for value in _control.unpack_tuple(builder, affine)
    )
    whole = builder.zext(codes, ir.VectorType(_WORD, lanes))
    numbers = builder.fadd(builder.fmul(builder.sitofp(whole, scale.type), scale), zero_point)
    numbers, smallest = builder.fmul(numbers, factor), builder.fneg(largest)
    numbers = builder.select(builder.fcmp_ordered("<", numbers, largest), numbers, largest)
    return builder.select(builder.fcmp_ordered(">", numbers, smallest), numbers, smallest)


def _to_bf16(builder: Any, numbers: Any) -> Any:
    """Bits of bf16, as `numbers.float_to_bf16` gives them."""
    lanes = numbers.type.count
    bits = builder.bitcast(numbers, ir.VectorType(_WORD, lanes))
    dropped, one, below_half = (splat(builder, _WORD(number), lanes) for number in (16, 1, 0x7FFF))
    to_even = builder.and_(builder.lshr(bits, dropped), one)
    rounded = builder.add(bits, builder.add(to_even, below_half))
    return builder.trunc(builder.lshr(rounded, dropped), ir.VectorType(_HALF_WORD, lanes))


_read_64, _read_32, _read_8 = _reader(64), _reader(32), _reader(8)


_SINGLE = ir.FloatType()


_EXTENT = cast(Any, types).Tuple((types.int32, types.int32, types.intp))


class Extent(NamedTuple):
    """The extremes of some values, as bits.

    `largest` is the maximum of their bits as signed numbers: those of the largest value unless all are negative.
    `negative` is the maximum as unsigned numbers: the bits of the smallest value if any is negative. `beyond` counts
    the magnitudes whose bits exceed a limit.
    """

    largest: np.int32
    negative: np.uint32
    beyond: int


class Steps(NamedTuple):
    """The code of a value v: the whole number nearest to (v − zero_point)/scale, clamped to 0 … levels."""

    zero_point: np.float32
    scale: np.float32
    levels: np.float32


_EMPTY = Extent(np.int32(-0x80000000), np.uint32(0), 0)
Scanner = Callable[[Numbers, int, np.float32, np.int32, Fp32Array, int], tuple[np.int32, np.int32, int]]
Packer = Callable[[Fp32Array, Steps, Planes, int], None]


@kernel
def scan(values: Numbers, start: int, factor: np.float32, limit: np.int32, y: Fp32Array) -> Extent:
    """y = values·factor, of fp32 or bits of bf16 from values[start] on; no bounds are checked."""
    extent = _EMPTY
    if y.size >= 64:
        for at in range(0, y.size, 64):
            extent = _join(extent, _scan_64(values, start + at, factor, limit, y, at))
    elif y.size == 32:
        extent = _join(extent, _scan_32(values, start, factor, limit, y, 0))
    else:
        for at in range(0, y.size, 8):
            extent = _join(extent, _scan_8(values, start + at, factor, limit, y, at))
    return extent


@kernel
def is_scannable(values: Values, count: int, group: int) -> bool:
    """Whether a tile of `count` channels can be scanned in place: it has no padding, and is not fp16."""
    return count == group and values.kind != FP16


@kernel
def scan_values(values: Values, start: int, factor: np.float32, limit: np.int32, y: Fp32Array) -> Extent:
    """`scan` of a tile that is scannable."""
    if values.kind == FP32:
        return scan(values.wide, start, factor, limit, y)
    return scan(values.narrow, start, factor, limit, y)


@kernel
def magnitude_of(extent: Extent) -> np.int32:
    """The bits of the largest magnitude, INFINITY_BITS or above where one is not finite."""
    positive = max(extent.largest, np.int32(0))
    return max(positive, np.int32(extent.negative & MAGNITUDE)) if extent.negative > MAGNITUDE else positive


@kernel
def _join(extent: Extent, part: tuple[np.int32, np.int32, int]) -> Extent:
    largest, negative, beyond = part
    return Extent(max(extent.largest, largest), max(extent.negative, np.uint32(negative)), extent.beyond + beyond)


@kernel
def pack(y: Fp32Array, steps: Steps, planes: Planes) -> None:
    """Write the planes of a tile's codes, the lowest bit first. No bounds are checked."""
    if planes.nbytes >= 8:
        for byte in range(0, planes.nbytes, 8):
            _pack_64(y, steps, planes, byte)
    elif planes.nbytes == 4:
        _pack_32(y, steps, planes, 0)
    else:
        for byte in range(planes.nbytes):
            _pack_8(y, steps, planes, byte)


def _scanner(lanes: int) -> Scanner:
    """scanner(values, start, factor, limit, y, at) -> the parts of an `Extent`, both extremes as int32."""

    def declare(typing_context: Any, values: Any, start: Any, factor: Any, limit: Any, y: Any, at: Any) -> Any:
        return _EXTENT(values, types.intp, types.float32, types.int32, y, types.intp), build

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values_type, _, _, _, y_type, _ = signature.args
        values, start, factor, limit, y, at = arguments
        words = ir.VectorType(_WORD, lanes)
        numbers = _load(context, builder, values_type, values, start, lanes)
        numbers = builder.fmul(numbers, splat(builder, factor, lanes))
        builder.store(numbers, address(context, builder, y_type, y, at, numbers.type), align=4)
        bits = builder.bitcast(numbers, words)
        magnitudes = builder.and_(bits, splat(builder, _WORD(MAGNITUDE), lanes))
        exceeds = builder.icmp_signed(">", magnitudes, splat(builder, limit, lanes))
        beyond = builder.ctpop(builder.bitcast(exceeds, ir.IntType(lanes)))
        beyond = beyond if lanes == 64 else builder.zext(beyond, ir.IntType(64))
        parts = (_reduced(builder, "smax", bits), _reduced(builder, "umax", bits), beyond)
        return context.make_tuple(builder, signature.return_type, parts)

    scanner: Scanner = _make(declare)
    return scanner


def _load(context: Any, builder: Any, array_type: Any, array: Any, start: Any, lanes: int) -> Any:
    """fp32, of an array of fp32 or of bits of bf16."""
    width = array_type.dtype.bitwidth
    source = ir.VectorType(_SINGLE if width == 32 else ir.IntType(width), lanes)
    loaded = builder.load(address(context, builder, array_type, array, start, source), align=width // 8)
    if width == 32:
        return loaded
    wide = builder.zext(loaded, ir.VectorType(_WORD, lanes))
    return builder.bitcast(builder.shl(wide, splat(builder, _WORD(16), lanes)), ir.VectorType(_SINGLE, lanes))


def _reduced(builder: Any, operation: str, bits: Any) -> Any:
    name = f"llvm.vector.reduce.{operation}.v{bits.type.count}i32"
    function = _control.get_or_insert_function(builder.module, ir.FunctionType(_WORD, [bits.type]), name)
    return builder.call(function, [bits])


def _packer(lanes: int) -> Packer:
    """packer(y, steps, planes, byte): of each plane, the `lanes` bits from its byte `byte` on."""

    def declare(typing_context: Any, y: Any, steps: Any, planes: Any, byte: Any) -> Any:
        return types.void(y, steps, planes, types.intp), build

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        y_type, _, planes_type, _ = signature.args
        y, steps, planes, byte = arguments
        numbers = _load(context, builder, y_type, y, builder.mul(byte, byte.type(8)), lanes)
        _scatter(context, builder, planes_type, planes, byte, _codes_of(builder, numbers, steps))
        return context.get_dummy_value()

    packer: Packer = _make(declare)
    return packer


def _codes_of(builder: Any, numbers: Any, steps: Any) -> Any:
    """A byte each; adding `TO_WHOLE` rounds to a whole number, whose bits are then the lowest."""
    lanes = numbers.type.count
    zero_point, scale, levels = (splat(builder, value, lanes) for value in _control.unpack_tuple(builder, steps))
    numbers, zeros = builder.fdiv(builder.fsub(numbers, zero_point), scale), numbers.type(None)
    numbers = builder.select(builder.fcmp_ordered(">", numbers, zeros), numbers, zeros)
    numbers = builder.select(builder.fcmp_ordered("<", numbers, levels), numbers, levels)
    rounded = builder.fadd(numbers, splat(builder, _SINGLE(float(TO_WHOLE)), lanes))
    return builder.trunc(builder.bitcast(rounded, ir.VectorType(_WORD, lanes)), ir.VectorType(_BYTE, lanes))


def _scatter(context: Any, builder: Any, planes_type: Any, planes: Any, byte: Any, codes: Any) -> None:
    """Write bit k of the codes to the k-th plane, highest first: each bit in turn is shifted to the byte's sign."""
    low_type, _, _, high_type, *_ = planes_type.types
    low, low_at, num_low, high, high_at, num_high, nbytes = _control.unpack_tuple(builder, planes)
    lanes, one = codes.type.count, num_low.type(1)
    unused = builder.trunc(builder.sub(num_low.type(8), builder.add(num_low, num_high)), _BYTE)
    left = _control.alloca_once_value(builder, builder.shl(codes, splat(builder, unused, lanes)))
    for array_type, array, at, count in ((high_type, high, high_at, num_high), (low_type, low, low_at, num_low)):
        with _control.for_range(builder, count) as loop:
            plane = builder.sub(builder.sub(count, one), loop.index)
            place = builder.add(builder.add(at, byte), builder.mul(plane, nbytes))
            shifted = builder.load(left)
            signs = builder.bitcast(builder.icmp_signed("<", shifted, codes.type(None)), ir.IntType(lanes))
            builder.store(signs, address(context, builder, array_type, array, place, signs.type), align=1)
            builder.store(builder.add(shifted, shifted), left)


_scan_64, _scan_32, _scan_8 = _scanner(64), _scanner(32), _scanner(8)
_pack_64, _pack_32, _pack_8 = _packer(64), _packer(32), _packer(8)
