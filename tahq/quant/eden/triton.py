"""`eden` on CUDA in Triton: a launch plan for every shape, and the kernels one after the other.

Streams equal the reference's but where a sum (a tile's energy, its projection) rounds differently, which may move a
width, a scale by one code, or the code of a value at a threshold; decoded values are equal to the bit. Encoding is four
kernels and never synchronises. Decoding is two, then waits for the verdict. Kernels are specialised on types, the size
of tiles and whether they are filled up, never on bits, data or the key.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

import torch

from tahq.errors import CodecError
from tahq.quant import stream
from tahq.quant.eden import stream as eden_stream
from tahq.quant.eden import triton_kernels as kernels
from tahq.quant.eden.stream import EdenLayout
from tahq.quant.gpu import launch, tile_launch
from tahq.quant.gpu.launch import Launch
from tahq.quant.gpu.levels import tables
from tahq.quant.spec import EdenSpec
from tahq.quant.tiling import Tiling

EXPONENT_PLACE = 3
"""Of e in the header."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches for one spec and shape, and how many words of 32 bits they need to work in."""

    encode_words: int
    decode_words: int
    measure: Launch
    count: Launch
    allocate: Launch
    quantize: Launch
    starts: Launch
    values: Launch


def encode(layout: EdenLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """A stream of version 1: see `eden.codec.encode_reference`; x on a CUDA device, not empty."""
    plan = _plan(layout.spec, layout.tiling)
    x = launch.aligned(x)
    work = torch.empty(plan.encode_words, dtype=torch.int32, device=x.device)
    buf = torch.empty(layout.sections.nbytes, dtype=torch.uint8, device=x.device)
    with launch.on_device_of(x):
        plan.measure(x, work)
        plan.count(work)
        plan.allocate(work, buf)
        plan.quantize(x, work, tables(x.device), buf, last=_halves(key))
    return buf


def decode(
    layout: EdenLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor:
    """The tensor of a stream.

    Raises:
        CodecError: what `eden.stream.unpack` refuses.
    """
    buf = stream.accept(buf, layout.sections.nbytes, layout.spec)
    plan = _plan(layout.spec, layout.tiling)
    work = torch.empty(plan.decode_words, dtype=torch.int32, device=buf.device)
    x = torch.empty(layout.tiling.shape, dtype=dtype, device=buf.device)
    with launch.on_device_of(buf):
        plan.starts(buf, work)
        plan.values(buf, work, tables(buf.device), x, last=_halves(key))
    if launch.is_refused(int(work[0])):
        _refuse(layout, buf)
    return x


def _refuse(layout: EdenLayout, buf: torch.Tensor) -> NoReturn:
    """Let the reference say what is wrong with a damaged stream."""
    eden_stream.unpack(layout, buf)
    raise CodecError(f"{layout.spec}: damaged stream")


def _halves(key: int) -> tuple[int, int]:
    """The lower and the upper half of a key, as signed numbers, so that all have the same type to a kernel."""
    low, high = ((key >> place & 0xFFFFFFFF) for place in (0, 32))
    return (low ^ 2**31) - 2**31, (high ^ 2**31) - 2**31


@lru_cache(maxsize=256)
def _plan(spec: EdenSpec, tiling: Tiling) -> Plan:
    layout = EdenLayout.of(spec, tiling.shape)
    work = tile_launch.Work.of(tiling.num_tiles)
    num_measured = launch.measuring_programs(tiling.num_tiles, tiling.group)
    count, allocate = tile_launch.allocate(layout, work, num_measured, is_relative=True)
    return Plan(
        encode_words=work.end,
        decode_words=tile_launch.decode_words(tiling.num_tiles),
        measure=_measure(tiling, work, num_measured),
        count=count,
        allocate=allocate,
        quantize=_quantize(layout, work, num_measured),
        starts=tile_launch.starts(layout, is_centered=False, exponent_place=EXPONENT_PLACE),
        values=_values(layout),
    )


def _measure(tiling: Tiling, work: tile_launch.Work, num_measured: int) -> Launch:
    constants = {
        "G": tiling.group,
        "TILES": launch.measuring_tiles(tiling.group),
        "PADDED": tiling.padding > 0,
        "num_warps": launch.MEASURING_WARPS,
        **launch.EXACT,
    }
    numbers = (tiling.num_tiles, tiling.channels, tiling.tiles_per_token, work.levels)
    return Launch(kernels.measure_kernel, (num_measured, 1, 1), numbers, constants)


def _quantize(layout: EdenLayout, work: tile_launch.Work, num_measured: int) -> Launch:
    tiling = layout.tiling
    scale_at, _, _, codes_at = tile_launch.section_starts(layout)
    shape = (tiling.num_tiles, layout.num_planes, tiling.channels, tiling.tiles_per_token)
    numbers = (num_measured, *shape, work.levels, work.starts, scale_at, codes_at)
    constants = tile_launch.coding_constants(tiling)
    return Launch(kernels.quantize_kernel, tile_launch.coding_grid(tiling), numbers, constants)


def _values(layout: EdenLayout) -> Launch:
    tiling = layout.tiling
    scale_at, _, _, codes_at = tile_launch.section_starts(layout)
    numbers = (tiling.num_tiles, tiling.channels, tiling.tiles_per_token, scale_at, codes_at)
    return Launch(kernels.values_kernel, tile_launch.coding_grid(tiling), numbers, tile_launch.coding_constants(tiling))
