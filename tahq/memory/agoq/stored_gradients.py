"""Gradients in 8 bits between micro-batches: AGoQ's QuanGrad (§5).

A holder of a gradient (a parameter, or a low-rank weight) keeps E4M3 codes in blocks of 128 with scales in fp32, 1.03
bytes per element. A micro-batch's gradient is added in fp32 to what the codes decode to, the sum is rounded to nearest
and coded, and its fp32 copy is freed; so only one gradient at a time is there in fp32. The optimizer reads the decoded
gradient, of a few holders at a time.

The codes are the holder's attribute `gradient_codes`, None before there are any. A parameter whose gradient is in host
memory (`offload/host_part.py`) is treated alike, but for the codes. For others all functions here act on `grad` alone.
"""

import importlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from tahq.kernel_launch import has_triton
from tahq.memory.offload.host_memory import lent
from tahq.memory.offload.host_part import host_gradient, host_part
from tahq.memory.small_floats.block_codes import BlockCodes, dequantize_blocks, quantize_blocks
from tahq.models.deferred_gradients import after_gradient

DECODED_AT_A_TIME = 1 << 24
"""Elements of gradients that the optimizer gets in fp32 at a time, unless one holder has more."""


class HoldsGradient(Protocol):
    """A parameter, or a low-rank weight, whose gradient is a projection and has another shape."""

    grad: torch.Tensor | None

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight."""

    @property
    def device(self) -> torch.device:
        """Device of weight and gradient."""

    def numel(self) -> int:
        """Elements of the weight."""


Holder = TypeVar("Holder", bound=HoldsGradient)


def store_gradient(holder: HoldsGradient) -> None:
    """Keep a holder's gradient in codes from now on, or in host memory if that is its place."""
    if host_gradient(holder) is None:
        holder.gradient_codes = None  # type: ignore[attr-defined]
    after_gradient(holder, fold_gradient)


def is_stored(holder: HoldsGradient) -> bool:
    """Whether a holder keeps its gradient in codes, or in host memory."""
    return hasattr(holder, "gradient_codes") or host_gradient(holder) is not None


@torch.no_grad()
def fold_gradient(holder: Any) -> None:
    """Add the gradient that has come to the stored one, and free it."""
    gradient, holder.grad = holder.grad, None
    if gradient is None:
        return
    if (on_host := host_gradient(holder)) is not None:
        on_host.add(gradient)
        return
    past: tuple[torch.Size, BlockCodes] | None = holder.gradient_codes
    if gradient.is_cuda and has_triton():
        kernels = importlib.import_module("tahq.memory.agoq.stored_triton")
        coded = kernels.accumulated(gradient, None if past is None else past[1])
    else:
        total = gradient.float() if past is None else gradient + dequantize_blocks(past[1], past[0])
        coded = quantize_blocks(total, 8, torch.float32)
    holder.gradient_codes = gradient.shape, coded


def gradient_of(holder: HoldsGradient) -> torch.Tensor | None:
    """The gradient, decoded or copied where it is stored; None without one."""
    if (on_host := host_gradient(holder)) is not None and on_host.is_there:
        return on_host.copy()
    past: tuple[torch.Size, BlockCodes] | None = getattr(holder, "gradient_codes", None)
    return holder.grad if past is None else dequantize_blocks(past[1], past[0])


def replace_gradient(holder: HoldsGradient, gradient: torch.Tensor) -> None:
    """Put another gradient in the place of a holder's."""
    drop_gradient(holder)
    holder.grad = gradient.to(getattr(holder, "grad_dtype", gradient.dtype))
    if is_stored(holder):
        fold_gradient(holder)


def scale_gradients(holders: Iterable[HoldsGradient], factor: float) -> None:
    """Multiply every gradient in place, of stored ones the scales; does nothing if the factor is 1."""
    if factor == 1.0:
        return
    holders = list(holders)
    for holder in holders:
        if (on_host := host_gradient(holder)) is not None:
            on_host.scale(factor)
    codes = [getattr(holder, "gradient_codes", None) for holder in holders]
    plain = [holder.grad for holder in holders if holder.grad is not None]
    tensors = [*plain, *(past[1].scales for past in codes if past is not None)]
    wide = [tensor for tensor in tensors if tensor.dtype == torch.float32]
    if wide:
        torch._foreach_mul_(wide, factor)  # one kernel launch for many tensors
    for tensor in tensors:
        if tensor.dtype != torch.float32:
            tensor.mul_(factor)  # of bf16 the other would round the factor, too, on CPUs


def drop_gradient(holder: HoldsGradient) -> None:
    """Forget a holder's gradient."""
    holder.grad = None
    if (on_host := host_gradient(holder)) is not None:
        on_host.drop()
    elif is_stored(holder):
        holder.gradient_codes = None  # type: ignore[attr-defined]


def with_gradients(holders: Iterable[Holder]) -> Iterator[list[Holder]]:
    """Holders in parts, each while its gradients, and no others, are there in fp32, and drop them.

    What a holder has in host memory is lent to its part. Holders with nothing stored elsewhere are all in one part.
    """
    parts: list[list[Holder]] = [[]]
    room = DECODED_AT_A_TIME
    for holder in holders:
        arriving = holder.numel() if _arrives(holder) else 0
        if parts[-1] and arriving > room:
            parts.append([])
            room = DECODED_AT_A_TIME
        parts[-1].append(holder)
        room -= arriving
    later = [[each.grad for each in part] for part in parts]
    for part in parts:
        for holder in part:
            holder.grad = None
    loans = (
        [loan for each in part if (host := host_part(each)) is not None for loan in host.loans()] for part in parts
    )
    for _, part, gradients in zip(lent(loans), parts, later, strict=True):
        for holder, gradient in zip(part, gradients, strict=True):
            on_host = host_gradient(holder)
            if on_host is None or not on_host.is_there:
                holder.grad = gradient if gradient is not None else gradient_of(holder)
            else:
                holder.grad = on_host.lent()
        yield part
        gradients.clear()
        for holder in part:
            drop_gradient(holder)


def _arrives(holder: HoldsGradient) -> bool:
    return is_stored(holder) or host_part(holder) is not None
