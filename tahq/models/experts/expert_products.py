"""The experts of a block: tokens sorted by expert, and one product per expert and matrix, in the experts' order.

Transformers' own modules route tokens, and hold the weights of a block's experts as matrices of three dimensions. This
computes in place of their loops, by the interface that transformers has for it. It differs from theirs in this:
gradients of weights are added in place, expert by expert, or left to `DeferredGradients`; weights are cast once per
step, as those of other layers; nothing is added in an order that threads decide. A token's outputs are added in the
order of its choices. Bits depend on inputs only; of equally probable experts torch's `topk` takes the same ones again.

Shapes: T tokens, K choices of each, E experts, C hidden channels, I inner channels of an expert.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from tahq.models.deferred_gradients import (
    DeferredGradients,
    accumulate,
    announce,
    cast_weight,
    current_deferral,
    gradient_dtype,
    product_dtype,
    shared_copies,
)

EXPERTS_NAME = "tahq_in_order"


def register_experts() -> None:
    """Register `expert_outputs` with transformers; repeating it is harmless."""
    importlib.import_module("transformers.integrations.moe").ExpertsInterface.register(EXPERTS_NAME, expert_outputs)


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the stacked weights of experts."""
    return type(module).__name__.endswith("Experts")


def is_router(module: nn.Module) -> bool:
    """Whether a module chooses the experts of tokens."""
    return type(module).__name__.endswith("TopKRouter")


def expert_outputs(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Σₖ wₖ · down(act(gate(x)) · up(x)), by the experts that each token has chosen.

    Args:
        module: transformers' module with `gate_up_proj` [E, 2·I, C], gate first, and `down_proj` [E, C, I].
        hidden: x, [T, C].
        chosen: [T, K] int64.
        weights: w, [T, K].

    Returns:
        [T, C], in the dtype of `hidden`.
    """
    num_choices, experts = chosen.shape[1], chosen.flatten()
    order = torch.sort(experts, stable=True).indices
    sizes = _sizes(experts, module.num_experts)
    # one row per choice, so that no two gradients are added by index
    rows = hidden[:, None].expand(-1, num_choices, -1).reshape(-1, hidden.shape[-1])[order]
    gate, up = products(rows, module.gate_up_proj, sizes).chunk(2, dim=-1)
    outputs = products(module.act_fn(gate) * up, module.down_proj, sizes) * weights.flatten()[order, None]
    return outputs[torch.argsort(order)].view(-1, num_choices, hidden.shape[-1]).sum(1, dtype=hidden.dtype)


def _sizes(experts: torch.Tensor, num_experts: int) -> list[int]:
    """The number of rows of each expert."""
    if hasattr(experts, "fake_mode"):  # shapes without numbers; rows take the same memory in any expert
        each, more = divmod(len(experts), num_experts)
        return [each + (expert < more) for expert in range(num_experts)]
    sizes: list[int] = torch.bincount(experts, minlength=num_experts).tolist()
    return sizes


def products(rows: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """x·Wᵀ of each expert: rows [N, in], sorted by expert, weight [E, out, in], rows of each expert; [N, out]."""
    y: torch.Tensor = _Products.apply(rows, weight, sizes, current_deferral())  # type: ignore[no-untyped-call]
    return y


class _Products(torch.autograd.Function):
    """See `products`; works like `deferred_gradients.product`."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int], deferred: DeferredGradients | None
    ) -> torch.Tensor:
        dtype = product_dtype(rows)
        cast = rows.to(dtype)
        ctx.weight, ctx.sizes, ctx.deferred = weight, sizes, deferred
        ctx.dtype, ctx.input_dtype, ctx.copies = dtype, rows.dtype, shared_copies()
        ctx.save_for_backward(*((cast,) if weight.requires_grad else ()))
        y = cast.new_empty(len(cast), weight.shape[1])
        for place, own, matrix in _by_expert(sizes, y, cast, of=cast_weight(weight, dtype, ctx.copies)):
            torch.mm(own, matrix.t(), out=place)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient, weight, sizes, saved = gradients[0].contiguous(), ctx.weight, ctx.sizes, ctx.saved_tensors

        def of_weight() -> None:
            if saved:
                _add_gradient(weight, gradient, saved[0], sizes)

        if ctx.deferred is None:
            of_weight()
        else:
            ctx.deferred.add(of_weight)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        of_rows = gradient.new_empty(len(gradient), weight.shape[2])
        for place, own, matrix in _by_expert(sizes, of_rows, gradient, of=cast_weight(weight, ctx.dtype, ctx.copies)):
            torch.mm(own, matrix, out=place)
        return of_rows.to(ctx.input_dtype), None, None, None


def _add_gradient(weight: torch.Tensor, gradient: torch.Tensor, rows: torch.Tensor, sizes: Sequence[int]) -> None:
    """Add gradientᵀ·rows of each expert to the weight's gradient."""
    with torch.no_grad():
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight, dtype=gradient_dtype(weight))
        for left, right, place in _by_expert(sizes, gradient, rows, of=weight.grad):
            place.add_(left.t().mm(right))
    announce(weight)


def _by_expert(
    sizes: Sequence[int], *rows: torch.Tensor, of: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The rows of each expert that has some, and its matrix of a stack."""
    parts = (torch.split(each, list(sizes)) for each in rows)
    for size, one, other, matrix in zip(sizes, *parts, of, strict=True):
        if size:
            yield one, other, matrix


# -- routers -------------------------------------------------------------------------------------------

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits [T, E], weights of the choices [T, K], and the choices [T, K]."""


def own_routers(tree: nn.Module, routed: Callable[[Routed], Routed]) -> None:
    """Let the routers of a tree of modules read weights as other products do, and `routed` change what they return."""
    for router in filter(is_router, tree.modules()):
        router.forward = partial(_route, router, router.forward, routed)


def _route(
    router: nn.Module,
    forward: Callable[[torch.Tensor], Routed],
    routed: Callable[[Routed], Routed],
    hidden: torch.Tensor,
) -> Routed:
    weight, dtype = router.get_parameter("weight"), product_dtype(hidden)
    if weight.dtype == dtype:
        return routed(forward(hidden))
    cast = _Cast.apply(weight, dtype)  # type: ignore[no-untyped-call]
    return routed(functional_call(_Plain(router, forward), {"router.weight": cast}, (hidden,)))


class _Plain(nn.Module):
    """A router's own forward."""

    def __init__(self, router: nn.Module, forward: Callable[[torch.Tensor], Routed]) -> None:
        super().__init__()
        self.router, self.compute = router, forward

    def forward(self, hidden: torch.Tensor) -> Routed:
        return self.compute(hidden)


class _Cast(torch.autograd.Function):
    """A weight as products read it; its gradient is added to that of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.weight = weight
        return cast_weight(weight, dtype, shared_copies()).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        if ctx.weight.requires_grad:
            accumulate(ctx.weight, gradients[0])
        return None, None
