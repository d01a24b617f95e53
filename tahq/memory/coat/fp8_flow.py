"""COAT's mixed-granularity FP8 precision flow in a slice of a Llama: each block computed by `CoatBlock`.

Linear layers have one scale per tensor, from the maxima of groups (group scaling), and multiply in FP8; non-linear
layers have one scale per 16 channels of a token. Gradients between layers and of weights are bf16 or fp32. The residual
stream keeps its dtype, fp32 from a cut, as without COAT; a norm reads its codes.

The two halves of a layer around its attention, which computes in bf16, are one autograd function each. They save for
the backward, in units U of a bf16 tensor [T, C] (COAT Table 2; heads as in Llama-2, I = 2⅔·C):

- each norm's input, E4M3 in groups of 16, 0.5 U, and its scales in bf16, 0.06 U;
- each norm's output, E4M3 with one scale, once for all matrices that take it, 0.5 U;
- the outputs of gate and up, E4M3 in groups, 2.67 U, and scales 0.33 U; SiLU is recomputed;
- their product, E4M3 with one scale, 1.33 U;
- the attention's output, 1 U, the same tensor that attention itself saves: no FP8 copy, only its scale (appendix D).

A block computes from its own input and weights only, so results do not depend on where the model is cut, how many
micro-batches are in flight, or whether blocks are recomputed in the backward.

Source: COAT §5, Figure 1, appendices D and G.
Letters: B samples, S positions, T = B·S tokens, H heads, D channels per head, C channels, I inner channels, N output
channels of a matrix.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tahq.errors import ModelError
from tahq.memory.coat.fp8_codes import (
    E4M3,
    FP8_FORMATS,
    GroupCodes,
    NormForward,
    OutputGradient,
    TensorCodes,
    WeightCodes,
    kernels_for,
    layouts_for,
    linear_forward,
    matrix,
    tensor_codes,
    weight_gradient_layout,
)
from tahq.memory.config import COAT_FAMILIES, CoatConfig
from tahq.memory.rotary import Rotation
from tahq.models.deferred_gradients import DeferredGradients, product_dtype
from tahq.models.keyed_dropout import keyed_attention
from tahq.models.slice import ModelSlice


class CoatBlock(nn.Module):
    """A Llama layer with the modules and parameters of a transformers layer, under their names, computing in FP8."""

    splits_backward = True  # Takes `deferred`: see `ModelSlice`

    # modules of the transformers layer
    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any

    def __init__(self, block: nn.Module, config: CoatConfig) -> None:
        super().__init__()
        for name, child in block.named_children():
            self.add_module(name, child)
        self._config = config
        attention, mlp = self.self_attn, self.mlp
        before = (attention.q_proj, attention.k_proj, attention.v_proj)
        after = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        codes = partial(WeightCodes, keep=config.keep_weight_codes)
        self._before, self._after = tuple(map(codes, before)), tuple(map(codes, after))

    def forward(
        self,
        hidden: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        deferred: DeferredGradients | None = None,
    ) -> torch.Tensor:
        """Hidden states [B, S, C] to [B, S, C] in the same dtype.

        `position_embeddings`: cosine and sine, [1 or B, S, D]. `deferred`: where the backward leaves the weights'
        gradients; None: it computes them.
        """
        flow = _Flow(kernels_for(hidden.device), product_dtype(hidden), self._config.backward_products, deferred)
        norm = self.input_layernorm
        query, key, value, hidden = _BeforeAttention.apply(  # type: ignore[no-untyped-call]
            hidden, norm.weight, norm.variance_epsilon, flow, self._before
        )
        attended = self._attend(query, key, value, position_embeddings, attention_mask)
        norm = self.post_attention_layernorm
        out: torch.Tensor = _AfterAttention.apply(  # type: ignore[no-untyped-call]
            attended, hidden, norm.weight, norm.variance_epsilon, flow, self._after
        )
        return out

    def train(self, mode: bool = True) -> Self:
        """Choose training or evaluation, and recode the weights: a step and an evaluation begin with it."""
        for weight in (*self._before, *self._after):
            weight.forget()
        return super().train(mode)

    @property
    def weight_codes_nbytes(self) -> int:
        """Bytes of the weights' codes and scales that are kept now."""
        return sum(weight.nbytes for weight in (*self._before, *self._after))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Q, K, V [B, S, heads·D] to attention's output [B, S, H·D]."""
        attention = self.self_attn
        heads = [x.view(*x.shape[:-1], -1, attention.head_dim) for x in (query, key, value)]
        rotated = [Rotation.apply(x, *tables, x.dtype) for x in heads[:2]]  # type: ignore[no-untyped-call]
        dropout = attention.attention_dropout if self.training else 0.0
        query, key, value = (x.transpose(1, 2) for x in (*rotated, heads[2]))
        with torch.autocast(query.device.type, enabled=False):
            attended, _ = keyed_attention(
                attention, query, key, value, mask, dropout=dropout, scaling=attention.scaling
            )
        return attended.flatten(2)


