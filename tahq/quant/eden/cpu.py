"""`eden` on the CPU in numba: three readings of the tensor, one of the stream, nothing of their size in between.

Encoding reads the tensor for its largest magnitudes, transforms it tile by tile for the energies that bits are
allocated by, and transforms it again to quantise and pack. Threads share ranges of tiles.

Streams equal the reference's but where a sum (a tile's energy, its projection) rounds differently, which may move a
width, a scale by one code, or the code of a value at a threshold; decoded values are equal always, NaN being NaN.
"""

import numpy as np
import torch

from tahq.quant.cpu.allocation import allocate
from tahq.quant.cpu.gaussian_tiles import Field, Scratch
from tahq.quant.cpu.hash import Key
from tahq.quant.cpu.kernel import Team
from tahq.quant.cpu.levels import levels
from tahq.quant.cpu.numbers import Values
from tahq.quant.cpu.tile_stream import Sections, new_stream, open_stream
from tahq.quant.cpu.tiles import measure, top_exponent
from tahq.quant.eden import stream as eden_stream
from tahq.quant.eden.cpu_kernels import measure_tiles, read_tiles, write_tiles
from tahq.quant.eden.stream import EdenLayout
from tahq.quant.tah.reference import TOP_EXPONENT


def encode(layout: EdenLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """The stream of x, as `eden.reference` and `eden.stream` write it (Vargaftik et al., ICML 2022).

    Args:
        layout: of x's shape.
        x: fp32, bf16 or fp16 on the CPU, of any strides, with at least one element; not written.
        key: of the signs and the rounding of scales, 64 bits.
        threads: how many may share the work.

    Returns:
        uint8 [nbytes].
    """
    values, group, num_tiles = Values.of(x), layout.tiling.group, layout.tiling.num_tiles
    energies, tile_levels, halves = np.empty(num_tiles, np.float32), np.empty(num_tiles, np.int32), Key.of(key)
    with Team(threads, x.numel()) as team:
        magnitudes = measure(values, layout.tiling, team)
        exponent = top_exponent(magnitudes.overall, TOP_EXPONENT)
        field, of_tiles = Field.of(values, layout.tiling, exponent), magnitudes.of_tiles

        def measure_energies(first: int, stop: int) -> None:
            z = np.empty(group, np.float32)
            measure_tiles(field, halves, of_tiles, first, stop, energies, tile_levels, z)

        team.share(num_tiles, measure_energies)
        buf = new_stream(layout, magnitudes, exponent)
        sections = Sections.of(layout, buf)
        starts = allocate(tile_levels, layout.num_planes, sections.width)

        def write(first: int, stop: int) -> None:
            scratch = Scratch.of(group)
            write_tiles(field, halves, of_tiles, energies, starts, first, stop, sections, levels(), scratch)

        team.share(num_tiles, write)
    return buf


def decode(
    layout: EdenLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor:
    """The tensor of a stream.

    Args:
        layout: of the tensor's shape, with at least one element.
        buf: on the CPU; nothing in it is trusted.
        dtype: fp32, bf16 or fp16.
        key: that of the encoder.
        threads: how many may share the work.

    Returns:
        A fresh, contiguous tensor of the layout's shape; a tile that was not finite is NaN.

    Raises:
        CodecError: whatever `eden.stream.unpack` refuses.
    """
    opened = open_stream(layout, buf, lambda buf: eden_stream.unpack(layout, buf))
    x = torch.empty(layout.tiling.shape, dtype=dtype)
    field, halves = Field.of(Values.of(x), layout.tiling, -opened.exponent), Key.of(key)

    def read(first: int, stop: int) -> None:
        scratch = Scratch.of(layout.tiling.group)
        read_tiles(field, halves, opened.starts, first, stop, opened.sections, levels(), scratch)

    with Team(threads, x.numel()) as team:
        team.share(layout.tiling.num_tiles, read)
    return x
