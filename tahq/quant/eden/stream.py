"""Byte layout of eden streams, version 1: header, scales, widths, codes. docs/wire-format.md has the tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tahq.quant import stream
from tahq.quant.gaussian import tile_stream
from tahq.quant.gaussian.bit_allocation import num_planes
from tahq.quant.gaussian.quantizer import CodedTiles
from tahq.quant.gaussian.tile_stream import VERSION, TileLayout, log2_group
from tahq.quant.spec import EdenSpec
from tahq.quant.tiling import Tiling


@dataclass(frozen=True, slots=True)
class EdenLayout(TileLayout):
    """Everything about a stream that the shape and the spec decide."""

    @classmethod
    def of(cls, spec: EdenSpec, shape: Sequence[int]) -> "EdenLayout":
        """Lay out the stream of a tensor of this shape.

        Raises:
            CodecError: a shape without dimensions.
        """
        tiling = Tiling.of(shape, spec.group)
        planes = num_planes(spec.bits, tiling.num_tiles)
        header = (("version", VERSION), ("flags", 0), ("log2 G", log2_group(tiling)))
        sizes = tile_stream.section_sizes(tiling, planes)
        return cls(spec, tiling, planes, header, stream.Sections.of(sizes))


def pack(layout: EdenLayout, tiles: CodedTiles) -> torch.Tensor:
    """The stream of `tiles`: uint8 [nbytes], on their device, without synchronising it."""
    return tile_stream.pack(layout, tiles, {})


def unpack(layout: EdenLayout, buf: torch.Tensor) -> CodedTiles:
    """The tiles of a stream.

    Raises:
        CodecError: a wrong length, and whatever `gaussian.tile_stream.unpack` refuses.
    """
    return tile_stream.unpack(layout, stream.accept(buf, layout.sections.nbytes, layout.spec), {})
