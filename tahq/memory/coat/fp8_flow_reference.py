"""COAT's FP8 precision flow in plain torch: the reference of the kernels, and the implementation on CPUs.

A non-linear layer takes its input as E4M3 codes in groups of 1×16, in its forward and in its backward: the gradient is
that of the function that was computed. Everything between two sets of codes is fp32. Codes and scales are bit-equal on
every device with IEEE's fp32 where a row's mean of squares is added in the same order; see `norm_forward`.

NaN and infinity make the codes of their group, or tensor, NaN, so that a loss or a gradient is NaN and the step is
skipped.

Source: COAT §3 (quantiser), §5.2 (mixed granularity, group scaling), appendices D and G.
Letters: T tokens, C channels.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch.nn import functional as F

from tahq.memory.coat.fp8_codes import (
    E4M3,
    GROUP,
    LARGEST,
    GroupCodes,
    Layouts,
    NormForward,
    TensorCodes,
)
from tahq.memory.small_floats.block_codes import SMALLEST_SCALE


def group_maxima(x: torch.Tensor) -> torch.Tensor:
    """max|x| of every group of 1×16 of x [T, C], the last of a row possibly shorter: the first stage of group scaling.

    fp32 [T, ⌈C/16⌉]; NaN where a group holds a NaN.
    """
    return _grouped(x.float().abs()).amax(-1)


def tensor_scale(maxima: torch.Tensor, fp8: torch.dtype = E4M3) -> torch.Tensor:
    """S = max(maxima)/Δmax, fp32 [1]: the second stage of group scaling (COAT §5.2); maxima cover a tensor."""
    return (maxima.max() * (1 / LARGEST[fp8])).clamp(min=SMALLEST_SCALE).reshape(1)


def quantize_tensor(x: torch.Tensor, scale: torch.Tensor, fp8: torch.dtype, layouts: Layouts) -> TensorCodes:
    """round(x/S) with one scale; x [T, C], scale from `tensor_scale`."""
    return _in_layouts((x.float() * (1 / scale)).to(fp8), scale, layouts)


def quantize_groups(x: torch.Tensor) -> GroupCodes:
    """round(x/S) of x [T, C] in groups of 1×16, S = max|x|/448 rounded to bf16.

    With a scale rounded down the largest element is at most 448·(1 + 2⁻⁸) < 464, which still rounds to 448.
    """
    scales = (group_maxima(x) * (1 / LARGEST[E4M3])).clamp(min=SMALLEST_SCALE).bfloat16()
    return GroupCodes((x.float() * _spread(1 / scales.float(), x.shape[1])).to(E4M3), scales)


def dequantize_groups(x: GroupCodes) -> torch.Tensor:
    """fp32 [T, C]; exact, a code having 4 bits and a scale 8."""
    return x.codes.float() * _spread(x.scales.float(), x.codes.shape[1])


def norm_forward(x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float) -> NormForward:
    """Add a branch [T, C] (None: there is none) to the residual stream x [T, C], code the sum, and prepare its RMSNorm.

    The mean of squares is a sum of C numbers in a device-specific order, so `rstd` may differ between devices in its
    last bits, and with it an output code near the border of two; the input's codes may not.
    """
    total = x if added is None else x + added
    codes = quantize_groups(total)
    values = dequantize_groups(codes)
    rstd = torch.rsqrt(values.square().mean(-1) + epsilon)
    return NormForward(total, codes, rstd, group_maxima(_normalised(values, rstd, weight)))


def norm_output(
    codes: GroupCodes, rstd: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, layouts: Layouts
) -> TensorCodes:
    """x̂·rstd·w of a coded input, coded with one scale for the matrices that follow."""
    return quantize_tensor(_normalised(dequantize_groups(codes), rstd, weight), scale, E4M3, layouts)


def norm_backward(
    gradients: Sequence[torch.Tensor],
    codes: GroupCodes,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    residual_gradient: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the residual stream, in the dtype of `residual_gradient`, and of the norm's weight, fp32 [C].

    With n = x̂·rstd and g = Σ gradients, [T, C] from each matrix that takes the norm's output:
    ∂x = residual_gradient + rstd·(g·w − n·mean(g·w·n)), ∂w = Σ_T g·n.
    """
    gradient = sum(each.float() for each in gradients)
    assert isinstance(gradient, torch.Tensor)
    normalised = dequantize_groups(codes) * rstd[:, None]
    weighted = gradient * weight.float()
    inner = weighted - normalised * (weighted * normalised).mean(-1, keepdim=True)
    of_input = residual_gradient.float() + inner * rstd[:, None]
    return of_input.to(residual_gradient.dtype), (gradient * normalised).sum(0)


