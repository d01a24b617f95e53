"""Byte layout of `eden` and `wf` streams, version 1: a scale and a width per tile, means of `wf`, then codes.

A tile's codes take as many planes as its width. All tiles together have K planes, which shape and spec decide, so the
length never depends on the data; only the division of planes among tiles does. docs/dev/wire-format.md has the tables;
`unpack` lists what a decoder refuses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tahq.quant import bit_planes, stream
from tahq.quant.gaussian.levels import CodedTiles
from tahq.quant.gaussian.small_scale import NOT_FINITE, value_of
from tahq.quant.spec import EdenSpec, WfSpec
from tahq.quant.stream import FLAGS, LOG2_GROUP, VERSION_1, Description, HeaderByte, Statistics, exponent_byte
from tahq.quant.tiling import Tiling

WIDTH_BITS = 3
"""Bits that encode a tile's width, minus one."""


@dataclass(frozen=True, slots=True)
class TileLayout(stream.Layout):
    """Everything about a stream that the shape and the spec decide.

    The tiles have K = `num_planes` bits together; a plane is one bit of each of a tile's G codes, G/8 bytes.
    """

    spec: EdenSpec | WfSpec
    num_planes: int

    @classmethod
    def of(cls, spec: EdenSpec | WfSpec, shape: Sequence[int]) -> "TileLayout":
        """Lay out the stream of a tensor of this shape."""
        tiling = Tiling.of(shape, spec.group)
        num_tiles, num_planes = tiling.num_tiles, math.floor(spec.bits * tiling.num_tiles)
        header = [("version", 1), ("flags", 0), ("log2 G", tiling.log2_group)]
        sizes = {"scale": num_tiles, "width": math.ceil(num_tiles * WIDTH_BITS / 8)}
        if isinstance(spec, WfSpec):
            header.append(("center", int(spec.center == "on")))
            if spec.center == "on":
                sizes["mean"] = 2 * tiling.channels if num_tiles else 0
        sizes["codes"] = num_planes * tiling.group // 8
        return cls(spec, tiling, tuple(header), stream.Sections.of(sizes), num_planes)

    @property
    def has_mean(self) -> bool:
        """Whether the stream has means of channels: `wf` with centering."""
        return "mean" in self.sections.by_name


def pack(layout: TileLayout, tiles: CodedTiles) -> torch.Tensor:
    """The stream of `tiles`, whose widths sum to K: uint8 [nbytes], on their device, without synchronising it."""
    is_flagged = (tiles.scale == NOT_FINITE).any().to(torch.int32)
    buf = layout.new_stream(is_flagged, tiles.exponent, tiles.codes.device)
    planes = bit_planes.to_planes(tiles.codes)[plane_places(tiles.width, layout.num_planes)]
    contents = {
        "scale": tiles.scale,
        "width": bit_planes.pack_numbers((tiles.width - 1).to(torch.uint8), WIDTH_BITS),
        "codes": planes.view(-1),
    }
    if tiles.mean is not None:
        section = layout.sections.by_name["mean"]  # shorter than the means: padding channels have none
        contents["mean"] = tiles.mean.view(torch.uint8)[: section.stop - section.start]
    for name, content in contents.items():
        layout.sections.view(buf, name).copy_(content)
    return buf


def unpack(layout: TileLayout, buf: torch.Tensor) -> CodedTiles:
    """The tiles of an accepted buffer (`stream.accept`); CodecError for anything that no encoder writes."""
    is_flagged, exponent = layout.read_header(buf)
    num_tiles, group = layout.tiling.num_tiles, layout.tiling.group
    scale = layout.sections.view(buf, "scale").clone()
    less_one, left_over = bit_planes.unpack_numbers(layout.sections.view(buf, "width"), num_tiles, WIDTH_BITS)
    width = less_one.to(torch.int32) + 1
    mean = layout.sections.view(buf, "mean").view(torch.float16) if layout.has_mean else None
    problems = {
        "padding after a section is not zero": layout.sections.has_dirty_filling(buf),
        "bits behind the widths are not zero": left_over.any(),
        f"the widths must sum to {layout.num_planes}": width.sum() != layout.num_planes,
        "the flag for non-finite values does not agree with the scales": (scale == NOT_FINITE).any() != is_flagged,
    }
    if mean is not None:
        problems["a mean is not finite"] = ~mean.isfinite().all()
        mean = torch.nn.functional.pad(mean, (0, layout.tiling.padding if len(mean) else 0))
    stream.refuse(problems, layout.spec)
    planes = bit_planes.empty_planes(num_tiles, group, buf.device)
    planes[plane_places(width, layout.num_planes)] = layout.sections.view(buf, "codes").view(-1, group // 8)
    exponents = torch.full((), exponent, dtype=torch.int32, device=buf.device)
    return CodedTiles(exponents, scale, width, bit_planes.from_planes(planes), mean)


def plane_places(width: torch.Tensor, num_planes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each plane of a stream: its tile, and its number among the tile's planes; both int64 [K].

    Since the sum K of the widths (int32 [T]) is known, nothing synchronises.
    """
    tile = torch.repeat_interleave(width, output_size=num_planes)
    start = width.cumsum(0) - width
    return tile, torch.arange(num_planes, device=width.device) - start[tile]


def _statistics(spec: EdenSpec | WfSpec, shape: Sequence[int], buf: torch.Tensor) -> Statistics:
    tiles = unpack(TileLayout.of(spec, shape), buf)
    is_finite = tiles.scale != NOT_FINITE
    found: dict[str, int | float] = {
        "tiles": tiles.scale.numel(),
        "tiles that are not finite": int((~is_finite).sum()),
        "tiles of zeros": int((tiles.scale == 0).sum()),
    }
    if tiles.width.numel():
        found["fewest bits of a code"] = int(tiles.width.min())
        found["bits of a code on average"] = float(tiles.width.double().mean())
        found["most bits of a code"] = int(tiles.width.max())
    found |= stream.step_statistics(torch.ldexp(value_of(tiles.scale[is_finite]).double(), -tiles.exponent))
    if tiles.mean is not None and tiles.mean.numel():
        found["largest mean of a channel"] = float(torch.ldexp(tiles.mean.double().abs().amax(), -tiles.exponent))
    return found


def _describe(summary: str, *more_header: HeaderByte) -> Description:
    return Description(
        summary=summary,
        header=(VERSION_1, FLAGS, LOG2_GROUP, *more_header, exponent_byte(TileLayout.min_exponent)),
        contents={
            "scale": "u8 per tile, a float with 3 bits of mantissa; 255 = not finite",
            "width": "3 bits per tile, the bits of its codes minus one",
            "mean": "fp16 per channel, of x·2^e over all tokens",
            "codes": "tile by tile, as many planes as its width",
        },
        sections=lambda spec, shape, buf: TileLayout.of(spec, shape).sections,
        statistics=_statistics,
    )


EDEN = _describe("randomised Hadamard, Gaussian-optimal levels, unbiased; for gradients")
WF = _describe(
    "Hadamard, bits where they reduce a token's error most; for activations",
    HeaderByte("center", 0, 1, "1: the means of channels are in the stream"),
)
