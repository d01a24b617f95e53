"""`fp8_flow_reference` on CUDA, with the same functions and arguments, which are documented there.

Bit-equal to the reference: scales and codes of a given tensor, in groups or with one scale, and a norm's output for a
given `rstd`. Within a few units of fp32's last place: `rstd` (another order of additions) and everything after SiLU
(another exponential), so that an output code near the border of two may be its neighbour. Gradients are summed in
another order.

Quantisation is fused: the norm's kernel codes its input and takes its output's maxima in one pass; SiLU's likewise.
SiLU's gradients are computed twice, for their maxima and as codes, and never stored otherwise. Maxima are passed as
bits, int32, which order NaN above infinity. No call waits for the device.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from triton import next_power_of_2

from tahq.kernel_launch import launch
from tahq.memory.coat import fp8_flow_kernels as kernels
from tahq.memory.coat.fp8_codes import (
    E4M3,
    FRACTION_BITS,
    GROUP,
    LARGEST,
    GroupCodes,
    Layouts,
    NormForward,
    TensorCodes,
)
from tahq.memory.small_floats.block_codes import has_fp8_units

_MAXIMA_BLOCK = 8192
_SCALE_BLOCK = 16384
_GROUPS_BLOCK = 128  # Groups per program of SiLU's kernels: 2048 elements of each tensor
NORM_ELEMENTS_PER_WARP = 1024
"""In a norm's forward: 32 per thread, so that few threads repeat the work done once per row."""
_TILE = {"M": 64, "N": 128}
_BACKWARD_PROGRAMS = 256
"""Rows of partial sums of a norm weight's gradient; fixed, so that every device adds in the same order."""
_EXACT = {"enable_fp_fusion": False}  # A fused multiply-add rounds once where the reference rounds twice


