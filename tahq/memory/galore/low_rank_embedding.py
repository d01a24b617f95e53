"""An embedding over a `LowRankWeight`: only the rows that are looked up are decoded.

The backward makes the gradient of the whole table, fp32 [V, C], as torch's embedding does and with its operator, and
hands it to `LowRankWeight.take`. It is cheap against a matrix product, so a backward in two parts does not defer it.

Shapes: V words, C channels.
"""

from typing import Any

import torch
from torch import nn

from tahq.memory.galore.low_rank_weight import LowRankWeight

_NO_PADDING = -1


class LowRankEmbedding(nn.Module):
    """The rows of a table [V, C].

    Args:
        weight: the table; no parameter of the module.
        padding: token whose row gets no gradient; None: there is none.
    """

    def __init__(self, weight: LowRankWeight, padding: int | None) -> None:
        super().__init__()
        self.low_rank = weight
        self._padding = _NO_PADDING if padding is None else padding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> fp32 [..., C], under autocast too, as an ordinary embedding's."""
        # autograd records what depends on something that has a gradient, and tokens have none
        anchor = torch.empty(0, device=tokens.device, requires_grad=True)
        rows: torch.Tensor = _Rows.apply(tokens, anchor, self.low_rank, self._padding)  # type: ignore[no-untyped-call]
        return rows


class _Rows(torch.autograd.Function):
    """The look-up whose backward takes the table's gradient out of autograd's hands."""

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
