"""TAH-Quant's arithmetic, transcribed from the paper in plain torch; every other backend answers to it.

Shape letters: B samples, S tokens, M tiles a token, G channels a tile (a power of two), R tiles an
allocation tile, n allocation tiles a sample. Everything is fp32 and runs on the tensor's device. Encoding
asks the device nothing: no shape depends on data, but on CPU, where it costs no synchronisation, only the
tiles with an outlier are transformed.

Equal to the bit on every device, as all of it is single IEEE operations in a fixed order: exponent,
outlier test, transform, scale, zero-point, codes, decoded values. Entropies are sums of logarithms and
may differ in the last digits; where two lie that close at the border, the selection may differ too.

Deviations from the paper: Eq. 2 is given its minus sign; a power of two takes the tensor into the range
of fp16 metadata (Eq. 24 does so for gradients only); a constant tile has scale 0, where the quantiser
would divide 0 by 0; a tile with NaN or infinity is marked as a whole.
"""

from dataclasses import dataclass
from fractions import Fraction

import torch

EPSILON = 1e-12
"""ς, ϵ and ϱ of Eqs. 1 to 3."""
TOP_EXPONENT = 10
"""What is coded has its largest magnitude in [2^10, 2^11): times √256 it is below fp16's 65,504."""
MAX_EXPONENT = 127
"""Of the power of two that a tensor is multiplied by; it travels as a signed byte."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Which allocation tiles of a sample get L bits.

    Attributes:
        num_low: how many.
        tiles_per_alloc: R, consecutive tiles of a token that get their bits together.
        by_low_entropy: those of lowest entropy (the paper's rule, §3.2), else those of highest.
        even_share: not None: entropies do not matter, the i-th gets L bits iff ⌊(i+1)·share⌋ > ⌊i·share⌋.
    """

    num_low: int
    tiles_per_alloc: int = 1
    by_low_entropy: bool = True
    even_share: Fraction | None = None


@dataclass(frozen=True, slots=True)
class TahTiles:
    """What a TAH stream says, tile by tile; [B, S, M] unless noted.

    Attributes:
        exponent: e, int32 without dimensions; what is coded is x·2^e.
        high: bool [B, n], the codes of this allocation tile have H bits, else L.
        scale: fp16, not negative; 0 where the tile is constant or not finite.
        transformed: bool, the tile was swapped and transformed.
        zero_point: fp16; NaN where the tile has a value that is not finite.
        pivot: uint8, the channel that was swapped with channel 0; 0 where nothing was transformed.
        codes: uint8 [B, S, M, G].
    """

    exponent: torch.Tensor
    high: torch.Tensor
    scale: torch.Tensor
    transformed: torch.Tensor
    zero_point: torch.Tensor
    pivot: torch.Tensor
    codes: torch.Tensor


def encode(x: torch.Tensor, allocation: Allocation, *, tau: float, low: int, high: int, padding: int = 0) -> TahTiles:
    """Quantise tiles: allocate bits by entropy, suppress outliers, round (TAH-Quant §3.1 to §3.3).

    Args:
        x: fp32 [B, S, M, G]; not written.
        allocation: which allocation tiles get `low` bits.
        tau: τ of Eq. 3, not negative.
        low: L, bits of a low-entropy tile.
        high: H, bits of the others.
        padding: how many channels at the end of every token's last tile are filling (zeros).
    """
    finite = largest_magnitude(x).isfinite()
    exponent = top_exponent(x, finite, TOP_EXPONENT)
    y = torch.where(finite.unsqueeze(-1), x, 0.0).mul_(power_of_two(exponent))
    magnitude = y.abs()
    transformed = outlier_ratio(magnitude) > tau
    is_high = allocate_(magnitude, allocation)
    pivot = transform_(y, transformed)
    if padding:
        _hide_padding_(y, transformed, padding)
    per_tile = tile_by_tile(is_high, allocation.tiles_per_alloc).view(transformed.shape)
    levels = torch.where(per_tile, 2**high - 1, 2**low - 1).to(torch.float32)
    scale, zero_point = scale_and_zero_point(y, levels)
    codes = quantize_(y, scale, zero_point, levels).to(torch.uint8)
    if padding:
        codes[:, :, -1, -padding:].mul_(transformed[:, :, -1:])
    zero_point = torch.where(finite, zero_point, torch.nan)
    return TahTiles(exponent, is_high, scale, transformed, zero_point, pivot, codes)


