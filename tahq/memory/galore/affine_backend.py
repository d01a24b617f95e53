"""Whether codes of `affine_groups` are handled by Triton's kernels, or by plain torch."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch


def affine_kernels(codes: torch.Tensor) -> ModuleType | None:
    """`affine_triton`, for codes on CUDA where triton is installed; None: plain torch."""
    return _loaded() if codes.is_cuda else None


@cache
def _loaded() -> ModuleType | None:
    return import_module("tahq.memory.galore.affine_triton") if find_spec("triton") is not None else None
