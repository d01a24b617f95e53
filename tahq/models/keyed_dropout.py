"""Dropout whose masks are keyed, so that they depend neither on the cut nor on what ran before.

A mask is drawn by a generator seeded, for that mask alone, by (seed, module path in the whole model, step, replica,
micro-batch, purpose). Recomputing a block, as activation checkpointing and replay do, draws the same mask without any
saved random state.

Attention's dropout needs attention to be written out: torch's fused kernel draws from the global generator, in an order
that depends on what else ran. With dropout in training, and only then, `keyed_attention` computes the weights
[B, H, S, S] and passes them through the module's `KeyedDropout`.

Shapes: B samples, H query heads, K key and value heads, S positions, D channels per head.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from tahq.models.deferred_gradients import product_dtype
from tahq.models.fused_attention import fused_attention
from tahq.randomness import derive_seed

ATTENTION_NAME = "tahq_keyed_dropout"


class DrawName(NamedTuple):
    """Which forward pass is running: together with seed and module path, the key of a mask."""

    step: int
    replica: int
    micro_batch: int
    purpose: int | str


class RandomContext:
    """The run's seed and the name of the forward pass that runs next, read by keyed dropout."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.at(step=0, replica=0, micro_batch=0, purpose="train")

    def at(self, step: int, replica: int, micro_batch: int, purpose: int | str) -> None:
        """Name the next forward pass."""
        self.current = DrawName(step, replica, micro_batch, purpose)

    @contextmanager
    def pinned(self, name: DrawName) -> Iterator[None]:
        """Compute under `name`, for a recomputed block, whatever pass has been named since."""
        before, self.current = self.current, name
        try:
            yield
        finally:
            self.current = before


class KeyedDropout(nn.Module):
    """`nn.Dropout` with a keyed mask: y = x · m / (1 − p), m drawn Bernoulli(1 − p).

    Masks are bit-equal on every CPU; on CUDA they come from the device's generator and are equal on devices of the
    same kind. The name of the current pass is read from `random`; `path` is the module's in the whole model.
    """

    def __init__(self, p: float, path: str, random: RandomContext) -> None:
        super().__init__()
        self.p, self.path, self.random = p, path, random

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` of any shape with elements dropped in training; unchanged in evaluation."""
        if not self.training or self.p == 0.0:
            return x
        generator = torch.Generator(x.device)
        generator.manual_seed(derive_seed(self.random.seed, self.path, *self.random.current))
        keep = torch.rand(x.shape, generator=generator, device=x.device) >= self.p
        # Autograd keeps the mask at one byte per element; a scaled float mask would take four.
        return x * keep * (1.0 / (1.0 - self.p))


def key_dropout(tree: nn.Module, random: RandomContext) -> None:
    """Replace each `nn.Dropout` of a module tree that has the whole model's names.

    An attention that keeps its dropout as a number (`attention_dropout`, in Llama and its relatives) gets a module for
    it, `attn_dropout`, as GPT-2's has.
    """
    for path, module in list(tree.named_modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout):
                setattr(module, name, KeyedDropout(child.p, f"{path}.{name}", random))
        p = getattr(module, "attention_dropout", None)
        if p is not None:
            module.add_module("attn_dropout", KeyedDropout(float(p), f"{path}.attn_dropout", random))


MASK_ALIGNMENT = 16
"""Elements that a mask's rows begin at multiples of, so that kernels on CUDA make no copy."""


def attention_mask(
    like: torch.Tensor, window: int | None, positions: torch.Tensor | None = None
) -> torch.Tensor | None:
    """0 where a position attends to another, else −∞: [1 or B, 1, S, S], or None for plain causal masking.

    With a window w, position q attends to k when q − w < k ≤ q. Without `positions`, None is returned exactly where
    transformers returns it, so that the fused kernel masks by itself and the bits agree. Kernels convert a bool mask in
    every call and keep the result for the backward; this one has the type of products already, so blocks share it.

    Args:
        like: hidden states [B, S, C], on whose device and in the type of whose products the mask is.
        window: w; None: there is none.
        positions: int64 [B, S], of each token in its record, for rows whose records do not see each other.
    """
    num_positions, device = like.shape[1], like.device
    if positions is None and (window is None or num_positions < window):
        return None
    at = torch.arange(num_positions, device=device)
    query, key = at[:, None], at[None, :]
    mask = key <= query if window is None else (key <= query) & (key > query - window)
    mask = mask[None]
    if positions is not None:
        first = at - positions  # of the record
        mask = mask & (first[:, :, None] == first[:, None, :])
    width = -(-num_positions // MASK_ALIGNMENT) * MASK_ALIGNMENT
    rows = torch.zeros(len(mask), 1, num_positions, width, dtype=product_dtype(like), device=device)
    return rows[..., :num_positions].masked_fill_(~mask[:, None], float("-inf"))


def keyed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """softmax(QKᵀ · scaling + mask) V, with dropout on the weights in training: [B, S, H, D], and no weights.

    `module`: transformers' attention, with the `attn_dropout` that `key_dropout` adds, and `attention_chunks` where
    `attend_in_chunks` was called. Query [B, H, S, D], key and value [B, K, S, D] with K dividing H. Mask: as of
    `attention_mask`. Scaling None: 1/√D. With a `softcap` c the scores s become c · tanh(s / c).
    """
    if dropout == 0.0 and softcap is None:
        num_chunks: Any = getattr(module, "attention_chunks", 1)
        output = fused_attention(query, key, value, attention_mask, scaling, num_chunks)
        if output is not None:
            return output, None
        fused = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
        result: tuple[torch.Tensor, None] = fused(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return result
    num_positions, groups = query.shape[2], query.shape[1] // key.shape[1]
    if attention_mask is None:
        is_hidden = torch.ones(num_positions, num_positions, dtype=torch.bool, device=query.device).triu(1)
    else:
        is_hidden = attention_mask != 0
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(is_hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    weights = module.attn_dropout(weights)  # type: ignore[operator]
    return (weights @ value).transpose(1, 2).contiguous(), None


def register_attention(name: str, attention: Callable[..., tuple[torch.Tensor, None]]) -> None:
    """Register a function like `keyed_attention` with transformers; repeating it is harmless."""
    importlib.import_module("transformers.modeling_utils").AttentionInterface.register(name, attention)
