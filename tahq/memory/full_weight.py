"""A weight in fp32 or bf16, with the same operations as one in INT8: what GaLore without quantisation has."""

import torch


class FullWeight:
    """One tensor of the weight's shape.

    Args:
        shape: the weight's.
        device: where it lies; uninitialised until it is assigned or loaded.
        dtype: fp32 or bf16. An update is added in fp32 under either, and the sum rounded to nearest.
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

    @torch.no_grad()
    def assign(self, values: torch.Tensor) -> None:
        """Take these values (of any float type), rounded to nearest."""
        self.values.copy_(values)

    @torch.no_grad()
    def add(self, update: torch.Tensor, *, keep: float, rate: float, key: int | None) -> None:
        """W ← keep · W + rate · update, in fp32; see `Int8Weight.add`. Nothing is drawn."""
        if keep == 1.0:  # torch adds bf16 in fp32 and rounds once
            self.values.add_(update, alpha=rate)
            return
        weight = self.values.mul_(keep) if self.values.dtype == torch.float32 else self.values.float().mul_(keep)
        weight.add_(update.to(torch.float32), alpha=rate)
        if weight is not self.values:
            self.values.copy_(weight)
