"""The batch of a step, as a function of (data, seed, step) alone.

Training samples are counted through, over all epochs: number i is place i mod n of epoch ⌊i/n⌋, and the
epoch's keyed permutation says which sample stands there. Step t takes the `global_batch` numbers after
those of step t−1, so a batch may begin in one epoch and end in the next, and no sample is lost or seen
twice. There is no state: the first and the last stage each ask for step t and compare digests.

A snapshot keeps a `Cursor`: the step, the number of the next sample, and the samples of an epoch. A run
resumed with another global batch continues at that number; with another sequence length, so another
number of samples, at the same place in the epoch as a fraction, which is no longer exact: the order is
another one, so some text comes twice in that epoch and some not at all.

Shapes: B samples a step (`global_batch`), S tokens a sample.
"""

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tahq.data.dataset import I64, NO_LOSS, Dataset
from tahq.data.permutation import Permutation
from tahq.errors import DataError
from tahq.randomness import derive_seed


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a run stands in its data: before `step`, the next training sample is number `sample`."""

    step: int = 0
    sample: int = 0
    num_train_samples: int = 0
    """Samples of an epoch when this was written; 0: those of the dataset that it is used with."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The samples of one step.

    Attributes:
        tokens: int64 [B, S].
        labels: int64 [B, S], the token after each, or −100 where there is no loss.
        sample_ids: int64 [B].
        num_tokens: labels that count.
        digest: hex BLAKE2b over the three, the same on every stage that derived the same batch.
        micro_batch_size: samples that travel together.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    sample_ids: torch.Tensor
    num_tokens: int
    digest: str
    micro_batch_size: int

    def micro_batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the tokens and labels of micro-batch `index`, each int64 [micro_batch_size, S]."""
        rows = self._rows(index)
        return self.tokens[rows], self.labels[rows]

    def micro_batch_sample_ids(self, index: int) -> torch.Tensor:
        """View of the sample ids of micro-batch `index`, int64 [micro_batch_size]."""
        return self.sample_ids[self._rows(index)]

    def _rows(self, index: int) -> slice:
        if not 0 <= index < len(self.sample_ids) // self.micro_batch_size:
            raise IndexError(f"micro-batch {index} of {len(self.sample_ids) // self.micro_batch_size}")
        return slice(index * self.micro_batch_size, (index + 1) * self.micro_batch_size)


class BatchSource:
    """Batches of a dataset, by step.

    Args:
        dataset: where the samples come from.
        seed: the run's, in [0, 2**63).
        global_batch: samples a step.
        micro_batch: samples that travel together; divides `global_batch`.
        origin: where this run began or was resumed.

    Raises:
        DataError: an epoch has fewer samples than a batch.
    """

    def __init__(
        self, dataset: Dataset, *, seed: int, global_batch: int, micro_batch: int, origin: Cursor = Cursor()
    ) -> None:
        if dataset.num_train_samples < global_batch:
            raise DataError(
                f"{dataset.num_train_samples} training samples of seq_len {dataset.seq_len} are fewer than "
                f"training.global_batch {global_batch}; give more data, a smaller batch or a smaller seq_len"
            )
        self._dataset = dataset
        self._seed = seed
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._origin = rescale(origin, dataset.num_train_samples)

    @property
    def num_validation_batches(self) -> int:
        """Batches after which the validation split is used up, the last one perhaps filled up."""
        return -(-self._dataset.num_validation_samples // self._global_batch)

    def cursor(self, step: int) -> Cursor:
        """Where the run stands before `step`; ValueError if that is before its origin."""
        if step < self._origin.step:
            raise ValueError(f"step {step} lies before step {self._origin.step}, where this run began")
        sample = self._origin.sample + (step - self._origin.step) * self._global_batch
        return Cursor(step, sample, self._dataset.num_train_samples)

    def epoch(self, step: int) -> float:
        """Epochs seen before `step`, with their fraction."""
        return self.cursor(step).sample / self._dataset.num_train_samples

    def train(self, step: int) -> StepBatch:
        """The training batch of `step`.

        Raises:
            ValueError: `step` lies before the origin.
            DataError: a token is not in the vocabulary.
        """
        first = self.cursor(step).sample
        return self._gather(self._sample_ids(np.arange(first, first + self._global_batch, dtype=np.int64)))

    def validation(self, index: int) -> StepBatch:
        """Batch `index` of the validation split, in one order for all runs: the first few batches are a fair sample.

        Every index gives a full batch, so that all stages may agree on a number of batches without knowing
        the data: past the end, samples come again with no loss on them, and `num_tokens` does not count them.

        Raises:
            DataError: nothing is held out.
        """
        num_samples = self._dataset.num_validation_samples
        if num_samples == 0:
            raise DataError("no validation samples: data.validation is 0 or the data too little; unset eval_every")
        numbers = np.arange(index * self._global_batch, (index + 1) * self._global_batch, dtype=np.int64)
        places = Permutation(num_samples, derive_seed("validation order"))(numbers % num_samples)
        return self._gather(self._dataset.num_train_samples + places, scored=numbers < num_samples)

    def _sample_ids(self, numbers: I64) -> I64:
        epochs, places = np.divmod(numbers, self._dataset.num_train_samples)
        if not self._dataset.shuffle:
            return places
        for epoch in np.unique(epochs):
            order = Permutation(self._dataset.num_train_samples, derive_seed("data order", self._seed, int(epoch)))
            places[epochs == epoch] = order(places[epochs == epoch])
        return places

    def _gather(self, sample_ids: I64, scored: npt.NDArray[np.bool_] | None = None) -> StepBatch:
        tokens, labels = self._dataset.gather(sample_ids)
        if scored is not None:
            labels = np.where(scored[:, None], labels, NO_LOSS)
        return StepBatch(
            tokens=_tensor(tokens),
            labels=_tensor(labels),
            sample_ids=_tensor(sample_ids),
            num_tokens=int((labels != NO_LOSS).sum()),
            digest=batch_digest(tokens, labels, sample_ids),
            micro_batch_size=self._micro_batch,
        )


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


def batch_digest(tokens: I64, labels: I64, sample_ids: I64) -> str:
    """Hex BLAKE2b-128 over the shape and, little-endian int64, tokens, labels and sample ids."""
    digest = hashlib.blake2b(struct.pack("<QQ", *tokens.shape), digest_size=16)
    for array in (tokens, labels, sample_ids):
        digest.update(np.ascontiguousarray(array, dtype="<i8").data)
    return digest.hexdigest()


def _tensor(array: I64) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
