"""`aqsgd`: the activation compression of AQ-SGD, as a codec that remembers every sample at both ends of a cut.

At a sample's first visit its values are sent in fp16; later the change since the last visit, in `bits` bits. Whether a
visit is the first is decided sample by sample: a run thus begins with a warm-up epoch without compression, and a sample
that is new or forgotten in the middle of a run needs no special epoch.

Rules, which both ends follow:
- every sample of a micro-batch is coded relative to what was remembered *before* it; if a sample occurs twice, the last
  occurrence is remembered (the scale of a micro-batch is known only once all changes are);
- a sample with NaN or infinity is not remembered: the old value stays, and its visit does not count;
- without sample ids (evaluation) samples are sent whole, as at a first visit, and not remembered;
- `cache=none` remembers nothing and sends Q(x) every time, whatever the ids: the paper's control.

Shape letters: S tokens, C channels, E samples per block of the memory.
"""

import errno
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from tahq.errors import CodecError, SnapshotError, UserError
from tahq.quant.aqsgd import stream as aqsgd_stream
from tahq.quant.aqsgd.reference import AqsgdParts, decode_samples, encode_samples
from tahq.quant.aqsgd.stream import AqsgdLayout, Record, has_ids
from tahq.quant.codec import Codec
from tahq.quant.spec import AqsgdSpec
from tahq.quant.stream import accept
from tahq.quant.tiling import check_decodable, check_encodable, check_shape

SENT, RECEIVED = "sent/", "received/"
"""Prefixes of the names of state tensors, for the two ends."""
IDS, VISITS, ENTRIES = "ids", "visits", "entries/"
BLOCK_NBYTES = 16 * 1024 * 1024
"""A block of a memory has as many samples as fit into this, at least one."""


def in_memory(num_values: int) -> torch.Tensor:
    """A block in memory: fp16 [num_values] of any content. The system provides pages as they are written."""
    return torch.empty(num_values, dtype=torch.float16)


