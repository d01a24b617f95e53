"""Parts that the Triton kernels of every codec share: tiles in and out, powers of two, bit planes.

A block is TILES consecutive tiles of G channels, fp32 [TILES, G]. Kernels walk over blocks in strides of the
grid, so a grid never has more programs than fill the device. Everything here is equal to the reference bit
for bit: additions, multiplications, comparisons and bit operations, each rounded once (kernels are compiled
without fusion into multiply-adds).

Nothing is initialised beforehand. The first kernel of an encoder writes one word per program to `work`: the
bits of the largest finite magnitude that the program saw, and as sign bit whether it saw a tile that is not
finite. Each kernel that needs the tensor's exponent reduces these words, a few hundred at most, itself.
"""

import triton
import triton.language as tl

from tahq.quant.backends import interprets_triton

MAX_MEASURED = 512
"""Programs of an encoder's first kernel: words at the start of `work` that each of the later ones reduces."""
INFINITY = tl.constexpr(0x7F800000)
"""Bits of fp32's infinity; those of a NaN's magnitude are above."""
ROUNDING = tl.constexpr(12582912.0)
"""1.5·2^23: a number from 0 to 2^16 added to it is rounded half to even to a whole number."""
ROUNDING_BITS = tl.constexpr(0x4B400000)
IS_INTERPRETED = tl.constexpr(interprets_triton())
_MEASURED = tl.constexpr(MAX_MEASURED)
DAMAGED, FLAGGED, MARKED = 1, 2, 4
"""A decoder's findings: a damaged stream; a header flagged as not finite; a tile marked as not finite."""
_DAMAGED, _FLAGGED, _MARKED = tl.constexpr(DAMAGED), tl.constexpr(FLAGGED), tl.constexpr(MARKED)


@triton.jit
def magnitude_bits(values):
    """Bits of |x|, which are in the order of |x|."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def power_of_two(exponent):
    """2^exponent in fp32, exactly, for exponents from −127 (which is subnormal) to 127."""
    bits = tl.where(exponent == -127, 1 << 22, (exponent + 127) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def tensor_exponent(work, num_measured, TOP: tl.constexpr, MOST: tl.constexpr = _MEASURED):
    """e = TOP − ⌊log2 max|x|⌋, at most 127, 0 for zeros; and whether a tile is not finite. MOST: of `num_measured`."""
    program = tl.arange(0, MOST)
    words = tl.load(work + program, mask=program < num_measured, other=0)
    largest = tl.max(words & 0x7FFFFFFF, axis=0)
    exponent = tl.minimum(TOP + 127 - (largest >> 23), 127)  # beyond 127, too, where the largest is subnormal
    return tl.where(largest > 0, exponent, 0), tl.min(words, axis=0) < 0


@triton.jit
def store_measured(work, largest, largest_finite):
    """This program's word, from the largest magnitudes [TILES] (bits), of all tiles and of finite ones."""
    flag = tl.where(tl.max(largest, axis=0) >= INFINITY, -0x80000000, 0).to(tl.int32)
    tl.store(work + tl.program_id(0), tl.max(largest_finite, axis=0) | flag)


