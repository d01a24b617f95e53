"""The samples of a step that had NaN or infinity somewhere, kept for whoever wants to know why.

``runs/<name>/non_finite/step-00000013.safetensors``: `tokens` and `labels` (int64 [B, S]), `sample_ids` (int64 [B]);
the step, counted from 1, and the batch's digest are in the metadata. The micro-batches are its rows, in order.
"""

from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from safetensors.torch import save

from tahq.data.batches import StepBatch
from tahq.pipeline.checkpoint.durable_file import TEMPORARY_SUFFIX, write_durably

MAX_KEPT = 16
"""Of the latest steps; a run that skips steps again and again shall not fill the disk."""


def keep_batch(folder: Path, step: int, batch: StepBatch) -> Path:
    """Write the batch of a step, counted from 1, and remove the oldest beyond `MAX_KEPT`; returns the file.

    Raises:
        SnapshotError: the disk would not take it.
    """
    name = f"step-{step:08}.safetensors"
    tensors = {"tokens": batch.tokens, "labels": batch.labels, "sample_ids": batch.sample_ids}
    content = save(
        {key: tensor.contiguous() for key, tensor in tensors.items()},
        {"step": str(step), "digest": batch.digest, "micro_batch": str(batch.micro_batch_size)},
    )

    def write(file: BinaryIO) -> str:
        file.write(content)
        return name

    path = write_durably(folder / (name + TEMPORARY_SUFFIX), write)
    for old in sorted(folder.glob("step-*.safetensors"))[:-MAX_KEPT]:
        with suppress(OSError):  # what cannot be removed only takes space
            old.unlink(missing_ok=True)
    return path
