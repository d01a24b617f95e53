"""`wf` on the CPU in numba: four readings of the tensor, one of the stream, nothing of their size in between.

Encoding reads the tensor for its largest magnitudes, then for the channels' means, transforms it tile by tile for the
energies that bits are allocated by, and transforms it again to choose steps, quantise and pack. Threads share ranges
of tiles; for the means, ranges of channels, so that their number shows nowhere.

Streams equal the reference's but where a sum (a mean, an energy, an error) rounds differently, which may move a
width, a step or a code; decoded values are equal always, NaN being NaN.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from tahq.quant.cpu.allocation import allocate
from tahq.quant.cpu.gaussian_tiles import Field, Scratch
from tahq.quant.cpu.kernel import Team
from tahq.quant.cpu.levels import levels
from tahq.quant.cpu.numbers import Fp32Array, Values
from tahq.quant.cpu.tile_stream import Sections, new_stream, open_stream
from tahq.quant.cpu.tiles import Int32Array, measure, top_exponent
from tahq.quant.tah.reference import TOP_EXPONENT
from tahq.quant.wf import stream as wf_stream
from tahq.quant.wf.cpu_kernels import level_tiles, measure_tiles, read_tiles, sum_channels, write_tiles
from tahq.quant.wf.stream import WfLayout

HalfArray = NDArray[np.float16]


def encode(layout: WfLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """The stream of x, as `wf.reference` and `wf.stream` write it.

    Args:
        layout: of x's shape.
        x: fp32, bf16 or fp16 on the CPU, of any strides, with at least one element; not written.
        key: ignored.
        threads: how many may share the work.

    Returns:
        uint8 [nbytes].
    """
    values, num_tiles = Values.of(x), layout.tiling.num_tiles
    with Team(threads, x.numel()) as team:
        magnitudes = measure(values, layout.tiling, team)
        exponent = top_exponent(magnitudes.overall, TOP_EXPONENT)
        field, of_tiles = Field.of(values, layout.tiling, exponent), magnitudes.of_tiles
        buf = new_stream(layout, magnitudes, exponent)
        means = _center(layout, field, of_tiles, buf, team)
        energies = _measure_energies(layout, field, means, of_tiles, team)
        tile_levels = np.empty(num_tiles, np.int32)
        level_tiles(energies, layout.tiling.tiles_per_token, tile_levels)
        sections = Sections.of(layout, buf)
        starts = allocate(tile_levels, layout.num_planes, sections.width)

        def write(first: int, stop: int) -> None:
            scratch = Scratch.of(layout.tiling.group)
            write_tiles(field, means, of_tiles, energies, starts, first, stop, sections, levels(), scratch)

        team.share(num_tiles, write)
    return buf


def decode(layout: WfLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """The tensor of a stream.

    Args:
        layout: of the tensor's shape, with at least one element.
        buf: on the CPU; nothing in it is trusted.
        dtype: fp32, bf16 or fp16.
        key: ignored.
        threads: how many may share the work.

    Returns:
        A fresh, contiguous tensor of the layout's shape; a tile that was not finite is NaN.

    Raises:
        CodecError: whatever `wf.stream.unpack` refuses.
    """

    def has_finite_means(buf: torch.Tensor) -> bool:
        return bool(np.isfinite(_stored_means(layout, buf)).all())

    opened = open_stream(layout, buf, lambda buf: wf_stream.unpack(layout, buf), has_finite_means)
    x = torch.empty(layout.tiling.shape, dtype=dtype)
    field = Field.of(Values.of(x), layout.tiling, -opened.exponent)
    means = _filled_up(layout, _stored_means(layout, opened.buf))

    def read(first: int, stop: int) -> None:
        scratch = Scratch.of(layout.tiling.group)
        read_tiles(field, means, opened.starts, first, stop, opened.sections, levels(), scratch)

    with Team(threads, x.numel()) as team:
        team.share(layout.tiling.num_tiles, read)
    return x


def _center(layout: WfLayout, field: Field, of_tiles: Int32Array, buf: torch.Tensor, team: Team) -> Fp32Array:
    """Write the channels' means to the stream, if it has them; fp32 [M·G] as the receiver will have them, or empty."""
    stored = _stored_means(layout, buf)
    if stored.size:
        totals = np.zeros(field.grid.tiles_per_token * field.grid.group, np.float64)

        def add_up(first: int, stop: int) -> None:
            sum_channels(field, of_tiles, first, stop, totals, np.empty(field.grid.group, np.float32))

        team.share(field.grid.tiles_per_token, add_up)
        num_tokens = layout.tiling.num_tiles // layout.tiling.tiles_per_token
        means = (totals[: stored.size] / num_tokens).astype(np.float32).astype(np.float16)
        stored[:] = means + np.float16(0.0)  # −0 becomes +0
    return _filled_up(layout, stored)


def _stored_means(layout: WfLayout, buf: torch.Tensor) -> HalfArray:
    """The section of means, fp16 [C] in the stream's memory; empty without centering."""
    if not layout.has_mean:
        return np.empty(0, np.float16)
    return layout.sections.view(buf, "mean").view(torch.float16).numpy()


def _filled_up(layout: WfLayout, stored: HalfArray) -> Fp32Array:
    """Means in fp32, with zeros for the filling of a token's last tile."""
    return np.pad(stored.astype(np.float32), (0, layout.tiling.padding if stored.size else 0))


def _measure_energies(layout: WfLayout, field: Field, means: Fp32Array, of_tiles: Int32Array, team: Team) -> Fp32Array:
    energies = np.empty(layout.tiling.num_tiles, np.float32)

    def measure_range(first: int, stop: int) -> None:
        z = np.empty(layout.tiling.group, np.float32)
        measure_tiles(field, means, of_tiles, first, stop, energies, z)

    team.share(layout.tiling.num_tiles, measure_range)
    return energies
