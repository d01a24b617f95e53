"""FP8 formats, and tensors of COAT's activations: codes with scales for groups of 16 or a whole tensor.

Letters: T tokens, C channels, N output channels of a matrix.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Literal, NamedTuple

import torch

GROUP = 16  # Elements along the channels that share a scale in non-linear layers (COAT §5.2, appendix H)
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
FP8_FORMATS = {"e4m3": E4M3, "e5m2": E5M2}  # By their name in cluster.yaml
LARGEST = {E4M3: 448.0, E5M2: 57344.0}  # Δmax of each format
FRACTION_BITS = {E4M3: 3, E5M2: 2}
SMALLEST_SCALE = 2.0**-120
"""Lower limit of scales, so that a scale and its reciprocal stay within fp32's normal range; zeros stay zeros."""

Layouts = Literal["rows", "columns", "both"]
"""Layouts of a tensor's codes that are written: not transposed, transposed, or both."""

_FIRST_WITH_FP8 = (8, 9)


@cache
def has_fp8_units(device: torch.device) -> bool:
    """Whether a device has FP8 conversions and products: NVIDIA's from compute capability 8.9 on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _FIRST_WITH_FP8


class GroupCodes(NamedTuple):
    """A tensor [T, C] in groups of 16 along its channels."""

    codes: torch.Tensor  # E4M3 [T, C]
    scales: torch.Tensor  # bf16 [T, ⌈C/16⌉]


class TensorCodes(NamedTuple):
    """A matrix [T, C] with one scale, in one or both layouts.

    `row_codes`: [T, C]; `column_codes`: [C, T], both contiguous; `scale`: fp32 [1], on their device.
    FP8 matrix units need both operands contiguous along the summed dimension, so a backward needs the transposed codes;
    where products are emulated, a view suffices.
    """

    row_codes: torch.Tensor | None
    column_codes: torch.Tensor | None
    scale: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        """Codes [T, C]."""
        if self.row_codes is None:
            assert self.column_codes is not None
            return self.column_codes.t()
        return self.row_codes

    @property
    def columns(self) -> torch.Tensor:
        """Codes [C, T]."""
        return self.rows.t() if self.column_codes is None else self.column_codes

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Values [T, C]."""
        return (self.rows.float() * self.scale).to(dtype)


class NormForward(NamedTuple):
    """The results of an RMSNorm's first pass."""

    total: torch.Tensor  # Its input, the sum of residual stream and branch, in the stream's dtype
    codes: GroupCodes  # The same in groups
    rstd: torch.Tensor  # fp32 [T], of the coded input
    maxima: torch.Tensor  # Maxima of the output's magnitudes, in no particular order


def kernels_for(device: torch.device) -> ModuleType:
    """`fp8_flow_triton` on CUDA with triton, else `fp8_flow_reference`, which documents the functions of both."""
    return _kernels_for(device.type)


@cache
def _kernels_for(device_type: str) -> ModuleType:
    has_triton = device_type == "cuda" and find_spec("triton") is not None
    return import_module(f"tahq.memory.coat.fp8_flow_{'triton' if has_triton else 'reference'}")
