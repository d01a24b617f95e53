"""`tah` on CUDA in Triton: a launch plan for every shape, and the kernels one after the other.

Streams equal the reference's but for which of two allocation tiles gets H bits where their entropies lie
within 1e-5 of each other; decoded values are equal to the bit. Encoding is five kernels (seven, where a sample
has more than 32,768 allocation tiles) and never synchronises. Decoding is two, then waits for the verdict.
Kernels are specialised on the spec, on types, on whether tiles are filled up and on the size class of a
sample, never on data.
"""

import math
from functools import lru_cache
from typing import Any

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
    tiling = layout.tiling
    tile_slots, alloc_slots = launch.slots(tiling.num_tiles), launch.slots(layout.num_allocs)
    num_tallies, num_counts = _selection_words(layout)
    counts_at = selection.WORDS_BEFORE_TILES + 4 * tile_slots + 2 * alloc_slots + num_tallies
    return launch.LaunchPlan(
        encode_words=counts_at + num_counts,
        encode=(
            ("x work", _measure(layout, counts_at, num_counts)),
            *(("work", kernel) for kernel in _select(layout, tile_slots, alloc_slots)),
            ("x work buf", _quantize(layout, tile_slots)),
        ),
        decode_words=launch.slots(1 + tiling.num_samples) + layout.num_allocs,
        decode=(("buf work", _place(layout)), ("buf work x", _values(layout))),
    )


def _is_counted(layout: TahLayout) -> bool:
    """Whether samples are too large for one program each to find the border."""
    return layout.spec.adaptive == "on" and layout.allocs_per_sample > selection.MAX_KEYS_IN_REGISTERS


