"""A keyed permutation of 0 … n−1 that any element can be asked of, in O(1) memory.

Shuffling an epoch by an array of indices costs 8 bytes a sample on every worker and ties a run to one
library's shuffle. Here sample i of an epoch is π(i), π being a Feistel network: the index is written as
two digits, i = l·b + r with l < a, r < b and a·b barely above n, and each round adds a keyed hash of one
digit to the other, modulo that digit's base. Each round can be undone, so π is a bijection of
0 … a·b−1; results of n and above are sent through π again until they fall below n (cycle walking), which
keeps it a bijection of 0 … n−1 and, since a·b − n < a ≈ √n, hardly ever happens.

Only wrapping 64-bit integer arithmetic is used, so the order is the same for every version of numpy,
Python and every machine. It is a shuffle, not a cipher.
"""

from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

_NUM_ROUNDS = 12
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1

U64 = npt.NDArray[np.uint64]


def mix64(x: U64) -> U64:
    """The finaliser of splitmix64, a bijective hash of 64 bits (Steele, Lea and Flood 2014, §4)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Permutation:
    """A bijection of 0 … num_items−1, chosen by `key`.

    Args:
        num_items: n, in [1, 2**62].
        key: 64 bits; other keys give unrelated orders.

    Raises:
        ValueError: `num_items` is out of range.

    Example:
        >>> sorted(Permutation(5, key=1)(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """

    num_items: int
    key: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_items <= 2**62:
            raise ValueError(f"a permutation needs between 1 and 2**62 items, got {self.num_items}")

    def __call__(self, positions: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """π(i) for every i of `positions` (any shape, 0 ≤ i < num_items), int64."""
        x = np.atleast_1d(positions).astype(np.uint64)
        if x.size and int(x.max()) >= self.num_items:
            raise ValueError(f"position {int(x.max())} is not below {self.num_items}")
        x = self._network(x)
        while (outside := x >= np.uint64(self.num_items)).any():
            x[outside] = self._network(x[outside])
        return x.astype(np.int64).reshape(np.shape(positions))

    def _network(self, x: U64) -> U64:
        left_base = isqrt(self.num_items - 1) + 1  # ⌈√n⌉
        a, b = np.uint64(left_base), np.uint64(-(-self.num_items // left_base))
        left, right = x // b, x % b
        for number in range(_NUM_ROUNDS):
            round_key = np.uint64((self.key + (number + 1) * _GOLDEN) & _MASK)
            if number % 2 == 0:
                left = (left + mix64(mix64(right ^ round_key) + round_key) % a) % a
            else:
                right = (right + mix64(mix64(left ^ round_key) + round_key) % b) % b
        return left * b + right
