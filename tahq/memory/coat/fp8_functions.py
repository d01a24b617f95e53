"""The two halves of a Llama layer around its attention, each one autograd function that saves FP8 tensors.

`BeforeAttention` is the norm and the projections to Q, K and V, `AfterAttention` the output projection, the residual
sum, the second norm, the gated MLP and the second sum. The residual stream passes through both, so its gradient is
added where a norm's is computed.

Saved for the backward, in units U of a bf16 tensor [T, C] (COAT Table 2; heads as in Llama-2, I = 2⅔·C):

- each norm's input, E4M3 in groups of 16, 0.5 U, and its scales in bf16, 0.06 U;
- each norm's output, E4M3 with one scale, once for all matrices that take it, 0.5 U;
- the outputs of gate and up, E4M3 in groups, 2.67 U, and scales 0.33 U; SiLU is recomputed;
- their product, E4M3 with one scale, 1.33 U;
- the attention's output, 1 U, the same tensor that attention itself saves: no FP8 copy, only its scale (appendix D).

Letters: B samples, S positions, T = B·S tokens, C channels, I inner channels, N output channels.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tahq.memory.coat.fp8_codes import E4M3, FP8_FORMATS, GroupCodes, Layouts, NormForward, TensorCodes, kernels_for
from tahq.memory.coat.fp8_linear import OutputGradient, WeightCodes, layouts_for, linear_forward
from tahq.models.deferred_gradients import DeferredGradients, accumulate

Gradients = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class FlowOptions:
    """Options of a layer in one forward pass.

    `dtype`: of products, Q, K, V and gradients between layers; `deferred`: where a split backward leaves the weights'
    gradients.
    """

    dtype: torch.dtype
    backward_products: str
    deferred: DeferredGradients | None


class BeforeAttention(torch.autograd.Function):
    """(x, norm weight, weights and biases of Q, K, V) -> Q, K, V, x."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        norm_weight: torch.Tensor,
        epsilon: float,
        flow: FlowOptions,
        weights: tuple[WeightCodes, ...],
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """Hidden states [B, S, C] to each projection's [B, S, N], and the hidden states.

        `parameters` repeats the weights and biases for autograd.
        """
        kernels = kernels_for(hidden.device)
        norm = kernels.norm_forward(_matrix(hidden), None, norm_weight, epsilon)
        y, kept = _normalised(kernels, norm, norm_weight)
        outputs = [linear_forward(y, weight, flow.dtype) for weight in weights]
        ctx.flow, ctx.weights = flow, weights
        ctx.save_for_backward(*norm.codes, norm.rstd, norm_weight, *kept)
        shape = hidden.shape[:-1]
        return *(output.view(*shape, -1) for output in outputs), hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """Gradients of hidden states, norm weight, weights and biases."""
        codes, scales, rstd, norm_weight, *kept = ctx.saved_tensors
        flow, kernels, y = ctx.flow, kernels_for(codes.device), TensorCodes(*kept)
        of_normalised, of_parameters = [], []
        for index, (weight, gradient) in enumerate(zip(ctx.weights, gradients[:-1], strict=True)):
            of_output = OutputGradient.of(_matrix(gradient), weight, flow.dtype, flow.backward_products)
            of_normalised.append(of_output.of_input(weight, flow.dtype))
            of_parameters += _weight_gradients(ctx, 5 + 2 * index, of_output, weight, lambda: y)
        of_hidden, of_norm = kernels.norm_backward(
            of_normalised, GroupCodes(codes, scales), rstd, norm_weight, _matrix(gradients[-1])
        )
        return of_hidden.view(gradients[-1].shape), of_norm.to(norm_weight.dtype), None, None, None, *of_parameters


