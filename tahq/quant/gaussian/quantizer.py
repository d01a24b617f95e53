"""Transformed values to codes of the Gaussian-optimal quantiser and back, each tile with its own bits and step.

A code of b bits counts the levels ascending: 2^(b−1) + m for a value that is not negative (−0 is not), 2^(b−1) − 1 − m
for a negative one, m being the index of the magnitude: the number of thresholds t_j with |z| > fp32(t_j·s).

Shape letters: T tiles, G values a tile. Equal to the bit on every device, but for sums.
"""

from dataclasses import dataclass
from functools import cache

import torch

from tahq.quant.gaussian import levels as gaussian_levels


@dataclass(frozen=True, slots=True)
class CodedTiles:
    """What a stream of `eden` or `wf` says of its T tiles.

    Attributes:
        exponent: e, int32 without dimensions; what is coded is x·2^e.
        scale: uint8 [T], codes of `gaussian.small_scale`; 255 where a value is not finite.
        width: int32 [T], bits of the tile's codes, 1 to 8.
        codes: uint8 [T, G].
    """

    exponent: torch.Tensor
    scale: torch.Tensor
    width: torch.Tensor
    codes: torch.Tensor


def magnitude_indices(magnitude: torch.Tensor, step: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """m of each value: how many thresholds of its tile's bits, times its tile's step, it exceeds.

    Args:
        magnitude: fp32 [T, G], not negative, finite.
        step: fp32 [T], not negative.
        width: int32 [T], bits of each tile.

    Returns:
        int32 [T, G]. Where the step is 0, all thresholds are: 0 for a value of 0, the last for others.
    """
    borders = _tables(magnitude.device).thresholds[width] * step.unsqueeze(-1)
    count = torch.searchsorted(borders, magnitude, out_int32=True)
    return torch.minimum(count, _num_magnitudes(width) - 1)


def magnitudes_of(index: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """Level magnitudes fp32 [T, G] of indices m [T, G] in tiles of `width` bits [T]."""
    table = _tables(index.device).magnitudes
    place = index + table.shape[1] * width.unsqueeze(-1)
    return table.view(-1).index_select(0, place.view(-1)).view(index.shape)


def signed_codes(z: torch.Tensor, index: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """uint8 codes [T, G] of values z whose magnitudes have these indices."""
    half = _num_magnitudes(width)
    return torch.where(z >= 0, half + index, half - 1 - index).to(torch.uint8)


def levels_of(codes: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """Signed levels fp32 [T, G] of uint8 codes [T, G] in tiles of `width` bits [T]."""
    table = _tables(codes.device).levels
    place = codes.to(torch.int32) + table.shape[1] * width.unsqueeze(-1)
    return table.view(-1).index_select(0, place.view(-1)).view(codes.shape)


def _num_magnitudes(width: torch.Tensor) -> torch.Tensor:
    """2^(b−1), int32 [T, 1]."""
    return (torch.ones_like(width) << width - 1).unsqueeze(-1)


class _Tables:
    """The tables of `gaussian.levels` on one device."""

    def __init__(self, device: torch.device) -> None:
        self.magnitudes = torch.from_numpy(gaussian_levels.magnitude_table()).to(device)
        self.thresholds = torch.from_numpy(gaussian_levels.threshold_table()).to(device)
        self.levels = torch.from_numpy(gaussian_levels.level_table()).to(device)


@cache
def _tables(device: torch.device) -> _Tables:
    """Copied to a device once, as a copy from host memory synchronises."""
    return _Tables(device)
