"""Which code computes the FP8 precision flow on a device: plain torch, or Triton's kernels on CUDA.

Both have the functions of `fp8_flow_reference`, and `fp8_flow_triton` says where their results may differ.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Literal, Protocol, cast

import torch

from tahq.memory.coat import fp8_flow_reference
from tahq.memory.coat.fp8_codes import GroupCodes, Layouts, NormForward, TensorCodes


class FlowKernels(Protocol):
    """What `fp8_flow_reference` and `fp8_flow_triton` have in common; the former says what each does."""

    group_maxima: Callable[[torch.Tensor], torch.Tensor]
    tensor_scale: Callable[[torch.Tensor, torch.dtype], torch.Tensor]
    quantize_tensor: Callable[[torch.Tensor, torch.Tensor, torch.dtype, Layouts], TensorCodes]
    norm_forward: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, float], NormForward]
    norm_output: Callable[[GroupCodes, torch.Tensor, torch.Tensor, torch.Tensor, Layouts], TensorCodes]
    norm_backward: Callable[
        [Sequence[torch.Tensor], GroupCodes, torch.Tensor, torch.Tensor, torch.Tensor],
        tuple[torch.Tensor, torch.Tensor],
    ]
    gated_forward: Callable[[torch.Tensor, torch.Tensor], tuple[GroupCodes, GroupCodes, torch.Tensor]]
    gated_output: Callable[[GroupCodes, GroupCodes, torch.Tensor, Layouts], TensorCodes]
    gated_backward: Callable[[torch.Tensor, GroupCodes, GroupCodes], tuple[torch.Tensor, torch.Tensor]]
    gated_maxima: Callable[[torch.Tensor, GroupCodes, GroupCodes], tuple[torch.Tensor, torch.Tensor]]
    gated_gradient: Callable[
        [torch.Tensor, GroupCodes, GroupCodes, Literal["gate", "up"], torch.Tensor, torch.dtype, Layouts], TensorCodes
    ]


def kernels_for(device: torch.device) -> FlowKernels:
    """The kernels for a device; CUDA without triton gets the reference, which runs on any."""
    return _kernels_for(device.type)


@cache
def _kernels_for(device_type: str) -> FlowKernels:
    if device_type == "cuda" and find_spec("triton") is not None:
        return cast(FlowKernels, importlib.import_module("tahq.memory.coat.fp8_flow_triton"))
    return cast(FlowKernels, fp8_flow_reference)
