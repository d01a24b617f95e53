"""The samples of a step, by number, as a function of (seed, size of the data, step) only.

Training samples are counted over all epochs: number i is position i mod n of epoch ⌊i/n⌋, and the epoch's keyed
permutation maps the position to a sample. Step t takes the `global_batch` numbers after those of step t−1, so a batch
may begin in one epoch and end in the next, and no sample is lost or repeated. There is no state, and no text is needed:
a stage without data knows its micro-batches' samples too.

A checkpoint keeps a `Cursor`: the step, the number of the next sample, and the samples per epoch. A run resumed with
another global batch continues at that number; with another sequence length, so another number of samples, at the same
fraction of the epoch, which is not exact: the order changes, so some text is repeated in that epoch and some left out.

*Permutation.* Shuffling an epoch by an array of indices costs 8 bytes per sample on every worker and ties a run to one
library's shuffle. Here sample i of an epoch is π(i), computed in O(1) memory, with π a Feistel network: the index is
written as two digits, i = l·b + r with l < a, r < b and a·b barely above n, and each round adds a keyed hash of one
digit to the other, modulo that digit's base. Each round is invertible, so π is a bijection of 0 … a·b−1; results of n
and above go through π again until they fall below n (cycle walking), which keeps it a bijection of 0 … n−1 and, since
a·b − n < a ≈ √n, is rare. Only wrapping 64-bit integer arithmetic is used, so the order is the same in every version of
numpy and Python and on every machine. It is a shuffle, not a cipher.
"""

from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from tahq.randomness import derive_seed

_NUM_ROUNDS = 12
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


def mix64(x: U64) -> U64:
    """The finaliser of splitmix64, a bijective hash of 64 bits (Steele, Lea and Flood 2014, §4)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Permutation:
    """A bijection of 0 … num_items−1, chosen by `key`.

    Example:
        >>> sorted(Permutation(5, key=1)(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """

    num_items: int  # n, in [1, 2**62]
    key: int  # 64 bits; other keys give unrelated orders

    def __call__(self, positions: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """π(i) for every i of `positions` (any shape, 0 ≤ i < num_items), int64."""
        x = np.atleast_1d(positions).astype(np.uint64)
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


@dataclass(frozen=True, slots=True)
class Cursor:
    """A run's position in its data: before `step`, the next training sample is number `sample`."""

    step: int = 0
    sample: int = 0
    num_train_samples: int = 0  # Samples per epoch when this was written; 0: the current dataset's


BEGINNING = Cursor()  # Of a new run


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The order of a run's training samples."""

    num_train_samples: int  # n, samples per epoch, at least 1
    shuffle: bool
    seed: int  # The run's, in [0, 2**63)
    global_batch: int  # Samples per step
    micro_batch: int  # Samples per micro-batch; divides `global_batch`
    origin: Cursor = BEGINNING  # Where this run began or resumed; see `rescale`

    def cursor(self, step: int) -> Cursor:
        """Where the run stands before `step`; ValueError if that is before its origin."""
        origin = rescale(self.origin, self.num_train_samples)
        if step < origin.step:
            raise ValueError(f"step {step} lies before step {origin.step}, where this run began")
        return Cursor(step, origin.sample + (step - origin.step) * self.global_batch, self.num_train_samples)

    def sample_ids(self, step: int) -> I64:
        """Numbers, below `num_train_samples`, of the samples of `step`: int64 [global_batch]."""
        numbers = self.cursor(step).sample + np.arange(self.global_batch, dtype=np.int64)
        epochs, places = np.divmod(numbers, self.num_train_samples)
        if not self.shuffle:
            return places
        for epoch in np.unique(epochs):
            order = Permutation(self.num_train_samples, derive_seed("data order", self.seed, int(epoch)))
            places[epochs == epoch] = order(places[epochs == epoch])
        return places

    def micro_batches(self, step: int) -> list[list[int]]:
        """The same by micro-batch."""
        parts: list[list[int]] = self.sample_ids(step).reshape(-1, self.micro_batch).tolist()
        return parts


def rescale(cursor: Cursor, num_train_samples: int) -> Cursor:
    """The same place in the same epoch, where an epoch has `num_train_samples` samples.

    Exact if the number is unchanged; otherwise the position within the epoch is rounded down.

    Example:
        >>> rescale(Cursor(step=30, sample=150, num_train_samples=100), 50)
        Cursor(step=30, sample=75, num_train_samples=50)
    """
    written = cursor.num_train_samples or num_train_samples
    epoch, place = divmod(cursor.sample, written)
    sample = epoch * num_train_samples + place * num_train_samples // written
    return Cursor(cursor.step, sample, num_train_samples)
