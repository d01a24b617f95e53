"""The first kernel of a decoder of `eden` and `wf` on CUDA: where tiles begin, and what it refuses.

It sums the widths, which nothing says beforehand, into `starts` as `gaussian.triton_allocation` has
them, and looks at what is outside of the tiles. Whatever a buffer holds, `starts` ascend and end at K planes at most,
so no byte outside the buffer is ever read. Each of its programs counts for itself what the ones before it have: three
bits per tile are few.

`work` of a decoder: the verdict, a word that is not 0 where the widths do not sum to K, and from SLOTS on `starts`.
"""

import triton
import triton.language as tl

from tahq.quant.gaussian.small_scale import NOT_FINITE
from tahq.quant.gaussian.tile_stream import TileLayout
from tahq.quant.gpu.tiles import DAMAGED, MARKED, any_of, as_halves, header_verdict, is_gap_dirty, is_left_over

TILES_COUNTED = 4096
"""Per program."""
SLOTS = 16
"""Words before `starts`."""
_EIGHTS = tl.constexpr(TILES_COUNTED // 8)
_EIGHTS_AT_ONCE = tl.constexpr(4096)
_CHANNELS_AT_ONCE = tl.constexpr(2048)
_SLOTS, _MIN_EXPONENT = tl.constexpr(SLOTS), tl.constexpr(TileLayout.min_exponent)
_DAMAGED, _MARKED, _NOT_FINITE = tl.constexpr(DAMAGED), tl.constexpr(MARKED), tl.constexpr(NOT_FINITE)


@triton.jit
def _load_eights(widths, eight, num_tiles):
    """Words int32 of 24 bits: the bits less one of eight tiles, three bits each."""
    byte, stop = 3 * eight, (num_tiles * 3 + 7) // 8
    word = tl.load(widths + byte, mask=byte < stop, other=0).to(tl.int32)
    word |= tl.load(widths + byte + 1, mask=byte + 1 < stop, other=0).to(tl.int32) << 8
    return word | (tl.load(widths + byte + 2, mask=byte + 2 < stop, other=0).to(tl.int32) << 16)


@triton.jit
def _sum_before(widths, first_eight, num_tiles):
    """Sum of the widths of all tiles before those of `first_eight`."""
    total = tl.zeros([_EIGHTS_AT_ONCE], tl.int32)
    for first in range(0, first_eight, _EIGHTS_AT_ONCE):
        eight = first + tl.arange(0, _EIGHTS_AT_ONCE)
        word = tl.where(eight < first_eight, _load_eights(widths, eight, num_tiles), 0)
        fours = (word & 0x1C71C7) + ((word >> 3) & 0x1C71C7)  # four sums of six bits
        twos = (fours & 0x03F03F) + ((fours >> 6) & 0x03F03F)
        total += (twos & 0xFFF) + (twos >> 12)
    return tl.sum(total, axis=0) + 8 * first_eight


@triton.jit
def _are_means_wrong(means, channels):
    """Whether one of the means (fp16 bits) is infinite or NaN."""
    is_wrong = tl.zeros([_CHANNELS_AT_ONCE], tl.int32)
    for first in range(0, channels, _CHANNELS_AT_ONCE):
        channel = first + tl.arange(0, _CHANNELS_AT_ONCE)
        mean = tl.load(means + channel, mask=channel < channels, other=0).to(tl.int32)
        is_wrong |= ((mean & 0x7C00) == 0x7C00).to(tl.int32)
    return any_of(is_wrong)


@triton.jit(do_not_specialize=["num_tiles", "num_planes", "channels"])
def starts_kernel(
    buf,
    work,
    num_tiles,
    num_planes,
    channels,
    scale_at,
    width_at,
    mean_at,
    codes_at,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    CENTER: tl.constexpr,
    PLACE: tl.constexpr,
):
    """The plane at which each tile begins, at most K, and the verdict on all except widths, scales and codes.

    WIDTH is log2 G, PLACE that of e in the header.
    """
    first_eight = tl.program_id(0) * _EIGHTS
    eight = first_eight + tl.arange(0, _EIGHTS)
    tiles = eight[:, None] * 8 + tl.arange(0, 8)[None, :]
    less_one = (_load_eights(buf + width_at, eight, num_tiles)[:, None] >> (3 * tl.arange(0, 8))[None, :]) & 7
    width = tl.reshape(tl.where(tiles < num_tiles, less_one + 1, 0), [_EIGHTS * 8])
    stop = _sum_before(buf + width_at, first_eight, num_tiles) + tl.cumsum(width, axis=0)
    tile = first_eight * 8 + tl.arange(0, _EIGHTS * 8)
    tl.store(work + _SLOTS + 1 + tile, tl.minimum(stop, num_planes), mask=tile < num_tiles)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(work + 1, (tl.max(stop, axis=0) != num_planes).to(tl.int32))
    if tl.program_id(0) == 0:
        tl.store(work + _SLOTS, 0)
        is_wrong = is_left_over(buf, width_at, num_tiles * 3)
        is_wrong |= is_gap_dirty(buf, scale_at + num_tiles)
        is_wrong |= is_gap_dirty(buf, width_at + (num_tiles * 3 + 7) // 8)
        is_wrong |= is_gap_dirty(buf, codes_at + num_planes.to(tl.int64) * (G // 8))
        if CENTER:
            is_wrong |= is_gap_dirty(buf, mean_at + 2 * channels)
            is_wrong |= _are_means_wrong(as_halves(buf + mean_at), channels)
        header = header_verdict(buf, WIDTH, CENTER, 0, PLACE, _MIN_EXPONENT)
        tl.store(work, header | tl.where(is_wrong, _DAMAGED, 0))


@triton.jit
def tile_verdict(work, scale, is_tile):
    """The verdict [TILES] on scales, int32, and on the widths' sum."""
    marked = tl.where(is_tile & (scale == _NOT_FINITE), _MARKED, 0)
    return marked | tl.where(tl.load(work + 1) != 0, _DAMAGED, 0)
