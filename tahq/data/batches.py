"""The batch of a step, as a function of (data, seed, step) only; `sample_order` numbers its samples.

There is no state: the first and the last stage each ask for step t and compare digests.

Shapes: B rows per step, as many as samples (`global_batch`) or, of preferences, twice as many; S tokens per row.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tahq.data.dataset import NO_LOSS, Dataset, ValidationSet
from tahq.data.sample_order import BEGINNING, I64, Cursor, Permutation, SampleOrder
from tahq.errors import DataError
from tahq.randomness import derive_seed


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The samples of one step."""

    tokens: torch.Tensor  # int64 [B, S]
    labels: torch.Tensor  # int64 [B, S], the token after each, or −100 where there is no loss
    sample_ids: torch.Tensor  # int64 [B], of each row
    num_tokens: int  # Labels that count
    digest: str  # Hex BLAKE2b over the three tensors: equal on stages that made the same batch
    micro_batch_size: int  # Rows
    positions: torch.Tensor | None = None  # int64 [B, S], of each token in its record; None: each row is one record
    num_pairs: int = 0  # Preferences that count; 0: samples are rows

    def micro_batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the tokens and labels of micro-batch `index`, each int64 [micro_batch_size, S]."""
        rows = self._rows(index)
        return self.tokens[rows], self.labels[rows]

    def micro_batch_positions(self, index: int) -> torch.Tensor | None:
        """View of the positions of micro-batch `index`; None if each of its rows is one record."""
        positions = None if self.positions is None else self.positions[self._rows(index)]
        is_shared = positions is not None and bool((positions[:, -1] < positions.shape[1] - 1).any())
        return positions if is_shared else None

    def _rows(self, index: int) -> slice:
        if not 0 <= index < len(self.sample_ids) // self.micro_batch_size:
            raise IndexError(f"micro-batch {index} of {len(self.sample_ids) // self.micro_batch_size}")
        return slice(index * self.micro_batch_size, (index + 1) * self.micro_batch_size)


class BatchSource:
    """Batches of `global_batch` samples in micro-batches of `micro_batch`, which divides it, by step.

    `seed` is the run's, in [0, 2**63); `origin`: where this run began or resumed; `sets` are validated on, None: what
    is held out of the dataset. DataError if an epoch has fewer samples than a batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        origin: Cursor = BEGINNING,
        sets: Sequence[ValidationSet] | None = None,
    ) -> None:
        if dataset.num_train_samples < global_batch:
            raise DataError(
                f"{dataset.num_train_samples} training samples of seq_len {dataset.seq_len} are fewer than "
                f"training.global_batch {global_batch}; give more data, a smaller batch or a smaller seq_len"
            )
        self._dataset = dataset
        self._sets = (ValidationSet.held_out(dataset),) if sets is None else tuple(sets)
        self.order = SampleOrder(dataset.num_train_samples, dataset.shuffle, seed, global_batch, micro_batch, origin)

    def cursor(self, step: int) -> Cursor:
        """Where the run stands before `step`; ValueError if that is before its origin."""
        return self.order.cursor(step)

    def train(self, step: int) -> StepBatch:
        """The training batch of `step`; ValueError if that lies before the origin."""
        return self._gather(self._dataset, self.order.sample_ids(step))

    def validation(self, index: int, number: int = 0) -> StepBatch:
        """Batch `index` of validation set `number`, in one order for all runs: the first few batches are a fair sample.

        Every index gives a full batch, so that stages agree on the number of batches without knowing the data: past the
        end, samples are repeated without loss, and `num_tokens` does not count them. DataError if the set is empty.
        """
        own = self._sets[number] if number < len(self._sets) else None
        num_samples = own.num_samples if own is not None else 0
        if own is None or num_samples == 0:
            raise DataError(
                "no validation samples: data.validation is 0 or there is too little data; unset training.eval_every"
            )
        numbers = np.arange(index * self.order.global_batch, (index + 1) * self.order.global_batch, dtype=np.int64)
        places = Permutation(num_samples, derive_seed("validation order"))(numbers % num_samples)
        return self._gather(own.dataset, own.first + places, scored=numbers < num_samples)

    def _gather(self, dataset: Dataset, sample_ids: I64, scored: npt.NDArray[np.bool_] | None = None) -> StepBatch:
        tokens, labels = dataset.gather(sample_ids)
        size = dataset.rows_per_sample
        if scored is not None:
            labels = np.where(np.repeat(scored, size)[:, None], labels, NO_LOSS)
        digest, positions = batch_digest(tokens, labels, sample_ids), dataset.positions(sample_ids)
        arrays = tokens, labels, np.repeat(sample_ids, size)
        x, y, ids = (torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
        places = None if positions is None else torch.from_numpy(positions)
        has_loss = labels != NO_LOSS
        num_pairs = int(has_loss.any(1).sum()) // size if size > 1 else 0
        rows = size * self.order.micro_batch
        return StepBatch(x, y, ids, int(has_loss.sum()), digest, rows, places, num_pairs)


def batch_digest(tokens: I64, labels: I64, sample_ids: I64) -> str:
    """Hex BLAKE2b-128 over the shape and, little-endian int64, tokens, labels and sample ids."""
    digest = hashlib.blake2b(struct.pack("<QQ", *tokens.shape), digest_size=16)
    for array in (tokens, labels, sample_ids):
        digest.update(np.ascontiguousarray(array, dtype="<i8").data)
    return digest.hexdigest()
