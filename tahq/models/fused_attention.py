"""Attention by fused kernels: torch's, in chunks of samples and heads if wanted, and on CUDA with our own backward.

Causal attention in bf16 on CUDA, in heads of `attention_kernels.HEAD_DIMS`, is one call whatever the number of chunks,
since its backward has no workspace. Elsewhere a kernel's workspace is that of one chunk. It is large where the backward
has to give the same bits each time: the gradient of Q in fp32. A chunk has whole heads, and the query heads of a key
head stay together, so each number is computed from the same inputs. Outputs and gradients are written into tensors of
their full size, not joined from parts, and what is kept for the backward is what the kernel keeps of the whole.

On CUDA a chunk has as many heads, of all its samples, as the GPU has multiprocessors. With fewer the kernel would keep
⌈multiprocessors / heads⌉ partial sums of each head: that is the workspace again, and other bits.

Source: LLMQ, Chunking and Reproducibility.
Shapes: B samples, H query heads, K key and value heads, S positions, D channels per head.
"""

from collections.abc import Iterator
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from tahq.kernel_launch import has_triton
from tahq.models.deferred_gradients import product_dtype

_OF_FLASH = ("out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
_OPERATORS = {
    (SDPBackend.FLASH_ATTENTION, "cpu"): ("_scaled_dot_product_flash_attention_for_cpu", _OF_FLASH[:2]),
    (SDPBackend.FLASH_ATTENTION, "cuda"): ("_scaled_dot_product_flash_attention", _OF_FLASH),
    (SDPBackend.CUDNN_ATTENTION, "cuda"): ("_scaled_dot_product_cudnn_attention", _OF_FLASH),
    (SDPBackend.EFFICIENT_ATTENTION, "cuda"): (
        "_scaled_dot_product_efficient_attention",
        ("out", "logsumexp", "philox_seed", "philox_offset"),
    ),
}
"""torch's fused kernels, and their results by the names that these have as arguments of the backward."""
_WITH_STATISTICS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
_HEAD_ALIGNMENT = 8
"""Elements that a head's channels must be a multiple of."""
_FLASH_BLOCK = 64
"""Positions of a block, by whose number flash attention's forward decides whether to divide its sums."""


def attend_in_chunks(module: nn.Module, num_chunks: int) -> None:
    """Make the attention layers in a tree of modules compute so many chunks."""
    for layer in module.modules():
        if type(layer).__name__.endswith("Attention"):
            layer.attention_chunks = num_chunks  # type: ignore[assignment]


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    num_chunks: int,
) -> torch.Tensor | None:
    """softmax(QKᵀ · scaling + mask) V in chunks, or with own kernels: [B, S, H, D]; None: it is torch's one call.

    Arguments as of `keyed_attention`. With more chunks than samples heads are divided, too, at most into K parts.
    """
    if num_chunks == 1 and (mask is not None or not query.is_cuda):
        return None
    dtype, is_causal = product_dtype(query), mask is None and query.shape[2] > 1
    if mask is not None:  # as transformers does, because kernels with a mask do not group heads
        key, value = _of_every_head(query, key, value)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)  # as autocast does
    backend = partial(torch._fused_sdp_choice, attn_mask=mask, is_causal=is_causal, scale=scaling)
    choice = SDPBackend(backend(query, key, value, enable_gqa=key.shape[1] < query.shape[1]))
    keeps_weights = choice == SDPBackend.MATH and query.is_cuda and mask is None  # all S² of them
    if keeps_weights:
        key, value = _of_every_head(query, key, value)
        choice = SDPBackend(backend(query, key, value))
    num_chunks = _usable_chunks(query, key, num_chunks)
    place = choice, query.device.type
    if place[1] == "cuda" and choice in _WITH_STATISTICS and is_causal:
        kernels = _kernels_of(query.shape[3])
        if kernels is not None:
            attended: torch.Tensor = _Causal.apply(query, key, value, scaling, kernels)  # type: ignore[no-untyped-call]
            return attended.transpose(1, 2)
    if num_chunks == 1 and not keeps_weights:
        return None
    if place not in _OPERATORS or (place[1] == "cuda" and query.shape[3] % _HEAD_ALIGNMENT):
        return None
    bias = None if mask is None else mask.to(dtype)
    options = {"is_causal": is_causal, "scale": scaling, "dropout_p": 0.0, "compute_log_sumexp": True}
    output: torch.Tensor = _InChunks.apply(query, key, value, bias, num_chunks, *_OPERATORS[place], options)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2)


def _of_every_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, repeated for each query head that they serve."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (key, value))
    return key, value


@cache
def _fastest_forward(device: torch.device) -> SDPBackend:
    """cuDNN's on server GPUs since Hopper, half of flash attention's time on an H200; both are repeatable."""
    has_cudnn = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    is_hopper = has_cudnn and torch.cuda.get_device_capability(device)[0] in (9, 10)
    return SDPBackend.CUDNN_ATTENTION if is_hopper else SDPBackend.FLASH_ATTENTION


