"""Which samples a step trains on, by number, as a function of (seed, size of the data, step) alone.

Training samples are counted through, over all epochs: number i is place i mod n of epoch ⌊i/n⌋, and the
epoch's keyed permutation says which sample stands there. Step t takes the `global_batch` numbers after
those of step t−1, so a batch may begin in one epoch and end in the next, and no sample is lost or seen
twice. There is no state, and no text is needed: a stage that has no data knows its micro-batches' samples too.

A snapshot keeps a `Cursor`: the step, the number of the next sample, and the samples of an epoch. A run
resumed with another global batch continues at that number; with another sequence length, so another
number of samples, at the same place in the epoch as a fraction, which is no longer exact: the order is
another one, so some text comes twice in that epoch and some not at all.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tahq.data.permutation import Permutation
from tahq.randomness import derive_seed

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a run stands in its data: before `step`, the next training sample is number `sample`."""

    step: int = 0
    sample: int = 0
    num_train_samples: int = 0
    """Samples of an epoch when this was written; 0: those of the dataset that it is used with."""


BEGINNING = Cursor()
"""Of a new run."""


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The order of a run's training samples.

    Attributes:
        num_train_samples: n, samples of an epoch, at least 1.
        shuffle: whether epochs are shuffled.
        seed: the run's, in [0, 2**63).
        global_batch: samples a step.
        micro_batch: samples that travel together; divides `global_batch`.
        origin: where this run began or was resumed; see `rescale`.
    """

    num_train_samples: int
    shuffle: bool
    seed: int
    global_batch: int
    micro_batch: int
    origin: Cursor = BEGINNING

    def cursor(self, step: int) -> Cursor:
        """Where the run stands before `step`; ValueError if that is before its origin."""
        origin = rescale(self.origin, self.num_train_samples)
        if step < origin.step:
            raise ValueError(f"step {step} lies before step {origin.step}, where this run began")
        return Cursor(step, origin.sample + (step - origin.step) * self.global_batch, self.num_train_samples)

    def sample_ids(self, step: int) -> I64:
        """Numbers, below `num_train_samples`, of the samples of `step`: int64 [global_batch]."""
        first = self.cursor(step).sample
        return self._at(np.arange(first, first + self.global_batch, dtype=np.int64))

    def micro_batches(self, step: int) -> list[list[int]]:
        """The same by micro-batch."""
        return [list(map(int, part)) for part in self.sample_ids(step).reshape(-1, self.micro_batch)]

    def _at(self, numbers: I64) -> I64:
        epochs, places = np.divmod(numbers, self.num_train_samples)
        if not self.shuffle:
            return places
        for epoch in np.unique(epochs):
            order = Permutation(self.num_train_samples, derive_seed("data order", self.seed, int(epoch)))
            places[epochs == epoch] = order(places[epochs == epoch])
        return places


def rescale(cursor: Cursor, num_train_samples: int) -> Cursor:
    """The same place in the same epoch, where an epoch has `num_train_samples` samples.

    Exact if the cursor was written with as many; else the place within the epoch is rounded down.

    Example:
        >>> rescale(Cursor(step=30, sample=150, num_train_samples=100), 50)
        Cursor(step=30, sample=75, num_train_samples=50)
    """
    written = cursor.num_train_samples or num_train_samples
    epoch, place = divmod(cursor.sample, written)
    sample = epoch * num_train_samples + place * num_train_samples // written
    return Cursor(cursor.step, sample, num_train_samples)