def group_maxima(x: torch.Tensor) -> torch.Tensor:
    """int32 bits, of the maxima of runs of groups."""
    flat = x.detach().contiguous()
    maxima = _maxima(x, -(-x.numel() // _MAXIMA_BLOCK))
    launch(kernels.maxima_kernel, len(maxima), flat, maxima, x.numel(), BLOCK=_MAXIMA_BLOCK, num_warps=8)
    return maxima


def tensor_scale(maxima: torch.Tensor, fp8: torch.dtype = E4M3) -> torch.Tensor:
    """fp32 [1], on the device."""
    scale = torch.empty(1, dtype=torch.float32, device=maxima.device)
    bits = maxima if maxima.dtype == torch.int32 else maxima.view(torch.int32)
    numbers = {"RECIPROCAL": 1 / LARGEST[fp8], "BLOCK": _SCALE_BLOCK}
    launch(kernels.scale_kernel, 1, bits, scale, bits.numel(), **numbers, num_warps=32)
    return scale


def quantize_tensor(x: torch.Tensor, scale: torch.Tensor, fp8: torch.dtype, layouts: Layouts) -> TensorCodes:
    """See the reference."""
    values = x.detach().contiguous()
    inputs, options = (values, scale), {"MANTISSA": FRACTION_BITS[fp8]}
    return _tiled(kernels.quantize_kernel, inputs, x.shape, (), scale, fp8, layouts, **options)


def norm_forward(x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float) -> NormForward:
    """See the reference; maxima as bits, one per token."""
    tokens, channels = x.shape
    total = x if added is None else torch.empty_like(x)
    coded, rstd = _group_codes(x), torch.empty(tokens, dtype=torch.float32, device=x.device)
    maxima, groups = _maxima(x, tokens), coded.scales.shape[1]
    launch(
        kernels.norm_forward_kernel, tokens,
        x, x if added is None else added, weight, total, *_bits(coded), rstd, maxima, channels, groups, epsilon,
        ADDED=added is not None, NATIVE=has_fp8_units(x.device), EVEN=channels == next_power_of_2(groups) * GROUP,
        **_row(groups, NORM_ELEMENTS_PER_WARP), **_EXACT,
    )  # fmt: skip
    return NormForward(total, coded, rstd, maxima)


def norm_output(
    codes: GroupCodes, rstd: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, layouts: Layouts
) -> TensorCodes:
    """See the reference."""
    inputs = (*_bits(codes), rstd, weight, scale)
    groups = codes.scales.shape[1]
    return _tiled(kernels.norm_output_kernel, inputs, codes.codes.shape, (groups,), scale, E4M3, layouts)


def norm_backward(
    gradients: Sequence[torch.Tensor],
    codes: GroupCodes,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    residual_gradient: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference; one to three gradients."""
    (tokens, channels), groups = codes.codes.shape, codes.scales.shape[1]
    of_input = torch.empty_like(residual_gradient)
    num_programs = min(tokens, _BACKWARD_PROGRAMS)
    parts = torch.empty(num_programs, channels, dtype=torch.float32, device=weight.device)
    three = (*gradients, *[gradients[0]] * (3 - len(gradients)))
    launch(
        kernels.norm_backward_kernel, num_programs,
        *three, *_bits(codes), rstd, weight, residual_gradient, of_input, parts, tokens, channels, groups,
        NUM=len(gradients), NATIVE=has_fp8_units(weight.device), **_row(groups),
    )  # fmt: skip
    return of_input, parts.sum(0)


def gated_forward(gate: torch.Tensor, up: torch.Tensor) -> tuple[GroupCodes, GroupCodes, torch.Tensor]:
    """See the reference; maxima as bits, one per program."""
    of_gate, of_up = _group_codes(gate), _group_codes(up)
    maxima = _maxima(gate, _num_runs(of_gate))
    outputs = (*_bits(of_gate), *_bits(of_up), maxima)
    _launch_runs(kernels.gated_forward_kernel, of_gate, gate, up, *outputs, **_EXACT)
    return of_gate, of_up, maxima


def gated_output(gate: GroupCodes, up: GroupCodes, scale: torch.Tensor, layouts: Layouts) -> TensorCodes:
    """See the reference."""
    inputs = (*_bits(gate), *_bits(up), scale)
    groups = gate.scales.shape[1]
    return _tiled(kernels.gated_output_kernel, inputs, gate.codes.shape, (groups,), scale, E4M3, layouts)


def gated_backward(gradient: torch.Tensor, gate: GroupCodes, up: GroupCodes) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference."""
    of_gate, of_up = torch.empty_like(gradient), torch.empty_like(gradient)
    inputs = (gradient, *_bits(gate), *_bits(up))
    _launch_runs(kernels.gated_backward_kernel, gate, *inputs, of_gate, of_up, STORED=True)
    return of_gate, of_up


def gated_maxima(gradient: torch.Tensor, gate: GroupCodes, up: GroupCodes) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference; as bits, one per program."""
    of_gate, of_up = _maxima(gradient, _num_runs(gate)), _maxima(gradient, _num_runs(gate))
    inputs = (gradient, *_bits(gate), *_bits(up))
    _launch_runs(kernels.gated_backward_kernel, gate, *inputs, of_gate, of_up, STORED=False, **_EXACT)
    return of_gate, of_up


def gated_gradient(
    gradient: torch.Tensor,
    gate: GroupCodes,
    up: GroupCodes,
    of: Literal["gate", "up"],
    scale: torch.Tensor,
    fp8: torch.dtype,
    layouts: Layouts,
) -> TensorCodes:
    """See the reference."""
    inputs = (gradient, *_bits(gate), *_bits(up), scale)
    groups, options = gate.scales.shape[1], {"UP": of == "up", "MANTISSA": FRACTION_BITS[fp8]}
    return _tiled(kernels.gated_gradient_kernel, inputs, gradient.shape, (groups,), scale, fp8, layouts, **options)


def rotated(
    x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, dtype: torch.dtype, *, transposed: bool
) -> torch.Tensor:
    """See the reference; within a rounding of fp32."""
    values = x.contiguous()
    batch, positions, heads, channels = values.shape
    angles = cosine.shape[:-1].numel()  # of one sample's positions, or of each sample's
    result, half = torch.empty_like(values, dtype=dtype), channels // 2
    blocks = {"H": next_power_of_2(heads), "D": next_power_of_2(half)}
    launch(
        kernels.rotary_kernel, batch * positions,
        values, cosine.contiguous(), sine.contiguous(), result, angles, heads, half,
        SIGN=-1 if transposed else 1, **blocks, num_warps=4,
    )  # fmt: skip
    return result


def _tiled(
    kernel: Callable[..., None],
    inputs: tuple[torch.Tensor, ...],
    shape: torch.Size,
    numbers: tuple[int, ...],
    scale: torch.Tensor,
    fp8: torch.dtype,
    layouts: Layouts,
    **options: Any,
) -> TensorCodes:
    """A matrix [T, C] of codes with one scale, tile by tile."""
    tokens, channels = shape
    device = scale.device
    rows = None if layouts == "columns" else torch.empty(tokens, channels, dtype=fp8, device=device)
    columns = None if layouts == "rows" else torch.empty(channels, tokens, dtype=fp8, device=device)
    written = [each.view(torch.uint8) for each in (rows, columns) if each is not None]
    programs = -(-tokens // _TILE["M"]) * -(-channels // _TILE["N"])
    launch(
        kernel, programs, *inputs, written[0], written[-1], tokens, channels, *numbers,
        ROWS=rows is not None, COLUMNS=columns is not None, NATIVE=has_fp8_units(device),
        **_TILE, **options, **_EXACT, num_warps=8,
    )  # fmt: skip
    return TensorCodes(rows, columns, scale)


def _launch_runs(kernel: Any, like: GroupCodes, *arguments: torch.Tensor, **options: Any) -> None:
    """Launch over all groups of tensors like this one, a run of groups per program."""
    channels, groups = like.codes.shape[1], like.scales.shape[1]
    launch(
        kernel, _num_runs(like), *arguments, like.scales.numel(), channels, groups,
        EVEN=channels % GROUP == 0, NATIVE=has_fp8_units(like.codes.device), G=_GROUPS_BLOCK, num_warps=4, **options,
    )  # fmt: skip


def _num_runs(x: GroupCodes) -> int:
    return -(-x.scales.numel() // _GROUPS_BLOCK)


def _group_codes(like: torch.Tensor) -> GroupCodes:
    tokens, channels = like.shape
    codes = torch.empty(tokens, channels, dtype=E4M3, device=like.device)
    return GroupCodes(codes, torch.empty(tokens, -(-channels // GROUP), dtype=torch.bfloat16, device=like.device))


def _bits(x: GroupCodes) -> tuple[torch.Tensor, torch.Tensor]:
    return x.codes.view(torch.uint8), x.scales.view(torch.int16)


def _maxima(like: torch.Tensor, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int32, device=like.device)


def _row(groups: int, per_warp: int = 512) -> dict[str, int]:
    """A row's block and its warps, by default with 16 elements per thread."""
    block = next_power_of_2(groups)
    return {"G": block, "num_warps": min(16, max(1, block * GROUP // per_warp))}
