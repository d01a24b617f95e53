"""Byte layout of wf streams, version 1: header, scales, widths, means, codes. docs/wire-format.md has the tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tahq.quant import stream
from tahq.quant.gaussian import tile_stream
from tahq.quant.gaussian.bit_allocation import num_planes
from tahq.quant.gaussian.tile_stream import VERSION, TileLayout, log2_group
from tahq.quant.spec import WfSpec
from tahq.quant.tiling import Tiling
from tahq.quant.wf.reference import WfTiles


@dataclass(frozen=True, slots=True)
class WfLayout(TileLayout):
    """Everything about a stream that the shape and the spec decide."""

    @classmethod
    def of(cls, spec: WfSpec, shape: Sequence[int]) -> "WfLayout":
        """Lay out the stream of a tensor of this shape.

        Raises:
            CodecError: a shape without dimensions.
        """
        tiling = Tiling.of(shape, spec.group)
        planes, is_centered = num_planes(spec.bits, tiling.num_tiles), spec.center == "on"
        header = (("version", VERSION), ("flags", 0), ("log2 G", log2_group(tiling)), ("center", int(is_centered)))
        sizes = tile_stream.section_sizes(tiling, planes)
        codes = sizes.pop("codes")
        if is_centered:
            sizes["mean"] = 2 * tiling.channels if tiling.num_tiles else 0
        return cls(spec, tiling, planes, header, stream.Sections.of({**sizes, "codes": codes}))

    @property
    def has_mean(self) -> bool:
        """Whether there are means in the stream: not without centering."""
        return "mean" in self.sections.by_name


def pack(layout: WfLayout, tiles: WfTiles) -> torch.Tensor:
    """The stream of `tiles`: uint8 [nbytes], on their device, without synchronising it."""
    if tiles.mean is None:
        return tile_stream.pack(layout, tiles.tiles, {})
    section = layout.sections.by_name["mean"]
    mean = tiles.mean.view(torch.uint8)[
        : section.stop - section.start
    ]  # filling has none, nor have tensors of no token
    return tile_stream.pack(layout, tiles.tiles, {"mean": mean})


def unpack(layout: WfLayout, buf: torch.Tensor) -> WfTiles:
    """The tiles of a stream.

    Raises:
        CodecError: a wrong length; a mean that is not finite; whatever `gaussian.tile_stream.unpack` refuses.
    """
    buf = stream.accept(buf, layout.sections.nbytes, layout.spec)
    if not layout.has_mean:
        return WfTiles(tile_stream.unpack(layout, buf, {}), None)
    mean = layout.sections.view(buf, "mean").view(torch.float16)
    tiles = tile_stream.unpack(layout, buf, {"a mean is not finite": ~mean.isfinite().all()})
    padded = torch.nn.functional.pad(mean, (0, layout.tiling.padding if len(mean) else 0))
    return WfTiles(tiles, padded)
