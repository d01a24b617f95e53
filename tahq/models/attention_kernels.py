"""The backward of causal attention on CUDA, without atomics: two kernels, each of which writes its own rows only.

Flash attention's repeatable backward gives a head's blocks of keys to one multiprocessor, one after the other, so with
few heads many are idle, and has the gradient of each query head's keys and values, which are summed afterwards. Here a
program has a block of queries, or a block of keys and some of the query heads that share it. Sums are in fp32, in a
fixed order, and do not depend on other heads or samples.

Source: FlashAttention-2 (Dao 2023, algorithm 2), whose softmax statistics are taken as they are.
Shapes: B samples, H query heads, K key and value heads, S positions, D channels per head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from tahq.kernel_launch import launch

HEAD_DIMS = (16, 32, 64, 128)
_PROGRAMS = 1.5
"""Programs per multiprocessor that blocks of keys are divided into at least, if query heads share them."""
_OF_QUERIES: dict[str, Any] = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4}
_OF_KEYS: dict[str, Any] = {"ROWS": 32, "COLUMNS": 128, "num_stages": 3}
"""Of the kernels; the fastest of ten each on an H200, for 64 and 128 channels and 1,024 positions."""
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _gradient_of_scores(
    query, of_output, sums, norm, key, value, row, column, scale, MASKED: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """A tile of softmax's probabilities and of the scores' gradient, [rows, columns] or transposed."""
    if TRANSPOSED:
        scores = tl.dot(key, tl.trans(query))
        of_scores = tl.dot(value, tl.trans(of_output))
        sums, norm, row, column = sums[None, :], norm[None, :], row[None, :], column[:, None]
    else:
        scores = tl.dot(query, tl.trans(key))
        of_scores = tl.dot(of_output, tl.trans(value))
        sums, norm, row, column = sums[:, None], norm[:, None], row[:, None], column[None, :]
    probabilities = tl.exp2(scores * (scale * _LOG2E) - norm)
    if MASKED:
        probabilities = tl.where(column <= row, probabilities, 0.0)
    return probabilities, probabilities * (of_scores - sums)


@triton.jit
def _add_keys(
    total, query, of_output, sums, norm, keys, values, row, first, last, key_stride, value_stride, length, scale,
    MASKED: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the gradient of a block of queries by keys from `first` to `last`."""
    channel = tl.arange(0, D)[None, :]
    for start in range(first, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_there = (column < length)[:, None]
        key = tl.load(keys + column[:, None] * key_stride + channel, mask=is_there, other=0.0)
        value = tl.load(values + column[:, None] * value_stride + channel, mask=is_there, other=0.0)
        _, gradient = _gradient_of_scores(
            query, of_output, sums, norm, key, value, row, column, scale, MASKED=MASKED, TRANSPOSED=False
        )
        total += tl.dot(gradient.to(key.dtype), key)
    return total


@triton.jit
def queries_kernel(
    queries, keys, values, outputs, of_outputs, norms, of_queries, sums,
    samples, heads, group, length, q_sample, q_head, q_row, k_sample, k_head, k_row, v_sample, v_head, v_row,
    o_sample, o_head, o_row, g_sample, g_head, g_row, scale, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of one head's queries [B, S, H, D], and for each of them Σ output · its gradient."""
    of_all = tl.program_id(0) % (samples * heads)
    block = tl.cdiv(length, ROWS) - 1 - tl.program_id(0) // (samples * heads)  # the longest first
    sample, head = (of_all // heads).to(tl.int64), (of_all % heads).to(tl.int64)
    row, channel = block * ROWS + tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    is_there = row < length
    at, is_row = row.to(tl.int64)[:, None], is_there[:, None]
    query = tl.load(queries + sample * q_sample + head * q_head + at * q_row + channel, mask=is_row, other=0.0)
    output = tl.load(outputs + sample * o_sample + head * o_head + at * o_row + channel, mask=is_row, other=0.0)
    of_output = tl.load(of_outputs + sample * g_sample + head * g_head + at * g_row + channel, mask=is_row, other=0.0)
    of_row = of_all.to(tl.int64) * length + row
    total = tl.sum(output.to(tl.float32) * of_output.to(tl.float32), axis=1)
    tl.store(sums + of_row, total, mask=is_there)
    norm = tl.load(norms + of_row, mask=is_there, other=0.0) * _LOG2E
    keys += sample * k_sample + head // group * k_head
    values += sample * v_sample + head // group * v_head
    gradient = tl.zeros((ROWS, D), tl.float32)
    before = block * ROWS // COLUMNS * COLUMNS
    gradient = _add_keys(
        gradient, query, of_output, total, norm, keys, values, row, 0, before, k_row, v_row, length, scale,
        MASKED=False, D=D, COLUMNS=COLUMNS,
    )  # fmt: skip
    last = tl.minimum((block + 1) * ROWS, length)
    gradient = _add_keys(
        gradient, query, of_output, total, norm, keys, values, row, before, last, k_row, v_row, length, scale,
        MASKED=True, D=D, COLUMNS=COLUMNS,
    )  # fmt: skip
    of_queries += ((sample * length + at) * heads + head) * D + channel
    tl.store(of_queries, (gradient * scale).to(of_queries.dtype.element_ty), mask=is_row)


@triton.jit
def _add_queries(
    of_key, of_value, key, value, queries, of_outputs, norms, sums, column, first, last, q_row, g_row, length, scale,
    MASKED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a block of keys and values by one head's queries from `first` to `last`."""
    channel = tl.arange(0, D)[None, :]
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        is_there = row < length
        query = tl.load(queries + row[:, None] * q_row + channel, mask=is_there[:, None], other=0.0)
        of_output = tl.load(of_outputs + row[:, None] * g_row + channel, mask=is_there[:, None], other=0.0)
        norm = tl.load(norms + row, mask=is_there, other=float("inf")) * _LOG2E  # no probability behind the end
        total = tl.load(sums + row, mask=is_there, other=0.0)
        probabilities, gradient = _gradient_of_scores(
            query, of_output, total, norm, key, value, row, column, scale, MASKED=MASKED, TRANSPOSED=True
        )
        of_value += tl.dot(probabilities.to(query.dtype), of_output)
        of_key += tl.dot(gradient.to(query.dtype), query)
    return of_key, of_value


@triton.jit
def keys_kernel(
    queries, keys, values, of_outputs, norms, sums, of_keys, of_values,
    samples, heads, group, parts, length, q_sample, q_head, q_row, k_sample, k_head, k_row, v_sample, v_head, v_row,
    g_sample, g_head, g_row, scale, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of a head's keys and values by part of its query heads: [B, S, K, parts, D]."""
    key_heads = heads // group
    of_all, block = tl.program_id(0) % (samples * key_heads * parts), tl.program_id(0) // (samples * key_heads * parts)
    part, of_key_head = of_all % parts, of_all // parts
    sample, key_head = (of_key_head // key_heads).to(tl.int64), (of_key_head % key_heads).to(tl.int64)
    column, channel = block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, D)[None, :]
    is_there = (column < length)[:, None]
    at = column.to(tl.int64)[:, None]
    key = tl.load(keys + sample * k_sample + key_head * k_head + at * k_row + channel, mask=is_there, other=0.0)
    value = tl.load(values + sample * v_sample + key_head * v_head + at * v_row + channel, mask=is_there, other=0.0)
    of_key = tl.zeros((COLUMNS, D), tl.float32)
    of_value = tl.zeros((COLUMNS, D), tl.float32)
    first = block * COLUMNS
    behind = tl.minimum(first + COLUMNS, length)
    for number in range(group * part // parts, group * (part + 1) // parts):
        head = key_head * group + number
        of_head = (sample * heads + head) * length
        of_key, of_value = _add_queries(
            of_key, of_value, key, value, queries + sample * q_sample + head * q_head,
            of_outputs + sample * g_sample + head * g_head, norms + of_head, sums + of_head, column, first, behind,
            q_row, g_row, length, scale, MASKED=True, D=D, ROWS=ROWS,
        )  # fmt: skip
        of_key, of_value = _add_queries(
            of_key, of_value, key, value, queries + sample * q_sample + head * q_head,
            of_outputs + sample * g_sample + head * g_head, norms + of_head, sums + of_head, column, behind, length,
            q_row, g_row, length, scale, MASKED=False, D=D, ROWS=ROWS,
        )  # fmt: skip
    place = (((sample * length + at) * key_heads + key_head) * parts + part) * D + channel
    tl.store(of_keys + place, (of_key * scale).to(of_keys.dtype.element_ty), mask=is_there)
    tl.store(of_values + place, of_value.to(of_values.dtype.element_ty), mask=is_there)


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    """x with channels side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _parts(query: torch.Tensor, key: torch.Tensor) -> int:
    """Parts of the query heads that share a key head, each with programs of its own."""
    samples, key_heads, length, _ = key.shape
    programs = samples * key_heads * -(-length // _OF_KEYS["COLUMNS"])
    device = torch.cuda.get_device_properties(query.device) if query.is_cuda else None  # None: the interpreter
    wanted: float = _PROGRAMS if device is None else _PROGRAMS * device.multi_processor_count
    return int(min(query.shape[1] // key_heads, math.ceil(wanted / programs)))


def causal_gradients(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    norms: torch.Tensor,
    of_output: torch.Tensor,
    scale: float,
    parts: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value of softmax(QKᵀ · scale) V, in their shapes and with memory of [B, S, heads, D].

    Query, output and its gradient [B, H, S, D], key and value [B, K, S, D], each with channels side by side; norms: the
    logarithm of the softmax's sums, fp32 [B, H, S]. `parts`: of the query heads that share a key head.
    """
    (samples, heads, length, width), key_heads = query.shape, key.shape[1]
    parts, of_output, sums = parts or _parts(query, key), _with_rows(of_output), torch.empty_like(norms)
    of_query = query.new_empty(samples, length, heads, width)
    of_key, of_value = (query.new_empty(samples, length, key_heads, parts, width) for _ in range(2))
    strides = [stride for each in (query, key, value) for stride in each.stride()[:3]]
    of_queries, of_keys = -(-length // _OF_QUERIES["ROWS"]), -(-length // _OF_KEYS["COLUMNS"])
    launch(
        queries_kernel, samples * heads * of_queries,
        query, key, value, output, of_output, norms, of_query, sums, samples, heads, heads // key_heads, length,
        *strides, *output.stride()[:3], *of_output.stride()[:3], scale,
        D=width, num_stages=3 if width <= 64 else 2, **_OF_QUERIES,
    )  # fmt: skip
    launch(
        keys_kernel, samples * key_heads * parts * of_keys,
        query, key, value, of_output, norms, sums, of_key, of_value, samples, heads, heads // key_heads, parts, length,
        *strides, *of_output.stride()[:3], scale, D=width, num_warps=4 if width <= 64 else 8, **_OF_KEYS,
    )  # fmt: skip
    of_key, of_value = (each.sum(3) if parts > 1 else each.squeeze(3) for each in (of_key, of_value))
    return of_query.transpose(1, 2), of_key.transpose(1, 2), of_value.transpose(1, 2)