@cache
def _kernels_of(head_dim: int) -> Any:
    """`attention_kernels` where there is triton and they take so many channels, else None."""
    kernels: Any = import_module("tahq.models.attention_kernels") if has_triton() else None
    return kernels if kernels is not None and head_dim in kernels.HEAD_DIMS else None


def _usable_chunks(query: torch.Tensor, key: torch.Tensor, num_chunks: int) -> int:
    """Up to `num_chunks` chunks, of enough heads for a GPU."""
    least = 1
    if query.is_cuda:
        least = torch.cuda.get_device_properties(query.device).multi_processor_count
        if query.shape[2] <= _FLASH_BLOCK:
            least *= 2  # it does so below 1.6 blocks per multiprocessor
    count = min(num_chunks, max(1, len(query) * query.shape[1] // least))
    while count > 1 and any(query[at].shape[:2].numel() < least for at, _ in _chunks(query, key, count)):
        count -= 1
    return count


def _chunks(query: torch.Tensor, key: torch.Tensor, num_chunks: int) -> Iterator[tuple[Any, Any]]:
    """The places of each chunk in tensors of queries and of keys."""
    groups, num_parts = query.shape[1] // key.shape[1], min(num_chunks, len(key))
    for samples in _parts(len(key), num_parts):
        for heads in _parts(key.shape[1], min(-(-num_chunks // num_parts), key.shape[1])):
            yield (samples, slice(groups * heads.start, groups * heads.stop)), (samples, heads)


def _parts(size: int, num_parts: int) -> list[slice]:
    return [slice(size * part // num_parts, size * (part + 1) // num_parts) for part in range(num_parts)]


def _call(operator: Any, given: dict[str, Any]) -> Any:
    """Call an operator with the arguments that it has, of those given by name."""
    return operator(**{each.name: given[each.name] for each in operator._schema.arguments if each.name in given})


class _Causal(torch.autograd.Function):
    """Causal attention on CUDA in one call, [B, H, S, D]: a forward of torch's, and a backward without workspace."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, kernels: Any
    ) -> torch.Tensor:
        name = _OPERATORS[_fastest_forward(query.device), "cuda"][0]
        options = {"attn_bias": None, "compute_log_sumexp": True, "is_causal": True, "scale": scaling}
        given = {"query": query, "key": key, "value": value} | options
        output, norms = _call(getattr(torch.ops.aten, name).default, given)[:2]
        ctx.save_for_backward(query, key, value, output, norms.view(query.shape[:3]))
        ctx.scale, ctx.kernels = query.shape[3] ** -0.5 if scaling is None else scaling, kernels
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.kernels.causal_gradients(*ctx.saved_tensors, gradients[0], ctx.scale), None, None


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        num_chunks: int,
        name: str,
        results: tuple[str, ...],
        options: dict[str, Any],
    ) -> torch.Tensor:
        """The output, [B, H, S, D], with the memory layout [B, S, H, D]."""
        operator = getattr(torch.ops.aten, name).default
        output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        kept: list[Any] = []
        for at, of_keys in _chunks(query, key, num_chunks):
            found = _call(operator, _inputs(query, key, value, bias, at, of_keys) | options)
            output[at].copy_(found[0])
            kept += found[1 : len(results)]
        tensors = [each for each in kept if isinstance(each, torch.Tensor)]
        ctx.save_for_backward(query, key, value, bias, output, *tensors)
        ctx.numbers = [None if isinstance(each, torch.Tensor) else (each,) for each in kept]
        ctx.num_chunks, ctx.name, ctx.results, ctx.options = num_chunks, name, results, options
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, bias, output, *tensors = ctx.saved_tensors
        operator, saved = getattr(torch.ops.aten, f"{ctx.name}_backward").default, iter(tensors)
        kept = iter([next(saved) if each is None else each[0] for each in ctx.numbers])
        of_inputs = [torch.empty_like(each) for each in (query, key, value)]
        for at, of_keys in _chunks(query, key, ctx.num_chunks):
            given = _inputs(query, key, value, bias, at, of_keys) | ctx.options
            given |= {"grad_out": gradients[0][at], "grad_out_": gradients[0][at], "out": output[at]}
            given |= {each: next(kept) for each in ctx.results[1:]} | {"grad_input_mask": [True, True, True, False]}
            found = _call(operator, given)
            for whole, place, part in zip(of_inputs, (at, of_keys, of_keys), found, strict=False):
                whole[place].copy_(part)
        return *of_inputs, None, None, None, None, None


def _inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, at: Any, of_keys: Any
) -> dict[str, Any]:
    """The inputs of one chunk, by the names that operators have for them."""
    part = query[at]
    of_part = None if bias is None else bias.expand(*part.shape[:2], -1, -1)
    return {"query": part, "key": key[of_keys], "value": value[of_keys], "attn_bias": of_part, "attn_mask": of_part}
