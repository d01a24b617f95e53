"""Codes of one tile to bit planes and back, 32 at a time where a tile has as many, else eight as one 64-bit word.

A word holds eight codes, one a byte. Bit k of its bytes, gathered by one multiplication, is one byte of plane k;
the other way, one multiplication spreads a plane's byte over the word. `cpu.lanes` does that for four words at once.
Callers answer for `planes` being long enough.
"""

import numpy as np
from numpy.typing import NDArray

from tahq.quant.cpu.kernel import kernel
from tahq.quant.cpu.lanes import WORDS, put_planes, take_bits
from tahq.quant.cpu.numbers import Integer

ByteArray = NDArray[np.uint8]
WordArray = NDArray[np.uint64]

_LOWEST_BITS = np.uint64(0x0101010101010101)
_GATHER = np.uint64(0x0102040810204080)
"""Takes bit 0 of byte j, times this, to bit 56 + j; no two products meet in one bit, so nothing carries."""
_SPREAD = np.uint64(0x0002040810204081)
"""Takes bit j of seven bits to bit 8j; the copies lie 7 apart, so they don't meet either."""
_SEVEN, _EIGHTH = np.uint64(0x7F), np.uint64(0x80)
_TO_TOP, _TO_BYTE_7 = np.uint64(56), np.uint64(49)


@kernel
def write_planes(words: WordArray, first_bit: int, num_bits: int, planes: ByteArray, at: int) -> None:
    """Planes first_bit … first_bit + num_bits − 1 of the codes in `words`, one byte a word, from planes[at] on."""
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