def decode(tiles: TahTiles) -> torch.Tensor:
    """Values fp32 [B, S, M, G] of tiles: (q·s + z), transformed back where flagged, times 2^−e.

    q·s is exact (8 + 11 bits of significand), so a fused multiply-add gives the same.
    """
    y = tiles.codes.to(torch.float32)
    y.mul_(tiles.scale.float().unsqueeze(-1)).add_(tiles.zero_point.float().unsqueeze(-1))
    rows = _worth_transforming(tiles.transformed)
    flat, flag = y.view(-1, y.shape[-1]), tiles.transformed.flatten()[rows]
    back = swap(hadamard(flat[rows]), tiles.pivot.flatten()[rows].long())
    flat[rows] = torch.where(flag.unsqueeze(-1), back, flat[rows])
    return y.mul_(power_of_two(-tiles.exponent))


def top_exponent(x: torch.Tensor, finite: torch.Tensor, top: int) -> torch.Tensor:
    """The power of two that takes the largest magnitude of x into [2^top, 2^(top+1)): c of Eq. 24 as 2^e.

    e = top − ⌊log2 max|x|⌋, at most 127, over the tiles marked finite; 0 where they are all zero.

    Args:
        x: fp32 [..., G].
        finite: bool [...].
        top: exponent aimed at.

    Returns:
        int32 without dimensions; it is never below top − 127.
    """
    known = torch.where(finite, largest_magnitude(x), 0.0).flatten()
    overall = torch.nn.functional.pad(known, (0, 1)).amax()  # one zero more: there may be no tile at all
    floor_log2 = torch.frexp(overall).exponent - 1
    return torch.where(overall > 0, top - floor_log2, 0).clamp(max=MAX_EXPONENT).to(torch.int32)


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """max|x| of each tile: fp32 [...] of fp32 [..., G], never −0, and without a temporary of x's size."""
    return torch.maximum(x.amax(dim=-1), -x.amin(dim=-1)).abs_()


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in fp32, exactly, for exponents from −127 (which is subnormal) to 127."""
    bits = (exponent + 127) * 2**23 + (exponent == -127).to(torch.int32) * 2**22
    return bits.to(torch.int32).view(torch.float32)


def allocate_(magnitude: torch.Tensor, allocation: Allocation) -> torch.Tensor:
    """Mark the allocation tiles that get H bits, by the entropy over all of their channels or evenly.

    Args:
        magnitude: fp32 [B, S, M, G], not negative, finite; overwritten.
        allocation: the rule.

    Returns:
        bool [B, n].
    """
    num_samples, tokens, per_token, group = magnitude.shape
    num_allocs = tokens * per_token // allocation.tiles_per_alloc
    if allocation.even_share is not None:
        return spread_high(allocation.even_share, num_allocs, magnitude.device).expand(num_samples, -1)
    entropies = entropy_(magnitude.view(num_samples, num_allocs, allocation.tiles_per_alloc * group))
    return select_high(entropies if allocation.by_low_entropy else -entropies, allocation.num_low)


def tile_by_tile(of_allocs: torch.Tensor, tiles_per_alloc: int) -> torch.Tensor:
    """What holds for allocation tiles [B, n], for each of their tiles: [B, n·R]."""
    return of_allocs.unsqueeze(-1).expand(-1, -1, tiles_per_alloc).flatten(1)


def spread_high(low_share: Fraction, count: int, device: torch.device) -> torch.Tensor:
    """Mark all but ⌊count·low_share⌋ of `count`, evenly: bool [count], False where ⌊(i+1)·share⌋ > ⌊i·share⌋.

    Args:
        low_share: of a numerator and denominator that fit 64 bits when multiplied by `count`.
        count: n.
        device: where the result shall be.
    """
    steps = torch.arange(count + 1, dtype=torch.int64, device=device)
    floors = (steps * low_share.numerator).div_(low_share.denominator, rounding_mode="floor")
    return floors[1:] == floors[:-1]


def entropy_(magnitude: torch.Tensor) -> torch.Tensor:
    """Entropy of each tile's normalised magnitudes: H = −Σ p·log(p + ς), p = |a| / (‖a‖₁ + ϵ).

    TAH-Quant §3.2, Eqs. 1 and 2; the minus sign is missing in Eq. 2. Zeros add nothing, so padding
    does not either, and a tile of zeros has entropy 0.

    Args:
        magnitude: fp32 [..., G], not negative, finite; overwritten, as fresh memory costs more than the sum.

    Returns:
        fp32 [...], in nats.
    """
    share = magnitude.div_(magnitude.sum(dim=-1, keepdim=True) + EPSILON)
    return (share + EPSILON).log_().mul_(share).sum(dim=-1).neg_()


def select_high(entropies: torch.Tensor, num_low: int) -> torch.Tensor:
    """Mark the tiles that get H bits: all but the `num_low` of lowest entropy in each sample (§3.2).

    The order is stable: of equal entropies the tile of the lower index comes first.

    Args:
        entropies: fp32 [B, ...].
        num_low: tiles of each sample that get L bits.

    Returns:
        bool, shaped as `entropies`.
    """
    ranked = entropies.flatten(1).argsort(dim=1, stable=True)
    high = torch.ones_like(ranked, dtype=torch.bool)
    return high.scatter_(1, ranked[:, :num_low], False).view(entropies.shape)


def outlier_ratio(magnitude: torch.Tensor) -> torch.Tensor:
    """r = |α⁽¹⁾| / (|α⁽²⁾| + ϱ), the largest magnitude over the second largest (§3.3, Eq. 3).

    A tournament of halves: each round keeps the largest and second largest of every pair. A tile of
    zeros has r = 0 and so never exceeds a threshold.

    Args:
        magnitude: fp32 [..., G], not negative, finite.

    Returns:
        fp32 [...].
    """
    left, right = magnitude.chunk(2, dim=-1)
    first, second = torch.maximum(left, right), torch.minimum(left, right)
    while first.shape[-1] > 1:
        (left, right), (below, aside) = first.chunk(2, dim=-1), second.chunk(2, dim=-1)
        first = torch.maximum(left, right)
        second = torch.minimum(left, right).maximum(below).maximum(aside)
    return (first / (second + EPSILON)).squeeze(-1)


def transform_(y: torch.Tensor, transformed: torch.Tensor) -> torch.Tensor:
    """Swap and transform, in place, the tiles that are marked: α̂ = α·P_d·H/√G (§3.3, Eq. 4).

    Args:
        y: fp32 [B, S, M, G], contiguous.
        transformed: bool [B, S, M].

    Returns:
        uint8 [B, S, M]: the pivot d, the lowest index of the largest magnitude; 0 in the other tiles.
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
    """Indices of a superset of the marked tiles: just these on CPU, all where asking would synchronise."""
    if transformed.device.type == "cpu":
        return transformed.flatten().nonzero().squeeze(-1)
    return torch.arange(transformed.numel(), device=transformed.device)


