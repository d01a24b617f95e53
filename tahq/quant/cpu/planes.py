"""Codes of one tile to bit planes and back, 32 at a time where a tile has as many, else eight as one 64-bit word.

A word holds eight codes, one per byte. One multiplication gathers bit k of its bytes into a byte of plane k; another
spreads a plane's byte over the word. `take_bits` and `put_planes` do that for four words at once. Callers must ensure
that `planes` is long enough.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from tahq.quant.cpu.kernel import kernel
from tahq.quant.cpu.numbers import Integer

WORDS = 4
"""64-bit words, of eight codes each, that one call takes."""
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
        signs = builder.icmp_signed("<", builder.shl(codes, splat(builder, distance, _LANES)), _CODES(None))
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
            added = builder.select(builder.bitcast(bits, _FLAGS), splat(builder, single, _LANES), _CODES(None))
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


def splat(builder: Any, value: Any, lanes: int) -> Any:
    """A number in all lanes of a vector."""
    vector = ir.VectorType(value.type, lanes)
    single = builder.insert_element(vector(ir.Undefined), value, ir.Constant(_BITS, 0))
    return builder.shuffle_vector(single, vector(ir.Undefined), ir.Constant(ir.VectorType(_BITS, lanes), None))


_make: Any = intrinsic  # its type in numba lists the compiler's own argument among the caller's
take_bits: Callable[[NDArray[np.uint64], int, int, NDArray[np.uint8], int], None] = _make(_take_bits)
"""take_bits(words, first, place, plane, at): plane[at : at + 4] = bit `place` of each of the 32 codes in
words[first : first + 4]. No bounds are checked.
"""
put_planes: Callable[[NDArray[np.uint8], int, int, int, int, NDArray[np.uint64], int], None] = _make(_put_planes)
"""put_planes(planes, at, stride, first_bit, num_bits, words, first): add to the 32 codes in words[first : first + 4].

Bit first_bit + k of a code is set where its bit in the 4 bytes at planes[at + k·stride] is, for all k < num_bits in
one call, so that the codes stay in a register. No bounds are checked.
"""


ByteArray = NDArray[np.uint8]
WordArray = NDArray[np.uint64]

_LOWEST_BITS = np.uint64(0x0101010101010101)
_GATHER = np.uint64(0x0102040810204080)
"""Takes bit 0 of byte j, times this, to bit 56 + j; no two products meet in one bit, so nothing carries."""
_SPREAD = np.uint64(0x0002040810204081)
"""Takes bit j of seven bits to bit 8j; the copies lie 7 apart, so they do not overlap either."""
_SEVEN, _EIGHTH = np.uint64(0x7F), np.uint64(0x80)
_TO_TOP, _TO_BYTE_7 = np.uint64(56), np.uint64(49)


@kernel
def write_planes(words: WordArray, first_bit: int, num_bits: int, planes: ByteArray, at: int) -> None:
    """Planes first_bit … first_bit + num_bits − 1 of the codes in `words`, one byte per word, from planes[at] on."""
    for k in range(num_bits):
        start, place = at + k * words.size, first_bit + k
        whole = words.size & -WORDS
        for w in range(0, whole, WORDS):
            take_bits(words, w, place, planes, start + w)
        for w in range(whole, words.size):
            bits = (words[w] >> np.uint64(place)) & _LOWEST_BITS
            planes[start + w] = np.uint8((bits * _GATHER) >> _TO_TOP)


@kernel
def read_planes(planes: ByteArray, at: int, first_bit: int, num_bits: int, words: WordArray) -> None:
    """Add to the codes in `words` the bits that `write_planes` takes from them."""
    whole = words.size & -WORDS
    for w in range(0, whole, WORDS):
        put_planes(planes, at + w, words.size, first_bit, num_bits, words, w)
    for w in range(whole, words.size):
        for k in range(num_bits):
            byte = np.uint64(planes[at + k * words.size + w])
            spread = ((byte & _SEVEN) * _SPREAD) & _LOWEST_BITS
            words[w] |= (spread | ((byte & _EIGHTH) << _TO_BYTE_7)) << np.uint64(first_bit + k)


@kernel
def write_number(number: int, index: int, width: int, packed: ByteArray) -> None:
    """Put a number of `width` bits, at most 8, at its place among others that are packed lowest bit first."""
    place = index * width
    shifted = number << (place & 7)
    packed[place >> 3] |= np.uint8(shifted & 0xFF)
    if shifted > 0xFF:
        packed[(place >> 3) + 1] |= np.uint8(shifted >> 8)


@kernel
def read_number(index: int, width: int, packed: ByteArray) -> Integer:
    """The number that `write_number` put there; never more than `width` bits."""
    place = index * width
    bits = np.int64(packed[place >> 3])
    if (place & 7) + width > 8:
        bits |= np.int64(packed[(place >> 3) + 1]) << 8
    return (bits >> (place & 7)) & ((1 << width) - 1)
