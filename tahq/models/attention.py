"""Attention as transformers' layers call it: torch's fused kernel, or a written-out one with keyed dropout.

The fused kernel draws its dropout from the global generator, in an order that depends on what else
ran; so with dropout in training, and only then, attention is written out and its weights go
through the module's `KeyedDropout`. That costs memory for [B, H, S, S] weights.

Shapes: B samples, H query heads, K key and value heads, S positions, D channels a head.
"""

import importlib
from typing import Any

import torch
from torch import nn

ATTENTION_NAME = "tahq_keyed_dropout"


def window_mask(num_positions: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which positions each position sees: bool [1, 1, S, S], or None where plain causal masking is meant.

    With a window w, position q sees k when q − w < k ≤ q. None lets the fused kernel mask by
    itself; it is returned exactly where transformers returns it, so that the bits agree.
    """
    if window is None or num_positions < window:
        return None
    query = torch.arange(num_positions, device=device)[:, None]
    key = torch.arange(num_positions, device=device)[None, :]
    return ((key <= query) & (key > query - window))[None, None]


def keyed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """softmax(QKᵀ · scaling + mask) V, its weights dropped by `module.attn_dropout` in training.

    Args:
        module: transformers' attention module, with an `attn_dropout` (`key_dropout` sees to that).
        query: [B, H, S, D].
        key: [B, K, S, D], K dividing H.
        value: [B, K, S, D].
        attention_mask: bool, broadcast to [B, H, S, S]; None: causal.
        dropout: probability that a weight is dropped; 0 in evaluation.
        scaling: factor of the scores; None: 1/√D.
        kwargs: what transformers passes on to other kernels.

    Returns:
        [B, S, H, D], and None for the weights that nobody asks for.
    """
    if dropout == 0.0:
        return _fused_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    num_positions, groups = query.shape[2], query.shape[1] // key.shape[1]
    if attention_mask is None:
        attention_mask = torch.ones(num_positions, num_positions, dtype=torch.bool, device=query.device).tril()
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores.masked_fill(~attention_mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    weights = module.attn_dropout(weights)  # type: ignore[operator]
    return (weights @ value).transpose(1, 2).contiguous(), None


def _fused_attention(module: nn.Module, *states: torch.Tensor | None, **kwargs: Any) -> tuple[torch.Tensor, None]:
    fused = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
    output: tuple[torch.Tensor, None] = fused(module, *states, **kwargs)
    return output


def register_attention() -> None:
    """Make `keyed_attention` known to transformers under a name of our own; again is harmless."""
    interface = importlib.import_module("transformers.modeling_utils").AttentionInterface
    interface.register(ATTENTION_NAME, keyed_attention)
