"""Byte layout of fixed-point streams, version 1: `FixedTiles` to bytes and back. docs/wire-format.md has the tables.

Header, scales, whole bytes of the codes, remaining bits as planes. A code of 8 bits is one byte, of 6
bits six planes, of 10 bits one byte and two planes: no bit is wasted, and the common width is a plain copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from tahq.errors import CodecError
from tahq.quant import bit_planes, stream
from tahq.quant.fixed.reference import TOP_EXPONENT, FixedTiles
from tahq.quant.spec import FixedSpec
from tahq.quant.tiling import Tiling, check_shape

VERSION = 1
MIN_EXPONENT = TOP_EXPONENT - 127
"""Of the largest fp32 numbers."""


@dataclass(frozen=True, slots=True)
class FixedLayout:
    """Everything about a stream that the shape and the spec decide."""

    spec: FixedSpec
    tiling: Tiling
    sections: stream.Sections

    @classmethod
    def of(cls, spec: FixedSpec, shape: Sequence[int]) -> "FixedLayout":
        """Lay out the stream of a tensor of this shape.

        Raises:
            CodecError: a shape without dimensions.
        """
        return _layout(spec, check_shape(shape))

    @property
    def log2_group(self) -> int:
        """log2 G."""
        return self.tiling.group.bit_length() - 1

    def views(self, buf: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Of a stream: the bytes [T, G] of each place, lowest first, and the planes [T, bits mod 8, G/8]."""
        num_tiles, group = self.tiling.num_tiles, self.tiling.group
        whole = self.sections.view(buf, "bytes").view(self.spec.bits // 8, num_tiles, group)
        planes = self.sections.view(buf, "planes").view(num_tiles, self.spec.bits % 8, group // 8)
        return whole.unbind(), planes


@lru_cache(maxsize=1024)
def _layout(spec: FixedSpec, shape: tuple[int, ...]) -> FixedLayout:
    """Kept, as on a GPU the kernels of a small tensor take no longer than this does."""
    tiling = Tiling.of(shape, spec.group)
    num_codes = tiling.num_tiles * tiling.group
    sizes = {
        "scale": 2 * tiling.num_tiles,
        "bytes": num_codes * (spec.bits // 8),
        "planes": num_codes * (spec.bits % 8) // 8,
    }
    return FixedLayout(spec, tiling, stream.Sections.of(sizes))


def pack(layout: FixedLayout, tiles: FixedTiles) -> torch.Tensor:
    """The stream of `tiles`: uint8 [nbytes], on their device, without synchronising it."""
    bits = layout.spec.bits
    flags = tiles.scale.isnan().any().to(torch.int32)
    header = (VERSION, flags, layout.log2_group, bits, tiles.exponent)
    buf = stream.new_stream(layout.sections.nbytes, header, tiles.codes.device)
    layout.sections.view(buf, "scale").copy_(stream.fp16_bytes(tiles.scale))
    whole, planes = layout.views(buf)
    rest = tiles.codes.to(torch.int32 if bits > 8 else torch.uint8)
    for part in whole:
        part.copy_(rest & 0xFF)
        rest = rest >> 8
    if bits % 8:
        planes.copy_(bit_planes.to_planes(rest.to(torch.uint8))[:, : bits % 8])
    return buf


def unpack(layout: FixedLayout, buf: torch.Tensor) -> FixedTiles:
    """The tiles of a stream.

    Raises:
        CodecError: a wrong length; a version, flag, log2 G or bits that is not the spec's; an exponent
            below −113; filling that is not zero; a negative or infinite scale; a NaN scale without the
            header's flag, or the flag without one.
    """
    buf = stream.accept(buf, layout.sections.nbytes, layout.spec)
    is_flagged, exponent = read_header(layout, buf)
    scale = layout.sections.view(buf, "scale").view(torch.float16)
    _check(layout, buf, is_flagged, scale)
    return FixedTiles(
        exponent=torch.full((), exponent, dtype=torch.int32, device=buf.device),
        scale=scale,
        codes=_read_codes(layout, buf),
    )


def read_header(layout: FixedLayout, buf: torch.Tensor) -> tuple[bool, int]:
    """The flag for non-finite values and e, from an accepted buffer.

    Raises:
        CodecError: a header that is not of this layout.
    """
    expected = (("version", VERSION), ("flags", 0), ("log2 G", layout.log2_group), ("bits", layout.spec.bits))
    is_flagged, exponent = stream.read_header(buf, expected, layout.spec)
    if exponent < MIN_EXPONENT:
        raise CodecError(f"{layout.spec}: header byte 4 (e) is {exponent}, no encoder writes one below {MIN_EXPONENT}")
    return is_flagged, exponent


def _check(layout: FixedLayout, buf: torch.Tensor, is_flagged: bool, scale: torch.Tensor) -> None:
    marked = scale.isnan()
    problems = {
        "filling behind a section is not zero": layout.sections.has_dirty_filling(buf),
        "a scale is infinite": scale.isinf().any(),
        "a scale is negative": (scale.view(torch.int16) < 0).any(),
        "the flag for non-finite values does not agree with the scales": marked.any() != is_flagged,
    }
    stream.refuse(problems, layout.spec)


def _read_codes(layout: FixedLayout, buf: torch.Tensor) -> torch.Tensor:
    """Codes fp32 [T, G]: sums of bytes times powers of 256, exact in fp32."""
    whole, planes = layout.views(buf)
    num_tiles, group = layout.tiling.num_tiles, layout.tiling.group
    codes = torch.zeros(num_tiles, group, dtype=torch.float32, device=buf.device)
    for place, part in enumerate(whole):
        codes.add_(part, alpha=256**place)
    if layout.spec.bits % 8:
        filled = bit_planes.empty_planes(num_tiles, group, buf.device)
        filled[:, : layout.spec.bits % 8] = planes
        codes.add_(bit_planes.from_planes(filled), alpha=256 ** len(whole))
    return codes