def swap(tiles: torch.Tensor, pivot: torch.Tensor) -> torch.Tensor:
    """α·P_d: a copy of tiles [T, G] with channels 0 and pivot[t] of each tile exchanged."""
    index = pivot.unsqueeze(-1)
    swapped = tiles.scatter(1, index, tiles[:, :1])
    swapped[:, :1] = tiles.gather(1, index)
    return swapped


def hadamard(tiles: torch.Tensor) -> torch.Tensor:
    """α·H/√G, H being Sylvester's ±1 matrix; orthonormal and symmetric, so its own inverse.

    Butterflies (a, b) → (a + b, a − b) over channels that lie h = 1, 2, … G/2 apart, in this order,
    then one multiplication by fp32(1/√G).

    Args:
        tiles: fp32 [T, G], G a power of two.
    """
    count, group = tiles.shape
    distance = 1
    while distance < group:
        pairs = tiles.view(count, group // (2 * distance), 2, distance)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        tiles = torch.stack((a + b, a - b), dim=2).view(count, group)
        distance *= 2
    return tiles.mul_(float(group**-0.5))


def _hide_padding_(y: torch.Tensor, transformed: torch.Tensor, padding: int) -> None:
    """Give padding, where its tile is not transformed, the tile's first value: minimum and maximum stay."""
    last, flag = y[:, :, -1], transformed[:, :, -1:]
    last[..., -padding:] = torch.where(flag, last[..., -padding:], last[..., :1])


def scale_and_zero_point(y: torch.Tensor, levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp16 scale (max − min)/(2^b − 1) and zero-point min of every tile (§3.3, asymmetric quantiser).

    Args:
        y: fp32 [B, S, M, G].
        levels: fp32 [B, S, M], 2^b − 1.

    Returns:
        Both fp16 [B, S, M]. A scale below fp16's least is 0. Neither is ever −0, which zeros of both
        signs in a tile could give: the scale's sign means something else on the wire.
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
