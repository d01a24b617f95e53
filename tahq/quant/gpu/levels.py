"""Gaussian-optimal codes on CUDA, and planes of as many bits as a tile has: `gaussian.levels`, to the bit.

A value's index is found by comparing it with one threshold after the other, three instructions each, as many as the
widest tile of the block has. Binary search would pay only from seven bits on.

Shape letters: T tiles of a block, G values per tile.
"""

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl

from tahq.quant.gaussian.levels import MAX_BITS, MAX_MAGNITUDES, level_table, magnitude_table, threshold_table
from tahq.quant.gaussian.small_scale import DROPPED_BITS, LARGEST_CODE, NOT_FINITE, OFFSET
from tahq.quant.gpu.tiles import pack_bits, place_planes, plane_bytes, plane_words, unpack_bits

_OFFSET, _DROPPED = tl.constexpr(OFFSET), tl.constexpr(DROPPED_BITS)
_HALF = tl.constexpr(1 << (DROPPED_BITS - 1))
_LARGEST_CODE, _NOT_FINITE = tl.constexpr(LARGEST_CODE), tl.constexpr(NOT_FINITE)


@triton.jit
def code_of_bits(bits):
    """Codes of scales, int32, from bits of fp32 values after the addition that rounds them."""
    return tl.minimum(tl.maximum((bits >> _DROPPED) - _OFFSET, 0), _LARGEST_CODE)


@triton.jit
def nearest_code(value):
    """Codes, int32, of the scales nearest to fp32 values, ties to the larger."""
    return code_of_bits(value.to(tl.int32, bitcast=True) + _HALF)


@triton.jit
def scale_value(code):
    """fp32 scales of codes int32: 0 of code 0, NaN of 255."""
    value = ((code + _OFFSET) << _DROPPED).to(tl.float32, bitcast=True)
    return tl.where(code == _NOT_FINITE, float("nan"), tl.where(code == 0, 0.0, value))


_ROW = tl.constexpr(MAX_MAGNITUDES)
_MAGNITUDES_AT = tl.constexpr((MAX_BITS + 1) * MAX_MAGNITUDES)
_LEVELS_AT = tl.constexpr(2 * (MAX_BITS + 1) * MAX_MAGNITUDES)


@cache
def tables(device: torch.device) -> torch.Tensor:
    """By bits, 0 to 8: rows of 128 thresholds, of 128 magnitudes, of 256 levels; fp32 in one tensor.

    Copied to a device once, as a copy from host memory synchronises. Rows of thresholds are filled up with infinities:
    times a step of 0 these are NaN, which no value exceeds either.
    """
    finite = threshold_table()
    thresholds = np.where(finite == np.finfo(np.float32).max, np.float32(np.inf), finite)
    padded = np.pad(thresholds, ((0, 0), (0, 1)), constant_values=np.inf)
    parts = (padded, magnitude_table(), level_table())
    return torch.from_numpy(np.concatenate([part.ravel() for part in parts])).to(device)


@triton.jit
def quantize(magnitude, step, width, table):
    """Indices int32 [T, G] and their level magnitudes, fp32, of values |z| in tiles of these steps and widths [T]."""
    row = table + width * _ROW
    index = tl.zeros(magnitude.shape, tl.int32)
    level = tl.broadcast_to(tl.load(row + _MAGNITUDES_AT)[:, None], magnitude.shape)
    for passed in range(1, 1 << tl.maximum(tl.max(width, axis=0) - 1, 0)):
        is_above = magnitude > (tl.load(row + passed - 1) * step)[:, None]
        index = tl.where(is_above, passed, index)
        level = tl.where(is_above, tl.load(row + _MAGNITUDES_AT + passed)[:, None], level)
    return index, level


@triton.jit
def signed_codes(z, index, width):
    """Codes int32 [T, G] of values z with magnitudes of these indices."""
    half = (1 << tl.maximum(width - 1, 0))[:, None]
    return tl.where(z >= 0, half + index, half - 1 - index)


@triton.jit
def store_codes(codes_buf, codes, start, width, TILES: tl.constexpr, G: tl.constexpr):
    """Planes of codes [T, G]: of each tile as many as its width, from plane `start` of the tensor on."""
    first = start.to(tl.int64)[None, :, None] * (G // 8)
    plane, _, within = place_planes(0, 4, TILES, G)
    words = pack_bits(codes, 0, False, TILES, G)
    tl.store(codes_buf + (first + within), plane_bytes(words, words, 4), mask=plane < width[None, :, None])
    if tl.max(width, axis=0) > 4:
        plane, _, within = place_planes(-4, 4, TILES, G)
        words = pack_bits(codes, 4, False, TILES, G)
        tl.store(codes_buf + (first + within), plane_bytes(words, words, 4), mask=plane + 4 < width[None, :, None])


@triton.jit
def load_levels(codes_buf, start, width, table, TILES: tl.constexpr, G: tl.constexpr):
    """Levels fp32 [8, G/8, T] of the codes that `store_codes` stored; of tiles of no width, zeros."""
    first = start.to(tl.int64)[None, :, None] * (G // 8)
    plane, _, within = place_planes(0, 4, TILES, G)
    planes = tl.load(codes_buf + (first + within), mask=plane < width[None, :, None], other=0)
    codes = unpack_bits(plane_words(planes, 0, 4))
    if tl.max(width, axis=0) > 4:
        plane, _, within = place_planes(-4, 4, TILES, G)
        planes = tl.load(codes_buf + (first + within), mask=plane + 4 < width[None, :, None], other=0)
        codes |= unpack_bits(plane_words(planes, 0, 4)) << 4
    return tl.load(table + _LEVELS_AT + (width * (2 * _ROW))[None, None, :] + codes)
