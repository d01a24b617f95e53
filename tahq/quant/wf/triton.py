"""`wf` on CUDA in Triton: a launch plan for every shape, and the kernels one after the other.

Streams equal the reference's but where a sum (a mean, an energy, an error) rounds differently, which may move a width,
a step or a code; decoded values are equal to the bit. Encoding is six kernels and never synchronises. Decoding is two,
then waits for the verdict. Kernels are specialised on types, the size of tiles, whether they are filled up and whether
means are taken out, never on bits or data.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from tahq.quant.gaussian.tile_stream import TileLayout
from tahq.quant.gpu import gaussian, launch
from tahq.quant.gpu.launch import Launch
from tahq.quant.gpu.levels import tables
from tahq.quant.gpu.tiles import MAX_MEASURED
from tahq.quant.spec import WfSpec
from tahq.quant.tiling import Tiling
from tahq.quant.wf import triton_kernels as kernels

EXPONENT_PLACE = 4
"""Of e in the header."""
ELEMENTS_PER_BLOCK = 4096
"""Of the kernels that walk down columns."""
MAX_PARTS = 128
"""Parts of the tokens that are summed separately."""


@dataclass(frozen=True, slots=True)
class Columns:
    """How programs share the columns of tiles: each has one column of one part of the tokens at a time."""

    num_tokens: int
    tokens_per_block: int
    num_parts: int
    tokens_per_part: int
    num_programs: int

    @classmethod
    def of(cls, tiling: Tiling) -> "Columns":
        """Parts of whole blocks, as many as keep all programs busy."""
        num_tokens = tiling.num_tiles // tiling.tiles_per_token
        block = ELEMENTS_PER_BLOCK // tiling.group
        num_blocks = -(-num_tokens // block)
        most = max(1, min(MAX_PARTS, MAX_MEASURED // tiling.tiles_per_token, num_blocks))
        per_part = -(-num_blocks // most)
        num_parts = -(-num_blocks // per_part)
        programs = min(tiling.tiles_per_token * num_parts, MAX_MEASURED)
        return cls(num_tokens, block, num_parts, per_part * block, programs)


def encode(layout: TileLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """The stream of x, which is on a CUDA device and not empty."""
    return launch.run_encoder(_plan(layout.spec, layout.tiling), layout, x, table=tables(x.device))


def decode(
    layout: TileLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor | None:
    """The tensor of an accepted stream; None if the stream is damaged."""
    return launch.run_decoder(_plan(layout.spec, layout.tiling), layout, buf, dtype, table=tables(buf.device))


@lru_cache(maxsize=256)
def _plan(spec: WfSpec, tiling: Tiling) -> launch.LaunchPlan:
    layout, columns = TileLayout.of(spec, tiling.shape), Columns.of(tiling)
    work = gaussian.Work.of(tiling.num_tiles)
    energies_at = work.end
    sums_at = energies_at + launch.slots(tiling.num_tiles)
    num_sums = columns.num_parts * tiling.tiles_per_token * tiling.group if layout.has_mean else 0
    count, allocate = gaussian.allocate(layout, work, columns.num_programs, is_relative=False)
    return launch.LaunchPlan(
        encode_words=sums_at + 2 * num_sums,
        encode=(
            ("x work", _measure(layout, columns, sums_at)),
            ("x work buf", _energies(layout, columns, sums_at, energies_at)),
            ("work", _levels(tiling, columns, work, energies_at)),
            ("work", count),
            ("work buf", allocate),
            ("x work table buf", _quantize(layout, columns, work, energies_at)),
        ),
        decode_words=gaussian.decode_words(tiling.num_tiles),
        decode=(
            ("buf work", gaussian.starts(layout, exponent_place=EXPONENT_PLACE)),
            ("buf work table x", _values(layout)),
        ),
    )


def _measure(layout: TileLayout, columns: Columns, sums_at: int) -> Launch:
    numbers = (*_column_numbers(layout.tiling, columns), sums_at)
    return Launch(kernels.measure_kernel, (columns.num_programs, 1, 1), numbers, _column_constants(layout, columns))


def _energies(layout: TileLayout, columns: Columns, sums_at: int, energies_at: int) -> Launch:
    mean_at = gaussian.section_starts(layout)[2]
    numbers = (columns.num_programs, *_column_numbers(layout.tiling, columns), sums_at, energies_at, mean_at)
    return Launch(kernels.energy_kernel, (columns.num_programs, 1, 1), numbers, _column_constants(layout, columns))


def _column_numbers(tiling: Tiling, columns: Columns) -> tuple[int, ...]:
    return columns.num_tokens, tiling.channels, tiling.tiles_per_token, columns.num_parts, columns.tokens_per_part


def _column_constants(layout: TileLayout, columns: Columns) -> dict[str, Any]:
    return {
        "G": layout.tiling.group,
        "TOKENS": columns.tokens_per_block,
        "PADDED": layout.tiling.padding > 0,
        "CENTER": int(layout.has_mean),
        "num_warps": launch.MEASURING_WARPS,
        **launch.EXACT,
    }


def _levels(tiling: Tiling, columns: Columns, work: gaussian.Work, energies_at: int) -> Launch:
    grid = (-(-columns.num_tokens // kernels.TOKENS_PER_PROGRAM), 1, 1)
    numbers = (columns.num_tokens, tiling.tiles_per_token, energies_at, work.levels)
    return Launch(kernels.level_kernel, grid, numbers, {"num_warps": 4, **launch.EXACT})


def _quantize(layout: TileLayout, columns: Columns, work: gaussian.Work, energies_at: int) -> Launch:
    tiling = layout.tiling
    scale_at, _, mean_at, codes_at = gaussian.section_starts(layout)
    shape = (tiling.num_tiles, layout.num_planes, tiling.channels, tiling.tiles_per_token)
    numbers = (columns.num_programs, *shape, energies_at, work.starts, scale_at, mean_at, codes_at)
    return Launch(kernels.quantize_kernel, gaussian.coding_grid(tiling), numbers, _coding_constants(layout))


def _values(layout: TileLayout) -> Launch:
    tiling = layout.tiling
    scale_at, _, mean_at, codes_at = gaussian.section_starts(layout)
    numbers = (tiling.num_tiles, tiling.channels, tiling.tiles_per_token, scale_at, mean_at, codes_at)
    return Launch(kernels.values_kernel, gaussian.coding_grid(tiling), numbers, _coding_constants(layout))


def _coding_constants(layout: TileLayout) -> dict[str, Any]:
    return gaussian.coding_constants(layout.tiling) | {"CENTER": int(layout.has_mean)}