class AfterAttention(torch.autograd.Function):
    """(attention output, x, norm weight, weights and biases of o, gate, up, down) -> the layer's output."""

    @staticmethod
    def forward(
        ctx: Any,
        attended: torch.Tensor,
        hidden: torch.Tensor,
        norm_weight: torch.Tensor,
        epsilon: float,
        flow: FlowOptions,
        weights: tuple[WeightCodes, ...],
        *parameters: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention's output [B, S, H·D] and hidden states [B, S, C] to hidden states [B, S, C]."""
        kernels = kernels_for(hidden.device)
        project, gate, up, down = weights
        attention_output = _matrix(attended)
        a_scale = kernels.tensor_scale(kernels.group_maxima(attention_output), E4M3)
        a = kernels.quantize_tensor(attention_output, a_scale, E4M3, "rows")
        branch = linear_forward(a, project, flow.dtype)
        norm = kernels.norm_forward(_matrix(hidden), branch, norm_weight, epsilon)
        y, kept_y = _normalised(kernels, norm, norm_weight)
        del a, branch
        gate_codes, up_codes, maxima = kernels.gated_forward(
            linear_forward(y, gate, flow.dtype), linear_forward(y, up, flow.dtype)
        )
        del y
        p_scale = kernels.tensor_scale(maxima, E4M3)
        p, kept_p = _kept(kernels.gated_output(gate_codes, up_codes, p_scale, layouts_for(gate_codes.codes)))
        out = norm.total.add_(linear_forward(p, down, flow.dtype))
        ctx.flow, ctx.weights = flow, weights
        ctx.save_for_backward(
            attention_output, a_scale, *norm.codes, norm.rstd, norm_weight, *gate_codes, *up_codes, *kept_y, *kept_p
        )
        result: torch.Tensor = out.view(hidden.shape)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """Gradients of attention's output, hidden states, norm weight, weights and biases."""
        attended, a_scale, codes, scales, rstd, norm_weight, *rest = ctx.saved_tensors
        gate_codes, up_codes = GroupCodes(*rest[0:2]), GroupCodes(*rest[2:4])
        y, p = TensorCodes(*rest[4:7]), TensorCodes(*rest[7:10])
        flow, kernels = ctx.flow, kernels_for(codes.device)
        project, gate, up, down = ctx.weights
        gradient = _matrix(gradients[0])

        of_output = OutputGradient.of(gradient, down, flow.dtype, flow.backward_products)
        of_product = of_output.of_input(down, flow.dtype)
        of_down = _weight_gradients(ctx, 12, of_output, down, lambda: p)
        del of_output
        of_normalised, of_gate_and_up = [], []
        halves = _gated_gradients(flow, kernels, of_product, (gate_codes, up_codes), (gate, up))
        for index, weight in enumerate((gate, up)):
            of_output = next(halves)
            of_normalised.append(of_output.of_input(weight, flow.dtype))
            of_gate_and_up += _weight_gradients(ctx, 8 + 2 * index, of_output, weight, lambda: y)
            del of_output  # before the next is made
        del of_product, halves
        of_hidden, of_norm = kernels.norm_backward(
            of_normalised, GroupCodes(codes, scales), rstd, norm_weight, gradient
        )
        of_output = OutputGradient.of(of_hidden, project, flow.dtype, flow.backward_products)
        of_attended = of_output.of_input(project, flow.dtype)

        def a() -> TensorCodes:
            layouts: Layouts = "columns" if layouts_for(attended) == "both" else "rows"
            codes: TensorCodes = kernels.quantize_tensor(attended, a_scale, E4M3, layouts)
            return codes

        of_project = _weight_gradients(ctx, 6, of_output, project, a)
        shape = gradients[0].shape
        of_parameters = (*of_project, *of_gate_and_up, *of_down)
        return (
            of_attended.view(*shape[:-1], -1), of_hidden.view(shape), of_norm.to(norm_weight.dtype),
            None, None, None, *of_parameters,
        )  # fmt: skip


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """[B, S, C] as contiguous [T, C]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _normalised(kernels: ModuleType, norm: NormForward, weight: torch.Tensor) -> tuple[TensorCodes, TensorCodes]:
    """A norm's output for the matrices that follow, and in the saved layout."""
    scale = kernels.tensor_scale(norm.maxima, E4M3)
    return _kept(kernels.norm_output(norm.codes, norm.rstd, weight, scale, layouts_for(norm.codes.codes)))


def _kept(x: TensorCodes) -> tuple[TensorCodes, TensorCodes]:
    """Codes for a forward, and those that its backward needs."""
    return x, x if x.column_codes is None else TensorCodes(None, x.column_codes, x.scale)


def _gated_gradients(
    flow: FlowOptions,
    kernels: ModuleType,
    gradient: torch.Tensor,
    codes: tuple[GroupCodes, GroupCodes],
    weights: tuple[WeightCodes, WeightCodes],
) -> Iterator[OutputGradient]:
    """The gradients of gate's and then of up's output, one at a time to save memory."""
    fp8 = FP8_FORMATS.get(flow.backward_products)
    if fp8 is None or any(weight.linear.bias is not None for weight in weights):
        for weight, each in zip(weights, kernels.gated_backward(gradient, *codes), strict=True):
            yield OutputGradient.of(each, weight, flow.dtype, flow.backward_products)
        return
    for of, maxima in zip(("gate", "up"), kernels.gated_maxima(gradient, *codes), strict=True):
        scale = kernels.tensor_scale(maxima, fp8)
        yield OutputGradient(None, kernels.gated_gradient(gradient, *codes, of, scale, fp8, layouts_for(gradient)))


def _weight_gradients(
    ctx: Any, argument: int, of_output: OutputGradient, weight: WeightCodes, x: Callable[[], TensorCodes]
) -> list[torch.Tensor | None]:
    """Gradients of a linear layer's weight and bias; None for both if they are deferred.

    They are the forward's arguments number `argument` and `argument` + 1.
    """
    wants_weight, wants_bias = ctx.needs_input_grad[argument : argument + 2]
    linear = weight.linear

    def of_weight() -> torch.Tensor:
        return of_output.of_weight(x(), linear.weight.dtype)

    def add() -> None:
        if wants_weight:
            accumulate(linear.weight, of_weight())
        if wants_bias and of_output.of_bias is not None:
            accumulate(linear.bias, of_output.of_bias)

    if ctx.flow.deferred is not None:
        ctx.flow.deferred.add(add)
        return [None, None]
    of_bias = of_output.of_bias if wants_bias else None
    return [of_weight() if wants_weight else None, None if of_bias is None else of_bias.to(linear.bias.dtype)]
