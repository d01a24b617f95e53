"""Cross-entropy on CUDA: one kernel that reads logits twice, and writes their gradient over them.

A program has a row of logits. Everything is computed in fp32 and rounded once, as the gradient is stored. No two
programs write to the same place, so results are repeatable; the sum over rows is torch's. A row with NaN, with +∞, with
nothing but −∞, or with a label outside of the vocabulary has NaN as its loss.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tahq.models.loss import IGNORED_LABEL

_OPTIONS = {"BLOCK": 4096, "num_warps": 8, "enable_fp_fusion": False}  # Triton 3.10 changes the default of fusion
_IGNORED = tl.constexpr(IGNORED_LABEL)


@triton.jit
def cross_entropy_kernel(
    logits, labels, losses, stride, vocab, num_rows, scale, z_loss, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A row's losses and, if GRADIENT, `scale` times the gradient of the second one, in place of the row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    is_labelled = label != _IGNORED
    is_word = (label >= 0) & (label < vocab)
    at_label = tl.load(logits + label, mask=is_word, other=float("nan")).to(tl.float32)
    num_read = tl.where(is_labelled, vocab, 0)
    column = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_read, BLOCK):
        values = tl.load(logits + first + column, mask=first + column < vocab, other=float("-inf")).to(tl.float32)
        before, largest = largest, tl.maximum(largest, tl.max(values, axis=0))
        base = tl.where(largest == float("-inf"), 0.0, largest)  # −∞ − −∞ would be NaN
        sums = sums * tl.exp(before - base) + tl.exp(values - base)
    total = tl.sum(sums, axis=0)
    log_sum = largest + tl.log(total)
    loss = tl.where(is_labelled, tl.log(total) - (at_label - largest), 0.0)
    penalty = tl.where(is_labelled & (z_loss > 0), z_loss * log_sum * log_sum, 0.0)
    tl.store(losses + row, loss)
    tl.store(losses + num_rows + row, loss + penalty)
    if GRADIENT:
        tl.debug_barrier()  # every thread has read the logit of the label
        factor = (1 + 2 * z_loss * log_sum) / total
        for first in range(0, vocab, BLOCK):
            at = first + column
            values = tl.load(logits + at, mask=at < num_read, other=0.0).to(tl.float32)
            gradient = (tl.exp(values - largest) * factor - tl.where(at == label, 1.0, 0.0)) * scale
            gradient = tl.where(is_labelled, gradient, 0.0)
            tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < vocab)


@triton.jit
def multiply_kernel(rows, factor, stride, width, BLOCK: tl.constexpr):
    """Multiply a row by a number that is on the device; a factor of 1 reads nothing."""
    rows += tl.program_id(0).to(tl.int64) * stride
    by = tl.load(factor)
    if by != 1.0:
        for first in range(0, width, BLOCK):
            at = first + tl.arange(0, BLOCK)
            values = tl.load(rows + at, mask=at < width, other=0.0).to(tl.float32) * by
            tl.store(rows + at, values.to(rows.dtype.element_ty), mask=at < width)


def losses_of_rows(
    logits: torch.Tensor, labels: torch.Tensor, divisor: float | None = None, z_loss: float = 0.0
) -> torch.Tensor:
    """Cross-entropy of each row, and it with z_loss·lse² added, lse = log Σ exp(logits); 0 where labels are ignored.

    Args:
        logits: [T, V], any float dtype, rows of any stride; with `divisor` overwritten with the gradient of the sum of
            the second losses over it.
        labels: int64 [T].
        divisor: None: there is no gradient.
        z_loss: factor of lse².

    Returns:
        fp32 [2, T].
    """
    num_rows, vocab = logits.shape
    scale = 1.0 if divisor is None else 1 / divisor
    losses = torch.empty(2, num_rows, device=logits.device)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        cross_entropy_kernel[(num_rows,)](
            logits, labels.contiguous(), losses, logits.stride(0), vocab, num_rows,
            scale, z_loss, GRADIENT=divisor is not None, **_OPTIONS,
        )  # fmt: skip
    if divisor is not None:
        torch.autograd.graph.increment_version(logits)  # a backward that needs the logits then raises an error
    return losses


def multiply_rows(rows: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply rows [T, V] of any stride in place by a scalar on their device."""
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        multiply_kernel[(len(rows),)](rows, factor, rows.stride(0), rows.shape[1], **_OPTIONS)
    torch.autograd.graph.increment_version(rows)  # a second backward then raises an error
