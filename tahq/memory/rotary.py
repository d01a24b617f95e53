"""Rotary embedding of Q and K as one kernel each, on CUDA: of COAT's blocks, and of transformers' attention modules.

Written out in torch, as transformers has it, a rotation is eight operations in forward and in backward, in fp32.

Letters: B samples, S positions, H heads, D channels per head, C hidden channels.
"""

import importlib
from typing import Any

import torch

from tahq.memory.coat.fp8_codes import kernels_for
from tahq.models.deferred_gradients import product_dtype


class Rotation(torch.autograd.Function):
    """Rotary embedding of x [B, S, H, D] by tables [1 or B, S, D], in fp32, rounded to `dtype`.

        x·cos + half(x)·sin,   half(x₁, x₂) = (−x₂, x₁)

    A linear map, whose transpose takes the gradient back, rounded to the dtype of x. Only the tables are saved.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """See the class."""
        ctx.save_for_backward(cosine, sine)
        ctx.dtype = x.dtype
        rotated: torch.Tensor = kernels_for(x.device).rotated(x, cosine, sine, dtype, transposed=False)
        return rotated

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """By the transposed map."""
        rotated = kernels_for(gradients[0].device).rotated
        return rotated(gradients[0], *ctx.saved_tensors, ctx.dtype, transposed=True), None, None, None


def rotated_attention(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The `forward` of transformers' attention in Llama and its relatives, with `Rotation`: [B, S, C], and no weights.

    Rotations are computed in fp32 there too, and rounded where autocast does it, before the product of Q and K.
    """
    heads = (*hidden_states.shape[:-1], -1, module.head_dim)
    projections = module.q_proj, module.k_proj, module.v_proj
    query, key, value = (projection(hidden_states).view(heads) for projection in projections)
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    dtype = product_dtype(query)
    query, key = (Rotation.apply(x, *position_embeddings, dtype) for x in (query, key))  # type: ignore[no-untyped-call]
    attend = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    attended: torch.Tensor = attend[module.config._attn_implementation](
        module,
        *(x.transpose(1, 2) for x in (query, key, value)),
        attention_mask,
        dropout=module.attention_dropout if module.training else 0.0,
        scaling=module.scaling,
    )[0]
    return module.o_proj(attended.flatten(2)), None
