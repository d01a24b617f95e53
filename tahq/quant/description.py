"""What a codec says about its streams, so that one tool can show those of all: a `Description` beside each codec.

`tahq.quant.inspection` has the table of them. A new codec writes a module `<codec>/description.py` with one
value, and one line in that table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tahq.quant.stream import Sections

Statistics = Mapping[str, int | float]
"""What a stream's metadata adds up to, by the name that it is shown under."""


@dataclass(frozen=True, slots=True)
class HeaderByte:
    """One byte of a header: what it holds, and the range that any spec of the codec may put there."""

    name: str
    least: int
    most: int
    meaning: str

    def read(self, byte: int) -> int:
        """The byte's value, in two's complement where it may be negative."""
        return byte - 256 if self.least < 0 and byte > 127 else byte


@dataclass(frozen=True, slots=True)
class Description:
    """One codec's streams.

    Attributes:
        summary: what the codec is, in a few words.
        header: its bytes, in order; the rest of the 16 are zeros. Empty for a codec without a header.
        contents: what each section holds, by its name.
        sections: of a spec, a shape and a stream, at which few codecs need to look.
        statistics: of the same; checks the stream.
    """

    summary: str
    header: tuple[HeaderByte, ...]
    contents: Mapping[str, str]
    sections: Callable[[Any, Sequence[int], torch.Tensor], Sections]
    statistics: Callable[[Any, Sequence[int], torch.Tensor], Statistics]


FLAGS = HeaderByte("flags", 0, 1, "bit 0: a value that is not finite was met")
LOG2_GROUP = HeaderByte("log2 G", 3, 8, "G, channels a tile, as a power of two")


def version(number: int) -> HeaderByte:
    """The first byte of every header."""
    return HeaderByte("version", number, number, "of the stream")


def exponent(least: int) -> HeaderByte:
    """e, signed; the largest is 127 for every codec."""
    return HeaderByte("e", least, 127, "what is coded is x·2^e")


def step_statistics(steps: torch.Tensor) -> Statistics:
    """Range of the quantiser's steps (any shape, in the tensor's unit), zeros left out; nothing of no steps."""
    positive = steps[steps > 0].double()
    if not positive.numel():
        return {}
    return {"smallest step above 0": float(positive.min()), "largest step": float(positive.max())}