@triton.jit
def locate(
    x,
    block,
    tile,
    channel,
    num_tiles,
    channels,
    tiles_per_token,
    TILES: tl.constexpr,
    G: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Pointers to channels of a block's tiles in a contiguous tensor, and which of them are real.

    `tile` and `channel`, whole numbers below TILES and G, are broadcast against each other.
    """
    if PADDED:
        tiles = block * TILES + tile
        token = tiles // tiles_per_token
        in_token = (tiles - token * tiles_per_token) * G + channel
        return x + (token.to(tl.int64) * channels + in_token), (tiles < num_tiles) & (in_token < channels)
    first = x + tl.cast(block, tl.int64) * (TILES * G)
    return first + (tile * G + channel), (tile < num_tiles - block * TILES) & (channel < G)


@triton.jit
def locate_tiles(
    x, block, num_tiles, channels, tiles_per_token, TILES: tl.constexpr, G: tl.constexpr, PADDED: tl.constexpr
):
    """`locate` for a block [TILES, G]."""
    tile, channel = tl.arange(0, TILES)[:, None], tl.arange(0, G)[None, :]
    return locate(x, block, tile, channel, num_tiles, channels, tiles_per_token, TILES, G, PADDED)


@triton.jit
def locate_eights(
    x, block, num_tiles, channels, tiles_per_token, TILES: tl.constexpr, G: tl.constexpr, PADDED: tl.constexpr
):
    """`locate` for a block [8, G/8, TILES], as `unpack_bits` has them."""
    byte, tile = tl.arange(0, G // 8)[None, :, None], tl.arange(0, TILES)[None, None, :]
    channel = tl.arange(0, 8)[:, None, None] + 8 * byte
    return locate(x, block, tile, channel, num_tiles, channels, tiles_per_token, TILES, G, PADDED)


@triton.jit
def store_values(pointers, values, is_real):
    """Values fp32 as the tensor's own type: what exceeds its largest becomes that, NaN stays NaN."""
    if pointers.dtype.element_ty == tl.float16:
        largest = 65504.0
    elif pointers.dtype.element_ty == tl.bfloat16:
        largest = 3.3895313892515355e38
    else:
        largest = 3.4028234663852886e38
    at_most = tl.minimum(values, largest, propagate_nan=tl.PropagateNan.ALL)
    clamped = tl.maximum(at_most, -largest, propagate_nan=tl.PropagateNan.ALL)
    tl.store(pointers, clamped.to(pointers.dtype.element_ty), mask=is_real)


@triton.jit
def any_of(flags):
    """Whether one of the flags of a block is set: a scalar, to branch on."""
    return tl.max(flags.to(tl.int32), axis=0) > 0


@triton.jit
def only(numbers, is_own):
    """The one number [1] of int32 [TILES] that `is_own` selects."""
    return tl.zeros([1], tl.int32) + tl.sum(tl.where(is_own, numbers, 0), axis=0)


@triton.jit
def as_floats(pointer):
    """A pointer to words of 32 bits as one to fp32."""
    return pointer.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def as_halves(pointer):
    """A pointer to bytes as one to fp16's bits."""
    return pointer.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def exchange(y, pivot, G: tl.constexpr):
    """Tiles [TILES, G] with channels 0 and pivot[t] of each tile exchanged."""
    channel = tl.arange(0, G)[None, :]
    is_pivot = channel == pivot[:, None]
    bits = y.to(tl.int32, bitcast=True)  # sums of whole numbers keep the sign of a zero
    at_zero = tl.sum(tl.where(channel == 0, bits, 0), axis=1)
    at_pivot = tl.sum(tl.where(is_pivot, bits, 0), axis=1)
    moved = tl.where(is_pivot, at_zero[:, None], bits)
    return tl.where(channel == 0, at_pivot[:, None], moved).to(tl.float32, bitcast=True)


@triton.jit
def hadamard(y, TILES: tl.constexpr, G: tl.constexpr):
    """Butterflies (a, b) → (a + b, a − b) at distances 1, 2, … G/2, then times 1/√G.

    The other of a pair is the pair's sum less its own value, of their bits as whole numbers: a reduction,
    which needs no other layout of the block. Then b's place takes a − b as the other less its own.
    """
    is_b = tl.arange(0, 2)[None, None, :, None] == 1
    for level in tl.static_range(8):
        if (2 << level) <= G:
            own = tl.reshape(y, [TILES, G // (2 << level), 2, 1 << level])
            bits = own.to(tl.int32, bitcast=True)
            other = (tl.sum(bits, axis=2, keep_dims=True) - bits).to(tl.float32, bitcast=True)
            y = tl.reshape(tl.where(is_b, other - own, own + other), [TILES, G])
    return y * G**-0.5


@triton.jit
def log2(x):
    """log2 of normal numbers to about 2^-22, in one instruction where there is one."""
    if IS_INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def popcount(words):
    """How many bits of int32 are set."""
    if not IS_INTERPRETED:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    pairs = words - ((words >> 1) & 0x55555555)
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (nibbles + (nibbles >> 4)) & 0x0F0F0F0F
    return (eights & 0xFF) + ((eights >> 8) & 0xFF) + ((eights >> 16) & 0xFF) + ((eights >> 24) & 0xFF)


@triton.jit
def pack_bits(codes, FIRST: tl.constexpr, IS_NARROW: tl.constexpr, TILES: tl.constexpr, G: tl.constexpr):
    """Bits FIRST to FIRST + 3 of codes int32 [TILES, G]: int32 [TILES, G/8], byte k holding bit FIRST + k.

    Multiplying a number q below 16 by 1 + 2^7 + 2^14 + 2^21 puts its bit k at place 8k, among others.
    IS_NARROW: all codes are below 16.
    """
    numbers = codes if IS_NARROW else (codes >> FIRST) & 15
    placed = ((numbers * 0x00204081) & 0x01010101) << (tl.arange(0, G) % 8)[None, :]
    return tl.sum(tl.reshape(placed, [TILES, G // 8, 8]), axis=2)


@triton.jit
def unpack_bits(words):
    """The inverse of `pack_bits`, of words [TILES, G/8]: numbers int32 below 16, [8, G/8, TILES].

    The order of dimensions decides which thread has what: one has the eight channels of a byte, and its
    neighbour, once they are stored, those of the next byte.
    """
    spread = (tl.trans(words)[None, :, :] >> tl.arange(0, 8)[:, None, None]) & 0x01010101
    return (spread * 0x01020408) >> 24


@triton.jit
def from_eights(y, TILES: tl.constexpr, G: tl.constexpr):
    """[8, G/8, TILES] as [TILES, G]."""
    return tl.reshape(tl.permute(y, (2, 1, 0)), [TILES, G])


@triton.jit
def to_eights(y, TILES: tl.constexpr, G: tl.constexpr):
    """[TILES, G] as [8, G/8, TILES]."""
    return tl.permute(tl.reshape(y, [TILES, G // 8, 8]), (2, 1, 0))


@triton.jit
def place_planes(FIRST: tl.constexpr, PLANES: tl.constexpr, TILES: tl.constexpr, G: tl.constexpr):
    """Plane and tile of a block of planes [PLANES, TILES, G/8], and offsets within tiles that start at FIRST."""
    plane, tile = tl.arange(0, PLANES)[:, None, None], tl.arange(0, TILES)[None, :, None]
    return plane, tile, (plane - FIRST) * (G // 8) + tl.arange(0, G // 8)[None, None, :]


@triton.jit
def plane_bytes(low_words, high_words, PLANES: tl.constexpr):
    """Planes 0 to PLANES − 1 (4 or 8) of words [TILES, G/8]: uint8 [PLANES, TILES, G/8]."""
    plane = tl.arange(0, PLANES)[:, None, None]
    words = low_words[None, :, :]
    if PLANES > 4:
        words = tl.where(plane < 4, words, high_words[None, :, :])
    return (words >> (8 * (plane % 4))).to(tl.uint8)


@triton.jit
def plane_words(planes, FIRST: tl.constexpr, PLANES: tl.constexpr):
    """Planes FIRST to FIRST + 3 of uint8 [PLANES, TILES, G/8], each a byte of int32 [TILES, G/8]."""
    plane = tl.arange(0, PLANES)[:, None, None]
    placed = planes.to(tl.int32) << (8 * (plane % 4))
    return tl.sum(tl.where(plane // 4 == FIRST // 4, placed, 0), axis=0)


@triton.jit
def store_header(buf, exponent, is_flagged, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, PLACE: tl.constexpr):
    """The sixteen bytes [1, flags, A, B, C, …, 0]; e goes to byte PLACE, which is 4 where there is no C."""
    place = tl.arange(0, 16)
    header = tl.where(place == 0, 1, tl.where(place == 1, is_flagged.to(tl.int32), 0))
    header = tl.where(place == 2, A, tl.where(place == 3, B, tl.where(place == 4, C, header)))
    tl.store(buf + place, tl.where(place == PLACE, exponent, header).to(tl.uint8))


@triton.jit
def fill_gap(buf, stop):
    """Zeros from byte `stop` of a stream to the next multiple of 16."""
    place = stop + tl.arange(0, 16)
    tl.store(buf + place, tl.zeros([16], tl.uint8), mask=place < (stop + 15) // 16 * 16)


@triton.jit
def is_gap_dirty(buf, stop):
    """Whether a byte from `stop` to the next multiple of 16 is not zero."""
    place = stop + tl.arange(0, 16)
    filling = tl.load(buf + place, mask=place < (stop + 15) // 16 * 16, other=0)
    return tl.max(filling.to(tl.int32), axis=0) > 0


@triton.jit
def header_verdict(
    buf, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, PLACE: tl.constexpr, MIN_EXPONENT: tl.constexpr
):
    """The verdict on a header that should be as `store_header` writes it."""
    place = tl.arange(0, 16)
    header = tl.load(buf + place).to(tl.int32)
    expected = tl.where(place == 0, 1, tl.where(place == 2, A, tl.where(place == 3, B, 0)))
    expected = tl.where(place == 4, C, expected)
    is_wrong = any_of((header != expected) & (place != 1) & (place != PLACE))
    flags = tl.sum(tl.where(place == 1, header, 0), axis=0)
    exponent = tl.sum(tl.where(place == PLACE, header, 0), axis=0)
    is_low = (exponent > 127) & (exponent - 256 < MIN_EXPONENT)
    return tl.where(is_wrong | (flags > 1) | is_low, _DAMAGED, 0) | tl.where(flags == 1, _FLAGGED, 0)


@triton.jit
def store_verdict(work, verdict):
    """Add what a program found of its tiles, [TILES], to the verdict, which is the first word of `work`."""
    found = tl.max(verdict & _MARKED, axis=0) | tl.max(verdict & _DAMAGED, axis=0)
    if found > 0:
        tl.atomic_or(work, found, sem="relaxed")


@triton.jit
def is_left_over(buf, section, num_bits):
    """Whether a bit behind the last of `num_bits`, in its byte, is set."""
    is_partial = num_bits % 8 > 0
    last = tl.load(buf + section + num_bits // 8, mask=is_partial, other=0).to(tl.int32)
    return (last >> (num_bits % 8).to(tl.int32)) > 0


@triton.jit
def from_half(bits):
    """fp32 of fp16's bits."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def mix(bits):
    """MurmurHash3's finaliser of uint32."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def hash_words(counter, key_low, key_high):
    """uint32 of counters int32 (taken modulo 2^32) and of the key's halves, int32."""
    bits = mix(counter.to(tl.uint32, bitcast=True) ^ key_low.to(tl.uint32, bitcast=True))
    return mix(bits ^ key_high.to(tl.uint32, bitcast=True))


@triton.jit
def rounded_to_bf16(values, counter, key_low, key_high):
    """fp32 to bf16, as `stochastic_rounding.round_to_bf16` rounds it with the draw of a counter, int32."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # a NaN keeps a bit that bf16 has; adding a draw could turn it into a number
    result = tl.where(size > 0x7F800000, bits | 0x400000, bits)
    draw = (hash_words(counter, key_low, key_high) >> 16).to(tl.int32)
    result = tl.where(size < 0x7F800000, (bits + draw) & -0x10000, result)
    return result.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def flip_signs(y, tiles, key_low, key_high, TILES: tl.constexpr, G: tl.constexpr):
    """y [TILES, G] with the sign of element i, of all tiles, changed where bit i mod 32 of the hash of ⌊i/32⌋ is set.

    No element's number is computed, which might not fit 32 bits: only those of words.
    """
    channel = tl.arange(0, G)[None, :]
    if G >= 32:
        word = tiles[:, None] * (G // 32) + channel // 32
        place = channel % 32
    else:
        word = (tiles // (32 // G))[:, None] + channel // 32
        place = (tiles % (32 // G) * G)[:, None] + channel
    flips = (hash_words(word, key_low, key_high) << (31 - place).to(tl.uint32)) & 0x80000000
    return (y.to(tl.uint32, bitcast=True) ^ flips).to(tl.float32, bitcast=True)
