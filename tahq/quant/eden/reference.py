"""eden's arithmetic in plain torch: unbiased quantisation behind a randomised Hadamard transform; for gradients.

After random signs and a Hadamard transform the values of a tile look Gaussian whatever they were, so that the
Gaussian-optimal quantiser fits every tile (EDEN, Vargaftik et al., ICML 2022). Its scale s = ‖z‖²/⟨z, ẑ⟩ makes the
decoded tile right in its own direction, ⟨x̂, x⟩ = ‖x‖², for every draw of the signs. Behind a uniformly random rotation
that means no bias at all; behind signs and a Hadamard transform what is left is small, and smaller in larger tiles:
at 2 bits, of 256 cubed Gaussians in a tile, 1.5 % of their length, of 64 3.6 %. Signs come from a key that both ends
know and are never sent.

Of our own: a mean number of bits that need not be whole, spread over tiles by water-filling; a scale of 8 bits,
rounded stochastically, so that it stays unbiased; a power of two for the whole tensor.

Shape letters: T tiles, G channels per tile. Everything is fp32, encoding asks the device nothing, and all is equal to
the bit on every device but for sums (‖z‖² and ⟨z, ẑ⟩): where these round differently, a width or a scale may differ.
"""

import torch

from tahq.quant.gaussian import bit_allocation, small_scale
from tahq.quant.gaussian.levels import CodedTiles, levels_of, magnitude_indices, magnitudes_of, signed_codes
from tahq.quant.gaussian.tile_stream import TileLayout, pack, unpack
from tahq.quant.stochastic_rounding import hashes, shift_right
from tahq.quant.transforms import TOP_EXPONENT, hadamard, largest_magnitude, power_of_two, top_exponent

SCALE_COUNTER = 0x80000000
"""Where the counters of the scales' draws begin; those of the signs begin at 0."""
_SIGN_BIT = -(2**31)


def encode(layout: TileLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """A stream of version 1, on any device, without synchronising it."""
    return pack(layout, encode_tiles(layout.tiling.split(x).reshape(-1, layout.tiling.group), layout.num_planes, key))


def decode(
    layout: TileLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor:
    """The tensor of an accepted stream; raises what `unpack` does."""
    return layout.tiling.join(decode_tiles(unpack(layout, buf), key), dtype)


def encode_tiles(x: torch.Tensor, num_planes: int, key: int) -> CodedTiles:
    """Quantise tiles to `num_planes` bits in all.

    Args:
        x: fp32 [T, G]; not written.
        num_planes: K, from T to 8·T.
        key: of the signs and the rounding of scales, 64 bits.
    """
    finite = largest_magnitude(x).isfinite()
    exponent = top_exponent(x, finite, TOP_EXPONENT)
    y = torch.where(finite.unsqueeze(-1), x, 0.0).mul_(power_of_two(exponent))
    z = hadamard(flip_signs(y, key))
    energy = z.square().sum(dim=-1)
    step = (energy / z.shape[-1]).sqrt_()
    width = bit_allocation.allocate(small_scale.nearest_code(step), num_planes)
    index = magnitude_indices(z.abs(), step, width)
    scale = small_scale.stochastic_code(unbiased_scale(z, index, width, energy), scale_draws(len(z), key, z.device))
    codes = signed_codes(z, index, width).mul_(finite.unsqueeze(-1))
    return CodedTiles(exponent, torch.where(finite, scale, small_scale.NOT_FINITE).to(torch.uint8), width, codes)


def decode_tiles(tiles: CodedTiles, key: int) -> torch.Tensor:
    """Values fp32 [T, G]: s·level, transformed back, with the signs of `key`, times 2^−e."""
    y = levels_of(tiles.codes, tiles.width).mul_(small_scale.value_of(tiles.scale).unsqueeze(-1))
    return flip_signs(hadamard(y), key).mul_(power_of_two(-tiles.exponent))


def flip_signs(y: torch.Tensor, key: int) -> torch.Tensor:
    """y with the sign of element i (counted row by row) changed where bit i mod 32 of H(⌊i/32⌋) is set.

    Args:
        y: fp32 [T, G], contiguous; not written.
        key: of H, the hash of `stochastic_rounding`.
    """
    words = hashes(0, -(-y.numel() // 32), key, y.device)
    places = torch.arange(31, -1, -1, dtype=torch.int32, device=y.device)
    signs = (words.unsqueeze(-1) << places).bitwise_and_(_SIGN_BIT).view(-1)[: y.numel()]
    return (y.view(torch.int32) ^ signs.view(y.shape)).view(torch.float32)


def unbiased_scale(z: torch.Tensor, index: torch.Tensor, width: torch.Tensor, energy: torch.Tensor) -> torch.Tensor:
    """s = ‖z‖²/⟨|z|, levels⟩, fp32 [T], 0 where nothing is to be scaled: then ⟨s·ẑ, z⟩ = ‖z‖²."""
    projection = magnitudes_of(index, width).mul_(z.abs()).sum(dim=-1)
    return torch.where(projection == 0, 0.0, energy / projection)


def scale_draws(num_tiles: int, key: int, device: torch.device) -> torch.Tensor:
    """int32 [T], uniform on 20 bits: the upper bits of H(2^31 + tile)."""
    return shift_right(hashes(SCALE_COUNTER, num_tiles, key, device), 32 - small_scale.DROPPED_BITS)
