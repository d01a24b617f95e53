"""Affine integer codes for groups of 256 values, with a scale and a zero-point each, in plain torch.

    value = (code − zero) · scale,  0 ≤ code ≤ levels

A group's range always includes 0 (otherwise clamping the zero-point would lose the largest value of a group of one
sign), so every group has a code for 0, and zeros that pad the last group change nothing. The scale is bf16, rounded
*up* so that the range still fits; bf16 has fp32's exponents, so weights of 1e-30 and of 1e30 have the same relative
error. Code minus zero has 9 bits and the scale 8: their product is exact in fp32, so decoding gives the same bits
everywhere.

Source: Q-GaLore §3.1, which leaves open how scale and zero-point are stored; 3 bytes for 256 values here.
Shapes: G groups of 256 values.
"""

import math
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch.nn import functional

GROUP = 256
SMALLEST_SCALE = 2.0**-126
"""The smallest normal number; also the scale of a group of zeros."""


def num_groups(numel: int) -> int:
    """Groups of this many values, the last one possibly partial."""
    return -(-numel // GROUP)


def as_groups(flat: torch.Tensor) -> torch.Tensor:
    """[N] as [G, 256], padded with zeros; a view where N is a multiple of 256."""
    missing = -flat.numel() % GROUP
    return (functional.pad(flat, (0, missing)) if missing else flat).view(-1, GROUP)


def scales(groups: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and the exact zero-point of groups.

    scale = (max(x, 0) − min(x, 0)) / steps, rounded up to bf16; zero = −min(x, 0) / scale, in [0, steps], not yet a
    whole number; both fp32 [G], of finite groups fp32 [G, 256].
    """
    high = groups.amax(1).clamp_(min=0.0)
    low = groups.amin(1).clamp_(max=0.0)
    # A tensor: CUDA divides by a number by multiplying with its reciprocal, which rounds differently.
    number = torch.full((), float(steps), device=groups.device)
    # divided before they are subtracted: the range of the largest numbers is infinite
    scale = _up_to_bf16((high / number - low / number).clamp_(min=SMALLEST_SCALE))
    return scale, -low / scale


def decode(codes: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(code − zero) · scale in fp32 [G, 256], then rounded to `dtype`; codes and zero [G] of any integer type."""
    return codes.float().sub_(zero.float()[:, None]).mul_(scale.float()[:, None]).to(dtype)


def affine_nbytes(shape: tuple[int, ...], bits: int) -> int:
    """Bytes of a tensor of this shape in codes of this many bits, with scales (2 per group) and zero-points (1)."""
    numel = math.prod(shape)
    return -(-numel * bits // 8) + 3 * num_groups(numel)


def _up_to_bf16(x: torch.Tensor) -> torch.Tensor:
    """The smallest bf16 not below x, as fp32; x positive and finite."""
    return x.view(torch.int32).add(0xFFFF).bitwise_and_(-0x10000).view(torch.float32)


def affine_kernels(codes: torch.Tensor) -> ModuleType | None:
    """The Triton kernels, for codes on CUDA where triton is installed; None: plain torch."""
    return import_module("tahq.memory.galore.affine_kernels") if codes.is_cuda and _has_triton() else None


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
