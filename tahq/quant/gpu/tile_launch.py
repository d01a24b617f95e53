"""Launches that `eden` and `wf` share, of a shape and spec: the allocation of bits, and a decoder's first kernel.

What a kernel is given behind its tensors, and what it is compiled for, is put together here and in `eden.triton` and
`wf.triton`; see `gpu.launch`.
"""

from dataclasses import dataclass
from typing import Any

from tahq.errors import CodecError
from tahq.quant.gaussian.bit_allocation import NUM_LEVELS
from tahq.quant.gaussian.tile_stream import TileLayout, log2_group
from tahq.quant.gpu import allocation, launch, tile_stream
from tahq.quant.gpu.launch import Launch
from tahq.quant.gpu.tiles import MAX_MEASURED
from tahq.quant.tiling import Tiling

MAX_TILES = 1 << 28
"""Eight bits of each are counted in 32-bit numbers."""
MAX_PROGRAMS = 4 * launch.MAX_PROGRAMS
"""Of the kernels that code: four times what a device holds at a time, as blocks take as long as their widest tile."""


@dataclass(frozen=True, slots=True)
class Work:
    """Words of 32 bits of an encoder's work buffer, by what begins there.

    Attributes:
        levels: of tiles, behind the programs' largest magnitudes.
        counts: histograms of levels, one a program.
        starts: the plane at which each tile begins, and their number.
        end: where a codec may keep more; a multiple of 16.
    """

    levels: int
    counts: int
    starts: int
    end: int

    @classmethod
    def of(cls, num_tiles: int) -> "Work":
        """For this many tiles.

        Raises:
            CodecError: more than can be counted.
        """
        if num_tiles >= MAX_TILES:
            raise CodecError(f"backend triton codes fewer than {MAX_TILES} tiles; got {num_tiles}: use reference")
        counts = MAX_MEASURED + launch.slots(num_tiles)
        starts = counts + NUM_LEVELS * _programs(num_tiles)
        return cls(MAX_MEASURED, counts, starts, starts + launch.slots(num_tiles + 1))


def decode_words(num_tiles: int) -> int:
    """Words of a decoder's work buffer."""
    return tile_stream.SLOTS + num_tiles + 1


def allocate(layout: TileLayout, work: Work, num_measured: int, *, is_relative: bool) -> tuple[Launch, Launch]:
    """The kernels that count levels (it takes the work buffer) and allocate bits (the stream, too)."""
    num_tiles = layout.tiling.num_tiles
    grid = (_programs(num_tiles), 1, 1)
    constants = {"RELATIVE": is_relative, "num_warps": 8, "num_stages": 1}
    counted = (num_measured, num_tiles, work.levels, work.counts)
    width_at = layout.sections.by_name["width"].start
    numbers = (num_measured, num_tiles, layout.num_planes - num_tiles, work.levels, work.counts, work.starts, width_at)
    return (
        Launch(allocation.count_kernel, grid, counted, constants),
        Launch(allocation.allocate_kernel, grid, numbers, constants),
    )


def starts(layout: TileLayout, *, is_centered: bool, exponent_place: int) -> Launch:
    """A decoder's first kernel; it takes the stream and the work buffer."""
    tiling = layout.tiling
    numbers = (tiling.num_tiles, layout.num_planes, tiling.channels, *section_starts(layout))
    constants = {
        "G": tiling.group,
        "WIDTH": log2_group(tiling),
        "CENTER": int(is_centered),
        "PLACE": exponent_place,
        "num_warps": 8,
        "num_stages": 1,
    }
    grid = (-(-tiling.num_tiles // tile_stream.TILES_PER_PROGRAM), 1, 1)
    return Launch(tile_stream.starts_kernel, grid, numbers, constants)


def section_starts(layout: TileLayout) -> tuple[int, int, int, int]:
    """Where scales, widths, means (0 without) and codes begin."""
    sections = layout.sections.by_name
    mean_at = sections["mean"].start if "mean" in sections else 0
    return sections["scale"].start, sections["width"].start, mean_at, sections["codes"].start


def coding_constants(tiling: Tiling) -> dict[str, Any]:
    """What the kernels that code are compiled for, one warp a block."""
    return {
        "G": tiling.group,
        "WIDTH": log2_group(tiling),
        "TILES": _tiles_per_block(tiling.group),
        "PADDED": tiling.padding > 0,
        "NORM": tiling.group**-0.5,
        "num_warps": 1,
        **launch.EXACT,
    }


def coding_grid(tiling: Tiling) -> tuple[int, int, int]:
    """Of the kernels that code."""
    return (min(-(-tiling.num_tiles // _tiles_per_block(tiling.group)), MAX_PROGRAMS), 1, 1)


def _tiles_per_block(group: int) -> int:
    return launch.ELEMENTS_PER_WARP // group


def _programs(num_tiles: int) -> int:
    """Of the kernels that allocate bits."""
    return -(-num_tiles // allocation.TILES_PER_PROGRAM)
