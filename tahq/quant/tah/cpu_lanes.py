"""From a tile's planes to its values without a byte stored between: 64, 32 or 8 codes at a time.

Loops over the codes of a tile, one that gathers them from the planes, one that makes numbers of them, one that rounds
these, take longer for what stands around such short loops than for their work. Here the number of lanes is known when
the loop is compiled, and all between the planes and the tensor stays in registers. Written as LLVM's own vectors, so
any processor runs it. Equal to `tah.reference` to the bit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from tahq.quant.cpu.kernel import kernel
from tahq.quant.cpu.lanes import address, everywhere
from tahq.quant.cpu.numbers import Fp32Array, Int16Array
from tahq.quant.cpu.planes import ByteArray

_BIT, _BYTE, _HALF_WORD, _WORD = ir.IntType(1), ir.IntType(8), ir.IntType(16), ir.IntType(32)
_control: Any = cgutils  # neither of these two has types
_make: Any = intrinsic


class Planes(NamedTuple):
    """Where the planes of one tile lie.

    Attributes:
        low: array of the lowest planes.
        low_at: where in `low` the tile's start.
        num_low: how many they are.
        high: array of the planes above.
        high_at: where in `high` the tile's start.
        num_high: how many they are.
        nbytes: of one plane, G/8.
    """

    low: ByteArray
    low_at: int
    num_low: int
    high: ByteArray
    high_at: int
    num_high: int
    nbytes: int


class Line(NamedTuple):
    """What a code q stands for: (q·scale + zero_point)·factor, kept within ±largest."""

    scale: np.float32
    zero_point: np.float32
    factor: np.float32
    largest: np.float32


Numbers = Fp32Array | Int16Array
Reader = Callable[[Planes, int, Line, Numbers, int], None]


@kernel
def read_values(planes: Planes, line: Line, out: Numbers, start: int) -> None:
    """What the G codes of a tile stand for, from out[start] on: fp32, or bits of bf16, to nearest even.

    No array's bounds are looked at.
    """
    if planes.nbytes >= 8:
        for byte in range(0, planes.nbytes, 8):
            _read_64(planes, byte, line, out, start + 8 * byte)
    elif planes.nbytes == 4:
        _read_32(planes, 0, line, out, start)
    else:
        for byte in range(planes.nbytes):
            _read_8(planes, byte, line, out, start + 8 * byte)


def _reader(lanes: int) -> Reader:
    """reader(planes, byte, line, out, start): of each plane, the `lanes` bits from its byte `byte` on."""

    def declare(typing_context: Any, planes: Any, byte: Any, line: Any, out: Any, start: Any) -> Any:
        return types.void(planes, types.intp, line, out, types.intp), build

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        planes_type, _, _, out_type, _ = signature.args
        planes, byte, line, out, start = arguments
        codes = _gather(context, builder, planes_type, planes, byte, lanes)
        values = _numbers_of(builder, codes, line)
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
            added = builder.select(flags, everywhere(builder, single, lanes), zeros)
            builder.store(builder.or_(builder.load(codes), added), codes)
            builder.store(builder.add(single, single), weight)
    return builder.load(codes)


def _numbers_of(builder: Any, codes: Any, line: Any) -> Any:
    """fp32, each operation rounded by itself."""
    lanes = codes.type.count
    scale, zero_point, factor, largest = (
        everywhere(builder, value, lanes) for value in _control.unpack_tuple(builder, line)
    )
    whole = builder.zext(codes, ir.VectorType(_WORD, lanes))
    numbers = builder.fadd(builder.fmul(builder.sitofp(whole, scale.type), scale), zero_point)
    numbers, smallest = builder.fmul(numbers, factor), builder.fneg(largest)
    numbers = builder.select(builder.fcmp_ordered("<", numbers, largest), numbers, largest)
    return builder.select(builder.fcmp_ordered(">", numbers, smallest), numbers, smallest)


def _to_bf16(builder: Any, numbers: Any) -> Any:
    """As `numbers.float_to_bf16`."""
    lanes = numbers.type.count
    bits = builder.bitcast(numbers, ir.VectorType(_WORD, lanes))
    dropped, one, below_half = (everywhere(builder, _WORD(number), lanes) for number in (16, 1, 0x7FFF))
    to_even = builder.and_(builder.lshr(bits, dropped), one)
    rounded = builder.add(bits, builder.add(to_even, below_half))
    return builder.trunc(builder.lshr(rounded, dropped), ir.VectorType(_HALF_WORD, lanes))


_read_64, _read_32, _read_8 = _reader(64), _reader(32), _reader(8)
