"""What a codec made for entropy coding would take: wf's transform, one step for a whole token, an ideal coder behind.

Values z of a tile (centred and transformed as wf does) become round(z/Δ) with Δ = c·√F, F being the token's mean
energy: uniform steps, as an entropy coder wants them, spread the error evenly over a token, which is what
water-filling aims at. The ideal coder knows the frequencies of the codes for each level of energy of a tile in its
token, in eighths of an octave; the level is paid for with the 8 bits of wf's scale.
"""

import math

import torch
from stream_codes import entropy

from tahq.quant.tah.reference import hadamard
from tahq.quant.tiling import Tiling
from tahq.quant.wf import reference as wf_reference

LEVEL_BITS = 8
MEAN_BITS = 16


class UniformSteps:
    """One tensor, at any step."""

    def __init__(self, x: torch.Tensor, group: int) -> None:
        tiling = Tiling.of(x.shape, group)
        y = tiling.split(x).flatten(0, 1)
        mean = wf_reference.channel_means(y).float()
        tiles = y - mean.view(y.shape[1:])
        self._z = hadamard(tiles.reshape(-1, tiling.group))
        energy = self._z.square().mean(dim=-1).view(tiles.shape[:-1])
        self._level = wf_reference.levels_in_token(energy).flatten()
        self._token = energy.mean(dim=-1, keepdim=True).sqrt().expand(energy.shape).reshape(-1, 1)
        self._norm = float(x.float().norm())
        self._overhead = LEVEL_BITS / tiling.group + MEAN_BITS * tiling.channels / x.numel()

    def error(self, step: float) -> float:
        """‖x̂ − x‖/‖x‖ with Δ = step·√F."""
        back = self._codes(step).mul_(step * self._token)
        return float((back - self._z).norm()) / self._norm

    def bits(self, step: float) -> float:
        """An element, by an ideal coder, with levels and means."""
        codes = self._codes(step)
        shifted = codes - codes.min()
        parts = [shifted[self._level == level] for level in self._level.unique()]
        return sum(part.numel() * entropy(part) for part in parts) / codes.numel() + self._overhead

    def step_of(self, error: float) -> float:
        """The step of this error, by bisection."""
        low, high = 1e-3, 8.0
        for _ in range(24):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self.error(middle) > error else (middle, high)
        return low

    def _codes(self, step: float) -> torch.Tensor:
        return (self._z / (step * self._token)).round_()
