"""Block-wise 8-bit numbers with the dynamic tree map, the format of 8-bit optimizer states.

A tensor is flattened and cut into blocks of 256 elements, the last one shorter. A block's scale is its largest
magnitude, in fp32; an element is stored as the index of the nearest of 256 fixed values in [−1, 1], or in [0, 1] for
states without a sign, times the scale.  (Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, §2.1 and
§2.2)

The map: decades i = 0 … 6, each cut into F_i equal cells whose middles are the values, and 0 and 1:

    value(i, j) = 10^(i−6) · (0.1 + 0.9 · (j + ½)/F_i),  0 ≤ j < F_i

with F_i = 2^i for each sign, or F_i = 2^(i+1) without signs: finest near 1, seven decades deep. A code is the index of
its value in ascending order: 127 is 0 with signs, 0 without; 255 is 1. There is no −1: a block's largest magnitude is
exact where it is positive, 0.7 % too small where it is negative.

Decisions that the paper leaves open:

- an element halfway between two values (their middle times the scale, in fp32) rounds towards 0;
- a block whose largest magnitude is below 2⁻¹²⁶ (all zeros, or subnormal) is zeros with scale 0;
- a block with a NaN or an infinity has the scale NaN, so all of it is NaN and damage shows;
- without signs, negative elements become 0 and positive ones never do: they round to the lowest value instead. A second
  moment of 0 with a nonzero first moment would divide by ε alone as soon as a gradient is 0.

Every operation is correctly rounded by IEEE 754, so codes and values are the same on every device.
"""

from functools import lru_cache

import torch

from tahq.memory.small_floats.block_codes import in_blocks

CPU = torch.device("cpu")
BLOCK = 256  # Elements that share a scale
SMALLEST_SCALE = 2.0**-126  # Blocks whose largest magnitude is below this, the smallest normal number, are zeros
ZERO_SIGNED = 127  # The code of 0 with signs; without it is 0
_NUM_DECADES = 7
_LARGEST_NEGATIVE = 127  # Index of the largest magnitude with a negative code: −1 has none


def encode(x: torch.Tensor, signed: bool, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes, uint8 [N], and scales, fp32 [⌈N/block⌉], of N floating-point elements in any shape and strides.

    code_k = argmin_c |map(c) − x_k / s_b|,  s_b = max |x| over block b, in fp32, with the exceptions listed above
    """
    flat = x.detach().reshape(-1).float()
    flat = flat if signed else flat.clamp(min=0)  # which lets NaN through
    rows = in_blocks(flat, block)
    largest = rows.abs().amax(dim=1)
    scales = torch.where(largest < SMALLEST_SCALE, 0.0, torch.where(largest.isinf(), torch.nan, largest))
    codes = _codes(torch.where((scales > 0)[:, None], rows, 0.0), scales, signed)
    return codes.to(torch.uint8).reshape(-1)[: flat.numel()], scales


def decode(codes: torch.Tensor, scales: torch.Tensor, signed: bool, block: int = BLOCK) -> torch.Tensor:
    """The values of codes, map(code) · s: fp32 in the shape of `codes`, uint8; scales fp32 [⌈N/block⌉]."""
    flat = dynamic_map(signed, codes.device).index_select(0, codes.reshape(-1).int())
    values = in_blocks(flat, block) * scales[:, None]
    return values.reshape(-1)[: flat.numel()].reshape(codes.shape)


@lru_cache(maxsize=32)
def dynamic_map(signed: bool, device: torch.device = CPU) -> torch.Tensor:
    """The 256 values by code, ascending, fp32; cached, so not to be written to."""
    magnitudes = _magnitudes(signed)
    negative = [-value for value in magnitudes[_LARGEST_NEGATIVE:0:-1]] if signed else []
    return torch.tensor(negative + magnitudes, dtype=torch.float64).float().to(device)


@lru_cache(maxsize=32)
def borders(signed: bool, device: torch.device = CPU) -> torch.Tensor:
    """Middles between neighbouring magnitudes, ascending, fp32: 128 with signs, 255 without; not to be written to.

    Above borders[k] a number is nearer to magnitude k + 1 than to magnitude k; without signs, borders[0] is 0.
    """
    values = torch.tensor(_magnitudes(signed), dtype=torch.float64).float().double()
    middles = ((values[:-1] + values[1:]) / 2).float()
    if not signed:
        middles[0] = 0.0
    return middles.to(device)


def _magnitudes(signed: bool) -> list[float]:
    """The values from 0 up: 129 with signs, 256 without."""
    values = [0.0]
    for decade in range(_NUM_DECADES):
        cells = 1 << (decade if signed else decade + 1)
        values += [10.0 ** (decade - 6) * (0.1 + 0.9 * (cell + 0.5) / cells) for cell in range(cells)]
    return [*values, 1.0]


def _codes(rows: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """int32 [B, block] of rows [B, block]: the number of borders, times the row's scale, below each magnitude.

    Only the border nearest to a magnitude is compared: as exact as a search, and faster.
    """
    usual = torch.where(scales > 0, scales, 1.0)[:, None]
    magnitudes = rows.abs()
    upper = _estimated_place(magnitudes / usual, signed).round_().int()
    limits = borders(signed, rows.device).index_select(0, upper.flatten() - 1).view_as(rows) * usual
    place = upper - (magnitudes <= limits).int()
    if not signed:
        return place
    return ZERO_SIGNED + torch.where(rows < 0, -place.clamp(max=_LARGEST_NEGATIVE), place)


def _estimated_place(quotients: torch.Tensor, signed: bool) -> torch.Tensor:
    """The place of each quotient, interpolated between values; rounded, the number, from 1, of the border to compare.

    In decade i the place is a straight line, u_i(a) = first_i + (10^(6−i)·a − 0.1)·F_i/0.9. Each line is flatter than
    the one before and meets it at their joint, so the place is the lowest of all. Borders lie at whole u inside a
    decade, at 0.2 above a whole number where one begins, and at 0.25 below one before 1.
    """
    lowest = torch.full_like(quotients, torch.inf)
    for decade in range(_NUM_DECADES):
        cells = 1 << (decade if signed else decade + 1)
        first = cells if signed else cells - 1
        line = quotients * (10.0 ** (6 - decade) * cells / 0.9)
        torch.minimum(lowest, line.add_(first - cells / 9), out=lowest)
    return lowest
