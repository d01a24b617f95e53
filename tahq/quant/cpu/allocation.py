"""Widths of tiles by marginal return, as `gaussian.bit_allocation` has them, and on the wire: 3 bits a tile.

A histogram of levels says how many steps have each rank; one walk down the ranks finds the border. All integers, one
thread: three readings of one number a tile.
"""

import numpy as np
from numpy.typing import NDArray

from tahq.quant.cpu.kernel import kernel
from tahq.quant.cpu.planes import ByteArray, read_number, write_number
from tahq.quant.cpu.tiles import Int32Array
from tahq.quant.gaussian.bit_allocation import NUM_LEVELS, STEPS

Int64Array = NDArray[np.int64]

WIDTH_BITS = 3
"""Of a tile's width on the wire, less 1."""


def allocate(levels: Int32Array, budget: int, packed: ByteArray) -> Int64Array:
    """Widths by `bit_allocation.allocate`, written to the wire; where each tile's planes start, and the last ends.

    Args:
        levels: int32 [T], from 0 to 511.
        budget: K, from T to 8·T.
        packed: uint8 [⌈3·T/8⌉], zeros; written.

    Returns:
        int64 [T + 1], in planes.
    """
    starts = np.empty(levels.size + 1, np.int64)
    _write_widths(levels, budget - levels.size, np.zeros(NUM_LEVELS, np.int64), packed, starts)
    return starts


def read_starts(packed: ByteArray, num_tiles: int) -> Int64Array:
    """Where each tile's planes start, and the last ends: int64 [T + 1]; whatever the bytes, widths are 1 to 8."""
    starts = np.empty(num_tiles + 1, np.int64)
    _read_widths(packed, starts)
    return starts


@kernel
def _write_widths(
    levels: Int32Array, num_steps: int, counts: Int64Array, packed: ByteArray, starts: Int64Array
) -> None:
    border, num_on_border = _border(levels, num_steps, counts)
    starts[0] = 0
    for tile in range(levels.size):
        above = int(levels[tile]) - border
        width = 1
        for step in STEPS:
            is_granted = above > step or (above == step and num_on_border > 0)
            width += is_granted
            num_on_border -= is_granted and above == step
        write_number(width - 1, tile, WIDTH_BITS, packed)
        starts[tile + 1] = starts[tile] + width


@kernel
def _border(levels: Int32Array, num_steps: int, counts: Int64Array) -> tuple[int, int]:
    """θ, the rank at which the steps from above reach `num_steps`, and how many of that rank are granted."""
    for tile in range(levels.size):
        counts[levels[tile]] += 1
    rank, left = NUM_LEVELS - 1, num_steps
    while rank > -STEPS[-1]:
        num_of_rank = _steps_of_rank(counts, rank)
        if num_of_rank >= left:
            break
        left -= num_of_rank
        rank -= 1
    return rank, left


@kernel
def _steps_of_rank(counts: Int64Array, rank: int) -> int:
    total = 0
    for step in STEPS:
        level = rank + step
        if 0 <= level < counts.size:
            total += counts[level]
    return total


@kernel
def _read_widths(packed: ByteArray, starts: Int64Array) -> None:
    starts[0] = 0
    for tile in range(starts.size - 1):
        starts[tile + 1] = starts[tile] + read_number(tile, WIDTH_BITS, packed) + 1
