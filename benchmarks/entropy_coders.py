"""Two coders of codes, in numba on one thread, to measure what entropy coding would cost: rANS and canonical Huffman.

Both code tiles of G codes (uint8 [T, G]), each tile by the table of its width, with frequencies taken from every
eighth tile of the same tensor and sent along. Prototypes: a decoder here trusts its input, and T must be a multiple of
four, G of eight.

rANS (J. Duda, arXiv:1311.2540, 2013): four interleaved states of 31 bits, words of 16 bits, frequencies out of 4,096,
division by a reciprocal. Huffman: codes of up to 12 bits, four bit strings, one for each quarter of the tiles, which
the decoder reads in turns.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[np.generic]
MAX_WIDTH = 8
SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
LOWEST = 1 << 15
"""Of a state; its highest is below 2^31."""
RECIPROCAL_BITS = 44
"""x < f·2^19 and f ≤ 2^12: the reciprocal's excess, below f·2^(19 − 44), stays under 1/f, so the quotient is exact."""
SAMPLED = 8
"""One tile in so many is counted."""
STREAMS = 4


@dataclass(frozen=True, slots=True)
class Coded:
    """What a coder made of codes.

    Attributes:
        payload: the coded bits, uint16 words or bytes.
        starts: first byte of each bit string, or the states.
        lengths: of Huffman's codes, or rANS's frequencies, [9, 256]; what the tables are made from.
        table_nbytes: what these would take in a stream.
    """

    payload: Array
    starts: Array
    lengths: Array
    table_nbytes: int

    @property
    def nbytes(self) -> int:
        """Of all that has to be sent."""
        return self.payload.nbytes + self.starts.nbytes + self.table_nbytes


@njit(cache=True, nogil=True)
def count_symbols(codes: Array, width: Array) -> Array:
    """int64 [9, 256]: how often each code occurs in every eighth tile, by width."""
    counts = np.zeros((MAX_WIDTH + 1, 256), np.int64)
    for tile in range(0, codes.shape[0], SAMPLED):
        of_width = counts[width[tile]]
        for i in range(codes.shape[1]):
            of_width[codes[tile, i]] += 1
    return counts


@njit(cache=True, nogil=True)
def frequencies(counts: Array) -> Array:
    """int64 [9, 256]: shares out of 4,096, at least 1 for every code that a width has, whether it was seen or not."""
    result = np.zeros_like(counts)
    for width in range(1, MAX_WIDTH + 1):
        size = 1 << width
        total = counts[width, :size].sum()
        largest = 0
        for code in range(size):
            share = counts[width, code] * (SCALE - size) // max(total, 1)
            result[width, code] = share + 1
            largest = code if result[width, code] > result[width, largest] else largest
        result[width, largest] += SCALE - result[width, :size].sum()
    return result


