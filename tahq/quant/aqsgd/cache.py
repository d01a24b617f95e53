"""The memory of one end of a cut: the last activation sent for each sample, in fp16, in the host's memory.

Invariants:
- samples get a place in the order of their first visit, in blocks that are made as they are needed; nothing here
  knows how many samples there will be;
- `records`, `entries` and `tensors` describe the whole state, wherever the blocks lie;
- a block on disk is a memory-mapped file without a name: the kernel takes it back when the process ends, however
  it ends, so no run finds files of another. Checkpoints hold the state that outlives the process.

Shape letters: S tokens, C channels, E samples a block.
"""

import errno
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from tahq.errors import CodecError, SnapshotError, UserError
from tahq.quant.aqsgd.stream import Record

BLOCK_NBYTES = 16 * 1024 * 1024
"""A block has as many samples as fit into this, at least one."""
IDS, VISITS, ENTRIES = "ids", "visits", "entries/"

Allocate = Callable[[int], torch.Tensor]
"""Number of values -> fp16 tensor of that length, of any content."""


def in_memory(num_values: int) -> torch.Tensor:
    """A block in memory; the system provides pages as they are written."""
    return torch.empty(num_values, dtype=torch.float16)


def mapped_file(folder: Path, num_values: int) -> torch.Tensor:
    """A block in an unnamed file in `folder`, mapped into memory.

    Its space is reserved at once, so that a full disk is an error here and not a signal at a later write.
    """
    nbytes = 2 * num_values
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="aqsgd-", suffix=".fp16") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return torch.from_file(file.name, shared=True, size=num_values, dtype=torch.float16)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        raise UserError(
            f"cannot keep {nbytes:,} more bytes of AQ-SGD's cache in {folder}: {error.strerror}; "
            f"{'free some space' if full else 'make it writable'}, choose another run.dir, or cache=memory"
        ) from error


class SampleCache:
    """One end's memory of one cut and direction.

    Args:
        allocate: makes a block.
        block_nbytes: see `BLOCK_NBYTES`.
    """

    def __init__(self, allocate: Allocate, block_nbytes: int = BLOCK_NBYTES) -> None:
        self._allocate = allocate
        self._block_nbytes = block_nbytes
        self._blocks: list[torch.Tensor] = []
        self._places: dict[int, int] = {}
        self._visits: list[int] = []

    def __len__(self) -> int:
        """Samples that are remembered."""
        return len(self._places)

    @property
    def nbytes(self) -> int:
        """Bytes of what is remembered: 2·S·C a sample."""
        return len(self) * 2 * self._blocks[0][0].numel() if self._blocks else 0

    def records(self, sample_ids: Iterable[int]) -> tuple[Record, ...]:
        """What is remembered of each of these samples now; reads all of it, for the checksum."""
        return tuple(map(self._record, sample_ids))

    def entries(self, sample_ids: Sequence[int]) -> torch.Tensor:
        """A copy of what is remembered of these samples, all of which are: fp16 [N, S, C]."""
        return torch.stack([self._entry(self._places[sample_id]) for sample_id in sample_ids])

    def check_shape(self, shape: tuple[int, int]) -> None:
        """Refuse tensors of another shape than those that are remembered."""
        if self._blocks and self._blocks[0].shape[1:] != shape:
            raise CodecError(
                f"aqsgd remembers samples of shape {list(self._blocks[0].shape[1:])}, got one of {list(shape)}; "
                "a stateful codec belongs to one cut: make one for each"
            )

    def store(self, sample_id: int, entry: torch.Tensor) -> None:
        """Remember fp16 [S, C] of a sample, in place of what was; one more visit."""
        place = self._places.get(sample_id)
        if place is None:
            place = self._new_place(sample_id, entry.shape)
        self._entry(place).copy_(entry)
        self._visits[place] += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it: `ids` and `visits`, int64 [N] in the order of places, and `entries/00000`, … fp16 [≤ E, S, C].

        The entries are views: they change with the next `store`.
        """
        if not self._blocks:
            return {}
        per_block = len(self._blocks[0])
        filled = {
            f"{ENTRIES}{number:05d}": block[: len(self) - number * per_block]
            for number, block in enumerate(self._blocks)
        }
        return {IDS: torch.tensor(list(self._places)), VISITS: torch.tensor(self._visits), **filled}

    def load(self, names: Iterable[str], read: Callable[[str], torch.Tensor], shape: tuple[int, ...]) -> None:
        """Replace all that is remembered by the `tensors` of another cache, of which `read` returns one by its name.

        Entries of another shape than [S, C] are dropped. SnapshotError if the tensors do not belong together.
        """
        self._blocks, self._places, self._visits = [], {}, []
        blocks = sorted(name for name in names if name.startswith(ENTRIES))
        if not blocks or read(blocks[0]).shape[1:] != shape:
            return
        ids, visits = read(IDS).tolist(), read(VISITS).tolist()
        entries = (entry for name in blocks for entry in read(name))
        for sample_id, entry in zip(ids, entries, strict=False):
            self.store(sample_id, entry)
        if not len(ids) == len(visits) == len(self) or next(entries, None) is not None:
            raise SnapshotError(
                f"the state of aqsgd says {len(ids)} samples and {len(visits)} counts of visits, and has other than "
                f"{len(ids)} entries; resume from another checkpoint"
            )
        self._visits = visits

    def _record(self, sample_id: int) -> Record:
        place = self._places.get(sample_id)
        if place is None:
            return Record(sample_id)
        return Record(sample_id, self._visits[place], checksum(self._entry(place)))

    def _entry(self, place: int) -> torch.Tensor:
        block, row = divmod(place, len(self._blocks[0]))
        return self._blocks[block][row]

    def _new_place(self, sample_id: int, shape: torch.Size) -> int:
        place = self._places[sample_id] = len(self._places)
        self._visits.append(0)
        per_block = max(1, self._block_nbytes // (2 * shape.numel()))
        if place == per_block * len(self._blocks):
            self._blocks.append(self._allocate(per_block * shape.numel()).view(per_block, *shape))
        return place


def checksum(entry: torch.Tensor) -> int:
    """CRC-32 (zlib) of the fp16 values, little-endian, in row order."""
    return zlib.crc32(entry.view(torch.uint8).numpy().data)
