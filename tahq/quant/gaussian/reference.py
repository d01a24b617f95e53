"""The arithmetic of `eden` and `wf` in plain torch: Gaussian-optimal levels behind a Hadamard transform.

`eden` is unbiased, for gradients. After random signs and a Hadamard transform the values of a tile look Gaussian
whatever they were, so that the Gaussian-optimal quantiser fits every tile (EDEN, Vargaftik et al., ICML 2022). Its
scale s = ‖z‖²/⟨z, ẑ⟩ makes the decoded tile right in its own direction, ⟨x̂, x⟩ = ‖x‖², for every draw of the signs.
Behind a uniformly random rotation that means no bias at all; behind signs and a Hadamard transform the remaining bias
is small, and smaller in larger tiles: at 2 bits, of 256 cubed Gaussians in a tile, 1.5 % of their length, of 64 3.6 %.
Signs come from a key that both ends know and are never sent. Unlike the paper's, the mean number of bits need not be
whole, and is spread over tiles by water-filling; the scale has 8 bits, rounded stochastically, so that it stays
unbiased; and the whole tensor is multiplied by a power of two.

`wf` is for activations. These should come back accurately, token by token, since the normalisation of later layers
divides by a token's length. So bits go where they reduce the squared error most *relative to the token's energy*
(reverse water-filling), the scale of each tile is the best of five, and nothing is random: here a fresh random error
costs more than a small fixed one. The mean of each channel over the tensor is sent separately.

Shape letters: N tokens, M tiles per token, G channels per tile, T = N·M. Everything is fp32 (means are summed in
fp64), encoding never synchronises the device, and all is equal to the bit on every device except for sums (means,
energies, projections, errors): where these round differently, a width, a scale or a mean's last bit may differ.
"""

import torch

from tahq.quant.gaussian import bit_allocation, small_scale
from tahq.quant.gaussian.levels import CodedTiles, levels_of, magnitude_indices, magnitudes_of, signed_codes
from tahq.quant.gaussian.tile_stream import TileLayout, pack, unpack
from tahq.quant.spec import EdenSpec
from tahq.quant.stochastic_rounding import hashes, shift_right
from tahq.quant.tiling import TOP_EXPONENT, hadamard, largest_magnitude, power_of_two, top_exponent

SCALE_COUNTER = 0x80000000
"""Where the counters of the scales' draws begin; those of the signs begin at 0."""
CANDIDATES = (0, -1, 1, -2, 2)
"""Offsets of the codes that `wf` tries from that of the root mean square; the first with the least error is kept."""
SAME_LEVEL = 255
"""Level, for `wf`'s allocation of bits, of a tile that has its token's mean energy."""
_SIGN_BIT = -(2**31)


