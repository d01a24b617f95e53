"""Inspect a stream: the fields of its header, the places of its sections, totals over its metadata.

A stream says neither which codec wrote it nor its shape; without these, only `header_guesses` can help.
Everything here works for every codec that has a `Description`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tahq.errors import CodecError
from tahq.quant import get_codec
from tahq.quant.aqsgd.stream import AQSGD
from tahq.quant.fixed.stream import FIXED
from tahq.quant.gaussian.tile_stream import EDEN, WF
from tahq.quant.raw import RAW
from tahq.quant.spec import CodecSpec
from tahq.quant.stream import HEADER_NBYTES, Description, Statistics, accept
from tahq.quant.tah.stream import TAH

_DESCRIPTIONS: dict[str, Description] = {"raw": RAW, "fixed": FIXED, "tah": TAH, "aqsgd": AQSGD, "eden": EDEN, "wf": WF}
_ROW = 16


@dataclass(frozen=True, slots=True)
class HeaderField:
    """One byte of a stream's header."""

    place: int
    name: str
    value: int
    meaning: str


@dataclass(frozen=True, slots=True)
class SectionRow:
    """One section of a stream, in bytes from its start, and the number of zeros (`filling`) behind it."""

    name: str
    offset: int
    nbytes: int
    filling: int
    holds: str


def codec_summaries() -> dict[str, str]:
    """A short description of each codec, by name."""
    return {name: description.summary for name, description in _DESCRIPTIONS.items()}


def header_guesses(buf: torch.Tensor) -> dict[str, tuple[HeaderField, ...]]:
    """The codecs, by name, whose header the first 16 bytes could be, each with the fields read that way."""
    framed = {name: each for name, each in _DESCRIPTIONS.items() if each.header}
    return {name: _read_header(each, buf) for name, each in framed.items() if _could_be(each, buf)}


def header_fields(spec: CodecSpec, buf: torch.Tensor) -> tuple[HeaderField, ...]:
    """The named bytes of the header, valid or not; empty for a codec without a header."""
    description = _DESCRIPTIONS[spec.name]
    if description.header and buf.numel() < HEADER_NBYTES:
        raise CodecError(f"{spec}: a stream has a header of {HEADER_NBYTES} bytes; got {buf.numel()} bytes")
    return _read_header(description, buf)


def section_table(spec: CodecSpec, shape: Sequence[int], buf: torch.Tensor) -> tuple[SectionRow, ...]:
    """The sections of the stream of a tensor of this shape, header included."""
    description = _DESCRIPTIONS[spec.name]
    sections = description.sections(spec, shape, buf)
    rows = [
        SectionRow(
            name,
            section.start,
            section.stop - section.start,
            min(section.end, sections.nbytes) - section.stop,
            description.contents[name],
        )
        for name, section in sections.by_name.items()
    ]
    header = SectionRow("header", 0, HEADER_NBYTES, 0, ", ".join(byte.name for byte in description.header))
    return (header, *rows) if description.header else tuple(rows)


def statistics(spec: CodecSpec, shape: Sequence[int], buf: torch.Tensor, *, key: int = 0) -> Statistics:
    """Totals over a stream's metadata, and the range of its decoded values; CodecError if the decoder refuses it.

    Streams of a stateful codec cannot be decoded without its memory, so only their metadata is summarised. The values
    of a randomised codec are wrong unless `key` is the encoder's.
    """
    description, codec = _DESCRIPTIONS[spec.name], get_codec(spec, backend="reference")
    accepted = accept(buf, description.sections(spec, shape, buf).nbytes, spec)
    totals = description.statistics(spec, shape, accepted)
    values = {} if codec.is_stateful else _range(codec.decode(accepted, shape, key=key))
    num_elements = math.prod(shape)
    return {"bits per element": 8 * buf.numel() / num_elements if num_elements else 0.0, **totals, **values}


def hex_rows(buf: torch.Tensor, rows: Sequence[SectionRow], limit: int) -> Iterator[str]:
    """The first `limit` bytes as in docs/dev/wire-format.md: 16 per row, the offset first, the section's name last."""
    titles = {row.offset: row.name for row in rows if row.nbytes}
    data = bytes(buf[:limit].tolist())
    width = max(2, len(f"{max(len(data) - 1, 0):x}"))
    for start in range(0, len(data), _ROW):
        line = f"{start:0{width}x}  {data[start : start + _ROW].hex(' '):47}  {titles.get(start, '')}"
        yield line.rstrip()


def _read_header(description: Description, buf: torch.Tensor) -> tuple[HeaderField, ...]:
    first = buf[: len(description.header)].tolist()
    pairs = enumerate(zip(description.header, first, strict=True))
    return tuple(HeaderField(place, known.name, known.read(byte), known.meaning) for place, (known, byte) in pairs)


def _could_be(description: Description, buf: torch.Tensor) -> bool:
    header = buf[:HEADER_NBYTES].tolist()
    if len(header) < HEADER_NBYTES or any(header[len(description.header) :]):
        return False
    pairs = zip(description.header, header, strict=False)
    return all(known.least <= known.read(byte) <= known.most for known, byte in pairs)


def _range(values: torch.Tensor) -> Statistics:
    finite = values[values.isfinite()]
    if not finite.numel():
        return {}
    return {
        "smallest value": float(finite.min()),
        "largest value": float(finite.max()),
        "root mean square": math.sqrt(float(finite.double().square().mean())),
    }