def use_fp8_flow(module: ModelSlice, config: CoatConfig) -> None:
    """Compute a slice's blocks with FP8 flow; ModelError for another family, or a Llama with another activation."""
    spec = module.spec
    if spec.family not in COAT_FAMILIES:
        raise ModelError(
            f"memory.activations: coat is for models of the families {', '.join(COAT_FAMILIES)}; this one is "
            f"{spec.family}, whose layers differ; use memory.activations: none"
        )
    if spec.hf_config.hidden_act != "silu":
        raise ModelError(f"memory.activations: coat needs hidden_act silu; this model has {spec.hf_config.hidden_act}")
    blocks = module.get_submodule(f"{spec.layout.trunk}.{spec.layout.blocks}")
    for name, block in list(blocks.named_children()):
        blocks.add_module(name, CoatBlock(block, config))


@dataclass(frozen=True, slots=True)
class _Flow:
    """One forward pass of a layer.

    `dtype`: of products, Q, K, V and gradients between layers; `products`: as `backward_products`; `deferred`: where a
    split backward leaves the weights' gradients.
    """

    kernels: ModuleType
    dtype: torch.dtype
    products: str
    deferred: DeferredGradients | None

    def output_gradient(self, gradient: torch.Tensor, weight: WeightCodes) -> OutputGradient:
        return OutputGradient.of(gradient, weight, self.dtype, self.products)


class _BeforeAttention(torch.autograd.Function):
    """The norm and the projections to Q, K and V."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        norm_weight: torch.Tensor,
        epsilon: float,
        flow: _Flow,
        weights: tuple[WeightCodes, ...],
    ) -> tuple[torch.Tensor, ...]:
        """Hidden states [B, S, C] to each projection's [B, S, N], and the hidden states."""
        norm = flow.kernels.norm_forward(matrix(hidden), None, norm_weight, epsilon)
        y, kept = _norm_output(flow.kernels, norm, norm_weight)
        outputs = [linear_forward(y, weight, flow.dtype) for weight in weights]
        ctx.flow, ctx.weights = flow, weights
        ctx.save_for_backward(*norm.codes, norm.rstd, norm_weight, *kept)
        return *(output.view(*hidden.shape[:-1], -1) for output in outputs), hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        codes, scales, rstd, norm_weight, *kept = ctx.saved_tensors
        flow, y, of_normalised = ctx.flow, TensorCodes(*kept), []
        for weight, gradient in zip(ctx.weights, gradients[:-1], strict=True):
            of_output = flow.output_gradient(gradient, weight)
            of_normalised.append(of_output.of_input(weight, flow.dtype))
            of_output.add_weight_gradients(weight, lambda: y, flow.deferred)
        of_hidden, of_norm = flow.kernels.norm_backward(
            of_normalised, GroupCodes(codes, scales), rstd, norm_weight, matrix(gradients[-1])
        )
        return of_hidden.view(gradients[-1].shape), of_norm.to(norm_weight.dtype), None, None, None


