"""Byte layout of TAH streams, version 1: `TahTiles` to bytes and back. docs/dev/wire-format.md has the tables.

Header, bit map, scales, zero-points, pivots, low planes, high planes. The length is a function of the
shape and the spec, never of the data. What a decoder refuses is listed at `unpack`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from tahq.errors import CodecError
from tahq.quant import bit_planes, stream
from tahq.quant.spec import TahSpec
from tahq.quant.stream import FLAGS, LOG2_GROUP, VERSION_1, Description, HeaderByte, Statistics, exponent_byte
from tahq.quant.tiling import Tiling

SIGN = -(2**15)
"""fp16's sign bit as an int16."""


@dataclass(frozen=True, slots=True)
class TahTiles:
    """The content of a TAH stream, tile by tile, [B, S, M] unless noted; coded is x·2^e, e without dimensions.

    `high`, bool [B, n], marks allocation tiles with H bits. `scale`, fp16, is 0 where the tile is constant or not
    finite; `zero_point`, fp16, NaN where it is not finite. `pivot`, uint8, is the channel swapped with channel 0, else
    0.
    """

    exponent: torch.Tensor
    high: torch.Tensor
    scale: torch.Tensor
    transformed: torch.Tensor
    zero_point: torch.Tensor
    pivot: torch.Tensor
    codes: torch.Tensor


