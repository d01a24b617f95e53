"""Random inputs that many tests share."""

import torch


def normal(shape: int | tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """fp32 numbers of the standard normal distribution, the same for every call with this seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
