"""wf's arithmetic in plain torch: water-filled Gaussian quantisation of Hadamard-transformed tiles; for activations.

Activations should come back accurately, token by token, since the normalisation of later layers divides by a token's
length. So bits go where they take away most squared error *relative to the token's energy* (reverse water-filling),
the scale of each tile is the one of five with the least error, and nothing is random: an error that is drawn anew
costs more here than one that is small. What channels have in common over the tensor, their mean, travels apart.

Shape letters: N tokens, M tiles per token, G channels per tile, T = N·M. Everything is fp32 (means are summed in fp64),
asks the device nothing in encoding, and is equal to the bit on every device but for sums (means, energies, errors):
where these round differently, a width, a scale or a mean's last bit may differ.
"""

import torch

from tahq.quant.gaussian import bit_allocation, small_scale
from tahq.quant.gaussian.levels import CodedTiles, levels_of, magnitude_indices, magnitudes_of, signed_codes
from tahq.quant.gaussian.tile_stream import TileLayout, pack, unpack
from tahq.quant.transforms import TOP_EXPONENT, hadamard, largest_magnitude, power_of_two, top_exponent

CANDIDATES = (0, -1, 1, -2, 2)
"""Codes tried around that of the root mean square; of equal errors the first is kept."""
SAME_LEVEL = 255
"""Level, for the allocation of bits, of a tile that has its token's mean energy."""


def encode(layout: TileLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """A stream of version 1, on any device, without synchronising it."""
    return pack(layout, encode_tiles(layout.tiling.split(x).flatten(0, 1), layout.num_planes, center=layout.has_mean))


def decode(
    layout: TileLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor:
    """The tensor of an accepted stream; raises what `unpack` does."""
    return layout.tiling.join(decode_tiles(unpack(layout, buf)), dtype)


def encode_tiles(x: torch.Tensor, num_planes: int, *, center: bool) -> CodedTiles:
    """Quantise tiles to `num_planes` bits in all.

    Args:
        x: fp32 [N, M, G]; not written.
        num_planes: K, from T to 8·T.
        center: whether each channel's mean is taken out first.
    """
    finite = largest_magnitude(x).isfinite()
    exponent = top_exponent(x, finite, TOP_EXPONENT)
    y = torch.where(finite.unsqueeze(-1), x, 0.0).mul_(power_of_two(exponent))
    mean = channel_means(y) if center else None
    if mean is not None:
        y.sub_(mean.float().view(y.shape[1:])).mul_(finite.unsqueeze(-1))
    z = hadamard(y.view(-1, y.shape[-1]))
    energy = z.square().mean(dim=-1)
    width = bit_allocation.allocate(levels_in_token(energy.view(finite.shape)).view(-1), num_planes)
    scale = best_scale(z.abs(), energy, width)
    codes = _quantize(z, scale, width)
    marked = torch.where(finite.view(-1), scale, small_scale.NOT_FINITE).to(torch.uint8)
    return CodedTiles(exponent, marked, width, codes, mean)


def decode_tiles(tiles: CodedTiles) -> torch.Tensor:
    """Values fp32 [T, G]: s·level, transformed back, plus the means, times 2^−e."""
    y = hadamard(levels_of(tiles.codes, tiles.width).mul_(small_scale.value_of(tiles.scale).unsqueeze(-1)))
    if tiles.mean is not None and y.numel():
        y.view(-1, tiles.mean.numel()).add_(tiles.mean.float())
    return y.mul_(power_of_two(-tiles.exponent))


def channel_means(y: torch.Tensor) -> torch.Tensor:
    """fp16 means of each channel over all tokens, [M·G] of fp32 [N, M, G], never −0; 0 of no token.

    Summed in fp64, so that the order does not show, and rounded to fp32 on the way, as torch converts.
    """
    total = y.sum(dim=0, dtype=torch.float64).view(-1)
    return total.div_(max(len(y), 1)).float().half() + 0.0


def levels_in_token(energy: torch.Tensor) -> torch.Tensor:
    """Levels for the allocation, int32 [N, M] of tiles' mean energies fp32 [N, M]: how far a tile is above its token.

    q = code(√E) − code(√F) + 255 in eighths of an octave, F being the mean of the token's E.
    """
    of_tile = small_scale.nearest_code(energy.sqrt())
    of_token = small_scale.nearest_code(energy.mean(dim=-1, keepdim=True).sqrt_())
    return of_tile - of_token + SAME_LEVEL


def best_scale(magnitude: torch.Tensor, energy: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """int32 [T], the candidate code with the least Σ(|z| − s·level)²; 0 where the root mean square's code is 0.

    Args:
        magnitude: fp32 [T, G], |z|.
        energy: fp32 [T], mean square of each tile.
        width: int32 [T].
    """
    middle = small_scale.nearest_code(energy.sqrt())
    best, least = middle, torch.full_like(energy, torch.inf)
    for candidate in CANDIDATES:
        code = (middle + candidate).clamp_(1, small_scale.LARGEST_CODE)
        error = _squared_error(magnitude, small_scale.value_of(code), width)
        best = torch.where(error < least, code, best)
        least = torch.minimum(error, least)
    return best.mul_(middle > 0)


def _squared_error(magnitude: torch.Tensor, step: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    levels = magnitudes_of(magnitude_indices(magnitude, step, width), width)
    return levels.mul_(step.unsqueeze(-1)).sub_(magnitude).square_().sum(dim=-1)


def _quantize(z: torch.Tensor, scale: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """uint8 codes [T, G]; 0 in tiles of scale 0."""
    index = magnitude_indices(z.abs(), small_scale.value_of(scale), width)
    return signed_codes(z, index, width).mul_((scale > 0).unsqueeze(-1))
