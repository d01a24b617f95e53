"""Byte layout of AQ-SGD streams, version 1: `AqsgdParts` to bytes and back. docs/dev/wire-format.md has the tables.

Header, a record for each sample, marks of tokens that are not finite, scales, the values of samples that are sent
for the first time, codes of the changes of the others. Both ends know beforehand, from their memories, how many
there are of either; the records repeat it, so that ends that disagree notice before they use any value.

Shape letters: B samples, S tokens, C channels; F of the samples are sent whole, K = B − F as changes.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tahq.errors import CodecError
from tahq.quant import bit_planes, stream
from tahq.quant.aqsgd.reference import AqsgdParts
from tahq.quant.spec import AqsgdSpec
from tahq.quant.stream import FLAGS, VERSION_1, Description, HeaderByte, Statistics
from tahq.quant.tiling import check_shape

NO_ID = -1
_RECORD = struct.Struct("<QII")
"""Sample id + 1 (0: no id), visits, checksum."""


@dataclass(frozen=True, slots=True)
class Record:
    """The state of a sample at one end before a micro-batch: how often it was stored, and a CRC-32 of its values.

    `sample_id` is `NO_ID` for a sample that must not be remembered. A sample with 0 visits is sent whole.
    """

    sample_id: int = NO_ID
    visits: int = 0
    checksum: int = 0

    @property
    def name(self) -> str:
        """The sample's name in error messages."""
        return f"sample {self.sample_id}" if self.sample_id != NO_ID else "a sample without an id"


@dataclass(frozen=True, slots=True)
class AqsgdLayout:
    """The layout of a stream, given which samples are sent whole; `is_whole` is empty for a tensor without elements."""

    spec: AqsgdSpec
    shape: tuple[int, ...]
    is_whole: tuple[bool, ...]
    sections: stream.Sections

    @classmethod
    def of(cls, spec: AqsgdSpec, shape: Sequence[int], is_whole: Sequence[bool]) -> "AqsgdLayout":
        """Lay out the stream of a tensor of this shape."""
        checked = check_shape(shape)
        whole = () if 0 in checked else tuple(is_whole)
        return cls(spec, checked, whole, sections_of(spec, checked, sum(whole)))

    @property
    def grid(self) -> tuple[int, int, int]:
        """[B, S, C]."""
        return grid(self.shape)

    @property
    def is_empty(self) -> bool:
        """Whether the tensor has no elements, so that the stream is only a header."""
        return not self.is_whole


