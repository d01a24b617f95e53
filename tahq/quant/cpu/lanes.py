"""Two steps that LLVM has instructions for, but does not find in loops: 32 codes give one bit each, and take one.

A comparison of 32 lanes is a vector of 32 bits, which is one 32-bit word (on AVX2, one instruction); the other way, a
word selects lanes. Written as LLVM's own vectors, so any processor runs them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

WORDS = 4
"""64-bit words of codes, eight a word, that one call takes."""
_BYTE = ir.IntType(8)
_BITS = ir.IntType(32)
_LANES = 8 * WORDS
_CODES = ir.VectorType(_BYTE, _LANES)
_FLAGS = ir.VectorType(ir.IntType(1), _LANES)
_control: Any = cgutils  # it has no types


def _take_bits(typing_context: Any, words: Any, first: Any, place: Any, plane: Any, at: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words, first, place, plane, at = arguments
        codes = builder.load(address(context, builder, signature.args[0], words, first, _CODES), align=1)
        distance = builder.sub(ir.Constant(_BYTE, 7), builder.trunc(place, _BYTE))
        signs = builder.icmp_signed("<", builder.shl(codes, everywhere(builder, distance, _LANES)), _CODES(None))
        target = address(context, builder, signature.args[3], plane, at, _BITS)
        builder.store(builder.bitcast(signs, _BITS), target, align=1)
        return context.get_dummy_value()

    return types.void(words, types.intp, types.intp, plane, types.intp), build


def _put_planes(
    typing_context: Any, planes: Any, at: Any, stride: Any, first_bit: Any, num_bits: Any, words: Any, first: Any
) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        planes, at, stride, first_bit, num_bits, words, first = arguments
        target = address(context, builder, signature.args[5], words, first, _CODES)
        codes = _control.alloca_once_value(builder, builder.load(target, align=1))
        lowest = builder.shl(ir.Constant(_BYTE, 1), builder.trunc(first_bit, _BYTE))
        weight = _control.alloca_once_value(builder, lowest)
        with _control.for_range(builder, num_bits) as loop:
            place = builder.add(at, builder.mul(loop.index, stride))
            bits = builder.load(address(context, builder, signature.args[0], planes, place, _BITS), align=1)
            single = builder.load(weight)
            added = builder.select(builder.bitcast(bits, _FLAGS), everywhere(builder, single, _LANES), _CODES(None))
            builder.store(builder.or_(builder.load(codes), added), codes)
            builder.store(builder.add(single, single), weight)
        builder.store(builder.load(codes), target, align=1)
        return context.get_dummy_value()

    places = (types.intp,) * 4
    return types.void(planes, *places, words, types.intp), build


def address(context: Any, builder: Any, array_type: Any, array: Any, index: Any, pointee: Any) -> Any:
    """Where element `index` of an array lies, as an address of `pointee`."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), pointee.as_pointer())


def everywhere(builder: Any, value: Any, lanes: int) -> Any:
    """A number in all lanes of a vector."""
    vector = ir.VectorType(value.type, lanes)
    single = builder.insert_element(vector(ir.Undefined), value, ir.Constant(_BITS, 0))
    return builder.shuffle_vector(single, vector(ir.Undefined), ir.Constant(ir.VectorType(_BITS, lanes), None))


_make: Any = intrinsic  # numba's type for it has the compiler's own argument among the caller's
take_bits: Callable[[NDArray[np.uint64], int, int, NDArray[np.uint8], int], None] = _make(_take_bits)
"""take_bits(words, first, place, plane, at): plane[at : at + 4] = bit `place` of each of the 32 codes in
words[first : first + 4]. Neither array's bounds are looked at.
"""
put_planes: Callable[[NDArray[np.uint8], int, int, int, int, NDArray[np.uint64], int], None] = _make(_put_planes)
"""put_planes(planes, at, stride, first_bit, num_bits, words, first): add to the 32 codes in words[first : first + 4].

Bit first_bit + k of a code is set where the 4 bytes at planes[at + k·stride] name it, for all k < num_bits in one
call, so that the codes stay in a register. Neither array's bounds are looked at.
"""