def _num_key_blocks(layout: TahLayout) -> int:
    """Of a sample."""
    return -(-layout.allocs_per_sample // selection.KEYS_PER_PROGRAM)


def _selection_words(layout: TahLayout) -> tuple[int, int]:
    """Words of borders and tallies, and of histograms, which begin as zeros."""
    if layout.spec.adaptive == "off":
        return 0, 0
    num_samples = layout.tiling.num_samples
    counts = selection.NUM_LEVELS * selection.NUM_BINS * num_samples if _is_counted(layout) else 0
    return 2 * num_samples * (1 + _num_key_blocks(layout)), counts


def _measure(layout: TahLayout, counts_at: int, num_counts: int) -> Launch:
    tiling = layout.tiling
    constants = {
        "G": tiling.group,
        "BYTES": launch.bytes_per_word(tiling.group),
        "TILES": MEASURED_ELEMENTS // tiling.group,
        "PADDED": tiling.padding > 0,
        "ENTROPY": layout.spec.adaptive == "on",
        "num_warps": MEASURING_WARPS,
        "num_stages": 1,
    }
    shape = (tiling.num_tiles, tiling.channels, tiling.tiles_per_token)
    tau = layout.spec.tau
    most_second = (1 + 2.0**-20) / tau if tau >= 1 else 2.0
    numbers = (*shape, most_second, counts_at, num_counts)
    return Launch(encoding.measure_kernel, (_num_measured(layout), 1, 1), numbers, constants)


def _num_measured(layout: TahLayout) -> int:
    tiling = layout.tiling
    return min(-(-tiling.num_tiles * tiling.group // MEASURED_ELEMENTS), selection.MAX_MEASURED)


def _select(layout: TahLayout, tile_slots: int, alloc_slots: int) -> tuple[Launch, ...]:
    if layout.spec.adaptive == "off":
        return (_spread(layout, tile_slots),)
    n, num_low, num_samples = layout.allocs_per_sample, layout.num_low, layout.tiling.num_samples
    keyed = (tile_slots, alloc_slots, _num_measured(layout), n, layout.tiles_per_alloc)
    is_counted = _is_counted(layout)
    constants = {
        "IS_SINGLE": layout.tiles_per_alloc == 1,
        "REVERSE": layout.spec.select == "low",
        "COUNTED": is_counted,
    }
    grid, ranked = (_num_key_blocks(layout), num_samples, 1), (tile_slots, alloc_slots, n, num_low)
    options = {"num_warps": 4, "num_stages": 1}
    keys = Launch(selection.key_kernel, grid, keyed, constants | options)
    place = Launch(selection.place_kernel, grid, ranked, options)
    if is_counted:
        counts = [Launch(selection.count_kernel, grid, ranked, {"LEVEL": level} | options) for level in (1, 2)]
        return keys, *counts, Launch(selection.tally_kernel, grid, ranked, options), place
    block = max(selection.KEYS_PER_PROGRAM, 1 << (n - 1).bit_length())
    in_registers = {"BLOCK": block, "num_warps": max(4, block // 2048), "num_stages": 1}
    return keys, Launch(selection.bisect_kernel, (num_samples, 1, 1), ranked, in_registers), place


def _spread(layout: TahLayout, tile_slots: int) -> Launch:
    share = layout.even_share
    sample = (layout.allocs_per_sample, layout.num_low)
    grid = (-(-layout.num_allocs // selection.KEYS_PER_PROGRAM), 1, 1)
    numbers = (tile_slots, _num_measured(layout), layout.num_allocs, *sample, share.numerator, share.denominator)
    return Launch(selection.spread_kernel, grid, numbers, {"num_warps": 8, "num_stages": 1})


def _section_starts(layout: TahLayout) -> tuple[int, ...]:
    return tuple(section.start for section in layout.sections.by_name.values())


def _coding_constants(layout: TahLayout, elements_per_warp: int) -> dict[str, Any]:
    group = layout.tiling.group
    return {
        "G": group,
        "WIDTH": layout.tiling.log2_group,
        "TILES": launch.tiles_per_block(group, elements_per_warp),
        "LOW": layout.spec.low,
        "HIGH": layout.spec.high,
        "IS_SINGLE": layout.tiles_per_alloc == 1,
        "PADDED": layout.tiling.padding > 0,
        "num_warps": launch.warps_per_block(group, elements_per_warp),
        **launch.EXACT,
    }


def _quantize(layout: TahLayout, tile_slots: int) -> Launch:
    tiling, tau = layout.tiling, layout.spec.tau
    group = tiling.group
    num_blocks = -(-tiling.num_tiles // launch.tiles_per_block(group, ENCODED_PER_WARP))
    numbers = (
        *(tiling.num_tiles, tile_slots, layout.num_allocs, layout.num_high),
        *(layout.tiles_per_alloc, tiling.channels, tiling.tiles_per_token),
        tau if tau <= torch.finfo(torch.float32).max else math.inf,
        *_section_starts(layout),
    )
    constants = _coding_constants(layout, ENCODED_PER_WARP) | {"BYTES": launch.bytes_per_word(group)}
    if layout.spec.high <= 4:
        constants["maxnreg"] = MOST_REGISTERS
    grid = (min(num_blocks, MAX_PROGRAMS), 1, 1)
    return Launch(encoding.quantize_kernel, grid, numbers, constants)


def _place(layout: TahLayout) -> Launch:
    tiling, spec = layout.tiling, layout.spec
    grid = (-(-layout.allocs_per_sample // decoding.ALLOCS_PER_PROGRAM), tiling.num_samples, 1)
    numbers = (
        *(launch.slots(1 + tiling.num_samples), tiling.num_tiles, layout.num_allocs, layout.num_high),
        *(layout.allocs_per_sample, layout.num_low),
        *_section_starts(layout),
    )
    constants = {"G": tiling.group, "WIDTH": tiling.log2_group, "LOW": spec.low, "HIGH": spec.high}
    return Launch(decoding.place_kernel, grid, numbers, constants | {"num_warps": 4, "num_stages": 1})


def _values(layout: TahLayout) -> Launch:
    tiling = layout.tiling
    numbers = (
        *(launch.slots(1 + tiling.num_samples), tiling.num_samples, tiling.num_tiles),
        *(layout.tiles_per_alloc, tiling.channels, tiling.tiles_per_token),
        *_section_starts(layout)[1:],
    )
    constants = _coding_constants(layout, ENCODED_PER_WARP) | {"BYTES": launch.bytes_per_word(tiling.group)}
    num_blocks = -(-tiling.num_tiles // launch.tiles_per_block(tiling.group, ENCODED_PER_WARP))
    return Launch(decoding.values_kernel, (min(num_blocks, MAX_PROGRAMS), 1, 1), numbers, constants)


encode, decode = launch.backend(plan)
