"""Adam's direction in the low rank, its moments in fp32 or in 8 bits a number.

    m ← β₁·m + (1 − β₁)·g,  v ← β₂·v + (1 − β₂)·g²
    direction = m / (1 − β₁ᵗ) / (√v / √(1 − β₂ᵗ) + ε)                (Kingma & Ba 2015, Alg. 1)

t counts this weight's own steps. It is our AdamW's step (`adamw_step`, `adamw8bit`) at rate −1, of a weight that is 0:
the same plain torch, the same kernels, and the direction is of the moments before they are rounded to 8 bits.
"""

from typing import Literal

import torch

from tahq.memory.adam.adamw8bit import adamw8bit_step
from tahq.memory.adam.backend import has_kernels, triton_backend
from tahq.memory.adam.blockwise8 import num_blocks, zero_codes
from tahq.memory.adam.step import AdamwNumbers, adamw_step

MomentType = Literal["int8", "fp32"]


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
        self._group = {"lr": -1.0, "betas": betas, "eps": epsilon, "weight_decay": 0.0}
        names = {"exp_avg": True, "exp_avg_sq": False}
        if kind == "fp32":
            self._states = {name: torch.zeros(shape, device=device) for name in names}
        else:
            self._states = {name: zero_codes(shape, signed, device) for name, signed in names.items()}
            self._states |= {f"{name}_scale": torch.zeros(num_blocks(shape), device=device) for name in names}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The moments by the name of the state in a snapshot; the tensors themselves."""
        return dict(self._states)

    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        """Take a step's gradient, fp32, into the moments; which way to go, fp32, to be descended."""
        self.num_steps += 1
        numbers = AdamwNumbers.of(self._group, self.num_steps)
        direction = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
        flat = direction.view(-1), gradient.reshape(-1)
        m, v = (self._states[name].view(-1) for name in ("exp_avg", "exp_avg_sq"))
        use_kernels = has_kernels(*flat, m, v)
        if m.dtype == torch.uint8:
            coded_step = triton_backend().adamw8bit_step if use_kernels else adamw8bit_step
            coded_step(*flat, m, v, self._states["exp_avg_scale"], self._states["exp_avg_sq_scale"], numbers)
        else:
            plain_step = triton_backend().plain_adamw_step if use_kernels else adamw_step
            plain_step(*flat, m, v, numbers)
        return direction
