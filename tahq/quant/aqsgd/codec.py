"""`aqsgd`: the activation compression of AQ-SGD, as a codec that remembers every sample at both ends of a cut.

At a sample's first visit its values are sent in fp16; later the change since the last visit, in `bits` bits. Whether a
visit is the first is decided sample by sample: a run from the beginning so has a warm-up epoch without compression, and
a sample that is new or forgotten in the middle of a run needs no special epoch.

Rules, which both ends follow:
- every sample of a micro-batch is taken relative to what was remembered *before* it; if one occurs twice in it, the
  last occurrence is remembered (the one scale of a micro-batch is not known before all changes are);
- a sample with NaN or infinity is not remembered: the old value stays, and its visit does not count;
- without sample ids (evaluation) samples are sent whole, as at a first visit, and not remembered;
- `cache=none` remembers nothing and sends Q(x) every time, whatever the ids: the paper's control.

Puts together `aqsgd.reference` (arithmetic), `aqsgd.stream` (bytes) and `aqsgd.cache` (what is remembered).
"""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from tahq.errors import CodecError
from tahq.quant.aqsgd import reference as aqsgd_reference
from tahq.quant.aqsgd import stream as aqsgd_stream
from tahq.quant.aqsgd.cache import SampleCache, in_memory, mapped_file
from tahq.quant.aqsgd.stream import NO_ID, AqsgdLayout, AqsgdParts, Record
from tahq.quant.codec import Codec
from tahq.quant.spec import AqsgdSpec
from tahq.quant.stream import accept
from tahq.quant.tiling import check_decodable, check_encodable, check_shape

SENT, RECEIVED = "sent/", "received/"
"""Prefixes of the names of state tensors, for the two ends."""


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
            sample_ids: B numbers from 0; None: the samples have no ids, and nothing is remembered.

        Raises:
            CodecError: x is not fp32, bf16 or fp16, has no dimension, or the number of ids is not B.
        """
        check_encodable(x)
        records = self._records(self._sent, x.shape, sample_ids)
        layout = self._layout(x.shape, records)
        if layout.is_empty:
            return aqsgd_stream.new_stream(layout, 0, x.device)
        memory = _memory(self._sent, layout, records, x.device)
        parts = _parts(x.detach(), layout, memory)
        if _has_ids(records):
            _remember(self._sent, records, parts, _restored(layout, parts, memory))
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
        records = self._records(self._received, shape, sample_ids)
        layout = self._layout(shape, records)
        if layout.is_empty:
            if aqsgd_stream.check_header(self.spec, accept(buf, layout.sections.nbytes, self.spec)):
                raise CodecError(f"{self.spec}: damaged stream: a tensor without elements is flagged as not finite")
            return torch.empty(layout.shape, dtype=dtype, device=buf.device)
        if self.spec.has_cache:
            check_agreement(self.spec, aqsgd_stream.read_records(self.spec, shape, buf), records)
        parts = aqsgd_stream.unpack(layout, buf)
        restored = _restored(layout, parts, _memory(self._received, layout, records, buf.device))
        if _has_ids(records):
            _remember(self._received, records, parts, restored)
        largest = torch.finfo(dtype).max  # what is beyond it becomes that
        values = restored.to(torch.float32, copy=True).clamp_(-largest, largest)
        return values.masked_fill_(parts.marks.unsqueeze(-1), torch.nan).to(dtype).view(layout.shape)

    def prepare(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Does nothing: there is no kernel to compile."""

    # -- state -----------------------------------------------------------------------------------

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
        """Replace the memory by the `state_tensors` of another object; returns whether there was anything to remember.

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

    # -- one micro-batch -------------------------------------------------------------------------

    def _records(self, end: SampleCache, shape: Sequence[int], sample_ids: Sequence[int] | None) -> tuple[Record, ...]:
        """What an end remembers of each sample before this micro-batch; without ids where nothing is to be."""
        samples, tokens, channels = aqsgd_stream.grid(check_shape(shape))
        if sample_ids is None or not self.spec.has_cache:
            return (Record(),) * (0 if 0 in shape else samples)
        ids = [int(number) for number in sample_ids]
        if len(ids) != samples or not all(0 <= number < 2**63 for number in ids):
            raise CodecError(f"{self.spec}: {samples} samples need as many sample ids, from 0 to 2^63; got {ids}")
        end.check_shape((tokens, channels))
        return end.records(ids)

    def _layout(self, shape: Sequence[int], records: Sequence[Record]) -> AqsgdLayout:
        is_whole = [self.spec.has_cache and record.visits == 0 for record in records]
        return AqsgdLayout.of(self.spec, shape, is_whole)


def check_agreement(spec: AqsgdSpec, told: Sequence[Record], known: Sequence[Record]) -> None:
    """Refuse the first sample that the sender remembers differently; the error says how, and what to do."""
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


def _has_ids(records: Sequence[Record]) -> bool:
    return any(record.sample_id != NO_ID for record in records)


def _memory(
    end: SampleCache, layout: AqsgdLayout, records: Sequence[Record], device: torch.device
) -> torch.Tensor | None:
    """m of the samples that are sent as changes, fp16 [K, S, C]; None where there is none to be relative to."""
    rows = layout.rows(whole=False)
    if not rows or not layout.spec.has_cache:
        return None
    return end.entries([records[row].sample_id for row in rows]).to(device)


def _parts(x: torch.Tensor, layout: AqsgdLayout, memory: torch.Tensor | None) -> AqsgdParts:
    """What is sent of x. A token that is not finite is sent as no change, or as zeros, and marked."""
    tokens = x.reshape(layout.grid).float()
    marks = ~tokens.isfinite().all(dim=-1)
    tokens = tokens.masked_fill(marks.unsqueeze(-1), 0.0)
    whole, changed = (_take(tokens, layout.rows(whole=is_whole)) for is_whole in (True, False))
    if memory is not None:
        marked = _take(marks, layout.rows(whole=False)).unsqueeze(-1)
        changed = (changed - memory.float()).masked_fill_(marked, 0.0)
    if changed.numel():
        scale, codes = aqsgd_reference.quantize(changed, layout.spec.bits)
    else:
        scale, codes = changed.new_empty(0, dtype=torch.float16), changed.to(torch.uint8)
    return AqsgdParts(marks, scale, aqsgd_reference.to_fp16(whole), codes)


def _restored(layout: AqsgdLayout, parts: AqsgdParts, memory: torch.Tensor | None) -> torch.Tensor:
    """What the receiver gets of all samples, [B, S, C]: fp16 with a cache, fp32 without."""
    if not parts.codes.numel():
        return parts.values
    change = aqsgd_reference.dequantize(parts.scale, parts.codes, layout.spec.bits)
    changed = change if memory is None else aqsgd_reference.advance(memory, change)
    if not parts.values.numel():
        return changed
    sources = torch.tensor([*layout.rows(whole=True), *layout.rows(whole=False)]).argsort().to(changed.device)
    return torch.cat((parts.values, changed))[sources]


def _remember(end: SampleCache, records: Sequence[Record], parts: AqsgdParts, restored: torch.Tensor) -> None:
    """Store every sample that is finite, in order: of one that occurs twice the last stays."""
    is_marked = parts.marks.any(dim=1).tolist()
    for record, entry, marked in zip(records, restored.cpu(), is_marked, strict=True):
        if not marked:
            end.store(record.sample_id, entry)


def _take(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows of x; all or none of them without an index, which would be a copy that waits for the device."""
    if len(rows) in (0, len(x)):
        return x[: len(rows)]
    return x[torch.tensor(rows, device=x.device)]
