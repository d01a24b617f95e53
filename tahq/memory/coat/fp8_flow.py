"""COAT's mixed-granularity FP8 precision flow in a slice of a Llama: each block computed by `CoatBlock`.

Linear layers have one scale per tensor, from the maxima of groups (group scaling), and multiply in FP8; non-linear
layers have one scale per 16 channels of a token. A block saves those codes for its backward (listed in
`fp8_functions.py`); attention computes in bf16, and keeps Q, K, V and its output once. Gradients between layers and of
weights are bf16 or fp32. The residual stream keeps its dtype, fp32 from a cut, as without COAT; a norm reads its codes.

A block computes from its own input and weights only, so results do not depend on where the model is cut, how many
micro-batches are in flight, or whether blocks are recomputed in the backward.

Source: COAT §5, Figure 1, appendices D and G.
Letters: B samples, S positions, H heads, D channels per head, C channels.
"""

from functools import partial
from typing import Any, Self

import torch
from torch import nn

from tahq.errors import ModelError
from tahq.memory.coat.fp8_codes import kernels_for
from tahq.memory.coat.fp8_functions import AfterAttention, BeforeAttention, FlowOptions
from tahq.memory.coat.fp8_linear import WeightCodes
from tahq.memory.config import COAT_FAMILIES, CoatConfig
from tahq.models.deferred_gradients import DeferredGradients, product_dtype
from tahq.models.keyed_dropout import keyed_attention
from tahq.models.slice import ModelSlice


class CoatBlock(nn.Module):
    """A Llama layer with the modules and parameters of a transformers layer, under their names, computing in FP8."""

    splits_backward = True
    """Takes `deferred`: see `ModelSlice`."""

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
        """Hidden states [B, S, C] to [B, S, C] in the same dtype; `position_embeddings`: cosine and sine [1, S, D].

        `deferred`: where the backward leaves the weights' gradients; None: it computes them.
        """
        flow = FlowOptions(product_dtype(hidden), self._config.backward_products, deferred)
        norm = self.input_layernorm
        query, key, value, hidden = BeforeAttention.apply(  # type: ignore[no-untyped-call]
            hidden, norm.weight, norm.variance_epsilon, flow, self._before, *_parameters(self._before)
        )
        attended = self._attend(query, key, value, position_embeddings, attention_mask)
        norm = self.post_attention_layernorm
        out: torch.Tensor = AfterAttention.apply(  # type: ignore[no-untyped-call]
            attended, hidden, norm.weight, norm.variance_epsilon, flow, self._after, *_parameters(self._after)
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
        rotated = [_Rotation.apply(x, *tables) for x in heads[:2]]  # type: ignore[no-untyped-call]
        dropout = attention.attention_dropout if self.training else 0.0
        query, key, value = (x.transpose(1, 2) for x in (*rotated, heads[2]))
        with torch.autocast(query.device.type, enabled=False):
            attended, _ = keyed_attention(
                attention, query, key, value, mask, dropout=dropout, scaling=attention.scaling
            )
        return attended.flatten(2)


def use_fp8_flow(module: ModelSlice, config: CoatConfig) -> None:
    """Compute a slice's blocks with FP8 flow; its parameters do not change.

    Raises:
        ModelError: another family, or a Llama with another activation.
    """
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


def _parameters(weights: tuple[WeightCodes, ...]) -> list[torch.Tensor | None]:
    """Weight and bias of each, for autograd."""
    return [parameter for weight in weights for parameter in (weight.linear.weight, weight.linear.bias)]


class _Rotation(torch.autograd.Function):
    """Rotary embedding of x [B, S, H, D] by tables [1, S, D], in fp32, rounded to the dtype of x.

        x·cos + half(x)·sin,   half(x₁, x₂) = (−x₂, x₁)

    A linear map, whose transpose takes the gradient back. One function that saves only its tables; written out in torch
    it is eight operations in forward and in backward.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        rotated: torch.Tensor = kernels_for(x.device).rotated(x, cosine, sine, False)
        return rotated

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradient = kernels_for(gradients[0].device).rotated(gradients[0], *ctx.saved_tensors, True)
        return gradient, None, None
