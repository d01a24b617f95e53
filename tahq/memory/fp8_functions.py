"""The two halves of a Llama layer around its attention, each one function for autograd: what they keep is FP8.

`BeforeAttention` is the norm and the projections to Q, K and V, `AfterAttention` the output projection, the residual
sum, the second norm, the gated MLP and the second sum. The residual stream passes through both, so that its gradient
is added where a norm's is computed.

Kept for backward, in units U of a bf16 tensor [T, C] (COAT Table 2; heads as in Llama-2, I = 2⅔·C):

- either norm's input, E4M3 in groups of 16, 0.5 U, and its scales in bf16, 0.06 U;
- either norm's output, E4M3 with one scale, once for all the matrices that take it, 0.5 U;
- the outputs of gate and up, E4M3 in groups, 2.67 U, and scales 0.33 U; SiLU is computed again;
- their product, E4M3 with one scale, 1.33 U;
- the attention's output as it is, 1 U, which is the tensor that attention itself keeps: no FP8 copy of it, only its
  scale (appendix D).

Letters: B samples, S positions, T = B·S tokens, C channels, I inner channels, N output channels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tahq.memory.fp8_codes import E4M3, GroupCodes, Layouts, TensorCodes
from tahq.memory.fp8_kernels import FlowKernels, kernels_for
from tahq.memory.fp8_linear import OutputGradient, WeightCodes, for_products, linear_forward
from tahq.models.deferred_gradients import DeferredGradients, accumulate

Gradients = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Flow:
    """How a layer is computed in one forward pass.

    `dtype`: of products, Q, K, V and gradients between layers; `deferred`: where a split backward leaves what weights'
    gradients need.
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
        flow: Flow,
        weights: tuple[WeightCodes, ...],
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """Hidden states [B, S, C] to each projection's [B, S, N], and the hidden states.

        `parameters`, the weights and biases once more, are named for autograd.
        """
        kernels = kernels_for(hidden.device)
        norm = kernels.norm_forward(_matrix(hidden), None, norm_weight, epsilon)
        y, kept = _normalised(kernels, norm.codes, norm.rstd, norm_weight, norm.maxima)
        outputs = [linear_forward(y, weight, flow.dtype) for weight in weights]
        ctx.flow, ctx.weights, ctx.num_parameters = flow, weights, len(parameters)
        ctx.save_for_backward(norm.codes.codes, norm.codes.scales, norm.rstd, norm_weight, *_parts(kept))
        shape = hidden.shape[:-1]
        return *(output.view(*shape, -1) for output in outputs), hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """Gradients of hidden states, norm weight, weights and biases."""
        codes, scales, rstd, norm_weight, *parts = ctx.saved_tensors
        flow, kernels = ctx.flow, kernels_for(codes.device)
        y = _tensor_codes(parts)
        of_outputs = [
            _prepared(flow, weight, _matrix(gradient))
            for weight, gradient in zip(ctx.weights, gradients[:-1], strict=True)
        ]
        of_normalised = [each.of_input(w, flow.dtype) for each, w in zip(of_outputs, ctx.weights, strict=True)]
        of_parameters = _weight_gradients(
            ctx, 5, [(g, w, lambda: y) for g, w in zip(of_outputs, ctx.weights, strict=True)]
        )
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
        flow: Flow,
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
        y, kept_y = _normalised(kernels, norm.codes, norm.rstd, norm_weight, norm.maxima)
        gate_codes, up_codes, maxima = kernels.gated_forward(
            linear_forward(y, gate, flow.dtype), linear_forward(y, up, flow.dtype)
        )
        del y
        p_scale = kernels.tensor_scale(maxima, E4M3)
        p, kept_p = _kept(kernels.gated_output(gate_codes, up_codes, p_scale, _layouts(gate_codes.codes)))
        out = norm.total.add_(linear_forward(p, down, flow.dtype))
        ctx.flow, ctx.weights, ctx.num_parameters = flow, weights, len(parameters)
        ctx.save_for_backward(
            attention_output, a_scale, norm.codes.codes, norm.codes.scales, norm.rstd, norm_weight,
            gate_codes.codes, gate_codes.scales, up_codes.codes, up_codes.scales,
            *_parts(kept_y), *_parts(kept_p),
        )  # fmt: skip
        return out.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """Gradients of attention's output, hidden states, norm weight, weights and biases."""
        attended, a_scale, codes, scales, rstd, norm_weight, *rest = ctx.saved_tensors
        gate_codes, up_codes = GroupCodes(*rest[0:2]), GroupCodes(*rest[2:4])
        y, p = _tensor_codes(rest[4:7]), _tensor_codes(rest[7:10])
        flow, kernels = ctx.flow, kernels_for(codes.device)
        project, gate, up, down = ctx.weights
        gradient = _matrix(gradients[0])
        of_down = _prepared(flow, down, gradient)
        of_gate, of_up, *maxima = kernels.gated_backward(of_down.of_input(down, flow.dtype), gate_codes, up_codes)
        of_gate_output, of_up_output = _prepared(flow, gate, of_gate, maxima[0]), _prepared(flow, up, of_up, maxima[1])
        del of_gate, of_up
        of_normalised = of_gate_output.of_input(gate, flow.dtype), of_up_output.of_input(up, flow.dtype)
        of_hidden, of_norm = kernels.norm_backward(
            of_normalised, GroupCodes(codes, scales), rstd, norm_weight, gradient
        )
        of_project = _prepared(flow, project, of_hidden)

        def a() -> TensorCodes:
            layouts: Layouts = "columns" if for_products(attended, attended.shape[1]) else "rows"
            return kernels.quantize_tensor(attended, a_scale, E4M3, layouts)

        of_parameters = _weight_gradients(
            ctx,
            6,
            [
                (of_project, project, a),
                (of_gate_output, gate, lambda: y),
                (of_up_output, up, lambda: y),
                (of_down, down, lambda: p),
            ],
        )
        shape = gradients[0].shape
        of_attended = of_project.of_input(project, flow.dtype).view(*shape[:-1], -1)
        of_weight = of_norm.to(norm_weight.dtype)
        return of_attended, of_hidden.view(shape), of_weight, None, None, None, *of_parameters


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """[B, S, C] as contiguous [T, C]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _layouts(x: torch.Tensor) -> Layouts:
    """The layouts of what a linear layer takes, of the size of x [T, C]."""
    return "both" if for_products(x, x.shape[1]) else "rows"


def _normalised(
    kernels: FlowKernels, codes: GroupCodes, rstd: torch.Tensor, weight: torch.Tensor, maxima: torch.Tensor
) -> tuple[TensorCodes, TensorCodes]:
    """A norm's output as the matrices behind it take it, and as it is kept."""
    scale = kernels.tensor_scale(maxima, E4M3)
    return _kept(kernels.norm_output(codes, rstd, weight, scale, _layouts(codes.codes)))


