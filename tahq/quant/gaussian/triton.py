"""`eden` and `wf` on CUDA in Triton: the launches for every shape.

Streams equal the reference's except where a sum (a mean, an energy, a projection, an error) rounds differently, which
may move a width, a scale or a code; decoded values are equal to the bit. Encoding is four kernels (`eden`) or six
(`wf`) and never synchronises. Decoding is two, then waits for the verdict. Kernels are specialised on types, the size
of tiles, whether they are padded and whether means are taken out, never on bits, data or the key.
"""

from dataclasses import dataclass
from functools import lru_cache

from tahq.errors import CodecError
from tahq.quant.gaussian import triton_kernels as kernels
from tahq.quant.gaussian.bit_allocation import NUM_LEVELS
from tahq.quant.gaussian.tile_stream import TileLayout
from tahq.quant.gaussian.triton_allocation import TILES_PER_PROGRAM, allocate_kernel, count_kernel
from tahq.quant.gaussian.triton_stream import SLOTS, TILES_COUNTED, starts_kernel
from tahq.quant.gpu import launch
from tahq.quant.gpu.launch import EXACT, Launch, Steps
from tahq.quant.gpu.levels import tables
from tahq.quant.gpu.tiles import MAX_MEASURED
from tahq.quant.spec import EdenSpec
from tahq.quant.tiling import Tiling

ELEMENTS_PER_BLOCK = 4096
"""Of the kernels that walk down columns."""
MAX_PARTS = 128
"""Parts of the tokens that are summed separately."""
MAX_TILES = 1 << 28
"""Eight bits of each are counted in 32-bit numbers."""
MAX_PROGRAMS = 4 * launch.MAX_PROGRAMS
"""Of the kernels that code: four times what a device holds at a time, as blocks take as long as their widest tile."""


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


