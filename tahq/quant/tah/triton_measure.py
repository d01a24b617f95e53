"""`tah` on CUDA, an encoder's first kernel: entropy, ‖α‖₁, minimum and maximum of every tile, and whether it is plain.

It reads the tensor before its exponent is known, so that entropies are of tiles in units of their own power of two. It
is bound by memory, so that whatever the last kernel can be told of a tile costs less here. `tah.triton_select` follows.
"""

import triton
import triton.language as tl

from tahq.quant.gpu.tiles import (
    INFINITY,
    log2,
    power_of_two,
    store_measured,
)
from tahq.quant.gpu.words import locate_words, over_block, range_of, sum_of
from tahq.quant.tah.triton_select import NOT_FINITE, locate_measured

_LN_2 = tl.constexpr(0.6931471805599453)
_LARGE = tl.constexpr(127 + 64)
_TINY = tl.constexpr(1e-37)


@triton.jit
def _entropy(magnitude, exponent):
    """Entropy [TILES] of tiles, in nats, and ‖α‖₁, negative where it stands for 2^64 times its magnitude.

    Of magnitudes in units of 2^(exponent − 127), the largest of a tile being from 1 to 2, so that no logarithm that
    counts is far from 0. With m = Σ|α|, entropy is log m − Σ|α| log|α| / m. ϵ is left to the selection.
    """
    mass = sum_of(magnitude)
    spread = sum_of(magnitude * log2(magnitude + _TINY))
    known = tl.maximum(mass, _TINY)
    entropy = _LN_2 * (log2(known) - spread / known)
    is_large = exponent >= _LARGE
    mass *= power_of_two(tl.minimum(tl.where(is_large, exponent - _LARGE, exponent - 127), 127))
    return tl.maximum(entropy, 0.0), tl.where(is_large, -mass, mass)


@triton.jit
def _negated(entropy):
    """Zero, too, which 0 − x does not do."""
    return (entropy.to(tl.int32, bitcast=True) | -0x80000000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_tiles", "channels", "tiles_per_token", "most_second", "num_counts"])
def measure_kernel(
    x,
    work,
    num_tiles,
    channels,
    tiles_per_token,
    most_second,
    counts_at,
    num_counts,
    G: tl.constexpr,
    BYTES: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Four numbers a tile, see `triton_select.locate_measured`; largest magnitude of every program; no counts yet.

    A tile has no outlier if two of its magnitudes are at least `most_second` of the largest: a little more than 1/τ,
    and 2 where τ < 1, so that every tile is looked at. The sign of its entropy says that it may have one.
    """
    largest_seen = tl.zeros([TILES], tl.int32)
    largest_finite = tl.zeros([TILES], tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(num_tiles, TILES), tl.num_programs(0)):
        tiles = block * TILES + tl.arange(0, TILES)
        is_tile = tiles < num_tiles
        pointers, is_real = locate_words(x, block, num_tiles, channels, tiles_per_token, TILES, G, BYTES, PADDED)
        rows = tl.load(pointers, mask=is_real, other=0.0)
        values = tl.reshape(rows.to(tl.float32), [BYTES, TILES, G // 8 // BYTES, 8])
        lowest, highest, largest = range_of(values)
        is_finite = largest < INFINITY
        largest_seen = tl.maximum(largest_seen, largest)
        largest_finite = tl.maximum(largest_finite, tl.where(is_finite, largest, 0))
        exponent = largest >> 23
        unit = power_of_two(tl.maximum(127 - exponent, -127))
        magnitude = tl.abs(values) * over_block(unit)
        border = largest.to(tl.float32, bitcast=True) * unit * most_second
        below = (magnitude - over_block(border)).to(tl.int32, bitcast=True)
        is_plain = sum_of((below >> 31) & 1) <= G - 2
        entropy, mass = tl.zeros([TILES], tl.float32), tl.zeros([TILES], tl.float32)
        if ENTROPY:
            entropy, mass = _entropy(magnitude, exponent)
            mass = tl.where(is_finite, mass, 0.0)
        entropy = tl.where(is_finite, tl.where(is_plain, entropy, _negated(entropy)), NOT_FINITE)
        measured = tl.reshape(tl.join(tl.join(entropy, lowest), tl.join(mass, highest)), [TILES, 4])
        tl.store(locate_measured(work, tiles), measured, mask=is_tile[:, None])
    store_measured(work, largest_seen, largest_finite)
    for start in range(tl.program_id(0) * 1024, num_counts, tl.num_programs(0) * 1024):
        count = start + tl.arange(0, 1024)
        tl.store(work + counts_at + count, tl.zeros([1024], tl.int32), mask=count < num_counts)
