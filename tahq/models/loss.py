"""The loss of a micro-batch: a sum over its labelled tokens, computed from all logits at once or chunk by chunk.

Shapes: B samples, S positions, T = B·S tokens, C hidden channels, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from tahq.models.deferred_gradients import accumulate, cast_weight, product_dtype, shared_copies

IGNORED_LABEL = -100


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over the labelled tokens of −log softmax(logits)[label], in nats, computed in fp32.

    The caller divides by the token count of the whole step, which it knows beforehand; a mean of micro-batch means
    would weigh tokens by how many others share their micro-batch.

    Args:
        logits: [..., V], any float dtype.
        labels: [...] int64; `IGNORED_LABEL` where there is no loss. Already shifted: labels[b, s]
            is what logits[b, s] should predict.

    Returns:
        A scalar fp32 tensor.
    """
    flat = logits.float().reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


def chunked_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, num_chunks: int, divisor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of hidden·weightᵀ, of which only the logits of one chunk of tokens exist at a time.

    The forward computes the gradients, too: that of `hidden` is kept, and that of `weight` added to it, chunk by chunk,
    with one rounding of each product. So the gradient is that of a pass over full-size logits which adds its parts in
    the same order. Loss: the sum of the chunks' in fp32, in order. Source: LLMQ, Chunking.

    Args:
        hidden: [B, S, C], after the final norm.
        weight: of the head, [V, C].
        labels: [B, S], as of `summed_cross_entropy`.
        num_chunks: chunks of ⌈T / num_chunks⌉ tokens; the last one may be shorter.
        divisor: of the loss whose gradient is computed.

    Returns:
        The loss over `divisor`, for `backward`; and the loss, without a graph.
    """
    if torch.is_grad_enabled():
        loss, summed = _ChunkedCrossEntropy.apply(hidden, weight, labels, num_chunks, divisor)  # type: ignore[no-untyped-call]
        return loss, summed
    dtype, summed = product_dtype(hidden), torch.zeros((), device=hidden.device)
    matrix = cast_weight(weight, dtype, shared_copies())
    for rows, of_rows in _chunks(hidden, labels, num_chunks):
        summed += summed_cross_entropy(F.linear(rows.to(dtype), matrix), of_rows)
    return summed / divisor, summed


def _chunks(hidden: torch.Tensor, labels: torch.Tensor, num_chunks: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.flatten()
    size = -(-len(rows) // num_chunks)
    return zip(torch.split(rows, size), torch.split(flat, size), strict=True)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """See `chunked_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, num_chunks: int, divisor: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, summed = product_dtype(hidden), torch.zeros((), device=hidden.device)
        matrix, parts = cast_weight(weight, dtype, shared_copies()), list(_chunks(hidden, labels, num_chunks))
        of_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        targets = torch.split(of_hidden.view(-1, hidden.shape[-1]), len(parts[0][0]))
        for number, ((part, of_part), target) in enumerate(zip(parts, targets, strict=True), start=1):
            rows = part.to(dtype)
            logits = F.linear(rows, matrix).requires_grad_()
            with torch.enable_grad():
                loss = summed_cross_entropy(logits, of_part)
                (gradient,) = torch.autograd.grad(loss / divisor, logits)
            summed += loss.detach()
            del logits, loss
            target.copy_(gradient.mm(matrix))
            if weight.requires_grad:
                accumulate(weight, gradient.t().mm(rows), is_whole=number == len(parts))
        ctx.save_for_backward(of_hidden)
        ctx.mark_non_differentiable(summed)
        return summed / divisor, summed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (of_hidden,) = ctx.saved_tensors
        return of_hidden * gradients[0], None, None, None, None
