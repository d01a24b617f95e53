"""A slice's blocks by torch.compile: `training.compile`.

Blocks have one `forward`, which is compiled once for all of them; anew for other shapes, for evaluation, and where rows
hold several records. Attention stays the kernel that it is. Compiled operations are fused, so results have other bits
than without, but the same ones wherever the model is cut and in each run with the same torch.

Products are torch's own, so there is no backward in two parts, and what replaces layers of blocks is refused
(`ClusterConfig`).
"""

import torch

from tahq.models.deferred_gradients import is_linear
from tahq.models.keyed_dropout import keyed_attention
from tahq.models.slice import ModelSlice

_ATTENTION = "tahq_not_compiled"


def compile_blocks(module: ModelSlice) -> None:
    """Have the blocks of a slice compiled when they are first computed."""
    module.attend_by(_ATTENTION, torch.compiler.disable(keyed_attention))  # type: ignore[no-untyped-call]
    for block in module.blocks():
        for layer in filter(is_linear, block.modules()):
            del layer.forward  # that of `let_own_products`
        block.compile(dynamic=False)


def compile_now(module: ModelSlice, shape: tuple[int, int, int], autocast: torch.dtype | None) -> None:
    """Compile both passes for micro-batches [B, S, C], by computing one of zeros; gradients stay as they are."""
    device = next(module.parameters()).device
    hidden = torch.zeros(shape, dtype=module.residual, device=device, requires_grad=True)
    module.train()
    with torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None):
        y = module.through_blocks(hidden)
    if y.requires_grad:
        torch.autograd.grad(y, hidden, torch.zeros_like(y))
