"""Additions to the residual stream within the kernels of norms, on CUDA: LLMQ's fused residual.

Written out in torch, an addition and the norm behind it read and write the stream one after the other; so do the norm's
backward, the sum of its gradient and the stream's, and the copy of that sum in the products' dtype. Here a norm returns
the stream beside its output, and its backward takes the gradients of both. Every bit is that of the operations one by
one, so levels of `memory.recompute` that keep norms apart from additions have the same loss and gradients.

Source: LLMQ §3.1. Letters: B samples, S positions, C hidden channels.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from tahq.memory.agoq.stored_inputs import let_recompute
from tahq.memory.agoq.stored_triton import StoredNorm
from tahq.models.deferred_gradients import product_dtype


def fuse_residual(block: nn.Module, first: Any, attention: Any, second: Any, mlp: Any, *, recomputes: bool) -> None:
    """Give a block its parts' sum as `forward`: attention and MLP, each with the norm before it.

    `recomputes`: the products that take a norm's output have it recomputed, instead of keeping it.
    """
    for norm in (first, second):
        norm.forward = partial(_normed_stream, norm, recomputes)
    block.forward = partial(_forward, first, attention, second, mlp)


def _forward(first: Any, attention: Any, second: Any, mlp: Any, hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Hidden states [B, S, C] before a block to those behind it."""
    stream, normed = first(hidden)
    stream, normed = second(stream, attention(normed, **arguments)[0])
    behind: torch.Tensor = _Sum.apply(stream, mlp(normed))  # type: ignore[no-untyped-call]
    return behind


def _normed_stream(
    layer: Any, recomputes: bool, x: torch.Tensor, addend: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, or x + addend, and its norm in the dtype of products."""
    norm: Any = StoredNorm(layer, None, x, product_dtype(x))
    with torch.no_grad():
        if addend is None:
            output, (stream,) = norm.run(x)
        else:
            output, stream = norm.run_on_sum(x, addend)
    if not torch.is_grad_enabled():
        return stream, output
    flowing, normed = _NormedStream.apply(norm, stream, output, x, addend, *norm.parameters)  # type: ignore[no-untyped-call]
    let_recompute(normed, norm, output, [stream], recomputes=recomputes)
    return flowing, normed


class _NormedStream(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        norm: StoredNorm,
        stream: torch.Tensor,
        output: torch.Tensor,
        x: torch.Tensor,
        addend: torch.Tensor | None,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.norm, ctx.addend_dtype = norm, None if addend is None else addend.dtype
        ctx.save_for_backward(stream)
        return stream, output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_stream, of_output = gradients
        needed = True, *ctx.needs_input_grad[5:]
        of_x, *of_parameters = ctx.norm.gradients(ctx.saved_tensors, of_output, needed, of_stream)
        of_addend = None if ctx.addend_dtype is None else _narrowed(of_x, ctx.addend_dtype)
        return None, None, None, of_x, of_addend, *of_parameters


class _Sum(torch.autograd.Function):
    """The stream and what is added to it at the end of a block; the next norm may have narrowed the gradient."""

    @staticmethod
    def forward(ctx: Any, stream: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
        ctx.dtype = addend.dtype
        return stream + addend

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradients[0], _narrowed(gradients[0], ctx.dtype)


def _narrowed(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient in this dtype: the copy that it carries, unless something was added since."""
    copy, version = getattr(gradient, "narrowed", (gradient, None))
    is_current = version == gradient._version and copy.dtype == dtype
    narrowed: torch.Tensor = copy if is_current else gradient.to(dtype)
    return narrowed
