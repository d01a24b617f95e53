"""Which tensors the Triton kernels of our AdamWs take; all others are computed in plain torch."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from tahq.quant.backends import interprets_triton

_ALIGNMENT = 16
"""Bytes: kernels are compiled for tensors that begin at a multiple of it."""
_TYPES = (torch.float32, torch.bfloat16, torch.uint8)


def has_kernels(*tensors: torch.Tensor) -> bool:
    """Whether kernels can take these: on a device that Triton knows, aligned, of types that kernels have."""
    return (
        _can_run(tensors[0].device.type)
        and tensors[0].numel() > 0
        and all(each.data_ptr() % _ALIGNMENT == 0 and each.dtype in _TYPES for each in tensors)
    )


def triton_backend() -> ModuleType:
    """`adamw_triton`; importing it needs triton."""
    return import_module("tahq.memory.adam.triton")


@cache
def _can_run(device_type: str) -> bool:
    if device_type == "cpu":
        return interprets_triton()
    return has_ptx(device_type)


@cache
def has_ptx(device_type: str) -> bool:
    """Whether kernels with PTX in them can be compiled for a kind of device: NVIDIA's, not AMD's, with triton."""
    return device_type == "cuda" and torch.version.hip is None and find_spec("triton") is not None
