"""`tah` on CUDA in Triton: the launches for every shape.

Streams equal the reference's except which of two allocation tiles gets H bits where their entropies lie
within 1e-5 of each other; decoded values are equal to the bit. Encoding is five kernels (seven, where a sample
has more than 32,768 allocation tiles) and never synchronises. Decoding is two, then waits for the verdict.
Kernels are specialised on the spec, on types, on whether tiles are padded and on the size class of a
sample, never on data.
"""

import math
from functools import lru_cache

import torch

from tahq.quant.gpu import launch
from tahq.quant.gpu.launch import Launch
from tahq.quant.tah import triton_decode as decoding
from tahq.quant.tah import triton_encode as encoding
from tahq.quant.tah import triton_select as selection
from tahq.quant.tah.stream import TahLayout

ENCODED_PER_WARP = 1024
"""Elements of a warp of the kernels that code: two threads have a tile of 64."""
MEASURED_ELEMENTS, MEASURING_WARPS = 4096, 4
"""Of a program of the first kernel."""
MOST_REGISTERS = 80
"""Of a thread that codes up to four bits: it would take a few more, but so more of them run at a time."""
MAX_PROGRAMS = 4 * launch.MAX_PROGRAMS
"""Of the kernels that code: more than a device holds at a time, as blocks with tiles to be coded alone take longer."""


@lru_cache(maxsize=256)
def plan(layout: TahLayout) -> launch.LaunchPlan:
    """The launches for a layout."""
    tiling, spec, group = layout.tiling, layout.spec, layout.tiling.group
    tile_slots, sample_slots = launch.slots(tiling.num_tiles), launch.slots(1 + tiling.num_samples)
    num_measured = min(-(-tiling.num_tiles * group // MEASURED_ELEMENTS), selection.MAX_MEASURED)
    select, num_tallies, num_counts = _select(layout, tile_slots, num_measured)
    counts_at = selection.WORDS_BEFORE_TILES + 4 * tile_slots + 2 * launch.slots(layout.num_allocs) + num_tallies
    starts = tuple(section.start for section in layout.sections.by_name.values())
    shape = (tiling.channels, tiling.tiles_per_token)
    common = {"G": group, "BYTES": launch.bytes_per_word(group), "PADDED": tiling.padding > 0}
    measuring = common | {
        "TILES": MEASURED_ELEMENTS // group,
        "ENTROPY": spec.adaptive == "on",
        "num_warps": MEASURING_WARPS,
        "num_stages": 1,
    }
    # Two magnitudes of at least this share of a tile's largest prove that it has no outlier.
    most_second = (1 + 2.0**-20) / spec.tau if spec.tau >= 1 else 2.0
    measured = (tiling.num_tiles, *shape, most_second, counts_at, num_counts)
    planes = {"WIDTH": tiling.log2_group, "LOW": spec.low, "HIGH": spec.high}
    tiles_per_block = launch.tiles_per_block(group, ENCODED_PER_WARP)
    coding_grid = (min(-(-tiling.num_tiles // tiles_per_block), MAX_PROGRAMS), 1, 1)
    coding = (
        common
        | planes
        | {
            "TILES": tiles_per_block,
            "IS_SINGLE": layout.tiles_per_alloc == 1,
            "num_warps": launch.warps_per_block(group, ENCODED_PER_WARP),
            **launch.EXACT,
        }
    )
    tau = spec.tau if spec.tau <= torch.finfo(torch.float32).max else math.inf
    sizes = (tiling.num_tiles, tile_slots, layout.num_allocs, layout.num_high, layout.tiles_per_alloc)
    registers = {"maxnreg": MOST_REGISTERS} if spec.high <= 4 else {}
    placing_grid = (-(-layout.allocs_per_sample // decoding.ALLOCS_PER_PROGRAM), tiling.num_samples, 1)
    counts = (tiling.num_tiles, layout.num_allocs, layout.num_high, layout.allocs_per_sample, layout.num_low)
    placing = {"G": group, "num_warps": 4, "num_stages": 1} | planes
    read = (sample_slots, tiling.num_samples, tiling.num_tiles, layout.tiles_per_alloc, *shape, *starts[1:])
    return launch.LaunchPlan(
        encode_words=counts_at + num_counts,
        encode=(
            ("x work", Launch(encoding.measure_kernel, (num_measured, 1, 1), measured, measuring)),
            *(("work", kernel) for kernel in select),
            (
                "x work buf",
                Launch(encoding.quantize_kernel, coding_grid, (*sizes, *shape, tau, *starts), coding | registers),
            ),
        ),
        decode_words=sample_slots + layout.num_allocs,
        decode=(
            ("buf work", Launch(decoding.place_kernel, placing_grid, (sample_slots, *counts, *starts), placing)),
            ("buf work x", Launch(decoding.values_kernel, coding_grid, read, coding)),
        ),
    )


def _select(layout: TahLayout, tile_slots: int, num_measured: int) -> tuple[list[Launch], int, int]:
    """The kernels that select; words of borders and tallies, and of histograms, which begin as zeros."""
    n, num_low, num_samples = layout.allocs_per_sample, layout.num_low, layout.tiling.num_samples
    if layout.spec.adaptive == "off":
        share = layout.even_share
        grid = (-(-layout.num_allocs // selection.KEYS_PER_PROGRAM), 1, 1)
        numbers = (tile_slots, num_measured, layout.num_allocs, n, num_low, share.numerator, share.denominator)
        return [Launch(selection.spread_kernel, grid, numbers, {"num_warps": 8, "num_stages": 1})], 0, 0
    is_counted = n > selection.MAX_KEYS_IN_REGISTERS  # too large for one program to find a sample's border
    num_blocks, alloc_slots = -(-n // selection.KEYS_PER_PROGRAM), launch.slots(layout.num_allocs)
    grid, ranked = (num_blocks, num_samples, 1), (tile_slots, alloc_slots, n, num_low)
    keyed = (tile_slots, alloc_slots, num_measured, n, layout.tiles_per_alloc)
    options = {"num_warps": 4, "num_stages": 1}
    rule = {"IS_SINGLE": layout.tiles_per_alloc == 1, "REVERSE": layout.spec.select == "low", "COUNTED": is_counted}
    kernels = [Launch(selection.key_kernel, grid, keyed, rule | options)]
    if is_counted:
        kernels += [Launch(selection.count_kernel, grid, ranked, {"LEVEL": level} | options) for level in (1, 2)]
        kernels.append(Launch(selection.tally_kernel, grid, ranked, options))
    else:
        block = max(selection.KEYS_PER_PROGRAM, 1 << (n - 1).bit_length())
        in_registers = {"BLOCK": block, "num_warps": max(4, block // 2048), "num_stages": 1}
        kernels.append(Launch(selection.bisect_kernel, (num_samples, 1, 1), ranked, in_registers))
    kernels.append(Launch(selection.place_kernel, grid, ranked, options))
    num_counts = selection.NUM_LEVELS * selection.NUM_BINS * num_samples if is_counted else 0
    return kernels, 2 * num_samples * (1 + num_blocks), num_counts


encode, decode = launch.backend(plan)