def sections_of(spec: AqsgdSpec, shape: Sequence[int], num_whole: int) -> stream.Sections:
    """The sections of a stream in which `num_whole` samples are sent whole."""
    samples, tokens, channels = grid(shape) if 0 not in shape else (0, 0, 0)
    num_codes = (samples - num_whole) * tokens * channels
    sizes = {
        "records": _RECORD.size * samples if spec.has_cache else 0,
        "marks": -(-samples * tokens // 8),
        "scale": 2 * channels if num_codes else 0,
        "values": 2 * num_whole * tokens * channels,
        "planes": spec.bits * -(-num_codes // 8),
    }
    return stream.Sections.of(sizes)


def max_nbytes(spec: AqsgdSpec, shape: Sequence[int]) -> int:
    """Length of the longest stream of this shape, over all numbers of samples that may be sent whole.

    A value takes 16 bits and a code at most 8, so the more are sent whole the longer: each sample adds S·C bytes
    or more. Filling, and scales where any sample is left, add up to 2·C + 52 at most, less than 64 samples do.
    """
    samples = grid(shape)[0] if spec.has_cache and 0 not in shape else 0
    return max(sections_of(spec, shape, whole).nbytes for whole in range(max(0, samples - 64), samples + 1))


def check_length(spec: AqsgdSpec, shape: Sequence[int], buf: torch.Tensor) -> None:
    """Refuse a stream whose length does not fit the shape, before anything is allocated per sample."""
    checked = check_shape(shape)
    longest = max_nbytes(spec, checked)
    least = sections_of(spec, checked, num_whole=0).by_name["records"].end if spec.has_cache else longest
    stream.accept(buf, min(max(buf.numel(), least), longest), spec)


def grid(shape: Sequence[int]) -> tuple[int, int, int]:
    """[B, S, C] of a shape; one dimension is one sample of one token."""
    samples = shape[0] if len(shape) > 1 else 1
    return samples, math.prod(shape[1:-1]), shape[-1]


def has_ids(records: Sequence[Record]) -> bool:
    """Whether the samples have ids and may be remembered; either all of them have an id or none of them."""
    return any(record.sample_id != NO_ID for record in records)


def pack(layout: AqsgdLayout, records: Sequence[Record], parts: AqsgdParts) -> torch.Tensor:
    """The stream: uint8 [nbytes], on the parts' device; does not synchronise it where no sample has an id."""
    buf = new_stream(layout, parts.marks.any().to(torch.int32), parts.marks.device)
    contents = {
        "marks": bit_planes.pack_numbers(parts.marks.flatten().to(torch.uint8), 1),
        "scale": parts.scale.view(torch.uint8),
        "values": parts.values.flatten().view(torch.uint8),
        "planes": _to_planes(parts.codes, layout.spec.bits),
    }
    if has_ids(records):
        packed = b"".join(_RECORD.pack(r.sample_id + 1, r.visits, r.checksum) for r in records)
        contents["records"] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    for name, content in contents.items():
        layout.sections.view(buf, name).copy_(content)
    return buf


def read_records(spec: AqsgdSpec, shape: Sequence[int], buf: torch.Tensor) -> tuple[Record, ...]:
    """The records of a stream of any length; CodecError if it is too short for them."""
    records = AqsgdLayout.of(spec, shape, ()).sections.by_name["records"]
    readable = stream.accept(buf, max(buf.numel(), records.end), spec)
    check_header(spec, readable)
    packed = bytes(readable[records.start : records.stop].tolist())
    return tuple(Record(number - 1, visits, checksum) for number, visits, checksum in _RECORD.iter_unpack(packed))


def unpack(layout: AqsgdLayout, buf: torch.Tensor) -> AqsgdParts:
    """The content of a stream, records aside; CodecError for anything that no encoder writes."""
    buf = stream.accept(buf, layout.sections.nbytes, layout.spec)
    is_flagged = check_header(layout.spec, buf)
    samples, tokens, channels = layout.grid
    num_whole = sum(layout.is_whole)
    marks, left_over = bit_planes.unpack_numbers(layout.sections.view(buf, "marks"), samples * tokens, 1)
    scale = layout.sections.view(buf, "scale").view(torch.float16)
    values = layout.sections.view(buf, "values").view(torch.float16)
    num_codes = (samples - num_whole) * tokens * channels
    codes, left_of_codes = _from_planes(layout.sections.view(buf, "planes"), num_codes, layout.spec.bits)
    problems = {
        "padding after a section is not zero": layout.sections.has_dirty_filling(buf),
        "bits behind the marks or the codes are not zero": left_over.any() | left_of_codes.any(),
        "a scale is negative": (scale.view(torch.int16) < 0).any(),
        "a scale is not finite": ~scale.isfinite().all(),
        "a value is not finite": ~values.isfinite().all(),
        "the flag for non-finite values does not agree with the marks": marks.any() != is_flagged,
    }
    stream.refuse(problems, layout.spec)
    return AqsgdParts(
        marks=marks.bool().view(samples, tokens),
        scale=scale,
        values=values.view(num_whole, tokens, channels),
        codes=codes.view(samples - num_whole, tokens, channels),
    )


def new_stream(layout: AqsgdLayout, flags: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A stream of zeros behind its header; all of it for a tensor without elements."""
    spec = layout.spec
    return stream.new_stream(layout.sections.nbytes, (1, flags, spec.bits, int(spec.has_cache)), device)


def check_header(spec: AqsgdSpec, buf: torch.Tensor) -> bool:
    """Whether the header's flag is set; CodecError for anything that is not this spec's."""
    expected = (("version", 1), ("flags", 0), ("bits", spec.bits), ("records", int(spec.has_cache)))
    is_flagged, reserved = stream.read_header(buf, expected, spec)
    if reserved:
        raise CodecError(f"{spec}: header bytes 4 to 15 must be zero; byte 4 is {reserved}")
    return is_flagged


def _to_planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Plane 0 of all codes, then plane 1, …; bit j of byte i is code 8i + j. The last byte is filled up with zeros."""
    flat = torch.nn.functional.pad(codes.flatten(), (0, -codes.numel() % 8))
    return bit_planes.to_planes(flat.view(-1, 8))[:, :bits, 0].transpose(0, 1).flatten()


def _from_planes(packed: torch.Tensor, count: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The uint8 codes [count] of `_to_planes`, and what stands in the places behind the last code."""
    num_words = packed.numel() // bits
    planes = bit_planes.empty_planes(num_words, 8, packed.device)
    planes[:, :bits, 0] = packed.view(bits, num_words).transpose(0, 1)
    codes = bit_planes.from_planes(planes).flatten()
    return codes[:count], codes[count:]


def _layout_of(spec: AqsgdSpec, shape: Sequence[int], buf: torch.Tensor) -> tuple[AqsgdLayout, tuple[Record, ...]]:
    """The layout depends on which samples are sent whole, which the records of the stream say."""
    records = read_records(spec, shape, buf) if spec.has_cache else ()
    num_samples = 0 if 0 in shape else grid(shape)[0]
    is_whole = [record.visits == 0 for record in records] or [False] * num_samples
    return AqsgdLayout.of(spec, shape, is_whole), records


def _sections(spec: AqsgdSpec, shape: Sequence[int], buf: torch.Tensor) -> stream.Sections:
    if not spec.has_cache:  # the stream may be of another shape: nothing is made for each sample of this one
        return sections_of(spec, check_shape(shape), num_whole=0)
    return _layout_of(spec, shape, buf)[0].sections


def _statistics(spec: AqsgdSpec, shape: Sequence[int], buf: torch.Tensor) -> Statistics:
    layout, records = _layout_of(spec, shape, buf)
    if layout.is_empty:
        return {"samples": layout.grid[0]}
    parts = unpack(layout, buf)
    return {
        "samples": layout.grid[0],
        "samples sent whole": sum(layout.is_whole),
        "samples without an id": sum(record.sample_id == NO_ID for record in records),
        "most visits of a sample": max((record.visits for record in records), default=0),
        "tokens that are not finite": int(parts.marks.sum()),
        **stream.step_statistics(parts.scale.double() / 2 ** (spec.bits - 1)),
    }


AQSGD = Description(
    summary="AQ-SGD: the change since the sample's last visit, one scale per channel",
    header=(
        VERSION_1,
        FLAGS,
        HeaderByte("bits", 2, 8, "of a code"),
        HeaderByte("records", 0, 1, "1: a record per sample follows"),
    ),
    contents={
        "records": "a sample's id + 1, its visits, a checksum of the remembered values",
        "marks": "one bit per token, 1 = not finite",
        "scale": "fp16 per channel, the largest change",
        "values": "fp16, samples that are sent whole",
        "planes": "codes of the changes of the others, lowest bits first",
    },
    sections=_sections,
    statistics=_statistics,
)
