"""Rotary embedding of Q or K as one function, which keeps nothing but its tables.

Written out in torch it is eight operations over the tensor and as many in backward; on CUDA this is one kernel.

Letters: B samples, S positions, H heads, D channels a head.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """x·cos + half(x)·sin, half(x₁, x₂) = (−x₂, x₁), in fp32, rounded to the dtype of x.

    Args:
        x: [B, S, H, D].
        cosine: [1, S, D].
        sine: [1, S, D].
    """
    rotated: torch.Tensor = _Rotation.apply(x, cosine, sine)  # type: ignore[no-untyped-call]
    return rotated


class _Rotation(torch.autograd.Function):
    """A linear map of pairs of channels; its transpose takes the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotated(x, cosine, sine, transposed=False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotated(gradients[0], cosine, sine, transposed=True), None, None


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    compute = _kernel_for(x.device.type)
    return compute(x, cosine, sine, transposed)


@cache
def _kernel_for(device_type: str) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]:
    if device_type == "cuda" and find_spec("triton") is not None:
        of_triton: Callable[..., torch.Tensor] = import_module("tahq.memory.coat.fp8_flow_triton").rotated
        return of_triton
    return rotated


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, transposed: bool) -> torch.Tensor:
    """The reference: `rotate`, or its transpose, x₁·c₁ + x₂·s₂ and x₂·c₂ − x₁·s₁."""
    first, second = x.float().chunk(2, dim=-1)
    (c1, c2), (s1, s2) = (table.float()[:, :, None].chunk(2, dim=-1) for table in (cosine, sine))
    if transposed:
        return torch.cat((first * c1 + second * s2, second * c2 - first * s1), -1).to(x.dtype)
    return torch.cat((first * c1 - second * s1, second * c2 + first * s2), -1).to(x.dtype)