def encode(layout: TileLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """A stream of version 1, on any device, without synchronising it."""
    tiles = layout.tiling.split(x).flatten(0, 1)
    finite = largest_magnitude(tiles).isfinite()
    exponent = top_exponent(tiles, finite, TOP_EXPONENT)
    y = torch.where(finite.unsqueeze(-1), tiles, 0.0).mul_(power_of_two(exponent))
    if isinstance(layout.spec, EdenSpec):
        return pack(layout, _encode_unbiased(y, finite, exponent, layout.num_planes, key))
    return pack(layout, _encode_accurately(y, finite, exponent, layout.num_planes, layout.has_mean))


def decode(
    layout: TileLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor:
    """The tensor of an accepted stream: s·level, transformed back, times 2^−e; raises what `unpack` does."""
    tiles = unpack(layout, buf)
    y = hadamard(levels_of(tiles.codes, tiles.width).mul_(small_scale.value_of(tiles.scale).unsqueeze(-1)))
    if isinstance(layout.spec, EdenSpec):
        y = flip_signs(y, key)
    elif tiles.mean is not None and y.numel():
        y.view(-1, tiles.mean.numel()).add_(tiles.mean.float())
    return layout.tiling.join(y.mul_(power_of_two(-tiles.exponent)), dtype)


def _encode_unbiased(
    y: torch.Tensor, finite: torch.Tensor, exponent: torch.Tensor, num_planes: int, key: int
) -> CodedTiles:
    """`eden`: fp32 tiles [N, M, G], bool [N, M], e."""
    finite = finite.view(-1)
    z = hadamard(flip_signs(y.view(-1, y.shape[-1]), key))
    energy = z.square().sum(dim=-1)
    step = (energy / z.shape[-1]).sqrt_()
    width = bit_allocation.allocate(small_scale.nearest_code(step), num_planes)
    index = magnitude_indices(z.abs(), step, width)
    draws = shift_right(hashes(SCALE_COUNTER, len(z), key, z.device), 32 - small_scale.DROPPED_BITS)
    scale = small_scale.stochastic_code(unbiased_scale(z, index, width, energy), draws)
    codes = signed_codes(z, index, width).mul_(finite.unsqueeze(-1))
    return CodedTiles(exponent, torch.where(finite, scale, small_scale.NOT_FINITE).to(torch.uint8), width, codes)


def flip_signs(y: torch.Tensor, key: int) -> torch.Tensor:
    """y, fp32 [T, G], with the sign of element i, counted by rows, changed where bit i mod 32 of H(⌊i/32⌋) is set."""
    words = hashes(0, -(-y.numel() // 32), key, y.device)
    places = torch.arange(31, -1, -1, dtype=torch.int32, device=y.device)
    signs = (words.unsqueeze(-1) << places).bitwise_and_(_SIGN_BIT).view(-1)[: y.numel()]
    return (y.view(torch.int32) ^ signs.view(y.shape)).view(torch.float32)


def unbiased_scale(z: torch.Tensor, index: torch.Tensor, width: torch.Tensor, energy: torch.Tensor) -> torch.Tensor:
    """s = ‖z‖²/⟨|z|, levels⟩, fp32 [T], so that ⟨s·ẑ, z⟩ = ‖z‖²; 0 where the divisor is 0."""
    projection = magnitudes_of(index, width).mul_(z.abs()).sum(dim=-1)
    return torch.where(projection == 0, 0.0, energy / projection)


def _encode_accurately(
    y: torch.Tensor, finite: torch.Tensor, exponent: torch.Tensor, num_planes: int, center: bool
) -> CodedTiles:
    """`wf`: fp32 tiles [N, M, G], bool [N, M], e."""
    mean = _channel_means(y) if center else None
    if mean is not None:
        y.sub_(mean.float().view(y.shape[1:])).mul_(finite.unsqueeze(-1))
    z = hadamard(y.view(-1, y.shape[-1]))
    energy = z.square().mean(dim=-1)
    width = bit_allocation.allocate(_levels_in_token(energy.view(finite.shape)).view(-1), num_planes)
    scale = best_scale(z.abs(), energy, width)
    index = magnitude_indices(z.abs(), small_scale.value_of(scale), width)
    codes = signed_codes(z, index, width).mul_((scale > 0).unsqueeze(-1))
    marked = torch.where(finite.view(-1), scale, small_scale.NOT_FINITE).to(torch.uint8)
    return CodedTiles(exponent, marked, width, codes, mean)


def _channel_means(y: torch.Tensor) -> torch.Tensor:
    """fp16 means of each channel over all tokens, [M·G] of fp32 [N, M, G], never −0; 0 if there are no tokens.

    Summed in fp64, so that the order does not matter, and rounded to fp32 on the way to fp16, as torch converts.
    """
    total = y.sum(dim=0, dtype=torch.float64).view(-1)
    return total.div_(max(len(y), 1)).float().half() + 0.0


def _levels_in_token(energy: torch.Tensor) -> torch.Tensor:
    """Levels for the allocation, int32 [N, M] of tiles' mean energies fp32 [N, M]: how far a tile is above its token.

    q = code(√E) − code(√F) + 255 in eighths of an octave, F being the mean of the token's E.
    """
    of_tile = small_scale.nearest_code(energy.sqrt())
    of_token = small_scale.nearest_code(energy.mean(dim=-1, keepdim=True).sqrt_())
    return of_tile - of_token + SAME_LEVEL


def best_scale(magnitude: torch.Tensor, energy: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """int32 [T], the candidate code with the least Σ(|z| − s·level)²; 0 where the root mean square's code is 0.

    Takes |z|, fp32 [T, G]; the mean square of each tile, fp32 [T]; widths, int32 [T].
    """
    middle = small_scale.nearest_code(energy.sqrt())
    best, least = middle, torch.full_like(energy, torch.inf)
    for candidate in CANDIDATES:
        code = (middle + candidate).clamp_(1, small_scale.LARGEST_CODE)
        step = small_scale.value_of(code)
        levels = magnitudes_of(magnitude_indices(magnitude, step, width), width)
        error = levels.mul_(step.unsqueeze(-1)).sub_(magnitude).square_().sum(dim=-1)
        best = torch.where(error < least, code, best)
        least = torch.minimum(error, least)
    return best.mul_(middle > 0)