@dataclass(frozen=True, slots=True)
class Work:
    """Words of 32 bits of an encoder's work buffer, by what begins there.

    Behind the programs' largest magnitudes lie the tiles' levels, a histogram of levels per program, and the plane at
    which each tile begins; from `end`, a multiple of 16, `wf` has energies.
    """

    levels: int
    counts: int
    starts: int
    end: int

    @classmethod
    def of(cls, num_tiles: int) -> "Work":
        """For this many tiles; CodecError for more than can be counted."""
        if num_tiles >= MAX_TILES:
            raise CodecError(f"backend triton codes fewer than {MAX_TILES} tiles; got {num_tiles}: use reference")
        counts = MAX_MEASURED + launch.slots(num_tiles)
        starts = counts + NUM_LEVELS * -(-num_tiles // TILES_PER_PROGRAM)
        return cls(MAX_MEASURED, counts, starts, starts + launch.slots(num_tiles + 1))


@lru_cache(maxsize=256)
def plan(layout: TileLayout) -> launch.LaunchPlan:
    """The launches for a layout."""
    tiling, num_tiles, work = layout.tiling, layout.tiling.num_tiles, Work.of(layout.tiling.num_tiles)
    is_random = isinstance(layout.spec, EdenSpec)
    sections = layout.sections.by_name
    scale_at, width_at, codes_at = (sections[name].start for name in ("scale", "width", "codes"))
    mean_at = sections["mean"].start if layout.has_mean else 0
    if is_random:
        num_measured, marks_at, words = launch.measuring_programs(num_tiles, tiling.group), work.levels, work.end
        levels = _levels_of_tiles(tiling, work, num_measured)
    else:
        num_measured, marks_at = Columns.of(tiling).num_programs, work.end
        levels, words = _levels_in_tokens(layout, work, mean_at)
    tiles_per_block = launch.ELEMENTS_PER_WARP // tiling.group
    coding_grid = (min(-(-num_tiles // tiles_per_block), MAX_PROGRAMS), 1, 1)
    centered, width = {"CENTER": int(layout.has_mean)}, {"WIDTH": tiling.log2_group}
    padded, eight_warps = tiling.padding > 0, {"num_warps": 8, "num_stages": 1}
    coding = {"G": tiling.group, "TILES": tiles_per_block, "PADDED": padded, "RANDOM": is_random, "num_warps": 1}
    coding |= {**centered, **EXACT}
    first = {"G": tiling.group, "PLACE": len(layout.header)} | width | centered | eight_warps
    counting, counting_grid = {"RELATIVE": is_random} | eight_warps, (-(-num_tiles // TILES_PER_PROGRAM), 1, 1)
    counted, shape = (work.levels, work.counts), (tiling.channels, tiling.tiles_per_token)
    allocated = (num_measured, num_tiles, layout.num_planes - num_tiles, *counted, work.starts, width_at)
    written = (marks_at, work.starts, scale_at, mean_at, codes_at)
    quantized = (num_measured, num_tiles, layout.num_planes, *shape, *written)
    started = (num_tiles, layout.num_planes, tiling.channels, scale_at, width_at, mean_at, codes_at)
    read = (num_tiles, *shape, scale_at, mean_at, codes_at)
    return launch.LaunchPlan(
        encode_words=words,
        encode=(
            *levels,
            ("work", Launch(count_kernel, counting_grid, (num_measured, num_tiles, *counted), counting)),
            ("work buf", Launch(allocate_kernel, counting_grid, allocated, counting)),
            ("x work table buf key", Launch(kernels.quantize_kernel, coding_grid, quantized, coding | width)),
        ),
        decode_words=SLOTS + num_tiles + 1,
        decode=(
            ("buf work", Launch(starts_kernel, (-(-num_tiles // TILES_COUNTED), 1, 1), started, first)),
            ("buf work table x key", Launch(kernels.values_kernel, coding_grid, read, coding)),
        ),
    )


def _levels_of_tiles(tiling: Tiling, work: Work, num_measured: int) -> Steps:
    """`eden`: one kernel."""
    constants = {
        "G": tiling.group,
        "TILES": launch.measuring_tiles(tiling.group),
        "PADDED": tiling.padding > 0,
        "num_warps": launch.MEASURING_WARPS,
        **EXACT,
    }
    numbers = (tiling.num_tiles, tiling.channels, tiling.tiles_per_token, work.levels)
    return (("x work", Launch(kernels.measure_kernel, (num_measured, 1, 1), numbers, constants)),)


def _levels_in_tokens(layout: TileLayout, work: Work, mean_at: int) -> tuple[Steps, int]:
    """`wf`: three kernels, and the words of the work buffer, which holds energies and sums of channels besides."""
    tiling, columns = layout.tiling, Columns.of(layout.tiling)
    energies_at = work.end
    sums_at = energies_at + launch.slots(tiling.num_tiles)
    num_sums = columns.num_parts * tiling.tiles_per_token * tiling.group if layout.has_mean else 0
    constants = {
        "G": tiling.group,
        "TOKENS": columns.tokens_per_block,
        "PADDED": tiling.padding > 0,
        "CENTER": int(layout.has_mean),
        "num_warps": launch.MEASURING_WARPS,
        **EXACT,
    }
    grid, programs = (columns.num_programs, 1, 1), columns.num_programs
    shape = (columns.num_tokens, tiling.channels, tiling.tiles_per_token, columns.num_parts, columns.tokens_per_part)
    leveled = (columns.num_tokens, tiling.tiles_per_token, energies_at, work.levels)
    level_grid = (-(-columns.num_tokens // kernels.TOKENS_PER_PROGRAM), 1, 1)
    energy_numbers = (programs, *shape, sums_at, energies_at, mean_at)
    return (
        ("x work", Launch(kernels.sum_kernel, grid, (*shape, sums_at), constants)),
        ("x work buf", Launch(kernels.energy_kernel, grid, energy_numbers, constants)),
        ("work", Launch(kernels.level_kernel, level_grid, leveled, {"num_warps": 4, **EXACT})),
    ), sums_at + 2 * num_sums


encode, decode = launch.backend(plan, tables)
