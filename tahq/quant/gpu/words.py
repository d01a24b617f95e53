"""Tiles as words of bit planes, on CUDA: each thread works on the channels of whole words.

A block of words has dimensions [BYTES, T, words, 8]: T tiles, whose planes are `words` words of BYTES bytes of eight
channels each. Eight codes of four bits are one number of 32 bits; seen as a table of bits with the channel c = c₂c₁c₀
and the bit k = k₁k₀ as index, planes need it in the order k₁k₀c₂c₁c₀, and codes side by side are c₁c₀c₂k₁k₀. Two
exchanges of index bits, c₁ with k₁ and c₀ with k₀, turn one into the other.
"""

import triton
import triton.language as tl

from tahq.quant.gpu.tiles import IS_INTERPRETED, ROUNDING, any_of, locate

_AS_FLOAT, _AS_FLOAT_BITS = tl.constexpr(8388608.0), tl.constexpr(0x4B000000)
"""2^23: of a whole number below, added to it, the bits are those of 2^23 and its own."""


@triton.jit
def locate_words(
    x,
    block,
    num_tiles,
    channels,
    tiles_per_token,
    TILES: tl.constexpr,
    G: tl.constexpr,
    BYTES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """`locate` for rows [BYTES·TILES·words, 8] that are a block of words [BYTES, TILES, words, 8].

    A thread has all channels of its words, so that it reads them and builds the words alone. In two
    dimensions there is only one order in which a compiler can give rows to threads: the words of a tile, then tiles.
    """
    WORDS: tl.constexpr = G // 8 // BYTES
    row, bit = tl.arange(0, BYTES * TILES * WORDS)[:, None], tl.arange(0, 8)[None, :]
    tile, byte = row // WORDS % TILES, row // (TILES * WORDS)
    channel = (row % WORDS * BYTES + byte) * 8 + bit
    return locate(x, block, tile, channel, num_tiles, channels, tiles_per_token, TILES, G, PADDED)


@triton.jit
def over_channels_max(values):
    """Maximum [TILES] of a block of words."""
    return tl.max(tl.max(tl.max(values, axis=3), axis=0), axis=1)


@triton.jit
def over_block(numbers):
    """Numbers [TILES] as [1, TILES, 1, 1]: `over_channels_max` and `sum_of` undone, so that the layout stays theirs."""
    return numbers[:, None][None, :, :][:, :, :, None]


@triton.jit
def range_of(values):
    """Minimum and maximum [TILES] of a block of words, and the bits of the largest magnitude (NaN's if any is NaN).

    Bits of fp32 are in the order of the numbers as long as those are positive, and as unsigned numbers the negative
    ones are above and the other way round. A maximum of three whole numbers is one instruction, of fp32 that takes
    two; those are needed only where all of a tile's numbers have one sign.
    """
    bits = values.to(tl.int32, bitcast=True)
    upper = over_channels_max(bits)
    lower = over_channels_max(bits.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)
    lowest, highest = lower.to(tl.float32, bitcast=True), upper.to(tl.float32, bitcast=True)
    if any_of((upper < 0) | (lower >= 0)):
        lowest, highest = -over_channels_max(-values), over_channels_max(values)
    return lowest, highest, tl.maximum(upper & 0x7FFFFFFF, lower & 0x7FFFFFFF)


@triton.jit
def sum_of(values):
    """Sum [TILES] of a block of words."""
    return tl.sum(tl.sum(tl.sum(values, axis=3), axis=0), axis=1)


@triton.jit
def choose_bytes(a, b, CHOICE: tl.constexpr):
    """Four of the bytes of a (0 to 3) and b (4 to 7), by the hexadecimal digits of CHOICE, lowest first."""
    if not IS_INTERPRETED:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,n", [a, b, CHOICE], dtype=tl.int32, is_pure=True, pack=1
        )
    chosen = tl.zeros_like(a)
    for place in tl.static_range(4):
        number = (CHOICE >> (4 * place)) & 7
        source = a if number < 4 else b
        chosen |= ((source >> (8 * (number % 4))) & 0xFF) << (8 * place)
    return chosen


@triton.jit
def approximate_inverse(numbers):
    """1/x to 1 ulp, in one instruction, for normal numbers; correctly rounded in the interpreter."""
    if IS_INTERPRETED:
        return 1.0 / numbers
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [numbers], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def weights():
    """[8] powers of 16: the place of a channel's code in its half of the number, c₀c₂."""
    channel = tl.arange(0, 8)
    return tl.where(channel % 2 == 1, 256.0, 1.0) * tl.where(channel >= 4, 16.0, 1.0)


