"""The loss of a micro-batch: a sum over its labelled tokens, computed from all logits at once or chunk by chunk.

On CUDA a kernel (`loss_kernels`) computes it, and overwrites logits with their gradient; elsewhere torch's operators
do.

Of preferences it is that of DPO, from the log-probabilities of whole rows, under the model and under a reference.

With z-loss, what is differentiated also has z·lse² for each labelled token, lse = log Σ exp(logits), which keeps the
logits from growing; the reported loss does not. Sources: PaLM §5; LLMQ App. A.4; Rafailov et al. 2023 (DPO), Eq. 7.

Shapes: B samples, S positions, T = B·S tokens, C hidden channels, V vocabulary.
"""

import os
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tahq.kernel_launch import has_triton
from tahq.models.deferred_gradients import accumulate_product, cast_weight, linear, product_dtype, shared_copies

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


def soft_capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """c · tanh(logits / c) with the cap c (Gemma 2); None: the logits."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def preference_loss(
    log_probs: torch.Tensor, reference: torch.Tensor, labels: torch.Tensor, beta: float, smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of DPO, summed over pairs.

        −log σ(r_chosen − r_rejected)                 with the rewards r = β·(log π(y|x) − log π_ref(y|x))

    With smoothing ε, (1 − ε) of that and ε of the loss of the exchanged answers (conservative DPO, Mitchell 2023).
    Source: Rafailov et al. 2023, Eq. 7.

    Args:
        log_probs: Σ log p of each answer's labels, fp32 [2·P]: of each pair the chosen, then the rejected one.
        reference: the same under the reference.
        labels: as of `summed_cross_entropy`, int64 [2·P, S]; pairs without any do not count.
        beta: β.
        smoothing: ε.

    Returns:
        The loss, in nats; and fp32 [4], without a graph: the number of pairs, the sums of the rewards of chosen and of
        rejected answers, and how often the first is higher.
    """
    counts = (labels != IGNORED_LABEL).any(1).view(-1, 2).all(1)
    rewards = beta * (log_probs - reference).view(-1, 2)
    margins = rewards[:, 0] - rewards[:, 1]
    losses = -(1 - smoothing) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)
    columns = torch.ones_like(margins), *rewards.unbind(1), (margins > 0).float()
    return (losses * counts).sum(), torch.stack([(column * counts).sum() for column in columns]).detach()


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, divisor: float = 1.0, z_loss: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of all logits at once, and with z-loss for the backward.

    Where a gradient is needed on CUDA, the forward overwrites the logits with it.

    Args:
        logits: [..., V], any float dtype.
        labels: as of `summed_cross_entropy`.
        divisor: of the loss whose gradient is computed.
        z_loss: factor of lse².

    Returns:
        The loss over `divisor`, for `backward`; and the loss without z-loss, without a graph.
    """
    kernels = _kernels(logits)
    if kernels is None:
        loss, summed = _in_torch(logits, labels, z_loss)
        return loss / divisor, summed.detach()
    if torch.is_grad_enabled() and logits.requires_grad:
        loss, summed = _CrossEntropy.apply(logits, labels, divisor, z_loss)  # type: ignore[no-untyped-call]
        return loss, summed
    summed = kernels.losses_of_rows(_rows(logits), labels.flatten()).sum(1)[0]
    return summed / divisor, summed


def cross_entropy_of_rows(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each sample, summed over its labelled tokens, from all logits at once; else as `cross_entropy`.

    Args:
        logits: [B, S, V], any float dtype.
        labels: int64 [B, S], as of `summed_cross_entropy`.

    Returns:
        fp32 [B].
    """
    kernels = _kernels(logits)
    if kernels is None:
        flat = logits.float().flatten(0, 1)
        losses = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
    elif torch.is_grad_enabled() and logits.requires_grad:
        losses = _CrossEntropyOfTokens.apply(logits, labels)  # type: ignore[no-untyped-call]
    else:
        losses = kernels.losses_of_rows(_rows(logits), labels.flatten())[0]
    return losses.view(labels.shape).sum(1)


def _kernels(logits: torch.Tensor) -> ModuleType | None:
    """The Triton kernels, for logits on CUDA or in Triton's interpreter; None: plain torch."""
    is_usable = logits.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return import_module("tahq.models.loss_kernels") if is_usable and has_triton() else None