def _kept(x: TensorCodes) -> tuple[TensorCodes, TensorCodes]:
    """Codes for a forward, and the one layout that its backward needs."""
    return x, x if x.column_codes is None else TensorCodes(None, x.column_codes, x.scale)


def _parts(x: TensorCodes) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    return x.row_codes, x.column_codes, x.scale


def _tensor_codes(parts: list[Any]) -> TensorCodes:
    return TensorCodes(*parts)


def _prepared(
    flow: Flow, weight: WeightCodes, gradient: torch.Tensor, maxima: torch.Tensor | None = None
) -> OutputGradient:
    return OutputGradient.of(gradient, weight, flow.dtype, flow.backward_products, maxima)


def _weight_gradients(
    ctx: Any, first: int, products: list[tuple[OutputGradient, WeightCodes, Callable[[], TensorCodes]]]
) -> list[torch.Tensor | None]:
    """Gradients of weights and biases in the order of the forward's arguments from number `first` on; or None for
    all, and what computes them left to the split backward's second part.
    """
    gradients: list[torch.Tensor | None] = []
    for index, (of_output, weight, x) in enumerate(products):
        wanted = ctx.needs_input_grad[first + 2 * index], ctx.needs_input_grad[first + 2 * index + 1]
        if ctx.flow.deferred is not None:
            ctx.flow.deferred.add(_left(of_output, weight, x, wanted))
            gradients += [None, None]
            continue
        parameter = weight.linear.weight
        gradients.append(of_output.of_weight(x(), parameter.dtype) if wanted[0] else None)
        bias = weight.linear.bias
        gradients.append(of_output.of_bias.to(bias.dtype) if wanted[1] and of_output.of_bias is not None else None)
    return gradients


def _left(
    of_output: OutputGradient, weight: WeightCodes, x: Callable[[], TensorCodes], wanted: tuple[bool, bool]
) -> Callable[[], None]:
    """What adds the gradients of a weight and its bias later."""

    def compute() -> None:
        linear = weight.linear
        if wanted[0]:
            accumulate(linear.weight, of_output.of_weight(x(), linear.weight.dtype))
        if wanted[1] and of_output.of_bias is not None:
            accumulate(linear.bias, of_output.of_bias)

    return compute
