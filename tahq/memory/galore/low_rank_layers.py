"""A linear layer and an embedding over a `LowRankWeight`.

The linear layer decodes its weight for each product and frees it afterwards: the forward keeps the layer's input and no
copy of the weight; the backward decodes the weight again, computes the input's gradient, then the weight's, which goes
to `LowRankWeight.take` only. (Q-GaLore, Listing 1)

The embedding decodes only the rows that are looked up. Its backward makes the gradient of the whole table, fp32 [V, C],
with torch's operator, for `LowRankWeight.take`. It is cheap compared with a matrix product, so a split backward does
not defer it.

Shapes: W is [out, in] (`is_linear`, nn.Linear) or [in, out] (GPT-2's Conv1D); V words, C channels.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tahq.memory.galore.low_rank_weight import LowRankWeight
from tahq.models.deferred_gradients import DeferredGradients, current_deferral, product_dtype

_NO_PADDING = -1


class LowRankLinear(nn.Module):
    """x·Wᵀ + b, or x·W + b; W is not a parameter of the module, since its gradient has another shape."""

    def __init__(self, weight: LowRankWeight, bias: nn.Parameter | None, *, is_linear: bool) -> None:
        super().__init__()
        self.low_rank, self.bias, self.is_linear = weight, bias, is_linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]; under autocast in its type."""
        y: torch.Tensor = _Product.apply(x, self.bias, self.low_rank, self.is_linear, current_deferral())  # type: ignore[no-untyped-call]
        return y


class _Product(torch.autograd.Function):
    """The product, whose backward passes the weight's gradient to `LowRankWeight.take`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        weight: LowRankWeight,
        is_linear: bool,
        deferred: DeferredGradients | None,
    ) -> torch.Tensor:
        dtype = product_dtype(x)
        cast = x.to(dtype)
        ctx.weight, ctx.is_linear, ctx.deferred = weight, is_linear, deferred
        ctx.input_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(cast)
        matrix = weight.storage.decoded(dtype)
        b = None if bias is None else bias.to(dtype)
        if is_linear:
            return functional.linear(cast, matrix, b)
        rows = cast.reshape(-1, cast.shape[-1])
        product = rows.mm(matrix) if b is None else torch.addmm(b, rows, matrix)
        return product.view(*x.shape[:-1], matrix.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1])
        # the input's gradient first: taking the weight's may change the weight
        of_input = _input_gradient(ctx, gradient, x.shape) if ctx.needs_input_grad[0] else None
        of_bias = gradient.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[1] else None
        rows, weight, is_linear = x.reshape(-1, x.shape[-1]), ctx.weight, ctx.is_linear

        def compute() -> None:
            weight.take(gradient.t().mm(rows) if is_linear else rows.t().mm(gradient))

        if ctx.deferred is None:
            compute()
        else:
            ctx.deferred.add(compute)
        return of_input, of_bias, None, None, None


def _input_gradient(ctx: Any, gradient: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    matrix = ctx.weight.storage.decoded(gradient.dtype)
    product = gradient.mm(matrix if ctx.is_linear else matrix.t())
    return product.view(shape).to(ctx.input_dtype)


class LowRankEmbedding(nn.Module):
    """The rows of a table [V, C], which is not a parameter; `padding`: token whose row gets no gradient, or None."""

    def __init__(self, weight: LowRankWeight, padding: int | None) -> None:
        super().__init__()
        self.low_rank = weight
        self._padding = _NO_PADDING if padding is None else padding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> fp32 [..., C], under autocast too, as an ordinary embedding's."""
        # tokens have no gradient, and autograd only records what depends on a tensor that has one
        anchor = torch.empty(0, device=tokens.device, requires_grad=True)
        rows: torch.Tensor = _Rows.apply(tokens, anchor, self.low_rank, self._padding)  # type: ignore[no-untyped-call]
        return rows


class _Rows(torch.autograd.Function):
    """The look-up, whose backward passes the table's gradient to `LowRankWeight.take`."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, anchor: torch.Tensor, weight: LowRankWeight, padding: int
    ) -> torch.Tensor:
        ctx.weight, ctx.padding = weight, padding
        ctx.save_for_backward(tokens)
        return weight.storage.rows(tokens, torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None, None]:
        (tokens,) = ctx.saved_tensors
        num_rows = ctx.weight.shape[0]
        ctx.weight.take(torch.ops.aten.embedding_dense_backward(gradients[0], tokens, num_rows, ctx.padding, False))
        return None, None, None, None