def gated_forward(gate: torch.Tensor, up: torch.Tensor) -> tuple[GroupCodes, GroupCodes, torch.Tensor]:
    """Code the gate's and the up projection's outputs [T, C], and take the maxima of SiLU(gate)·up."""
    gate_codes, up_codes = quantize_groups(gate), quantize_groups(up)
    return gate_codes, up_codes, group_maxima(_gated(gate_codes, up_codes))


def gated_output(gate: GroupCodes, up: GroupCodes, scale: torch.Tensor, layouts: Layouts) -> TensorCodes:
    """SiLU(gate)·up of coded inputs, coded with one scale for the down projection."""
    return quantize_tensor(_gated(gate, up), scale, E4M3, layouts)


def gated_backward(gradient: torch.Tensor, gate: GroupCodes, up: GroupCodes) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up, in the dtype of the product's gradient [T, C].

    ∂gate = g·up·σ(gate)·(1 + gate·(1 − σ(gate))), ∂up = g·SiLU(gate).
    """
    of_gate, of_up = _gated_gradients(gradient, gate, up)
    return of_gate.to(gradient.dtype), of_up.to(gradient.dtype)


def gated_maxima(gradient: torch.Tensor, gate: GroupCodes, up: GroupCodes) -> tuple[torch.Tensor, torch.Tensor]:
    """Maxima of the gradients of gate and up, which are not stored."""
    of_gate, of_up = _gated_gradients(gradient, gate, up)
    return group_maxima(of_gate), group_maxima(of_up)


def gated_gradient(
    gradient: torch.Tensor,
    gate: GroupCodes,
    up: GroupCodes,
    of: Literal["gate", "up"],
    scale: torch.Tensor,
    fp8: torch.dtype,
    layouts: Layouts,
) -> TensorCodes:
    """The gradient of gate or of up, coded with one scale while it is computed, and never stored otherwise."""
    of_gate, of_up = _gated_gradients(gradient, gate, up)
    return quantize_tensor(of_gate if of == "gate" else of_up, scale, fp8, layouts)


def rotated(
    x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, dtype: torch.dtype, *, transposed: bool
) -> torch.Tensor:
    """`rotary.Rotation`, or its transpose, x₁·c₁ + x₂·s₂ and x₂·c₂ − x₁·s₁, in `dtype`."""
    first, second = x.float().chunk(2, dim=-1)
    (c1, c2), (s1, s2) = (table.float()[:, :, None].chunk(2, dim=-1) for table in (cosine, sine))
    if transposed:
        return torch.cat((first * c1 + second * s2, second * c2 - first * s1), -1).to(dtype)
    return torch.cat((first * c1 - second * s1, second * c2 + first * s2), -1).to(dtype)


def _normalised(values: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return values * rstd[:, None] * weight.float()


def _gated(gate: GroupCodes, up: GroupCodes) -> torch.Tensor:
    values = dequantize_groups(gate)
    return values * torch.sigmoid(values) * dequantize_groups(up)


def _gated_gradients(gradient: torch.Tensor, gate: GroupCodes, up: GroupCodes) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32, of gate and of up."""
    gate_values, wide = dequantize_groups(gate), gradient.float()
    sigmoid = torch.sigmoid(gate_values)
    of_gate = wide * dequantize_groups(up) * (sigmoid * (1 + gate_values * (1 - sigmoid)))
    return of_gate, wide * (gate_values * sigmoid)


def _grouped(x: torch.Tensor) -> torch.Tensor:
    """[T, ⌈C/16⌉, 16], the last group padded with zeros."""
    padded = F.pad(x, (0, -x.shape[1] % GROUP))
    return padded.view(x.shape[0], -1, GROUP)


def _spread(of_groups: torch.Tensor, channels: int) -> torch.Tensor:
    """A number per group repeated for its elements: [T, C]."""
    return of_groups.repeat_interleave(GROUP, dim=1)[:, :channels]


def _in_layouts(codes: torch.Tensor, scale: torch.Tensor, layouts: Layouts) -> TensorCodes:
    transposed = None if layouts == "rows" else codes.view(torch.uint8).t().contiguous().view(codes.dtype)
    return TensorCodes(None if layouts == "columns" else codes, transposed, scale)