def _rows(logits: torch.Tensor) -> torch.Tensor:
    """The logits as [T, V], without a graph, with the elements of a row one after the other."""
    rows = logits.detach().reshape(-1, logits.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _in_torch(logits: torch.Tensor, labels: torch.Tensor, z_loss: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums over labelled tokens of the loss with z-loss and without."""
    summed = summed_cross_entropy(logits, labels)
    if z_loss == 0.0:
        return summed, summed
    log_sums = torch.logsumexp(logits.float(), -1)
    return summed + z_loss * log_sums.where(labels != IGNORED_LABEL, 0.0).square().sum(), summed


class _CrossEntropy(torch.autograd.Function):
    """`cross_entropy` by the kernel."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, divisor: float, z_loss: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gradient, loss, summed = _differentiated(_rows(logits), labels.flatten(), divisor, z_loss)
        ctx.shape, ctx.kernels = logits.shape, _kernels(logits)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(summed)
        return loss / divisor, summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (of_logits,) = ctx.saved_tensors
        ctx.kernels.multiply_rows(of_logits, gradients[0])
        return of_logits.view(ctx.shape), None, None, None


class _CrossEntropyOfTokens(torch.autograd.Function):
    """The loss of each token, fp32 [T], by the kernel."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows, kernels = _rows(logits), _kernels(logits)
        assert kernels is not None, "the caller checked"
        losses: torch.Tensor = kernels.losses_of_rows(rows, labels.flatten(), 1.0)[0]
        ctx.shape = logits.shape
        ctx.save_for_backward(rows)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (of_logits,) = ctx.saved_tensors
        return of_logits.mul_(gradients[0][:, None]).view(ctx.shape), None


def _differentiated(
    logits: torch.Tensor, labels: torch.Tensor, divisor: float, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of logits [T, V], by the kernel in their place; and the sums of `_in_torch`, without a graph."""
    kernels = _kernels(logits)
    if kernels is not None:
        summed, loss = kernels.losses_of_rows(logits, labels, divisor, z_loss).sum(1).unbind()
        return logits, loss, summed
    logits.requires_grad_()
    with torch.enable_grad():
        loss, summed = _in_torch(logits, labels, z_loss)
        (gradient,) = torch.autograd.grad(loss / divisor, logits)
    return gradient, loss.detach(), summed.detach()


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    num_chunks: int,
    divisor: float = 1.0,
    z_loss: float = 0.0,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of hidden·weightᵀ, of which only the logits of one chunk of tokens exist at a time.

    The forward computes the gradients, too: that of `hidden` is kept, and that of `weight` added to it, chunk by chunk,
    by `accumulate_product`. So the gradient is that of a pass over full-size logits which adds its parts in the same
    order. Loss: the sum of the chunks' in fp32, in order. Source: LLMQ, Chunking.

    Args:
        hidden: [B, S, C], after the final norm.
        weight: of the head, [V, C].
        labels: [B, S], as of `summed_cross_entropy`.
        num_chunks: chunks of ⌈T / num_chunks⌉ tokens; the last one may be shorter.
        divisor: of the loss whose gradient is computed.
        z_loss: factor of lse².
        cap: of `soft_capped`.

    Returns:
        As of `cross_entropy`.
    """
    if torch.is_grad_enabled():
        loss, summed = _ChunkedCrossEntropy.apply(hidden, weight, labels, num_chunks, divisor, z_loss, cap)  # type: ignore[no-untyped-call]
        return loss, summed
    dtype, summed = product_dtype(hidden), torch.zeros((), device=hidden.device)
    matrix = cast_weight(weight, dtype, shared_copies())
    for rows, of_rows in _chunks(hidden, labels, num_chunks):
        summed += cross_entropy(soft_capped(linear(rows.to(dtype), matrix), cap), of_rows)[1]
    return summed / divisor, summed


def _chunks(hidden: torch.Tensor, labels: torch.Tensor, num_chunks: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.flatten()
    size = -(-len(rows) // num_chunks)
    return zip(torch.split(rows, size), torch.split(flat, size), strict=True)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        num_chunks: int,
        divisor: float,
        z_loss: float,
        cap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = product_dtype(hidden)
        loss, summed = (torch.zeros((), device=hidden.device) for _ in range(2))
        matrix, parts = cast_weight(weight, dtype, shared_copies()), list(_chunks(hidden, labels, num_chunks))
        of_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        targets = torch.split(of_hidden.view(-1, hidden.shape[-1]), len(parts[0][0]))
        for number, ((part, of_part), target) in enumerate(zip(parts, targets, strict=True), start=1):
            rows = part.to(dtype)
            logits = soft_capped(linear(rows, matrix), cap)
            slope = None if cap is None else 1 - (logits / cap).square()
            gradient, *sums = _differentiated(logits, of_part, divisor, z_loss)
            gradient = gradient if slope is None else gradient * slope
            loss += sums[0]
            summed += sums[1]
            target.copy_(gradient.mm(matrix))
            if weight.requires_grad:
                accumulate_product(weight, gradient.t(), rows, is_whole=number == len(parts))
            del gradient, logits  # before the next chunk's
        ctx.save_for_backward(of_hidden)
        ctx.mark_non_differentiable(summed)
        return loss / divisor, summed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (of_hidden,) = ctx.saved_tensors
        return of_hidden * gradients[0], *[None] * 6