@triton.jit
def _exchange(words, DISTANCE: tl.constexpr, MASK: tl.constexpr):
    """Bits of MASK and those DISTANCE above them, exchanged."""
    moved = (words ^ (words >> DISTANCE)) & MASK
    return words ^ moved ^ (moved << DISTANCE)


@triton.jit
def _transpose_bytes(first, second, third, fourth):
    """Byte k of number j as byte j of number k, of four numbers of four bytes."""
    low_left, high_left = choose_bytes(first, second, 0x5140), choose_bytes(first, second, 0x7362)
    low_right, high_right = choose_bytes(third, fourth, 0x5140), choose_bytes(third, fourth, 0x7362)
    return (
        choose_bytes(low_left, low_right, 0x5410),
        choose_bytes(low_left, low_right, 0x7632),
        choose_bytes(high_left, high_right, 0x5410),
        choose_bytes(high_left, high_right, 0x7632),
    )


@triton.jit
def pack_codes(codes, BYTES: tl.constexpr, T: tl.constexpr, WORDS: tl.constexpr):
    """int32 [BYTES, T, words], byte k with bit k of codes below 16, which are fp32 [BYTES, T, words, 8], weighted."""
    fours = tl.sum(tl.sum(tl.reshape(codes, [BYTES, T, WORDS, 2, 2, 2]), axis=5), axis=3)
    lower, upper = tl.split((fours + _AS_FLOAT).to(tl.int32, bitcast=True))
    words = (lower & 0xFFFF) | (upper << 16)
    return _exchange(_exchange(words, 14, 0xCCCC), 7, 0x00AA00AA)


@triton.jit
def halves(codes):
    """The lower and the upper four bits of weighted codes below 256."""
    weight = weights()[None, None, None, :]
    rounding = weight * ROUNDING
    upper = (tl.fma(codes, 0.0625, -0.46875 * weight) + rounding) - rounding
    return tl.fma(upper, -16.0, codes), upper


@triton.jit
def planes_of(words, BYTES: tl.constexpr, T: tl.constexpr, WORDS: tl.constexpr):
    """Four planes [T, words] of words [BYTES, T, words]: BYTES bytes each, of byte 0, 1, 2, 3 of the words."""
    if BYTES == 4:
        pairs = tl.reshape(tl.permute(words, (1, 2, 0)), [T, WORDS, 2, 2])
        even, odd = tl.split(pairs)
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        planes = _transpose_bytes(first, second, third, fourth)
    else:
        place = 8 * tl.arange(0, BYTES)[:, None, None]
        planes = (
            tl.sum((words & 0xFF) << place, axis=0),
            tl.sum(((words >> 8) & 0xFF) << place, axis=0),
            tl.sum(((words >> 16) & 0xFF) << place, axis=0),
            tl.sum(((words >> 24) & 0xFF) << place, axis=0),
        )
    return planes


@triton.jit
def as_words(buf, BYTES: tl.constexpr):
    """A pointer to bytes as one to words of BYTES."""
    if BYTES == 4:
        words = buf.to(tl.pointer_type(tl.int32), bitcast=True)
    elif BYTES == 2:
        words = buf.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        words = buf.to(tl.pointer_type(tl.int8), bitcast=True)
    return words


@triton.jit
def words_of(first, second, third, fourth, BYTES: tl.constexpr, T: tl.constexpr, WORDS: tl.constexpr):
    """`planes_of` undone: of four planes [T, words] int32, the words [BYTES, T, words]."""
    if BYTES == 4:
        first, second, third, fourth = _transpose_bytes(first, second, third, fourth)
        pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
        words = tl.permute(tl.reshape(pairs, [T, WORDS, 4]), (2, 0, 1))
    else:
        place = 8 * tl.arange(0, BYTES)[:, None, None]
        words = (first[None, :, :] >> place) & 0xFF
        words |= ((second[None, :, :] >> place) & 0xFF) << 8
        words |= ((third[None, :, :] >> place) & 0xFF) << 16
        words |= ((fourth[None, :, :] >> place) & 0xFF) << 24
    return words


@triton.jit
def unpack_codes(words):
    """Codes below 16, int32 [BYTES, T, words, 8], of words [BYTES, T, words]."""
    words = _exchange(_exchange(words, 7, 0x00AA00AA), 14, 0xCCCC)
    channel = tl.arange(0, 8)
    place = 2 * (channel % 4) + channel // 4
    return (words[:, :, :, None] >> (4 * place)[None, None, None, :]) & 15


@triton.jit
def as_floats(codes):
    """fp32 of whole numbers below 2^23."""
    return (codes | _AS_FLOAT_BITS).to(tl.float32, bitcast=True) - _AS_FLOAT
