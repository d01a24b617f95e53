"""`fixed` on CUDA in Triton: a launch plan for every shape, and the kernels one after the other.

Streams and decoded values equal the reference's to the bit. Encoding is two kernels and never synchronises;
decoding is one, then waits for the verdict. Kernels are specialised on the spec, on types and on whether
tiles are filled up, never on data or the key.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import torch

from tahq.errors import CodecError
from tahq.quant import stream
from tahq.quant.fixed import stream as fixed_stream
from tahq.quant.fixed import triton_kernels as kernels
from tahq.quant.fixed.stream import FixedLayout
from tahq.quant.gpu import launch
from tahq.quant.gpu.launch import Launch
from tahq.quant.gpu.tiles import MAX_MEASURED
from tahq.quant.spec import FixedSpec
from tahq.quant.tiling import Tiling


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches for one spec and shape: `measure` takes x and a work buffer, `quantize` the stream too."""

    measure: Launch
    quantize: Launch
    values: Launch


def encode(layout: FixedLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """A stream of version 1: see `fixed.codec.encode_reference`; x on a CUDA device, not empty."""
    plan = _plan(layout.spec, layout.tiling)
    x = launch.aligned(x)
    work = torch.empty(MAX_MEASURED, dtype=torch.int32, device=x.device)
    buf = torch.empty(layout.sections.nbytes, dtype=torch.uint8, device=x.device)
    with launch.on_device_of(x):
        plan.measure(x, work)
        plan.quantize(x, work, buf, last=(_signed(key & 0xFFFFFFFF), _signed(key >> 32 & 0xFFFFFFFF)))
    return buf


def decode(
    layout: FixedLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor:
    """The tensor of a stream.

    Raises:
        CodecError: what `fixed.stream.unpack` refuses.
    """
    buf = stream.accept(buf, layout.sections.nbytes, layout.spec)
    plan = _plan(layout.spec, layout.tiling)
    verdict = torch.zeros(1, dtype=torch.int32, device=buf.device)
    x = torch.empty(layout.tiling.shape, dtype=dtype, device=buf.device)
    with launch.on_device_of(buf):
        plan.values(buf, verdict, x)
    if launch.is_refused(int(verdict)):
        _refuse(layout, buf)
    return x


def _refuse(layout: FixedLayout, buf: torch.Tensor) -> NoReturn:
    """Let the reference say what is wrong with a damaged stream."""
    fixed_stream.unpack(layout, buf)
    raise CodecError(f"{layout.spec}: damaged stream")


def _signed(word: int) -> int:
    """A word of 32 bits as a signed number, so that every key has the same type to a kernel."""
    return word - 2**32 if word >= 2**31 else word


@lru_cache(maxsize=256)
def _plan(spec: FixedSpec, tiling: Tiling) -> Plan:
    layout = FixedLayout.of(spec, tiling.shape)
    num_measured = launch.measuring_programs(tiling.num_tiles, tiling.group)
    grid = (launch.programs(tiling.num_tiles, tiling.group), 1, 1)
    starts = tuple(section.start for section in layout.sections.by_name.values())
    numbers = (tiling.num_tiles, tiling.channels, tiling.tiles_per_token)
    constants = _coding_constants(layout)
    rounding = {"STOCHASTIC": spec.round == "stochastic"}
    return Plan(
        measure=Launch(kernels.measure_kernel, (num_measured, 1, 1), numbers, _measuring_constants(tiling)),
        quantize=Launch(kernels.quantize_kernel, grid, (num_measured, *numbers, *starts), constants | rounding),
        values=Launch(kernels.values_kernel, grid, (*numbers, *starts), constants),
    )


def _measuring_constants(tiling: Tiling) -> dict[str, Any]:
    return {
        "G": tiling.group,
        "TILES": launch.measuring_tiles(tiling.group),
        "PADDED": tiling.padding > 0,
        "num_warps": launch.MEASURING_WARPS,
        "num_stages": 1,
    }


def _coding_constants(layout: FixedLayout) -> dict[str, Any]:
    group = layout.tiling.group
    return {
        "G": group,
        "WIDTH": layout.log2_group,
        "TILES": launch.tiles_per_block(group, launch.ELEMENTS_PER_WARP),
        "BITS": layout.spec.bits,
        "PADDED": layout.tiling.padding > 0,
        "num_warps": launch.warps_per_block(group, launch.ELEMENTS_PER_WARP),
        **launch.EXACT,
    }
