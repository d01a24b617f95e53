"""The counter-based hash of `stochastic_rounding` in Triton: the reference's words, bit for bit."""

import triton
import triton.language as tl


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
