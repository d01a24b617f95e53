"""Water-filling of bits on CUDA, in two small kernels: `gaussian.bit_allocation`, to the bit.

The first writes a histogram of the levels of every block of tiles. The second adds them up, so that every program
knows the border θ, how many of the steps on it are granted, and what the blocks before it took; then each tile's width
goes to the stream, and the number of planes before each tile to `work`: `starts`, T + 1 words, from
which the kernels that code take both.

Levels are int32 words in `work`. Those of `eden`, taken before the tensor's exponent was known, are relative: they
lack 8·e − OFFSET.
"""

import triton
import triton.language as tl

from tahq.quant.gaussian.bit_allocation import NUM_LEVELS, STEPS
from tahq.quant.gaussian.small_scale import LARGEST_CODE, OFFSET
from tahq.quant.gpu.tiles import fill_gap, tensor_exponent
from tahq.quant.tiling import TOP_EXPONENT

TILES_PER_PROGRAM = 4096
_BLOCK = tl.constexpr(TILES_PER_PROGRAM)
_BINS = tl.constexpr(NUM_LEVELS)
_ABSENT = tl.constexpr(NUM_LEVELS - 1)
"""The bin of lanes without a tile; no tile's level reaches it."""
_BLOCKS_AT_ONCE = tl.constexpr(16)
_STEPS, _LAST_STEP = tl.constexpr(STEPS), tl.constexpr(STEPS[-1])
_OFFSET, _LARGEST_CODE, _TOP = tl.constexpr(OFFSET), tl.constexpr(LARGEST_CODE), tl.constexpr(TOP_EXPONENT)


@triton.jit
def _own_levels(work, levels_at, num_measured, num_tiles, RELATIVE: tl.constexpr):
    """Tiles of this program, which of its lanes have one, and levels from 0 on; those of the other lanes are absent."""
    tiles = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    is_tile = tiles < num_tiles
    level = tl.load(work + levels_at + tiles, mask=is_tile, other=0)
    if RELATIVE:
        exponent, _ = tensor_exponent(work, num_measured, _TOP)
        level = tl.minimum(tl.maximum(level + 8 * exponent - _OFFSET, 0), _LARGEST_CODE)
    return tiles, is_tile, tl.where(is_tile, level, _ABSENT)


@triton.jit(do_not_specialize=["num_measured", "num_tiles"])
def count_kernel(work, num_measured, num_tiles, levels_at, counts_at, RELATIVE: tl.constexpr):
    """The histogram of this program's tiles, NUM_LEVELS words."""
    _, _, level = _own_levels(work, levels_at, num_measured, num_tiles, RELATIVE)
    bin = tl.arange(0, _BINS)
    counts = tl.where(bin == _ABSENT, 0, tl.histogram(level, _BINS))
    tl.store(work + counts_at + tl.program_id(0) * _BINS + bin, counts)


@triton.jit
def _sum_counts(counts):
    """Histograms of all tiles, and of those of the programs before this one."""
    bin, lane = tl.arange(0, _BINS)[None, :], tl.arange(0, _BLOCKS_AT_ONCE)[:, None]
    total, before = tl.zeros([_BINS], tl.int32), tl.zeros([_BINS], tl.int32)
    for first in range(0, tl.num_programs(0), _BLOCKS_AT_ONCE):
        block = first + lane
        some = tl.load(counts + block * _BINS + bin, mask=block < tl.num_programs(0), other=0)
        total += tl.sum(some, axis=0)
        before += tl.sum(tl.where(block < tl.program_id(0), some, 0), axis=0)
    return total, before


@triton.jit
def _num_granted(distance):
    """How many steps of a tile whose level lies that far above the border are above it."""
    granted = tl.zeros_like(distance)
    for step in tl.static_range(7):
        granted += (distance > _STEPS[step]).to(tl.int32)
    return granted


@triton.jit
def _is_on_border(distance):
    """1 where a step of a tile whose level lies that far above the border is on it, else 0."""
    on_border = tl.zeros_like(distance)
    for step in tl.static_range(7):
        on_border += (distance == _STEPS[step]).to(tl.int32)
    return on_border


@triton.jit
def _num_above(total, rank):
    """How many steps of all tiles have a higher rank."""
    return tl.sum(total * _num_granted(tl.arange(0, _BINS) - rank), axis=0)


@triton.jit
def _find_border(total, num_steps):
    """θ, the highest rank at which the steps from above reach `num_steps`, and how many of that rank are granted."""
    lowest, highest = -_LAST_STEP, _ABSENT
    border = tl.min(total, axis=0) * 0 + lowest  # a tensor, as loops need it
    most = border - lowest + highest
    while border < most:
        middle = most - (most - border) // 2
        is_enough = _num_above(total, middle - 1) >= num_steps
        border = tl.where(is_enough, middle, border)
        most = tl.where(is_enough, most, middle - 1)
    return border, num_steps - _num_above(total, border)


@triton.jit
def _store_widths(buf, width, num_tiles):
    """Widths [_BLOCK] less one, of three bits: three bytes of eight tiles."""
    less_one = tl.reshape(tl.maximum(width - 1, 0), [_BLOCK // 8, 8]) << (3 * tl.arange(0, 8))[None, :]
    eights = tl.sum(less_one, axis=1)
    part = tl.arange(0, 4)[None, :]
    byte = tl.program_id(0) * (_BLOCK // 8 * 3) + tl.arange(0, _BLOCK // 8)[:, None] * 3 + part
    is_real = (part < 3) & (byte < (num_tiles * 3 + 7) // 8)
    tl.store(buf + byte, (eights[:, None] >> (8 * part)).to(tl.uint8), mask=is_real)


@triton.jit(do_not_specialize=["num_measured", "num_tiles", "num_steps"])
def allocate_kernel(
    work, buf, num_measured, num_tiles, num_steps, levels_at, counts_at, starts_at, width_at, RELATIVE: tl.constexpr
):
    """Widths, in the stream, and `starts`; `num_steps` is K − T."""
    tiles, is_tile, level = _own_levels(work, levels_at, num_measured, num_tiles, RELATIVE)
    total, before = _sum_counts(work + counts_at)
    border, num_on_border = _find_border(total, num_steps)
    distance = tl.arange(0, _BINS) - border
    ties_before = tl.sum(before * _is_on_border(distance), axis=0)
    planes_before = tl.sum(before * (1 + _num_granted(distance)), axis=0) + tl.minimum(ties_before, num_on_border)
    distance = level - border
    tie = tl.where(is_tile, _is_on_border(distance), 0)
    is_granted = ties_before + tl.cumsum(tie, axis=0) <= num_on_border
    width = tl.where(is_tile, 1 + _num_granted(distance) + tl.where(is_granted, tie, 0), 0)
    tl.store(work + starts_at + 1 + tiles, planes_before + tl.cumsum(width, axis=0), mask=is_tile)
    _store_widths(buf + width_at, width, num_tiles)
    if tl.program_id(0) == 0:
        tl.store(work + starts_at, 0)
        fill_gap(buf, width_at + (num_tiles * 3 + 7) // 8)


@triton.jit
def load_widths(starts, tiles, is_tile):
    """The plane at which each tile begins, and its width, which is 0 in lanes without a tile."""
    start = tl.load(starts + tiles, mask=is_tile, other=0)
    return start, tl.load(starts + 1 + tiles, mask=is_tile, other=0) - start
