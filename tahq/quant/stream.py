"""The common part of all framed streams: a header of 16 bytes, then sections that start at multiples of 16.

`Sections` are computed from the shape alone, so both ends know every offset beforehand. Reading trusts
nothing: the buffer's length is compared before a byte is looked at, then the header, then the padding
behind every section, which must be zeros. Multi-byte numbers are little-endian.

Each codec has a `Description` of its streams, from which `tahq codec inspect` shows them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from tahq.errors import CodecError
from tahq.quant.spec import CodecSpec
from tahq.quant.tiling import MAX_EXPONENT, TOP_EXPONENT, Tiling

HEADER_NBYTES = 16
ALIGNMENT = 16
NON_FINITE = 1
"""Bit 0 of the header's second byte: the encoder met NaN or infinity."""
CANONICAL_NAN = 0x7E00
"""The fp16 NaN that encoders write."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `start` to `stop` of a stream; `end` is where the padding behind them ends."""

    start: int
    stop: int

    @property
    def end(self) -> int:
        """The next multiple of 16."""
        return -(-self.stop // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Sections:
    """Where the sections of a stream lie, in order."""

    by_name: Mapping[str, ByteRange]
    nbytes: int

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> "Sections":
        """Lay sections of these sizes (bytes) behind the header."""
        sections: dict[str, ByteRange] = {}
        end = HEADER_NBYTES
        for name, size in sizes.items():
            sections[name] = ByteRange(end, end + size)
            end = sections[name].end
        return cls(sections, end)

    def view(self, buf: torch.Tensor, name: str) -> torch.Tensor:
        """The bytes of one section, without its padding."""
        section = self.by_name[name]
        return buf[section.start : section.stop]

    def has_dirty_filling(self, buf: torch.Tensor) -> torch.Tensor:
        """Bool without dimensions: is any byte behind a section not zero?"""
        gaps = [buf[section.stop : section.end] for section in self.by_name.values()]
        return torch.cat(gaps).any()


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything about a stream that the shape and the spec decide.

    `header` has the bytes before e, with their names; the flags are 0.
    """

    min_exponent: ClassVar[int] = TOP_EXPONENT - 127
    """The e of tensors with the largest fp32 numbers."""

    spec: CodecSpec
    tiling: Tiling
    header: tuple[tuple[str, int], ...]
    sections: Sections = field(hash=False)

    def new_stream(
        self, is_flagged: int | torch.Tensor, exponent: int | torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        """A stream of zeros with this header."""
        version, _, *rest = (value for _, value in self.header)
        return new_stream(self.sections.nbytes, (version, is_flagged, *rest, exponent), device)

    def read_header(self, buf: torch.Tensor) -> tuple[bool, int]:
        """The flag for non-finite values and e; CodecError for another layout's header, or e that no encoder writes."""
        is_flagged, exponent = read_header(buf, self.header, self.spec)
        if not self.min_exponent <= exponent <= MAX_EXPONENT:
            raise CodecError(
                f"{self.spec}: header byte {len(self.header)} (e) is {exponent}, "
                f"no encoder writes a value below {self.min_exponent}"
            )
        return is_flagged, exponent


def new_stream(nbytes: int, header: Sequence[int | torch.Tensor], device: torch.device) -> torch.Tensor:
    """A buffer of zeros that starts with these header bytes (a negative one in two's complement).

    Each byte is filled in on the device: a copy from host memory would synchronise.
    """
    buf = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    for place, value in enumerate(header):
        byte = buf[place]
        if isinstance(value, torch.Tensor):
            byte.copy_(value.bitwise_and(0xFF))
        else:
            byte.fill_(value & 0xFF)
    return buf


def accept(buf: torch.Tensor, nbytes: int, codec: object) -> torch.Tensor:
    """The buffer, contiguous and aligned for any view; CodecError if it is not uint8, 1-D and of this length."""
    if buf.dtype != torch.uint8 or buf.dim() != 1:
        raise CodecError(f"{codec}: a stream is a 1-D uint8 tensor; got {buf.dtype} with shape {list(buf.shape)}")
    if buf.numel() != nbytes:
        raise CodecError(
            f"{codec}: got a stream of {buf.numel()} bytes, the shape needs {nbytes}; do both ends use this codec?"
        )
    unaligned = buf.storage_offset() % ALIGNMENT or buf.data_ptr() % ALIGNMENT
    return buf.clone() if unaligned else buf.contiguous()


def read_header(buf: torch.Tensor, expected: Sequence[tuple[str, int]], codec: object) -> tuple[bool, int]:
    """Check a header [version, flags, …, e, 0 …] and return its variable part: the non-finite flag and e.

    `expected` are the bytes before e, with their names; `flags` may have bit 0 set. CodecError for any that differs.
    """
    header = buf[:HEADER_NBYTES].tolist()
    flagged = bool(header[1] & NON_FINITE)
    for place, (name, value) in enumerate(expected):
        got = header[place] & ~NON_FINITE if name == "flags" else header[place]
        if got != value:
            raise CodecError(
                f"{codec}: header byte {place} ({name}) is {header[place]}, expected {value}; "
                "do both ends use the same tahq and the same spec?"
            )
    if any(header[len(expected) + 1 :]):
        raise CodecError(f"{codec}: header bytes {len(expected) + 1} to 15 must be zero; got {header}")
    unsigned = header[len(expected)]
    return flagged, unsigned - 256 if unsigned > 127 else unsigned


def refuse(problems: Mapping[str, torch.Tensor], codec: object) -> None:
    """Raise CodecError for the first problem whose flag (bool, no dimensions) is set; one transfer from the device."""
    flags = torch.stack([flag.to(torch.bool) for flag in problems.values()]).tolist()
    for problem, is_set in zip(problems, flags, strict=True):
        if is_set:
            raise CodecError(f"{codec}: damaged stream: {problem}")


def fp16_bytes(values: torch.Tensor) -> torch.Tensor:
    """fp16 values [N] as 2·N bytes; every NaN as 0x7E00."""
    bits = torch.where(values.isnan(), CANONICAL_NAN, values.view(torch.int16))
    return bits.view(torch.uint8)


def is_flagged(buf: torch.Tensor) -> bool:
    """Bit 0 of the flags of a framed stream (a CPU buffer; on another device this waits for it)."""
    if buf.numel() < HEADER_NBYTES:
        raise CodecError(f"a stream has a header of {HEADER_NBYTES} bytes; got {buf.numel()} bytes")
    return bool(int(buf[1]) & NON_FINITE)


Statistics = Mapping[str, int | float]
"""Totals over a stream's metadata, by display name."""


@dataclass(frozen=True, slots=True)
class HeaderByte:
    """One byte of a header: its meaning, and the range that any spec of the codec may put there."""

    name: str
    least: int
    most: int
    meaning: str

    def read(self, byte: int) -> int:
        """The byte's value, in two's complement if it may be negative."""
        return byte - 256 if self.least < 0 and byte > 127 else byte


@dataclass(frozen=True, slots=True)
class Description:
    """The streams of one codec.

    Attributes:
        header: its bytes, in order; the rest of the 16 are zeros. Empty for a codec without a header.
        contents: the content of each section, by name.
        sections: of a spec, a shape and a stream, which few codecs need to read.
        statistics: of the same; checks the stream.
    """

    summary: str
    header: tuple[HeaderByte, ...]
    contents: Mapping[str, str]
    sections: Callable[[Any, Sequence[int], torch.Tensor], Sections]
    statistics: Callable[[Any, Sequence[int], torch.Tensor], Statistics]


VERSION_1 = HeaderByte("version", 1, 1, "of the stream")
FLAGS = HeaderByte("flags", 0, 1, "bit 0: a value was not finite")
LOG2_GROUP = HeaderByte("log2 G", 3, 8, "G, channels per tile, as a power of two")


def exponent_byte(least: int) -> HeaderByte:
    """e, signed."""
    return HeaderByte("e", least, MAX_EXPONENT, "coded is x·2^e")


def step_statistics(steps: torch.Tensor) -> Statistics:
    """Range of the quantiser's steps (any shape, in the tensor's unit) without zeros; empty if there are none."""
    positive = steps[steps > 0].double()
    if not positive.numel():
        return {}
    return {"smallest step above 0": float(positive.min()), "largest step": float(positive.max())}