# -- rANS -------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _rans_encoder(freqs: Array) -> Array:
    """uint64 [9, 256, 4]: largest state that needs no word out, reciprocal, start, 4,096 − frequency."""
    table = np.zeros((MAX_WIDTH + 1, 256, 4), np.uint64)
    for width in range(1, MAX_WIDTH + 1):
        start = 0
        for code in range(1 << width):
            freq = freqs[width, code]
            table[width, code, 0] = freq << 19
            table[width, code, 1] = ((1 << RECIPROCAL_BITS) // freq) + 1
            table[width, code, 2] = start
            table[width, code, 3] = SCALE - freq
            start += freq
    return table


@njit(cache=True, nogil=True, inline="always")
def _put(state, entry, words, at):
    """One code onto a state; a word goes out, towards lower places, if the state would grow too large."""
    is_full = np.uint64(state >= entry[0])
    words[at - np.uint64(1)] = np.uint16(state & np.uint64(0xFFFF))
    at -= is_full
    state >>= is_full << np.uint64(4)  # no branch: nobody could predict it
    quotient = (state * entry[1]) >> np.uint64(RECIPROCAL_BITS)
    return state + entry[2] + quotient * entry[3], at


@njit(cache=True, nogil=True)
def _rans_put_all(codes: Array, width: Array, table: Array, words: Array, states: Array) -> int:
    at = np.uint64(words.size)
    a = b = c = d = np.uint64(LOWEST)
    for tile in range(codes.shape[0] - 1, -1, -1):
        entries, row = table[width[tile]], codes[tile]
        for i in range(codes.shape[1] - 4, -1, -4):
            d, at = _put(d, entries[row[i + 3]], words, at)
            c, at = _put(c, entries[row[i + 2]], words, at)
            b, at = _put(b, entries[row[i + 1]], words, at)
            a, at = _put(a, entries[row[i]], words, at)
    states[0], states[1], states[2], states[3] = a, b, c, d
    return at


@njit(cache=True, nogil=True)
def _rans_decoder(freqs: Array, used: Array) -> Array:
    """uint32 [9, 4096]: of each slot its code, the code's frequency less 1, the slot's place among its slots."""
    table = np.zeros((MAX_WIDTH + 1, SCALE), np.uint32)
    for width in range(1, MAX_WIDTH + 1):
        start = 0
        for code in range((1 << width) if used[width] else 0):
            freq = freqs[width, code]
            for place in range(freq):
                table[width, start + place] = np.uint32(code | ((freq - 1) << 8) | (place << 20))
            start += freq
    return table


@njit(cache=True, nogil=True, inline="always")
def _take(state, slots, words, at):
    """One code off a state, which takes a word in if it has become too small."""
    entry = np.uint64(slots[state & np.uint64(SCALE - 1)])
    freq = ((entry >> np.uint64(8)) & np.uint64(SCALE - 1)) + np.uint64(1)
    state = freq * (state >> np.uint64(SCALE_BITS)) + (entry >> np.uint64(20))
    is_low = np.uint64(state < np.uint64(LOWEST))
    state = (state << (is_low << np.uint64(4))) | (np.uint64(words[at]) & (np.uint64(0) - is_low))
    return np.uint8(entry & np.uint64(0xFF)), state, at + is_low


@njit(cache=True, nogil=True)
def _rans_take_all(words: Array, states: Array, width: Array, table: Array, codes: Array) -> None:
    at = np.uint64(0)
    a, b, c, d = np.uint64(states[0]), np.uint64(states[1]), np.uint64(states[2]), np.uint64(states[3])
    for tile in range(codes.shape[0]):
        slots, row = table[width[tile]], codes[tile]
        for i in range(0, codes.shape[1], 4):
            row[i], a, at = _take(a, slots, words, at)
            row[i + 1], b, at = _take(b, slots, words, at)
            row[i + 2], c, at = _take(c, slots, words, at)
            row[i + 3], d, at = _take(d, slots, words, at)


def rans_encode(codes: Array, width: Array) -> Coded:
    """Count, make tables, code."""
    freqs = frequencies(count_symbols(codes, width))
    words, states = np.empty(codes.size + 1, np.uint16), np.empty(STREAMS, np.uint32)
    at = _rans_put_all(codes, width, _rans_encoder(freqs), words, states)
    return Coded(words[at:], states, freqs, _table_nbytes(width, SCALE_BITS))


def rans_decode(coded: Coded, width: Array, group: int) -> Array:
    """uint8 [T, G]."""
    codes = np.empty((width.size, group), np.uint8)
    words = np.append(coded.payload, np.uint16(0))  # the last states may look one word ahead
    table = _rans_decoder(coded.lengths, _used(width))
    _rans_take_all(words, coded.starts, width, table, codes)
    return codes


# -- Huffman ----------------------------------------------------------------------------------------


def code_lengths(freqs: Array, widths: Array) -> Array:
    """int64 [9, 256]: lengths of Huffman codes, at most 12 bits, for the widths that occur."""
    lengths = np.zeros((MAX_WIDTH + 1, 256), np.int64)
    for width in widths:
        shares = freqs[width, : 1 << width]
        found = _huffman(shares)
        while found.max() > SCALE_BITS:  # flatter shares have shorter codes
            shares = (shares + 1) // 2
            found = _huffman(shares)
        lengths[width, : 1 << width] = found
    return lengths


def _huffman(shares: Array) -> Array:
    lengths = np.zeros(shares.size, np.int64)
    heap = [(int(share), code, [code]) for code, share in enumerate(shares)]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        members = first[2] + second[2]
        lengths[members] += 1
        heapq.heappush(heap, (first[0] + second[0], first[1], members))
    return lengths


@njit(cache=True, nogil=True)
def _canonical(lengths: Array) -> Array:
    """uint32 [9, 256]: bits of each code, to be read from the lowest up, times 16, plus its length."""
    table = np.zeros(lengths.shape, np.uint32)
    for width in range(1, MAX_WIDTH + 1):
        value = 0
        for length in range(1, SCALE_BITS + 1):
            for code in range(1 << width):
                if lengths[width, code] == length:
                    table[width, code] = (_reversed(value, length) << 4) | length
                    value += 1
            value <<= 1
    return table


@njit(cache=True, nogil=True)
def _reversed(value: int, length: int) -> int:
    result = 0
    for _ in range(length):
        result = (result << 1) | (value & 1)
        value >>= 1
    return result


@njit(cache=True, nogil=True)
def _huffman_put_all(codes: Array, width: Array, table: Array, words: Array, starts: Array) -> int:
    """Bit strings of the four quarters, each in whole words of 32 bits; how many words in all."""
    at, quarter = np.uint64(0), codes.shape[0] // STREAMS
    for stream in range(STREAMS):
        starts[stream] = at
        held, num_held = np.uint64(0), np.uint64(0)
        for tile in range(stream * quarter, (stream + 1) * quarter):
            entries, row = table[width[tile]], codes[tile]
            for i in range(0, codes.shape[1], 2):
                first, second = np.uint64(entries[row[i]]), np.uint64(entries[row[i + 1]])
                num_first = first & np.uint64(15)
                held |= ((first >> np.uint64(4)) | ((second >> np.uint64(4)) << num_first)) << num_held
                num_held += num_first + (second & np.uint64(15))
                words[at] = np.uint32(held & np.uint64(0xFFFFFFFF))
                full = (num_held >> np.uint64(5)) << np.uint64(5)  # 32 or 0
                at += full >> np.uint64(5)
                held >>= full
                num_held -= full
        words[at] = np.uint32(held & np.uint64(0xFFFFFFFF))
        at += np.uint64(1)
    return at


@njit(cache=True, nogil=True)
def _huffman_decoder(table: Array, used: Array) -> Array:
    """uint16 [9, 4096]: what the next 12 bits begin with: a code, times 16, plus its length."""
    slots = np.zeros((MAX_WIDTH + 1, SCALE), np.uint16)
    for width in range(1, MAX_WIDTH + 1):
        for code in range((1 << width) if used[width] else 0):
            bits, length = table[width, code] >> 4, table[width, code] & 15
            for rest in range(1 << (SCALE_BITS - length)):
                slots[width, bits | (rest << length)] = (code << 4) | length
    return slots


@njit(cache=True, nogil=True, inline="always")
def _refill(held, num_held, words, at):
    """At least 32 bits, with one word more where there are fewer."""
    is_low = np.uint64(num_held < np.uint64(32))
    held |= (np.uint64(words[at]) & (np.uint64(0) - is_low)) << (num_held & np.uint64(31))
    return held, num_held + (is_low << np.uint64(5)), at + is_low


@njit(cache=True, nogil=True, inline="always")
def _peel(held, num_held, slots):
    entry = np.uint64(slots[held & np.uint64(SCALE - 1)])
    length = entry & np.uint64(15)
    return np.uint8(entry >> np.uint64(4)), held >> length, num_held - length


@njit(cache=True, nogil=True)
def _huffman_take_all(words: Array, starts: Array, width: Array, table: Array, codes: Array) -> None:
    """Two codes of each quarter in turn: 24 bits at most, of 32 at least."""
    quarter = codes.shape[0] // STREAMS
    at_a, at_b, at_c, at_d = np.uint64(starts[0]), np.uint64(starts[1]), np.uint64(starts[2]), np.uint64(starts[3])
    a = b = c = d = np.uint64(0)
    num_a = num_b = num_c = num_d = np.uint64(0)
    for tile in range(quarter):
        row_a, row_b, row_c, row_d = (
            codes[tile],
            codes[tile + quarter],
            codes[tile + 2 * quarter],
            codes[tile + 3 * quarter],
        )
        slots_a, slots_b = table[width[tile]], table[width[tile + quarter]]
        slots_c, slots_d = table[width[tile + 2 * quarter]], table[width[tile + 3 * quarter]]
        for i in range(0, codes.shape[1], 2):
            a, num_a, at_a = _refill(a, num_a, words, at_a)
            b, num_b, at_b = _refill(b, num_b, words, at_b)
            c, num_c, at_c = _refill(c, num_c, words, at_c)
            d, num_d, at_d = _refill(d, num_d, words, at_d)
            for j in (i, i + 1):
                row_a[j], a, num_a = _peel(a, num_a, slots_a)
                row_b[j], b, num_b = _peel(b, num_b, slots_b)
                row_c[j], c, num_c = _peel(c, num_c, slots_c)
                row_d[j], d, num_d = _peel(d, num_d, slots_d)


def huffman_encode(codes: Array, width: Array) -> Coded:
    """Count, make tables, code."""
    lengths = code_lengths(frequencies(count_symbols(codes, width)), np.flatnonzero(_used(width)))
    words, starts = np.empty(codes.size * SCALE_BITS // 32 + STREAMS + 1, np.uint32), np.empty(STREAMS, np.uint32)
    used = _huffman_put_all(codes, width, _canonical(lengths), words, starts)
    return Coded(words[:used], starts, lengths, _table_nbytes(width, 4))


def huffman_decode(coded: Coded, width: Array, group: int) -> Array:
    """uint8 [T, G]."""
    codes = np.empty((width.size, group), np.uint8)
    words = np.append(coded.payload, np.zeros(1, np.uint32))  # refilling looks ahead
    table = _huffman_decoder(_canonical(coded.lengths), _used(width))
    _huffman_take_all(words, coded.starts, width, table, codes)
    return codes


def _used(width: Array) -> Array:
    return np.bincount(width, minlength=MAX_WIDTH + 1) > 0


def _table_nbytes(width: Array, bits: int) -> int:
    """Of frequencies or lengths of `bits` bits, for the widths that occur."""
    symbols = sum(1 << int(used) for used in np.unique(width))
    return -(-symbols * bits // 8)
