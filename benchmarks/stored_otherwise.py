"""Ways to store a group's scale and power that were thought of and not taken, simulated in fp64 (decision 0018).

Each rounds M, the group's largest magnitude, and k, which log(Δmax/Δmin)/log(M/min) gives; codes are E4M3 and relative
to both as they are then. Groups: fp32 [P, 128].
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tahq.memory.coat.fp8_groups import E4M3, as_groups

_MAGNITUDES = torch.tensor(E4M3.magnitudes, dtype=torch.float64)
_RANGE = 1 / E4M3.smallest_share
_NORMAL_RANGE = E4M3.largest / 2**-6
LARGEST_POWER, SMALLEST_POWER = 32, 1 / 16

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""fp64 [P] as it would be stored."""


def nearest_code(y: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """The code of the nearest magnitude, the even one of two as near; beyond the last, the last. int64."""
    upper = torch.searchsorted(magnitudes, y).clamp(1, len(magnitudes) - 1)
    lower = upper - 1
    from_lower, to_upper = y - magnitudes[lower], magnitudes[upper] - y
    goes_up = (to_upper < from_lower) | ((to_upper == from_lower) & (upper % 2 == 0))
    return torch.where(goes_up, upper, lower)


@dataclass(frozen=True, slots=True)
class Storing:
    """`group_bits`: of scale and power together. `range`: what k stretches a group to."""

    group_bits: int
    scale: Rounding
    power: Rounding
    range: float = _RANGE

    @property
    def bits(self) -> float:
        """A number's, its share of scale and power included."""
        return 8 + self.group_bits / 128

    def round_trip(self, x: torch.Tensor) -> torch.Tensor:
        """What would be read of x, any shape, in fp64."""
        groups = as_groups(x.reshape(-1)).double()
        magnitudes = groups.abs()
        largest = magnitudes.amax(1)
        smallest = torch.where(magnitudes > 0, magnitudes, torch.inf).amin(1)
        scale = self.scale(torch.where(largest > 0, largest, 1.0))
        ratio = (smallest / scale).clamp(max=1 - 1e-9)
        k = self.power((math.log(self.range) / -ratio.log()).clamp(SMALLEST_POWER, LARGEST_POWER))
        k = torch.where(smallest < largest, k, 1.0)[:, None]
        ratios = (magnitudes / scale[:, None]).clamp(max=1)
        codes = nearest_code(ratios**k * _MAGNITUDES[-1], _MAGNITUDES)
        shares = (_MAGNITUDES[codes] / _MAGNITUDES[-1]) ** (1 / k)
        return (groups.sign() * scale[:, None] * shares).view(-1)[: x.numel()].view(x.shape)


def _exact(x: torch.Tensor) -> torch.Tensor:
    return x


def _one(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x)


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.float().bfloat16().double()


def _bf16_up(x: torch.Tensor) -> torch.Tensor:
    bits = x.float().view(torch.int32)
    return (bits + 0xFFFF & ~0xFFFF).view(torch.float32).double()


def _power_of_two_up(x: torch.Tensor) -> torch.Tensor:
    return 2.0 ** x.log2().ceil()


def _powers_an_octave(steps: float) -> Rounding:
    """Down to 2^(j/steps − 4)."""
    return lambda k: 2.0 ** (((k.log2() + 4) * steps + 1e-9).floor() / steps - 4)


STORINGS: Mapping[str, Storing] = {
    "fp32 scale, no expansion": Storing(32, _exact, _one),
    "bf16 scale, no expansion": Storing(16, _bf16, _one),
    "fp32 scale, fp32 k": Storing(64, _exact, _exact),
    "bf16 scale, fp32 k": Storing(48, _bf16, _exact),
    "bf16 scale, byte k (28 an octave): tahq's": Storing(24, _bf16, _powers_an_octave(28)),
    "the same, scale rounded up": Storing(24, _bf16_up, _powers_an_octave(28)),
    "the same, range of normal numbers": Storing(24, _bf16, _powers_an_octave(28), _NORMAL_RANGE),
    "bf16 scale, 4 bits of k (1.7 an octave)": Storing(20, _bf16, _powers_an_octave(15 / 9)),
    "power of two (byte), byte k": Storing(16, _power_of_two_up, _powers_an_octave(28)),
}
