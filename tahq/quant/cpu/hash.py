"""The counter-based 32-bit hash of `stochastic_rounding`, inside kernels: one draw for each (counter, key)."""

from typing import NamedTuple

import numpy as np

from tahq.quant.cpu.kernel import kernel

_FIRST, _SECOND = 0x85EBCA6B, 0xC2B2AE35
"""Multipliers of MurmurHash3's 32-bit finaliser."""


class Key(NamedTuple):
    """The two halves of a 64-bit key.

    Attributes:
        low: the lower 32 bits.
        high: the upper ones.
    """

    low: int
    high: int

    @classmethod
    def of(cls, key: int) -> "Key":
        """The halves of a key; of a negative one, in two's complement."""
        return cls(key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF)


@kernel
def hash_of(counter: int, key: Key) -> np.uint32:
    """32 bits, a function of the counter (modulo 2^32) and the key."""
    return _mix(_mix(np.uint32(counter) ^ np.uint32(key.low)) ^ np.uint32(key.high))


@kernel
def _mix(word: np.uint32) -> np.uint32:
    word = np.uint32(np.uint32(word) ^ np.uint32(np.uint32(word) >> 16))
    word = np.uint32(word * np.uint32(_FIRST))
    word = np.uint32(word ^ np.uint32(word >> 13))
    word = np.uint32(word * np.uint32(_SECOND))
    return np.uint32(word ^ np.uint32(word >> 16))
