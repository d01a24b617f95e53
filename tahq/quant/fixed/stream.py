"""Byte layout of fixed-point streams, version 1: `FixedTiles` to bytes and back (docs/dev/wire-format.md).

Header, scales, whole bytes of the codes, remaining bits as planes. A code of 8 bits is one byte, of 6
bits six planes, of 10 bits one byte and two planes: no bit is wasted, and the common width is a plain copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tahq.quant import bit_planes, stream
from tahq.quant.spec import FixedSpec
from tahq.quant.stream import FLAGS, LOG2_GROUP, VERSION_1, Description, HeaderByte, Statistics, exponent_byte
from tahq.quant.tiling import Tiling

TOP_EXPONENT = 14
"""The largest magnitude of a scaled tensor is in [2^14, 2^15)."""


@dataclass(frozen=True, slots=True)
class FixedTiles:
    """The content of a fixed-point stream; coded is x·2^e, e without dimensions.

    `scale`, fp16 [T], is the group's largest magnitude, rounded up; NaN if a value is not finite. `codes`, fp32 [T, G],
    are whole numbers q + Q from 0 to 2·Q, Q = 2^(bits − 1) − 1.
    """

    exponent: torch.Tensor
    scale: torch.Tensor
    codes: torch.Tensor


@dataclass(frozen=True, slots=True)
class FixedLayout(stream.Layout):
    """Everything about a stream that the shape and the spec decide."""

    min_exponent: ClassVar[int] = TOP_EXPONENT - 127

    spec: FixedSpec

    @classmethod
    def of(cls, spec: FixedSpec, shape: Sequence[int]) -> "FixedLayout":
        """Lay out the stream of a tensor of this shape."""
        tiling = Tiling.of(shape, spec.group)
        num_codes = tiling.num_tiles * tiling.group
        sizes = {
            "scale": 2 * tiling.num_tiles,
            "bytes": num_codes * (spec.bits // 8),
            "planes": num_codes * (spec.bits % 8) // 8,
        }
        header = (("version", 1), ("flags", 0), ("log2 G", tiling.log2_group), ("bits", spec.bits))
        return cls(spec, tiling, header, stream.Sections.of(sizes))

    def views(self, buf: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Views of a stream: the codes' whole bytes [T, G], lowest first, and their planes [T, bits mod 8, G/8]."""
        num_tiles, group = self.tiling.num_tiles, self.tiling.group
        whole = self.sections.view(buf, "bytes").view(self.spec.bits // 8, num_tiles, group)
        planes = self.sections.view(buf, "planes").view(num_tiles, self.spec.bits % 8, group // 8)
        return whole.unbind(), planes


def largest_code(bits: int) -> int:
    """Q = 2^(bits − 1) − 1."""
    return (1 << bits - 1) - 1


def pack(layout: FixedLayout, tiles: FixedTiles) -> torch.Tensor:
    """The stream of `tiles`: uint8 [nbytes], on their device, without synchronising it."""
    bits = layout.spec.bits
    buf = layout.new_stream(tiles.scale.isnan().any().to(torch.int32), tiles.exponent, tiles.codes.device)
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
    """The content of an accepted buffer (`stream.accept`); CodecError for anything that no encoder writes."""
    is_flagged, exponent = layout.read_header(buf)
    scale = layout.sections.view(buf, "scale").view(torch.float16)
    problems = {
        "padding after a section is not zero": layout.sections.has_dirty_filling(buf),
        "a scale is infinite": scale.isinf().any(),
        "a scale is negative": (scale.view(torch.int16) < 0).any(),
        "the flag for non-finite values does not agree with the scales": scale.isnan().any() != is_flagged,
    }
    stream.refuse(problems, layout.spec)
    exponents = torch.full((), exponent, dtype=torch.int32, device=buf.device)
    return FixedTiles(exponents, scale, _read_codes(layout, buf))


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


def _statistics(spec: FixedSpec, shape: Sequence[int], buf: torch.Tensor) -> Statistics:
    tiles = unpack(FixedLayout.of(spec, shape), buf)
    steps = tiles.scale.float() / largest_code(spec.bits)
    return {
        "groups": tiles.scale.numel(),
        "groups that are not finite": int(tiles.scale.isnan().sum()),
        "groups of zeros": int((tiles.scale == 0).sum()),
        **stream.step_statistics(torch.ldexp(steps.double(), -tiles.exponent)),
    }


FIXED = Description(
    summary="group-wise fixed point, symmetric",
    header=(
        VERSION_1,
        FLAGS,
        LOG2_GROUP,
        HeaderByte("bits", 2, 16, "of a code"),
        exponent_byte(FixedLayout.min_exponent),
    ),
    contents={
        "scale": "fp16 per group, its largest magnitude; NaN = not finite",
        "bytes": "bits 0 to 7 of all codes, then 8 to 15",
        "planes": "the remaining bits, lowest first, group by group",
    },
    sections=lambda spec, shape, buf: FixedLayout.of(spec, shape).sections,
    statistics=_statistics,
)