@dataclass(frozen=True, slots=True)
class TahLayout(stream.Layout):
    """Everything about a stream that the shape and the spec decide.

    An allocation tile is `tiles_per_alloc` consecutive quantisation tiles of one token; the bit map has one
    bit per allocation tile, all other sections have one entry per quantisation tile.

    Attributes:
        tiles_per_alloc: R = A/G.
        num_low: allocation tiles of each sample with L bits, ⌊(1−p)·n⌋.
    """

    spec: TahSpec
    tiles_per_alloc: int
    num_low: int

    @classmethod
    def of(cls, spec: TahSpec, shape: Sequence[int]) -> "TahLayout":
        """Lay out the stream of a tensor of this shape; CodecError if allocation tiles do not divide its channels."""
        tiling = Tiling.of(shape, spec.group)
        per_alloc = _tiles_per_alloc(spec, tiling)
        allocs_per_sample = tiling.tiles_per_sample // per_alloc
        num_low = math.floor(allocs_per_sample * (1 - spec.int4))
        num_tiles, plane_nbytes = tiling.num_tiles, tiling.group // 8
        num_high = per_alloc * tiling.num_samples * (allocs_per_sample - num_low)
        sizes = {
            "bit map": -(-tiling.num_samples * allocs_per_sample // 8),
            "scale": 2 * num_tiles,
            "zero-point": 2 * num_tiles,
            "pivot": -(-num_tiles * tiling.log2_group // 8),
            "low planes": num_tiles * spec.low * plane_nbytes,
            "high planes": num_high * (spec.high - spec.low) * plane_nbytes,
        }
        header = (("version", 1), ("flags", 0), ("log2 G", tiling.log2_group), ("L", spec.low), ("H", spec.high))
        return cls(spec, tiling, header, stream.Sections.of(sizes), per_alloc, num_low)

    @property
    def allocs_per_sample(self) -> int:
        """n."""
        return self.tiling.tiles_per_sample // self.tiles_per_alloc

    @property
    def num_allocs(self) -> int:
        """B·n, bits of the bit map."""
        return self.tiling.num_samples * self.allocs_per_sample

    @property
    def num_high(self) -> int:
        """Quantisation tiles of the whole tensor with H bits."""
        return self.tiles_per_alloc * self.tiling.num_samples * (self.allocs_per_sample - self.num_low)

    @property
    def even_share(self) -> Fraction:
        """1 − p, or a fraction of a denominator of at most n with the same ⌊i·(1−p)⌋ for every i up to n.

        `adaptive=off` spreads L bits by this share, whose products with n fit 64 bits however p is written.
        """
        return _below(1 - self.spec.int4, max(self.allocs_per_sample, 1))

    @property
    def grid(self) -> tuple[int, int, int]:
        """[B, S, M], the shape of per-tile numbers."""
        return self.tiling.num_samples, self.tiling.tokens_per_sample, self.tiling.tiles_per_token


def _tiles_per_alloc(spec: TahSpec, tiling: Tiling) -> int:
    if spec.alloc == "group":
        return 1
    if spec.alloc == "token":
        return max(tiling.tiles_per_token, 1)
    alloc, padded = int(spec.alloc), tiling.tiles_per_token * tiling.group
    if alloc % tiling.group or padded % alloc:
        raise CodecError(
            f"{spec}: alloc={alloc} does not fit {tiling.channels} channels, which are cut into tiles of "
            f"{tiling.group} and filled up to {padded}: it must be a multiple of {tiling.group} that divides "
            f"{padded}, or `group` or `token`"
        )
    return alloc // tiling.group


def _below(share: Fraction, largest_denominator: int) -> Fraction:
    """The largest fraction not above `share` whose denominator is at most this.

    An integer k in (i·below, i·share] with i ≤ largest_denominator would make k/i a larger one, so that
    ⌊i·below⌋ = ⌊i·share⌋ for all these i. Where the nearest fraction p/q lies above, the result is its
    lower neighbour p'/q' in the Farey sequence: p·q' − p'·q = 1, q' as large as allowed.
    """
    nearest = share.limit_denominator(largest_denominator)
    if nearest <= share:
        return nearest
    p, q = nearest.numerator, nearest.denominator
    q_below = largest_denominator - (largest_denominator - pow(p, -1, q)) % q
    return Fraction((p * q_below - 1) // q, q_below)


def tile_by_tile(of_allocs: torch.Tensor, tiles_per_alloc: int) -> torch.Tensor:
    """Repeat numbers of allocation tiles [B, n] for each of their tiles: [B, n·R]."""
    return of_allocs.unsqueeze(-1).expand(-1, -1, tiles_per_alloc).flatten(1)


def pack(layout: TahLayout, tiles: TahTiles) -> torch.Tensor:
    """The stream of `tiles`: uint8 [nbytes], on their device, without synchronising it."""
    spec, group = layout.spec, layout.tiling.group
    is_flagged = tiles.zero_point.isnan().any().to(torch.int32)
    buf = layout.new_stream(is_flagged, tiles.exponent, tiles.codes.device)
    high = tile_by_tile(tiles.high, layout.tiles_per_alloc).flatten()
    scale = tiles.scale.flatten().view(torch.int16)
    signed = torch.where(tiles.transformed.flatten(), scale | SIGN, scale)
    planes = bit_planes.to_planes(tiles.codes.view(-1, group))
    contents = {
        "bit map": bit_planes.pack_numbers(tiles.high.flatten().to(torch.uint8), 1),
        "scale": signed.view(torch.uint8),
        "zero-point": stream.fp16_bytes(tiles.zero_point.flatten()),
        "pivot": bit_planes.pack_numbers(tiles.pivot.flatten(), layout.tiling.log2_group),
    }
    for name, content in contents.items():
        layout.sections.view(buf, name).copy_(content)
    low_planes, high_planes = _plane_views(layout, buf)
    low_planes.copy_(planes[:, : spec.low])
    high_planes.copy_(planes[_marked(high, layout.num_high), spec.low : spec.high])
    return buf


def unpack(layout: TahLayout, buf: torch.Tensor) -> TahTiles:
    """The content of an accepted buffer (`stream.accept`); CodecError for anything that no encoder writes."""
    is_flagged, exponent = layout.read_header(buf)
    num_tiles, group = layout.tiling.num_tiles, layout.tiling.group
    bit_map, left_of_map = bit_planes.unpack_numbers(layout.sections.view(buf, "bit map"), layout.num_allocs, 1)
    high = bit_map.bool().view(layout.tiling.num_samples, layout.allocs_per_sample)
    pivot, left_of_pivots = bit_planes.unpack_numbers(
        layout.sections.view(buf, "pivot"), num_tiles, layout.tiling.log2_group
    )
    scale = layout.sections.view(buf, "scale").view(torch.int16)
    zero_point = layout.sections.view(buf, "zero-point").view(torch.float16)
    expected, marked = layout.allocs_per_sample - layout.num_low, zero_point.isnan()
    problems = {
        "padding after a section is not zero": layout.sections.has_dirty_filling(buf),
        "bits behind the bit map or the pivots are not zero": torch.cat((left_of_map, left_of_pivots)).any(),
        f"the bit map must give H bits to {expected} tiles of every sample": (high.sum(dim=1) != expected).any(),
        "a scale is not finite": ~scale.view(torch.float16).isfinite().all(),
        "a zero-point is infinite": zero_point.isinf().any(),
        "a zero-point is NaN where the scale is not +0": (marked & (scale != 0)).any(),
        "the flag for non-finite values does not agree with the zero-points": marked.any() != is_flagged,
    }
    stream.refuse(problems, layout.spec)
    low_planes, high_planes = _plane_views(layout, buf)
    planes = bit_planes.empty_planes(num_tiles, group, buf.device)
    planes[:, : layout.spec.low] = low_planes
    rows = _marked(tile_by_tile(high, layout.tiles_per_alloc).flatten(), layout.num_high)
    planes[rows, layout.spec.low : layout.spec.high] = high_planes
    return TahTiles(
        exponent=torch.full((), exponent, dtype=torch.int32, device=buf.device),
        high=high,
        scale=(scale & ~SIGN).view(torch.float16).view(layout.grid),
        transformed=(scale < 0).view(layout.grid),
        zero_point=zero_point.view(layout.grid),
        pivot=pivot.view(layout.grid),
        codes=bit_planes.from_planes(planes).view(*layout.grid, group),
    )


def _plane_views(layout: TahLayout, buf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    spec, plane_nbytes = layout.spec, layout.tiling.group // 8
    low = layout.sections.view(buf, "low planes").view(layout.tiling.num_tiles, spec.low, plane_nbytes)
    high = layout.sections.view(buf, "high planes").view(layout.num_high, spec.high - spec.low, plane_nbytes)
    return low, high


def _marked(flags: torch.Tensor, count: int) -> torch.Tensor:
    """Ascending indices of the `count` tiles that are flagged; the count being known, nothing synchronises."""
    return (flags == 0).to(torch.uint8).argsort(stable=True)[:count]


def _statistics(spec: TahSpec, shape: Sequence[int], buf: torch.Tensor) -> Statistics:
    tiles = unpack(TahLayout.of(spec, shape), buf)
    finite = ~tiles.zero_point.isnan()
    return {
        "tiles": tiles.scale.numel(),
        "allocation tiles": tiles.high.numel(),
        "share of allocation tiles with H bits": _share(tiles.high),
        "share of tiles transformed": _share(tiles.transformed),
        "tiles that are not finite": int((~finite).sum()),
        "tiles of one value": int(((tiles.scale == 0) & finite).sum()),
        **stream.step_statistics(torch.ldexp(tiles.scale.double(), -tiles.exponent)),
    }


def _share(flags: torch.Tensor) -> float:
    return float(flags.double().mean()) if flags.numel() else 0.0


TAH = Description(
    summary="TAH-Quant: bits by entropy, Hadamard for tiles with an outlier",
    header=(
        VERSION_1,
        FLAGS,
        LOG2_GROUP,
        HeaderByte("L", 2, 8, "bits of a code in a low-bit tile"),
        HeaderByte("H", 2, 8, "bits of a code in a high-bit tile"),
        exponent_byte(TahLayout.min_exponent),
    ),
    contents={
        "bit map": "one bit per allocation tile, 1 = H bits",
        "scale": "fp16 per tile; sign bit = transformed",
        "zero-point": "fp16 per tile, its minimum; NaN = not finite",
        "pivot": "log2 G bits per tile",
        "low planes": "bits 0 to L−1 of the codes, tile by tile",
        "high planes": "bits L to H−1, of the tiles with H bits",
    },
    sections=lambda spec, shape, buf: TahLayout.of(spec, shape).sections,
    statistics=_statistics,
)