class _AfterAttention(torch.autograd.Function):
    """The output projection, the residual sum, the second norm, the gated MLP and the second sum."""

    @staticmethod
    def forward(
        ctx: Any,
        attended: torch.Tensor,
        hidden: torch.Tensor,
        norm_weight: torch.Tensor,
        epsilon: float,
        flow: _Flow,
        weights: tuple[WeightCodes, ...],
    ) -> torch.Tensor:
        """Attention's output [B, S, H·D] and hidden states [B, S, C] to hidden states [B, S, C]."""
        kernels = flow.kernels
        project, gate, up, down = weights
        attention_output = matrix(attended)
        a = tensor_codes(attention_output, E4M3, "rows")
        branch = linear_forward(a, project, flow.dtype)
        norm = kernels.norm_forward(matrix(hidden), branch, norm_weight, epsilon)
        y, kept_y = _norm_output(kernels, norm, norm_weight)
        a_scale = a.scale
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
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        attended, a_scale, codes, scales, rstd, norm_weight, *rest = ctx.saved_tensors
        of_gate_and_up = GroupCodes(*rest[0:2]), GroupCodes(*rest[2:4])
        y, p = TensorCodes(*rest[4:7]), TensorCodes(*rest[7:10])
        flow, kernels = ctx.flow, ctx.flow.kernels
        project, gate, up, down = ctx.weights
        gradient = matrix(gradients[0])

        of_output = flow.output_gradient(gradient, down)
        of_product = of_output.of_input(down, flow.dtype)
        of_output.add_weight_gradients(down, lambda: p, flow.deferred)
        del of_output
        of_normalised = []
        halves = _gated_gradients(flow, of_product, of_gate_and_up, (gate, up))
        for weight in (gate, up):
            of_output = next(halves)
            of_normalised.append(of_output.of_input(weight, flow.dtype))
            of_output.add_weight_gradients(weight, lambda: y, flow.deferred)
            del of_output  # before the next is made
        del of_product, halves
        of_hidden, of_norm = kernels.norm_backward(
            of_normalised, GroupCodes(codes, scales), rstd, norm_weight, gradient
        )
        of_output = flow.output_gradient(of_hidden, project)
        of_attended = of_output.of_input(project, flow.dtype)

        def a() -> TensorCodes:
            return tensor_codes(attended, E4M3, weight_gradient_layout(attended), a_scale)

        of_output.add_weight_gradients(project, a, flow.deferred)
        shape = gradients[0].shape
        of_inputs = of_attended.view(*shape[:-1], -1), of_hidden.view(shape), of_norm.to(norm_weight.dtype)
        return *of_inputs, None, None, None


def _norm_output(kernels: ModuleType, norm: NormForward, weight: torch.Tensor) -> tuple[TensorCodes, TensorCodes]:
    scale = kernels.tensor_scale(norm.maxima, E4M3)
    return _kept(kernels.norm_output(norm.codes, norm.rstd, weight, scale, layouts_for(norm.codes.codes)))


def _kept(x: TensorCodes) -> tuple[TensorCodes, TensorCodes]:
    """Codes for a forward, and those that its backward needs."""
    return x, x.for_weight_gradient()


def _gated_gradients(
    flow: _Flow,
    gradient: torch.Tensor,
    codes: tuple[GroupCodes, GroupCodes],
    weights: tuple[WeightCodes, WeightCodes],
) -> Iterator[OutputGradient]:
    """The gradients of gate's and then of up's output, one at a time to save memory."""
    fp8, kernels = FP8_FORMATS.get(flow.products), flow.kernels
    if fp8 is None or any(weight.linear.bias is not None for weight in weights):
        for weight, each in zip(weights, kernels.gated_backward(gradient, *codes), strict=True):
            yield flow.output_gradient(each, weight)
        return
    for of, maxima in zip(("gate", "up"), kernels.gated_maxima(gradient, *codes), strict=True):
        scale = kernels.tensor_scale(maxima, fp8)
        yield OutputGradient(None, kernels.gated_gradient(gradient, *codes, of, scale, fp8, layouts_for(gradient)))
