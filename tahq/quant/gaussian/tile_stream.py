"""Byte layout that `eden` and `wf` share: a scale and a width a tile, then codes of as many planes as the width says.

The bits of all tiles together are K, decided by shape and spec, so that the length never depends on the data; which
tile has how many does. What a decoder refuses is listed at `unpack`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tahq.errors import CodecError
from tahq.quant import bit_planes, stream
from tahq.quant.gaussian.quantizer import CodedTiles
from tahq.quant.gaussian.small_scale import NOT_FINITE
from tahq.quant.spec import EdenSpec, WfSpec
from tahq.quant.tah.reference import MAX_EXPONENT, TOP_EXPONENT
from tahq.quant.tiling import Tiling

VERSION = 1
MIN_EXPONENT = TOP_EXPONENT - 127
"""Of the largest fp32 numbers."""
WIDTH_BITS = 3
"""Of a tile's number of bits, less one."""


@dataclass(frozen=True, slots=True)
class TileLayout:
    """Everything about a stream that the shape and the spec decide.

    Attributes:
        num_planes: K, bits of all tiles together; a plane is a bit of each of a tile's G codes, G/8 bytes.
        header: the bytes before e, with their names.
    """

    spec: EdenSpec | WfSpec
    tiling: Tiling
    num_planes: int
    header: tuple[tuple[str, int], ...]
    sections: stream.Sections


def log2_group(tiling: Tiling) -> int:
    """log2 G."""
    return tiling.group.bit_length() - 1


def section_sizes(tiling: Tiling, num_planes: int) -> dict[str, int]:
    """Bytes of the sections that both codecs have, in order."""
    num_tiles = tiling.num_tiles
    return {
        "scale": num_tiles,
        "width": math.ceil(num_tiles * WIDTH_BITS / 8),
        "codes": num_planes * tiling.group // 8,
    }


def pack(layout: TileLayout, tiles: CodedTiles, more: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The stream of `tiles`: uint8 [nbytes], on their device, without synchronising it.

    Args:
        layout: of the stream.
        tiles: whose widths sum to K.
        more: bytes of further sections, by name.
    """
    header = [value for _, value in layout.header]
    flags = (tiles.scale == NOT_FINITE).any().to(torch.int32)
    buf = stream.new_stream(layout.sections.nbytes, (header[0], flags, *header[2:], tiles.exponent), tiles.codes.device)
    planes = bit_planes.to_planes(tiles.codes)[plane_places(tiles.width, layout.num_planes)]
    contents = {
        "scale": tiles.scale,
        "width": bit_planes.pack_numbers((tiles.width - 1).to(torch.uint8), WIDTH_BITS),
        "codes": planes.view(-1),
        **more,
    }
    for name, content in contents.items():
        layout.sections.view(buf, name).copy_(content)
    return buf


def unpack(layout: TileLayout, buf: torch.Tensor, more_problems: Mapping[str, torch.Tensor]) -> CodedTiles:
    """The tiles of an accepted buffer, that is one of the right length (`stream.accept`).

    Args:
        layout: of the stream.
        buf: uint8 [nbytes].
        more_problems: flags (bool without dimensions) that refuse the stream, by what they say.

    Raises:
        CodecError: a header that is not the layout's; an exponent below −117; filling, or bits behind the widths, that
            are not zero; widths that do not sum to K; a scale of 255 without the header's flag, or the flag without
            one; any of `more_problems`.
    """
    is_flagged, exponent = read_header(layout, buf)
    num_tiles, group = layout.tiling.num_tiles, layout.tiling.group
    scale = layout.sections.view(buf, "scale").clone()
    packed = layout.sections.view(buf, "width")
    less_one, left_over = bit_planes.unpack_numbers(packed, num_tiles, WIDTH_BITS)
    width = less_one.to(torch.int32) + 1
    problems = {
        "filling behind a section is not zero": layout.sections.has_dirty_filling(buf),
        "bits behind the widths are not zero": left_over.any(),
        f"the widths must sum to {layout.num_planes}": width.sum() != layout.num_planes,
        "the flag for non-finite values does not agree with the scales": (scale == NOT_FINITE).any() != is_flagged,
        **more_problems,
    }
    stream.refuse(problems, layout.spec)
    planes = bit_planes.empty_planes(num_tiles, group, buf.device)
    planes[plane_places(width, layout.num_planes)] = layout.sections.view(buf, "codes").view(-1, group // 8)
    exponent_of = torch.full((), exponent, dtype=torch.int32, device=buf.device)
    return CodedTiles(exponent_of, scale, width, bit_planes.from_planes(planes))


def read_header(layout: TileLayout, buf: torch.Tensor) -> tuple[bool, int]:
    """The flag for non-finite values and e, from an accepted buffer.

    Raises:
        CodecError: a header that is not of this layout.
    """
    is_flagged, exponent = stream.read_header(buf, layout.header, layout.spec)
    if not MIN_EXPONENT <= exponent <= MAX_EXPONENT:
        place = len(layout.header)
        raise CodecError(
            f"{layout.spec}: header byte {place} (e) is {exponent}, no encoder writes one below {MIN_EXPONENT}"
        )
    return is_flagged, exponent


def plane_places(width: torch.Tensor, num_planes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each plane in a stream: whose tile it is, and which of the tile's planes.

    Args:
        width: int32 [T], summing to `num_planes`; their number being known, nothing synchronises.
        num_planes: K.

    Returns:
        Both int64 [K].
    """
    tile = torch.repeat_interleave(width, output_size=num_planes)
    start = width.cumsum(0) - width
    return tile, torch.arange(num_planes, device=width.device) - start[tile]
