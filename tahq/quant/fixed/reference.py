"""Fixed point's arithmetic in plain torch: symmetric codes, one scale per group, Eq. 24's constant.

ĝ = Q(c·g)/c (TAH-Quant, Eq. 24). The constant c is a power of two, 2^e, that takes the largest magnitude
of the tensor into [2^14, 2^15), near the top of fp16: groups down to 2^−28 of the largest then keep a
scale of full precision, and gradients of 1e-9 code like gradients of 1. A group's scale is its largest
magnitude rounded *up* to fp16, so that no value is clipped, and stochastic rounding has no bias.

Shape letters: T groups, G channels per group. Equal to the bit on every device.
"""

import torch

from tahq.quant.fixed.stream import TOP_EXPONENT, FixedLayout, FixedTiles, largest_code, pack, unpack
from tahq.quant.stochastic_rounding import round_stochastic_
from tahq.quant.tiling import largest_magnitude, power_of_two, top_exponent


def encode(layout: FixedLayout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
    """A stream of version 1, on any device, without synchronising it."""
    groups, bits = layout.tiling.split(x).reshape(-1, layout.tiling.group), layout.spec.bits
    finite = largest_magnitude(groups).isfinite()
    exponent = top_exponent(groups, finite, TOP_EXPONENT)
    y = torch.where(finite.unsqueeze(-1), groups, 0.0).mul_(power_of_two(exponent))
    scale = ceil_to_fp16(largest_magnitude(y))
    step = torch.where(scale == 0, torch.inf, step_size(scale, bits))
    y.div_(step.unsqueeze(-1))
    rounded = y.round_() if layout.spec.round == "nearest" else round_stochastic_(y, key)
    largest = largest_code(bits)
    codes = rounded.clamp_(-largest, largest).add_(largest)
    return pack(layout, FixedTiles(exponent, torch.where(finite, scale, torch.nan), codes))


def decode(
    layout: FixedLayout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
) -> torch.Tensor:
    """The tensor of an accepted stream: q·(s·2^−e), s = fp32(scale)/Q; raises what `unpack` does.

    s·2^−e is kept finite, so that a code of 0 is 0 even in a tensor that reaches fp32's largest.
    """
    tiles, bits = unpack(layout, buf), layout.spec.bits
    step = step_size(tiles.scale, bits).mul_(power_of_two(-tiles.exponent))
    step.clamp_(max=torch.finfo(torch.float32).max)
    return layout.tiling.join(tiles.codes.sub_(largest_code(bits)).mul_(step.unsqueeze(-1)), dtype)


def step_size(scale: torch.Tensor, bits: int) -> torch.Tensor:
    """s = fp32(scale)/Q, fp32 [T].

    The divisor is a tensor because CUDA multiplies by the reciprocal of a number, which rounds differently.
    """
    magnitude = scale.float()
    return magnitude / torch.full_like(magnitude, largest_code(bits))


def ceil_to_fp16(values: torch.Tensor) -> torch.Tensor:
    """The least fp16 number not below each fp32 value (not negative, at most 65,504).

    Rounds to nearest, then takes one step up where that fell short: bit patterns of fp16 numbers are in their order.
    """
    nearest = values.half()
    short = nearest.float() < values
    return (nearest.view(torch.int16) + short.to(torch.int16)).view(torch.float16)
