"""TAH-Quant's arithmetic, transcribed from the paper in plain torch; every other backend answers to it.

Shape letters: B samples, S tokens, M tiles per token, G channels per tile (a power of two), R tiles per
allocation tile, n allocation tiles per sample. Everything is fp32 and runs on the tensor's device. Encoding
never synchronises the device: no shape depends on data, except on the CPU, where only the tiles with an
outlier are transformed.

Equal to the bit on every device, as all of it is single IEEE operations in a fixed order: exponent,
outlier test, transform, scale, zero-point, codes, decoded values. Entropies are sums of logarithms and
may differ in the last digits; where two lie that close at the border, the selection may differ too.

Deviations from the paper: Eq. 2 is given its minus sign; a power of two takes the tensor into the range
of fp16 metadata (Eq. 24 does so for gradients only); a constant tile has scale 0, where the quantiser
would divide 0 by 0; a tile with NaN or infinity is marked as a whole.
"""

from fractions import Fraction

import torch

from tahq.quant.tah.stream import TahLayout, TahTiles, pack, tile_by_tile, unpack
from tahq.quant.tiling import TOP_EXPONENT, hadamard, largest_magnitude, power_of_two, top_exponent

EPSILON = 1e-12
"""ς, ϵ and ϱ of Eqs. 1 to 3."""


