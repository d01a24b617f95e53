"""Streams of `eden` and `wf` as the CPU's kernels see them: sections in place, and where each tile's planes start.

A stream is opened only if the reference would take it; kernels that read it then need no checks of their own, as the
starts end with what the section of codes holds.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from tahq.errors import CodecError
from tahq.quant import stream
from tahq.quant.cpu.allocation import Int64Array, read_starts
from tahq.quant.cpu.planes import ByteArray
from tahq.quant.cpu.tiles import Magnitudes
from tahq.quant.gaussian import tile_stream
from tahq.quant.gaussian.small_scale import NOT_FINITE
from tahq.quant.gaussian.tile_stream import WIDTH_BITS, TileLayout

_CPU = torch.device("cpu")


class Sections(NamedTuple):
    """The sections that both codecs' streams have, sharing the stream's memory."""

    scale: ByteArray
    width: ByteArray
    codes: ByteArray

    @classmethod
    def of(cls, layout: TileLayout, buf: torch.Tensor) -> "Sections":
        """Of an aligned buffer that is as long as the layout says."""
        scale, width, codes = (layout.sections.view(buf, name).numpy() for name in ("scale", "width", "codes"))
        return cls(scale, width, codes)


class OpenStream(NamedTuple):
    """A stream that may be read.

    Attributes:
        buf: the stream, aligned.
        sections: of it.
        starts: int64 [T + 1], where each tile's planes start, and the last ends.
        exponent: e.
    """

    buf: torch.Tensor
    sections: Sections
    starts: Int64Array
    exponent: int


def new_stream(layout: TileLayout, magnitudes: Magnitudes, exponent: int) -> torch.Tensor:
    """The header, and zeros behind it."""
    version, _, *rest = (value for _, value in layout.header)
    header = (version, int(not magnitudes.all_finite), *rest, exponent)
    return stream.new_stream(layout.sections.nbytes, header, _CPU)


def open_stream(
    layout: TileLayout,
    buf: torch.Tensor,
    unpack: Callable[[torch.Tensor], object],
    is_sound_besides: Callable[[torch.Tensor], bool] | None = None,
) -> OpenStream:
    """Refuse what the reference refuses, and let it say why: only a bad stream takes that slow way.

    Args:
        layout: of the stream.
        buf: on the CPU; nothing in it is trusted.
        unpack: the reference's.
        is_sound_besides: whether the reference takes the codec's own sections, given an aligned buffer.

    Raises:
        CodecError: of `unpack`.
    """
    buf = stream.accept(buf, layout.sections.nbytes, layout.spec)
    is_flagged, exponent = tile_stream.read_header(layout, buf)
    sections = Sections.of(layout, buf)
    starts = read_starts(sections.width, layout.tiling.num_tiles)
    is_sound = starts[-1] == layout.num_planes and _are_sound(sections, is_flagged)
    is_sound = is_sound and (is_sound_besides is None or is_sound_besides(buf))
    if not is_sound or layout.sections.has_dirty_filling(buf):
        unpack(buf)
        raise CodecError(f"{layout.spec}: damaged stream, though the reference takes it: please report this")
    return OpenStream(buf, sections, starts, exponent)


def _are_sound(sections: Sections, is_flagged: bool) -> bool:
    """Whether nothing is behind the widths, and scales mark tiles as not finite just where the header does."""
    used = sections.scale.size * WIDTH_BITS % 8
    is_clean = used == 0 or sections.width[-1] >> used == 0
    return bool(is_clean and (sections.scale == NOT_FINITE).any() == is_flagged)
