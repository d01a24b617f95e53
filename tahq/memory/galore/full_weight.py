"""A weight in fp32 or bf16, with the same operations as one in INT8: what GaLore without quantisation has.

bf16 has 8 significant bits: to nearest, an update below a 512th of a weight is lost, however often it comes. With a key
the sum in fp32 is rounded up or down in size, with the probability that makes the mean right, by a draw as `Int8Weight`
has it.
"""

import torch
from torch.nn import functional

from tahq.memory.galore.affine_backend import affine_kernels
from tahq.quant.stochastic_rounding import hashes, shift_right

_LOST_BITS = 16
"""Of fp32's 23 bits of mantissa, bf16 does not have these."""
_SLAB = 2**20
"""Elements that are rounded stochastically at a time: temporaries are 24 bytes each."""


class FullWeight:
    """One tensor of the weight's shape.

    Args:
        shape: the weight's.
        device: where it lies; uninitialised until it is assigned or loaded.
        dtype: fp32 or bf16. An update is added in fp32 under either, and the sum rounded.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
        self.shape = torch.Size(shape)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the folder of a snapshot that they are kept in; the tensors themselves."""
        return {"model": self.values}

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight; the tensor itself where it has this type."""
        return self.values.to(dtype)

    def rows(self, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows [..., n] of the weight [m, n] for int64 indices [...]."""
        return functional.embedding(indices, self.values).to(dtype)

    @torch.no_grad()
    def assign(self, values: torch.Tensor) -> None:
        """Take these values (of any float type), rounded to nearest."""
        self.values.copy_(values)

    @torch.no_grad()
    def add(self, update: torch.Tensor, *, keep: float, rate: float, key: int | None) -> None:
        """W ← keep · W + rate · update, in fp32; see `Int8Weight.add`. For fp32 nothing is drawn."""
        if key is not None and self.values.dtype == torch.bfloat16:
            self._add_stochastic(update, keep, rate, key)
            return
        if keep == 1.0:  # torch adds bf16 in fp32 and rounds once
            self.values.add_(update, alpha=rate)
            return
        weight = self.values.mul_(keep) if self.values.dtype == torch.float32 else self.values.float().mul_(keep)
        weight.add_(update.to(torch.float32), alpha=rate)
        if weight is not self.values:
            self.values.copy_(weight)

    def _add_stochastic(self, update: torch.Tensor, keep: float, rate: float, key: int) -> None:
        kernels = affine_kernels(self.values)
        if kernels is not None:
            kernels.add16(self.values, update, keep=keep, rate=rate, key=key)
            return
        flat, values = update.reshape(-1), self.values.view(-1)
        for first in range(0, flat.numel(), _SLAB):
            part = values[first : first + _SLAB]
            # two roundings, not a fused one: every device gets the same bits
            weight = part.float().mul_(keep).add_(flat[first : first + _SLAB].to(torch.float32).mul(rate))
            part.copy_(round_to_bf16(weight, first, key))


def round_to_bf16(x: torch.Tensor, first: int, key: int) -> torch.Tensor:
    """Round fp32 [N] stochastically to numbers that bf16 has; what it has, infinities and NaN stay as they are.

    x lies between two neighbours in bf16, the share f from the smaller in size towards the larger, a multiple of 2^−16:
    it becomes the larger with probability f. Added to the bits of x, a draw of 16 bits carries into those that stay
    where it is at least 2^16·(1 − f). The mean over keys is x, exactly.

    Args:
        x: contiguous.
        first: number of the first element, whose draw depends on it and the key.
        key: 64 bits.
    """
    draw = shift_right(hashes(first, x.numel(), key, x.device), 32 - _LOST_BITS)
    rounded = x.view(torch.int32).add(draw).bitwise_and_(-(2**_LOST_BITS)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)
