"""`wf` on CUDA in Triton: a launch plan for every shape, and the kernels one after the other.

Streams equal the reference's but where a sum (a mean, an energy, an error) rounds differently, which may move a width,
a step or a code; decoded values are equal to the bit. Encoding is six kernels and never synchronises. Decoding is two,
then waits for the verdict. Kernels are specialised on types, the size of tiles, whether they are filled up and whether
means are taken out, never on bits or data.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import torch

from tahq.errors import CodecError
from tahq.quant import stream
from tahq.quant.gpu import launch, tile_launch
from tahq.quant.gpu.launch import Launch
from tahq.quant.gpu.levels import tables
from tahq.quant.gpu.tiles import MAX_MEASURED
from tahq.quant.spec import WfSpec
from tahq.quant.tiling import Tiling
from tahq.quant.wf import stream as wf_stream
from tahq.quant.wf import triton_kernels as kernels
from tahq.quant.wf import triton_measure as measuring
from tahq.quant.wf.stream import WfLayout

EXPONENT_PLACE = 4
"""Of e in the header."""
ELEMENTS_PER_BLOCK = 4096
"""Of the kernels that walk down columns."""
MAX_PARTS = 128
"""Parts of the tokens that are summed separately."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches for one spec and shape, and how many words of 32 bits they need to work in."""

    encode_words: int
    decode_words: int
    measure: Launch
    energies: Launch
    levels: Launch
    count: Launch
    allocate: Launch
    quantize: Launch
    starts: Launch
    values: Launch


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


def encode(layout: WfLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """A stream of version 1: see `wf.codec.encode_reference`; x on a CUDA device, not empty."""
    plan = _plan(layout.spec, layout.tiling)
    x = launch.aligned(x)
    work = torch.empty(plan.encode_words, dtype=torch.int32, device=x.device)
    buf = torch.empty(layout.sections.nbytes, dtype=torch.uint8, device=x.device)
    with launch.on_device_of(x):
        plan.measure(x, work)
        plan.energies(x, work, buf)
        plan.levels(work)
        plan.count(work)
        plan.allocate(work, buf)
        plan.quantize(x, work, tables(x.device), buf)
    return buf


def decode(layout: WfLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """The tensor of a stream.

    Raises:
        CodecError: what `wf.stream.unpack` refuses.
    """
    buf = stream.accept(buf, layout.sections.nbytes, layout.spec)
    plan = _plan(layout.spec, layout.tiling)
    work = torch.empty(plan.decode_words, dtype=torch.int32, device=buf.device)
    x = torch.empty(layout.tiling.shape, dtype=dtype, device=buf.device)
    with launch.on_device_of(buf):
        plan.starts(buf, work)
        plan.values(buf, work, tables(buf.device), x)
    if launch.is_refused(int(work[0])):
        _refuse(layout, buf)
    return x


def _refuse(layout: WfLayout, buf: torch.Tensor) -> NoReturn:
    """Let the reference say what is wrong with a damaged stream."""
    wf_stream.unpack(layout, buf)
    raise CodecError(f"{layout.spec}: damaged stream")


@lru_cache(maxsize=256)
def _plan(spec: WfSpec, tiling: Tiling) -> Plan:
    layout, columns = WfLayout.of(spec, tiling.shape), Columns.of(tiling)
    work = tile_launch.Work.of(tiling.num_tiles)
    energies_at = work.end
    sums_at = energies_at + launch.slots(tiling.num_tiles)
    num_sums = columns.num_parts * tiling.tiles_per_token * tiling.group if layout.has_mean else 0
    count, allocate = tile_launch.allocate(layout, work, columns.num_programs, is_relative=False)
    return Plan(
        encode_words=sums_at + 2 * num_sums,
        decode_words=tile_launch.decode_words(tiling.num_tiles),
        measure=_measure(layout, columns, sums_at),
        energies=_energies(layout, columns, sums_at, energies_at),
        levels=_levels(tiling, columns, work, energies_at),
        count=count,
        allocate=allocate,
        quantize=_quantize(layout, columns, work, energies_at),
        starts=tile_launch.starts(layout, is_centered=layout.has_mean, exponent_place=EXPONENT_PLACE),
        values=_values(layout),
    )


def _measure(layout: WfLayout, columns: Columns, sums_at: int) -> Launch:
    numbers = (*_column_numbers(layout.tiling, columns), sums_at)
    return Launch(measuring.measure_kernel, (columns.num_programs, 1, 1), numbers, _column_constants(layout, columns))


def _energies(layout: WfLayout, columns: Columns, sums_at: int, energies_at: int) -> Launch:
    mean_at = tile_launch.section_starts(layout)[2]
    numbers = (columns.num_programs, *_column_numbers(layout.tiling, columns), sums_at, energies_at, mean_at)
    return Launch(measuring.energy_kernel, (columns.num_programs, 1, 1), numbers, _column_constants(layout, columns))


def _column_numbers(tiling: Tiling, columns: Columns) -> tuple[int, ...]:
    return columns.num_tokens, tiling.channels, tiling.tiles_per_token, columns.num_parts, columns.tokens_per_part


def _column_constants(layout: WfLayout, columns: Columns) -> dict[str, Any]:
    return {
        "G": layout.tiling.group,
        "TOKENS": columns.tokens_per_block,
        "PADDED": layout.tiling.padding > 0,
        "CENTER": int(layout.has_mean),
        "num_warps": launch.MEASURING_WARPS,
        **launch.EXACT,
    }


def _levels(tiling: Tiling, columns: Columns, work: tile_launch.Work, energies_at: int) -> Launch:
    grid = (-(-columns.num_tokens // measuring.TOKENS_PER_PROGRAM), 1, 1)
    numbers = (columns.num_tokens, tiling.tiles_per_token, energies_at, work.levels)
    return Launch(measuring.level_kernel, grid, numbers, {"num_warps": 4, **launch.EXACT})


def _quantize(layout: WfLayout, columns: Columns, work: tile_launch.Work, energies_at: int) -> Launch:
    tiling = layout.tiling
    scale_at, _, mean_at, codes_at = tile_launch.section_starts(layout)
    shape = (tiling.num_tiles, layout.num_planes, tiling.channels, tiling.tiles_per_token)
    numbers = (columns.num_programs, *shape, energies_at, work.starts, scale_at, mean_at, codes_at)
    return Launch(kernels.quantize_kernel, tile_launch.coding_grid(tiling), numbers, _coding_constants(layout))


def _values(layout: WfLayout) -> Launch:
    tiling = layout.tiling
    scale_at, _, mean_at, codes_at = tile_launch.section_starts(layout)
    numbers = (tiling.num_tiles, tiling.channels, tiling.tiles_per_token, scale_at, mean_at, codes_at)
    return Launch(kernels.values_kernel, tile_launch.coding_grid(tiling), numbers, _coding_constants(layout))


def _coding_constants(layout: WfLayout) -> dict[str, Any]:
    return tile_launch.coding_constants(layout.tiling) | {"CENTER": int(layout.has_mean)}
