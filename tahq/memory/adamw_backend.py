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
        can_run(tensors[0].device.type)
        and tensors[0].numel() > 0
        and all(each.data_ptr() % _ALIGNMENT == 0 and each.dtype in _TYPES for each in tensors)
    )


def triton_backend() -> ModuleType:
    """`adamw_triton`; importing it needs triton."""
    return import_module("tahq.memory.adamw_triton")


@cache
def can_run(device_type: str) -> bool:
    """Whether there are kernels for a kind of device: for CUDA with triton, for the CPU in Triton's interpreter."""
    if device_type == "cpu" and not interprets_triton():
        return False
    return device_type in ("cpu", "cuda") and find_spec("triton") is not None