def encode(layout: TahLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """A stream of version 1, on any device, without synchronising it."""
    return pack(layout, encode_tiles(layout, layout.tiling.split(x)))


def decode(layout: TahLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """The tensor of an accepted stream: (q·s + z), transformed back where flagged, times 2^−e.

    Raises CodecError for anything that no encoder writes, see `unpack`.

    q·s is exact (8 + 11 bits of significand), so a fused multiply-add gives the same.
    """
    tiles = unpack(layout, buf)
    y = tiles.codes.to(torch.float32)
    y.mul_(tiles.scale.float().unsqueeze(-1)).add_(tiles.zero_point.float().unsqueeze(-1))
    rows = _worth_transforming(tiles.transformed)
    flat, flag = y.view(-1, y.shape[-1]), tiles.transformed.flatten()[rows]
    back = swap(hadamard(flat[rows]), tiles.pivot.flatten()[rows].long())
    flat[rows] = torch.where(flag.unsqueeze(-1), back, flat[rows])
    return layout.tiling.join(y.mul_(power_of_two(-tiles.exponent)), dtype)


def encode_tiles(layout: TahLayout, x: torch.Tensor) -> TahTiles:
    """Quantise tiles: allocate bits by entropy, suppress outliers, round (TAH-Quant §3.1 to §3.3).

    `x`, fp32 [B, S, M, G], is not written; the padding in every token's last tile is zeros.
    """
    spec, padding = layout.spec, layout.tiling.padding
    finite = largest_magnitude(x).isfinite()
    exponent = top_exponent(x, finite, TOP_EXPONENT)
    y = torch.where(finite.unsqueeze(-1), x, 0.0).mul_(power_of_two(exponent))
    magnitude = y.abs()
    transformed = outlier_ratio(magnitude) > spec.tau
    is_high = allocate_(layout, magnitude)
    pivot = transform_(y, transformed)
    if padding:
        # Padding of tiles that are not transformed takes the tile's first value: minimum and maximum stay.
        last, flag = y[:, :, -1], transformed[:, :, -1:]
        last[..., -padding:] = torch.where(flag, last[..., -padding:], last[..., :1])
    per_tile = tile_by_tile(is_high, layout.tiles_per_alloc).view(transformed.shape)
    levels = torch.where(per_tile, 2**spec.high - 1, 2**spec.low - 1).to(torch.float32)
    scale, zero_point = scale_and_zero_point(y, levels)
    codes = quantize_(y, scale, zero_point, levels).to(torch.uint8)
    if padding:
        codes[:, :, -1, -padding:].mul_(transformed[:, :, -1:])
    zero_point = torch.where(finite, zero_point, torch.nan)
    return TahTiles(exponent, is_high, scale, transformed, zero_point, pivot, codes)


def allocate_(layout: TahLayout, magnitude: torch.Tensor) -> torch.Tensor:
    """Mark the allocation tiles, bool [B, n], that get H bits, by the entropy over all of their channels or evenly.

    Magnitudes are fp32 [B, S, M, G], finite; overwritten.
    """
    num_samples, num_allocs = len(magnitude), layout.allocs_per_sample
    if layout.spec.adaptive == "off":
        return spread_high(layout.even_share, num_allocs, magnitude.device).expand(num_samples, -1)
    channels = layout.tiles_per_alloc * layout.tiling.group
    entropies = entropy_(magnitude.view(num_samples, num_allocs, channels))
    return select_high(entropies if layout.spec.select == "high" else -entropies, layout.num_low)


def spread_high(low_share: Fraction, count: int, device: torch.device) -> torch.Tensor:
    """Mark all but ⌊count·low_share⌋ of `count`, evenly: bool [count], False where ⌊(i+1)·share⌋ > ⌊i·share⌋.

    Numerator and denominator times `count` must fit 64 bits.
    """
    steps = torch.arange(count + 1, dtype=torch.int64, device=device)
    floors = (steps * low_share.numerator).div_(low_share.denominator, rounding_mode="floor")
    return floors[1:] == floors[:-1]


def entropy_(magnitude: torch.Tensor) -> torch.Tensor:
    """Entropy of each tile's normalised magnitudes, in nats: H = −Σ p·log(p + ς), p = |a| / (‖a‖₁ + ϵ).

    TAH-Quant §3.2, Eqs. 1 and 2; the minus sign is missing in Eq. 2. Zeros add nothing, so padding does not either.
    Magnitudes, fp32 [..., G], are overwritten, as fresh memory costs more than the sum.
    """
    share = magnitude.div_(magnitude.sum(dim=-1, keepdim=True) + EPSILON)
    return (share + EPSILON).log_().mul_(share).sum(dim=-1).neg_()


def select_high(entropies: torch.Tensor, num_low: int) -> torch.Tensor:
    """Mark the tiles that get H bits: all but the `num_low` of lowest entropy in each sample, [B, ...] (§3.2).

    The order is stable: of equal entropies the tile of the lower index comes first.
    """
    ranked = entropies.flatten(1).argsort(dim=1, stable=True)
    high = torch.ones_like(ranked, dtype=torch.bool)
    return high.scatter_(1, ranked[:, :num_low], False).view(entropies.shape)


def outlier_ratio(magnitude: torch.Tensor) -> torch.Tensor:
    """r = |α⁽¹⁾| / (|α⁽²⁾| + ϱ), the largest magnitude over the second largest (§3.3, Eq. 3), of fp32 [..., G].

    A tournament of halves: each round keeps the largest and second largest of every pair. A tile of
    zeros has r = 0 and so never exceeds a threshold.
    """
    left, right = magnitude.chunk(2, dim=-1)
    first, second = torch.maximum(left, right), torch.minimum(left, right)
    while first.shape[-1] > 1:
        (left, right), (below, aside) = first.chunk(2, dim=-1), second.chunk(2, dim=-1)
        first = torch.maximum(left, right)
        second = torch.minimum(left, right).maximum(below).maximum(aside)
    return (first / (second + EPSILON)).squeeze(-1)


def transform_(y: torch.Tensor, transformed: torch.Tensor) -> torch.Tensor:
    """Swap and transform, in place, the tiles of fp32 [B, S, M, G] that are marked: α̂ = α·P_d·H/√G (§3.3, Eq. 4).

    Returns the pivots d, uint8 [B, S, M]: the lowest index of the largest magnitude; 0 in the other tiles.
    """
    rows = _worth_transforming(transformed)
    flat, flag = y.view(-1, y.shape[-1]), transformed.flatten()[rows]
    chosen = flat[rows]
    pivot = chosen.abs().argmax(dim=-1)
    flat[rows] = torch.where(flag.unsqueeze(-1), hadamard(swap(chosen, pivot)), chosen)
    pivots = torch.zeros_like(transformed, dtype=torch.uint8)
    pivots.view(-1)[rows] = (pivot * flag).to(torch.uint8)
    return pivots


def _worth_transforming(transformed: torch.Tensor) -> torch.Tensor:
    """Indices of a superset of the marked tiles: only these on the CPU, all tiles where asking would synchronise."""
    if transformed.device.type == "cpu":
        return transformed.flatten().nonzero().squeeze(-1)
    return torch.arange(transformed.numel(), device=transformed.device)


def swap(tiles: torch.Tensor, pivot: torch.Tensor) -> torch.Tensor:
    """α·P_d: a copy of tiles [T, G] with channels 0 and pivot[t] of each tile exchanged."""
    index = pivot.unsqueeze(-1)
    swapped = tiles.scatter(1, index, tiles[:, :1])
    swapped[:, :1] = tiles.gather(1, index)
    return swapped


def scale_and_zero_point(y: torch.Tensor, levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp16 scale (max − min)/(2^b − 1) and zero-point min of every tile (§3.3, asymmetric quantiser).

    A scale below fp16's least is 0. Neither is ever −0, which zeros of both signs in a tile could give: the scale's
    sign means something else on the wire.
    """
    smallest = y.amin(dim=-1)
    scale = (y.amax(dim=-1) - smallest) / levels
    return scale.half().abs_(), smallest.half() + 0.0


def quantize_(y: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Codes clamp(round-half-even((y − z)/s), 0, 2^b − 1), in place, 0 where s = 0.

    s and z are the rounded ones that the receiver has.
    """
    divisor = torch.where(scale == 0, torch.inf, scale.float())
    y.sub_(zero_point.float().unsqueeze(-1)).div_(divisor.unsqueeze(-1)).round_()
    return torch.minimum(y.clamp_(min=0.0), levels.unsqueeze(-1), out=y)
