"""Adam's direction in the low rank, its moments in fp32 or in 8 bits a number.

    m ← β₁·m + (1 − β₁)·g,  v ← β₂·v + (1 − β₂)·g²
    direction = (m / (1 − β₁ᵗ)) / (√v / √(1 − β₂ᵗ) + ε)                (Kingma & Ba 2015, Alg. 1)

t counts this weight's own steps. The direction is of the moments before they are rounded to 8 bits.
"""

import math
from collections.abc import Mapping
from typing import Literal, Protocol

import torch

from tahq.memory import blockwise8

MomentType = Literal["int8", "fp32"]


class Moment(Protocol):
    """How one moment is kept."""

    def read(self) -> torch.Tensor:
        """fp32, to be changed and given back to `write`."""

    def write(self, values: torch.Tensor) -> None:
        """Keep what `read` gave, changed."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What is kept, by the ending of its name in a snapshot."""


class Fp32Moment:
    """A moment as it is."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self._values = torch.zeros(shape, device=device)

    def read(self) -> torch.Tensor:
        """The tensor itself."""
        return self._values

    def write(self, values: torch.Tensor) -> None:
        """It has been changed in place."""
        if values is not self._values:
            self._values.copy_(values)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """One tensor."""
        return {"": self._values}


class Blockwise8Moment:
    """A moment in `blockwise8`'s codes, a scale for 256 of them."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, *, signed: bool) -> None:
        self._shape, self._signed = shape, signed
        self._codes = blockwise8.zero_codes(shape, signed, device)
        self._absmax = torch.zeros(blockwise8.num_blocks(shape), device=device)

    def read(self) -> torch.Tensor:
        """Decoded, in memory of its own."""
        return blockwise8.decode(self._codes, self._absmax, self._signed, self._shape)

    def write(self, values: torch.Tensor) -> None:
        """Round to the nearest codes."""
        codes, absmax = blockwise8.encode(values, self._signed)
        self._codes.view(-1).copy_(codes)
        self._absmax.copy_(absmax)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Codes and scales."""
        return {"": self._codes, "_absmax": self._absmax}


class LowRankAdam:
    """The moments of one weight.

    Args:
        shape: of its projected gradient.
        device: where it lies.
        kind: of the moments.
        betas: β₁ and β₂.
        epsilon: ε.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        device: torch.device,
        kind: MomentType,
        betas: tuple[float, float],
        epsilon: float,
    ) -> None:
        self.num_steps = 0
        self._betas, self._epsilon = betas, epsilon
        self._first = _moment(kind, shape, device, signed=True)
        self._second = _moment(kind, shape, device, signed=False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The moments by the name of the state in a snapshot; the tensors themselves."""
        moments = {"exp_avg": self._first, "exp_avg_sq": self._second}
        return {f"{name}{end}": value for name, moment in moments.items() for end, value in moment.tensors().items()}

    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        """Take a step's gradient, fp32, into the moments; which way to go, fp32, to be descended."""
        self.num_steps += 1
        (beta1, beta2), steps = self._betas, self.num_steps
        first = self._first.read().lerp_(gradient, 1 - beta1)
        second = self._second.read().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = second.sqrt().div_(math.sqrt(1 - beta2**steps)).add_(self._epsilon)
        direction = (first / denominator).div_(1 - beta1**steps)
        self._first.write(first)
        self._second.write(second)
        return direction


def _moment(kind: MomentType, shape: tuple[int, ...], device: torch.device, *, signed: bool) -> Moment:
    return Fp32Moment(shape, device) if kind == "fp32" else Blockwise8Moment(shape, device, signed=signed)