def mapped_file(folder: Path, num_values: int) -> torch.Tensor:
    """A block in an unnamed file in `folder`, mapped into memory; the kernel frees it however the process ends.

    Its space is reserved at once, so that a full disk raises an error here instead of a signal at a later write.
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
    """The memory of one end of a cut: the last activation sent for each sample, fp16 [S, C], in the host's memory.

    Samples get a place in the order of their first visit, in blocks that `allocate` makes as they are needed.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], block_nbytes: int = BLOCK_NBYTES) -> None:
        self._allocate = allocate
        self._block_nbytes = block_nbytes
        self._blocks: list[torch.Tensor] = []
        self._places: dict[int, int] = {}
        self._visits: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes remembered: 2·S·C per sample."""
        return len(self._places) * 2 * self._blocks[0][0].numel() if self._blocks else 0

    def records(self, sample_ids: Iterable[int]) -> tuple[Record, ...]:
        """The records of these samples as remembered now; reads all of their values, for the checksums."""
        return tuple(map(self._record, sample_ids))

    def entries(self, sample_ids: Sequence[int]) -> torch.Tensor:
        """A copy of the remembered values of these samples, all of them known: fp16 [N, S, C]."""
        return torch.stack([self._entry(self._places[sample_id]) for sample_id in sample_ids])

    def check_shape(self, shape: tuple[int, int]) -> None:
        """Refuse samples whose shape [S, C] is not that of the remembered ones."""
        if self._blocks and self._blocks[0].shape[1:] != shape:
            raise CodecError(
                f"aqsgd remembers samples of shape {list(self._blocks[0].shape[1:])}, got one of {list(shape)}; "
                "a stateful codec belongs to one cut: make one per cut"
            )

    def store(self, sample_id: int, entry: torch.Tensor) -> None:
        """Remember fp16 [S, C] as the new value of a sample, and count a visit."""
        place = self._places.get(sample_id)
        if place is None:
            place = self._places[sample_id] = len(self._places)
            self._visits.append(0)
            per_block = max(1, self._block_nbytes // (2 * entry.numel()))
            if place == per_block * len(self._blocks):
                self._blocks.append(self._allocate(per_block * entry.numel()).view(per_block, *entry.shape))
        self._entry(place).copy_(entry)
        self._visits[place] += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state: `ids` and `visits`, int64 [N] in the order of places, and `entries/00000`, … fp16 [≤ E, S, C].

        The entries are views: they change with the next `store`.
        """
        if not self._blocks:
            return {}
        num_samples, per_block = len(self._places), len(self._blocks[0])
        filled = {
            f"{ENTRIES}{number:05d}": block[: num_samples - number * per_block]
            for number, block in enumerate(self._blocks)
        }
        return {IDS: torch.tensor(list(self._places)), VISITS: torch.tensor(self._visits), **filled}

    def load(self, names: Iterable[str], read: Callable[[str], torch.Tensor], shape: tuple[int, ...]) -> None:
        """Replace the state by the `tensors` of another cache; `read` returns one by its name.

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
        if not len(ids) == len(visits) == len(self._places) or next(entries, None) is not None:
            raise SnapshotError(
                f"aqsgd's state has {len(ids)} sample ids and {len(visits)} visit counts, and these or its entries "
                "differ in number; resume from another checkpoint"
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


def checksum(entry: torch.Tensor) -> int:
    """CRC-32 (zlib) of the fp16 values, little-endian, in row order."""
    return zlib.crc32(entry.view(torch.uint8).numpy().data)


class AqsgdCodec(Codec):
    """16 bits per element at a sample's first visit, `bits` and a scale per channel afterwards; ignores `key`.

    One object belongs to one cut and one direction. It has two ends, the memory of `encode` and that of `decode`,
    which see the same traffic and stay equal to the bit. A worker uses one end of each object; a process that plays
    both sides of a cut may use both. Encoding may wait for the device, since the state is in the host's memory.
    """

    def __init__(self, spec: AqsgdSpec) -> None:
        self.spec: AqsgdSpec = spec
        self.is_stateful = spec.has_cache
        self._folder = Path(tempfile.gettempdir())
        self._sent = SampleCache(self._allocate)
        self._received = SampleCache(self._allocate)

    def encoded_nbytes(self, shape: Sequence[int]) -> int:
        """The longest stream in bytes, over all numbers of samples that may be sent whole; exact without a cache."""
        return aqsgd_stream.max_nbytes(self.spec, check_shape(shape))

    def encode(self, x: torch.Tensor, *, key: int = 0, sample_ids: Sequence[int] | None = None) -> torch.Tensor:
        """A stream of version 1; afterwards this end remembers its content.

        Args:
            x: [B, …, C].
            key: ignored.
            sample_ids: B numbers from 0 to 2^63 − 1; None: the samples have no ids, and nothing is remembered.

        Raises:
            CodecError: x is not fp32, bf16 or fp16, has no dimension, or the number of ids is not B.
        """
        check_encodable(x)
        records, layout = self._records_and_layout(self._sent, x.shape, sample_ids)
        if layout.is_empty:
            return aqsgd_stream.new_stream(layout, 0, x.device)
        memory, bits = _memory(self._sent, layout, records, x.device), self.spec.bits
        parts = encode_samples(x.detach().reshape(layout.grid).float(), layout.is_whole, memory, bits)
        if has_ids(records):
            _remember(self._sent, records, parts, decode_samples(parts, layout.is_whole, memory, bits))
        return aqsgd_stream.pack(layout, records, parts)

    def decode(
        self,
        buf: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        key: int = 0,
        sample_ids: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """See `Codec.decode`; `sample_ids` as in `encode`. A token that was not finite is NaN.

        Raises:
            CodecError: also if the two ends remember different values of a sample.
        """
        check_decodable(dtype)
        aqsgd_stream.check_length(self.spec, shape, buf)
        records, layout = self._records_and_layout(self._received, shape, sample_ids)
        if layout.is_empty:
            if aqsgd_stream.check_header(self.spec, accept(buf, layout.sections.nbytes, self.spec)):
                raise CodecError(f"{self.spec}: damaged stream: a tensor without elements is flagged as not finite")
            return torch.empty(layout.shape, dtype=dtype, device=buf.device)
        if self.spec.has_cache:
            check_agreement(self.spec, aqsgd_stream.read_records(self.spec, shape, buf), records)
        parts = aqsgd_stream.unpack(layout, buf)
        memory = _memory(self._received, layout, records, buf.device)
        restored = decode_samples(parts, layout.is_whole, memory, self.spec.bits)
        if has_ids(records):
            _remember(self._received, records, parts, restored)
        largest = torch.finfo(dtype).max  # what is beyond it becomes that
        values = restored.to(torch.float32, copy=True).clamp_(-largest, largest)
        return values.masked_fill_(parts.marks.unsqueeze(-1), torch.nan).to(dtype).view(layout.shape)

    def prepare(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Do nothing: there is no kernel to compile."""

    @property
    def state_nbytes(self) -> int:
        """Bytes remembered now by both ends, in the host's memory or mapped from disk."""
        return self._sent.nbytes + self._received.nbytes

    def predicted_state_nbytes(self, shape: Sequence[int], num_samples: int) -> int:
        """Bytes that one end will remember after so many samples of tensors of this shape: 2·S·C bytes per sample."""
        _, tokens, channels = aqsgd_stream.grid(shape)
        return num_samples * 2 * tokens * channels if self.spec.has_cache else 0

    def revisit_nbytes(self, shape: Sequence[int]) -> int:
        """Exact length of a stream in bytes if all of its samples are remembered."""
        return aqsgd_stream.sections_of(self.spec, check_shape(shape), num_whole=0).nbytes

    def keep_in(self, folder: Path) -> None:
        """Put further blocks of `cache=file` into this folder; the default is the system's temporary folder."""
        self._folder = folder

    @property
    def keeps_state_on_disk(self) -> bool:
        """Whether the state is mapped from files, and may be larger than the host's memory."""
        return self.spec.cache == "file"

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The memory of both ends, named `sent/…` and `received/…`; the tensors may share memory with it."""
        return {prefix + name: tensor for prefix, end in self._ends() for name, tensor in end.tensors().items()}

    def load_state(
        self, names: Iterable[str], read: Callable[[str], torch.Tensor], sample_shape: Sequence[int]
    ) -> bool:
        """Replace the memory by the `state_tensors` of another object; returns whether anything is remembered now.

        Args:
            names: of all tensors.
            read: a tensor by its name.
            sample_shape: [S, C] of the samples to come; the memory of samples of another shape is dropped.
        """
        listed = list(names)
        for prefix, end in self._ends():
            mine = [name.removeprefix(prefix) for name in listed if name.startswith(prefix)]

            def read_own(name: str, prefix: str = prefix) -> torch.Tensor:
                return read(prefix + name)

            end.load(mine, read_own, tuple(sample_shape))
        return self.state_nbytes > 0

    def _ends(self) -> tuple[tuple[str, SampleCache], tuple[str, SampleCache]]:
        return (SENT, self._sent), (RECEIVED, self._received)

    def _allocate(self, num_values: int) -> torch.Tensor:
        make = partial(mapped_file, self._folder) if self.spec.cache == "file" else in_memory
        return make(num_values)

    def _records_and_layout(
        self, end: SampleCache, shape: Sequence[int], sample_ids: Sequence[int] | None
    ) -> tuple[tuple[Record, ...], AqsgdLayout]:
        """The records of an end before this micro-batch, and the layout of the stream that follows from them."""
        samples, tokens, channels = aqsgd_stream.grid(check_shape(shape))
        if sample_ids is None or not self.spec.has_cache:
            records = (Record(),) * (0 if 0 in shape else samples)
        else:
            ids = [int(number) for number in sample_ids]
            if len(ids) != samples or not all(0 <= number < 2**63 for number in ids):
                raise CodecError(
                    f"{self.spec}: {samples} samples need as many sample ids, from 0 to 2^63 − 1; got {ids}"
                )
            end.check_shape((tokens, channels))
            records = end.records(ids)
        is_whole = [self.spec.has_cache and record.visits == 0 for record in records]
        return records, AqsgdLayout.of(self.spec, shape, is_whole)


def check_agreement(spec: AqsgdSpec, told: Sequence[Record], known: Sequence[Record]) -> None:
    """Raise CodecError for the first sample that the sender remembers differently, with both records."""
    for theirs, mine in zip(told, known, strict=True):
        if theirs.sample_id != mine.sample_id:
            raise CodecError(
                f"{spec}: got a stream of {theirs.name} where {mine.name} is due; do both stages have the "
                "same data, run.seed and version of tahq?"
            )
        if theirs != mine:
            sent, remembered = (f"after {each.visits} visits (checksum {each.checksum:08x})" for each in (theirs, mine))
            raise CodecError(
                f"{spec}: the two ends of this cut remember {mine.name} differently: the sender {sent}, "
                f"this end {remembered}; resume the run from its last checkpoint, where each stage finds the files "
                "of all stages"
            )


def _memory(
    end: SampleCache, layout: AqsgdLayout, records: Sequence[Record], device: torch.device
) -> torch.Tensor | None:
    """m of the samples that are sent as changes, fp16 [K, S, C]; None if there are no such samples, or no cache."""
    pairs = zip(records, layout.is_whole, strict=True)
    changed = [record.sample_id for record, is_whole in pairs if not is_whole]
    return end.entries(changed).to(device) if changed and layout.spec.has_cache else None


def _remember(end: SampleCache, records: Sequence[Record], parts: AqsgdParts, restored: torch.Tensor) -> None:
    """Store every finite sample, in order, so that the last of several occurrences stays."""
    is_marked = parts.marks.any(dim=1).tolist()
    for record, entry, marked in zip(records, restored.cpu(), is_marked, strict=True):
        if not marked:
            end.store(record.sample_id, entry)
