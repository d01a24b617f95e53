"""Parts of a block that the backward computes again: `memory.recompute`, LLMQ's levels of activation checkpointing.

What a block keeps of a micro-batch, by level; x is its input, y the residual stream behind attention:

    swiglu  the inputs of the MLP's activation instead of what that saves and its output
    norm    also the inputs of norms instead of what these save and their outputs
    ffn     x; Q, K, V, attention's output and statistics; y
    qkv     x; attention's output and statistics; y
    att     x and y
    block   x

`swiglu` and `norm` keep inputs as AgoQ does, but exact ones (`agoq/stored_inputs.py`). The next three checkpoint the
MLP, and attention, each with the norm before it; `qkv` keeps the outputs of attention's fused kernel, so that this is
not run again. With dropout in attention there is no fused kernel, and `qkv` keeps what `att` does. All randomness is
keyed, so loss and gradients have the bits of a backward that computes nothing again.

On CUDA norms, SiLU(gate)·up and GELU by tanh are one kernel each, at every level (`agoq/stored_triton.py`). There only
their inputs and outputs are kept, at levels that recompute them only the inputs. Additions to the residual stream are
part of the norms' kernels, but for levels that checkpoint norms (`residual_stream.py`). Rotary embedding is one kernel
for Q and one for K (`rotary.py`). Gradients of weights are added to those of earlier micro-batches by the products that
compute them, unrounded (`accumulate_product`); so are those of one input by the products that take it.

Source: LLMQ §3.1, Activation checkpointing.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from tahq.memory.agoq.stored_inputs import has_kernels, is_norm, store_inputs_of
from tahq.memory.config import EXACTLY_STORED, Recompute
from tahq.memory.rotary import rotated_attention
from tahq.models.deferred_gradients import current_deferral, own_products, shared_copies
from tahq.models.keyed_dropout import RandomContext
from tahq.models.slice import ModelSlice

FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
APART = ("ffn", "qkv", "att")
"""Levels that compute norms again together with what is behind them."""


def recompute(module: ModelSlice, level: Recompute, *, fuses: bool = True) -> None:
    """Make a slice's blocks keep what a level says; call it once, before COAT or AGoQ change them.

    Blocks of layers that no family here has allow `none` and `block` only, and run as transformers has them.

    `fuses`: use the kernels of norms and activations, on CUDA; those that COAT or AGoQ change have their own.
    """
    stored, kinds = EXACTLY_STORED.get(level, ()), ("norms", "mlp")
    on_cuda = has_kernels(next(module.parameters()).device.type)
    module.checkpoint_blocks = level == "block"
    module.owns_products |= on_cuda or level not in ("none", "block")
    if module.spec.layout.layers_like is None:
        return
    for block in module.blocks():
        first, second = filter(is_norm, block.children())
        attention = next(child for child in block.children() if type(child).__name__.endswith("Attention"))
        mlp = block.get_submodule("mlp")
        if on_cuda and module.spec.layout.rotary is not None:
            attention.forward = partial(rotated_attention, attention)
        again = [second, *mlp.modules()] if level == "ffn" else []
        for layer in block.modules():
            here = () if layer in again else stored
            arguments = {"model": module.spec.hf_config, "is_own": layer in (first, second)}
            if here:
                store_inputs_of(layer, here, None, **arguments)
            if on_cuda and fuses:
                kept = [kind for kind in kinds if kind not in here]
                store_inputs_of(layer, kept, None, **arguments, recomputes=False)
        if on_cuda and fuses and level not in APART:
            fused = import_module("tahq.memory.residual_stream")  # needs triton
            fused.fuse_residual(block, first, attention, second, mlp, recomputes="norms" in stored)
        if level in APART:
            _checkpoint(second, mlp, module.random)
        if level in ("qkv", "att"):
            _checkpoint(first, attention, module.random, keeps_attention=level == "qkv")


def _checkpoint(norm: nn.Module, part: nn.Module, random: RandomContext, *, keeps_attention: bool = False) -> None:
    """Let `part` take the norm's input, and compute both again."""
    compute: Callable[..., Any] = partial(_after, norm.forward, part.forward)
    contexts = partial(create_selective_checkpoint_contexts, _policy) if keeps_attention else noop_context_fn

    def forward(*args: Any, **kwargs: Any) -> Any:
        """By position or as `hidden_states`: the norm's input."""
        x, args = (kwargs.pop("hidden_states"), args) if "hidden_states" in kwargs else (args[0], args[1:])
        if not torch.is_grad_enabled():
            return compute(x, *args, **kwargs)
        name, deferred, copies = random.current, current_deferral(), shared_copies()

        def run(x: torch.Tensor) -> Any:
            with random.pinned(name), own_products(deferred, copies):
                return compute(x, *args, **kwargs)

        return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    norm.forward = _same
    part.forward = forward


def _after(
    norm: Callable[..., torch.Tensor], part: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    return part(norm(x), *args, **kwargs)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_attention = getattr(operator, "overloadpacket", operator).__name__ in FUSED_ATTENTION
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE
