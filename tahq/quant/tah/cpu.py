"""`tah` on the CPU in numba: two readings of the tensor, one of the stream, nothing of their size in between.

Encoding reads the tensor for its largest magnitudes and the sums that entropies are made of, and again to transform,
round and pack, each tile while it is in the first-level cache. The largest magnitudes, which the first reading leaves
for every tile, tell the second which tiles are not finite. Threads share ranges of tiles.

Streams equal those of `tah.reference` to the bit, but where two entropies at the border of the selection lie within
rounding of each other; decoded values are equal always, NaN being NaN.
"""

import numpy as np
import torch

from tahq.quant.cpu.kernel import Team
from tahq.quant.cpu.numbers import Values
from tahq.quant.cpu.planes import ByteArray
from tahq.quant.cpu.tiles import Grid, Magnitudes, measure, power_of_two, top_exponent
from tahq.quant.tah.cpu_kernels import TILES_A_BYTE, Rule, Sections, is_sound, read_tiles, write_tiles
from tahq.quant.tah.cpu_select import NUM_COUNTS, Sums, entropies, mark_smallest, measure_and_sum
from tahq.quant.tah.reference import spread_high
from tahq.quant.tah.stream import TahLayout
from tahq.quant.transforms import TOP_EXPONENT

_CPU = torch.device("cpu")


def encode(layout: TahLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """The stream that `tah.reference` writes; x has at least one element."""
    values, grid, rule = Values.of(x), Grid.of(layout.tiling), Rule.of(layout)
    with Team(threads, x.numel()) as team:
        magnitudes, sums = _survey(layout, values, grid, team)
        exponent = top_exponent(magnitudes.overall, TOP_EXPONENT)
        factor = power_of_two(exponent)
        is_high = _spread(layout) if sums is None else _select(layout, sums, exponent, team)
        buf = layout.new_stream(not magnitudes.all_finite, exponent, _CPU)
        sections = Sections.of(layout, buf)
        sections.bit_map[:] = np.packbits(is_high, bitorder="little")

        def write(first: int, stop: int) -> None:
            y = np.empty(grid.group, np.float32)
            write_tiles(values, grid, rule, factor, magnitudes.of_tiles, is_high, first, stop, sections, y)

        team.share(layout.tiling.num_tiles, write, multiple_of=TILES_A_BYTE)
    return buf


def decode(
    layout: TahLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor | None:
    """The tensor of an accepted stream; None if the stream is damaged."""
    is_flagged, exponent = layout.read_header(buf)
    sections = Sections.of(layout, buf)
    is_high = np.unpackbits(sections.bit_map, bitorder="little")
    samples, per_sample = layout.tiling.num_samples, layout.allocs_per_sample
    num_high = per_sample - layout.num_low
    is_good = is_sound(Grid.of(layout.tiling), sections, is_high, samples, per_sample, num_high, is_flagged)
    if not is_good or layout.sections.has_dirty_filling(buf):
        return None
    x = torch.empty(layout.tiling.shape, dtype=dtype)
    values, grid, rule, factor = Values.of(x), Grid.of(layout.tiling), Rule.of(layout), power_of_two(-exponent)

    def read(first: int, stop: int) -> None:
        y = np.empty(grid.group, np.float32)
        read_tiles(values, grid, rule, factor, is_high, first, stop, sections, y)

    with Team(threads, x.numel()) as team:
        team.share(layout.tiling.num_tiles, read)
    return x


def _survey(layout: TahLayout, values: Values, grid: Grid, team: Team) -> tuple[Magnitudes, Sums | None]:
    """Magnitudes of the tiles, and, if the selection looks at the data, the sums of the allocation tiles."""
    if layout.spec.adaptive == "off":
        return measure(values, layout.tiling, team), None
    of_tiles, sums = np.empty(layout.tiling.num_tiles, np.int32), Sums.room(layout.num_allocs)

    def survey(first: int, stop: int) -> tuple[np.int32, bool]:
        y = np.empty(layout.tiles_per_alloc * grid.group, np.float32)
        return measure_and_sum(values, grid, layout.tiles_per_alloc, first, stop, of_tiles, sums, y)

    return Magnitudes.of(of_tiles, team.share(layout.num_allocs, survey)), sums


def _spread(layout: TahLayout) -> ByteArray:
    """1 for each allocation tile [B·n] that gets H bits, else 0, whatever the data."""
    of_sample = spread_high(layout.even_share, layout.allocs_per_sample, _CPU)
    return np.tile(of_sample.numpy().view(np.uint8), layout.tiling.num_samples)


def _select(layout: TahLayout, sums: Sums, exponent: int, team: Team) -> ByteArray:
    """1 for each allocation tile [B·n] that gets H bits, else 0, by entropy."""
    ranks, is_high = np.empty(layout.num_allocs, np.float32), np.empty(layout.num_allocs, np.uint8)
    entropies(sums, exponent, ranks)
    if not layout.allocation.by_low_entropy:
        np.negative(ranks, out=ranks)

    def select(first: int, stop: int) -> None:
        room = np.empty(NUM_COUNTS, np.int64)
        mark_smallest(ranks, layout.allocs_per_sample, layout.num_low, first, stop, is_high, room)

    team.share(layout.tiling.num_samples, select)
    return is_high
