"""Kernels on CUDA, launched by `stored_triton`: norms and activations fused with codes of their inputs; gradients.

A norm's program has one row, others R blocks of 128. Codes are packed as `block_codes` says; scales are fp32, or int16
with the bits of bf16. Where BITS is 0 inputs are kept unchanged: they stand in the place of their codes.
"""

import triton
import triton.language as tl

from tahq.memory.small_floats.device_bits import (
    decode,
    encode,
    from_bf16_bits,
    inverse_root,
    largest_magnitude,
    reciprocal,
    scale_of,
    sigmoid,
    to_bf16_bits,
)
from tahq.quant.gpu.tiles import INFINITY, magnitude_bits

_TWICE_ROOT = tl.constexpr(1.5957691216057308)  # 2·√(2/π)
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _store_blocks(
    values, codes, scales, block, is_block,
    R: tl.constexpr, BITS: tl.constexpr, LARGEST: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Codes and scales of values fp32 [R, 128] at blocks [R]. NATIVE: for 8 bits only."""
    EXPONENT: tl.constexpr = 4 if BITS == 8 else 2
    largest = largest_magnitude(values, 1).to(tl.int32, bitcast=True)
    scale = tl.where(largest >= INFINITY, float("nan"), scale_of(largest, 1 / LARGEST))
    if scales.dtype.element_ty == tl.float32:
        tl.store(scales + block, scale, mask=is_block)
    else:
        scale_bits = to_bf16_bits(scale)
        tl.store(scales + block, scale_bits, mask=is_block)
        scale = from_bf16_bits(scale_bits)
    code = encode(values * reciprocal(scale)[:, None], EXPONENT, BITS - 1 - EXPONENT, NATIVE)
    if BITS == 8:
        tl.store(codes + block[:, None] * 128 + tl.arange(0, 128)[None, :], code, mask=is_block[:, None])
    else:
        # eight codes at a time, as one thread has them
        eights = tl.reshape(code.to(tl.int32), [R, 16, 8])
        lane = tl.arange(0, 8)[None, None, :]
        start = codes + block[:, None] * (16 * BITS)
        words = (start + 4 * tl.arange(0, 16)[None, :]).to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(words, tl.sum((eights & 15) << (4 * lane), axis=2), mask=is_block[:, None])
        for plane in tl.static_range(4, BITS):
            bits = tl.sum(((eights >> plane) & 1) << lane, axis=2).to(tl.uint8)
            tl.store(start + (64 + 16 * (plane - 4)) + tl.arange(0, 16)[None, :], bits, mask=is_block[:, None])


@triton.jit
def _load(
    codes, scales, at, block, is_block, is_real,
    R: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr, PAIRED: tl.constexpr = False,
):  # fmt: skip
    """`_load_blocks`, or the numbers themselves, which begin at `codes`, where they are real."""
    if BITS == 0:
        values = tl.load(codes + at, mask=is_real, other=0.0).to(tl.float32)
    else:
        values = _load_blocks(codes, scales, block, is_block, R, BITS, NATIVE, PAIRED)
    return values


@triton.jit
def _load_blocks(
    codes, scales, block, is_block,
    R: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr, PAIRED: tl.constexpr = False,
):  # fmt: skip
    """Values fp32 [R, 128] of blocks [R]; 0 where there is none. PAIRED: the faster layout beside fp32 weights."""
    EXPONENT: tl.constexpr = 4 if BITS == 8 else 2
    if BITS == 8:
        code = tl.load(codes + block[:, None] * 128 + tl.arange(0, 128)[None, :], mask=is_block[:, None], other=0)
    elif BITS == 4 and PAIRED:
        pairs = tl.load(codes + block[:, None] * 64 + tl.arange(0, 64)[None, :], mask=is_block[:, None], other=0)
        code = tl.reshape(tl.join(pairs & 15, pairs >> 4), [R, 128])
    else:
        lane = tl.arange(0, 8)[None, None, :]
        start = codes + block[:, None] * (16 * BITS)
        words = (start + 4 * tl.arange(0, 16)[None, :]).to(tl.pointer_type(tl.int32), bitcast=True)
        eights = (tl.load(words, mask=is_block[:, None], other=0)[:, :, None] >> (4 * lane)) & 15
        for plane in tl.static_range(4, BITS):
            at = start + (64 + 16 * (plane - 4)) + tl.arange(0, 16)[None, :]
            bits = tl.load(at, mask=is_block[:, None], other=0).to(tl.int32)
            eights = eights | (((bits[:, :, None] >> lane) & 1) << plane)
        code = tl.reshape(eights, [R, 128])
    scale = tl.load(scales + block, mask=is_block, other=0)
    if scales.dtype.element_ty != tl.float32:
        scale = from_bf16_bits(scale)
    return decode(code, EXPONENT, BITS - 1 - EXPONENT, NATIVE) * scale[:, None]


@triton.jit
def _store_rounded(values, y, at, is_real, maxima, MAXIMA: tl.constexpr):
    """Values fp32 [R, 128] in the dtype of y; MAXIMA: and the bits of their largest magnitude, as they are stored."""
    rounded = values.to(y.dtype.element_ty)
    tl.store(y + at, rounded, mask=is_real)
    if MAXIMA:
        largest = largest_magnitude(largest_magnitude(rounded.to(tl.float32), 1), 0)
        tl.store(maxima + tl.program_id(0), magnitude_bits(largest))


# -- norms ---------------------------------------------------------------------------------------


@triton.jit
def _normalised(values, is_real, channels, epsilon, CENTRED: tl.constexpr):
    """A row [K, 128] over its root mean square, CENTRED: after its mean is taken off; and the factor."""
    if CENTRED:
        mean = tl.sum(tl.sum(values, axis=1), axis=0) / channels
        values = tl.where(is_real, values - mean, 0.0)
    inverse = inverse_root(tl.sum(tl.sum(values * values, axis=1), axis=0) / channels + epsilon)
    return values * inverse, inverse


@triton.jit
def _row(channels, K: tl.constexpr):
    """Blocks of a row, offsets of its channels [K, 128], and which are real: codes have whole blocks only."""
    block = tl.arange(0, K)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    return block, column, block < channels // 128, column < channels


@triton.jit
def _scaled(normalised, weight, bias, column, is_real, HAS_BIAS: tl.constexpr):
    y = normalised * tl.load(weight + column, mask=is_real, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias + column, mask=is_real, other=0.0).to(tl.float32)
    return y


@triton.jit
def norm_forward_kernel(
    x, addend, weight, bias, y, codes, scales, maxima, channels, epsilon,
    CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr, BITS: tl.constexpr, LARGEST: tl.constexpr, MAXIMA: tl.constexpr,
    ADDS: tl.constexpr, NATIVE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A row's codes, and the norm of the exact row. ADDS, without bits: of x + addend, which is stored as `codes`."""
    block, column, is_block, is_real = _row(channels, K)
    row = tl.program_id(0).to(tl.int64)
    values = tl.load(x + row * channels + column, mask=is_real, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(addend + row * channels + column, mask=is_real, other=0.0).to(tl.float32)
        total = values.to(codes.dtype.element_ty)
        tl.store(codes + row * channels + column, total, mask=is_real)
        values = total.to(tl.float32)
    if BITS != 0:
        _store_blocks(values, codes, scales, row * (channels // 128) + block, is_block, K, BITS, LARGEST, NATIVE)
    normalised, _ = _normalised(values, is_real, channels, epsilon, CENTRED)
    out = _scaled(normalised, weight, bias, column, is_real, HAS_BIAS)
    _store_rounded(out, y, row * channels + column, is_real, maxima, MAXIMA)


@triton.jit
def norm_output_kernel(
    codes, scales, weight, bias, y, channels, epsilon,
    CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The norm of a decoded row."""
    block, column, is_block, is_real = _row(channels, K)
    row = tl.program_id(0).to(tl.int64)
    first = row * (channels // 128) + block
    values = _load_blocks(codes, scales, first, is_block, K, BITS, NATIVE, PAIRED=True)
    normalised, _ = _normalised(values, is_real, channels, epsilon, CENTRED)
    out = _scaled(normalised, weight, bias, column, is_real, HAS_BIAS)
    tl.store(y + row * channels + column, out.to(y.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize=["tokens"])
def norm_backward_kernel(
    gradient, past, codes, scales, weight, of_input, narrowed, of_weight, of_bias, tokens, channels, epsilon,
    CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr, BITS: tl.constexpr, ADDS: tl.constexpr, NARROWS: tl.constexpr,
    NATIVE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Gradients at the decoded rows; each program takes a share of the rows, and its part of the parameters'.

    ADDS: `of_input` has `past` added to it, after rounding; NARROWS: and is stored as `narrowed` as well.
    """
    block, column, is_block, is_real = _row(channels, K)
    factor = tl.load(weight + column, mask=is_real, other=0.0).to(tl.float32)
    to_weight = tl.zeros([K, 128], tl.float32)
    to_bias = tl.zeros([K, 128], tl.float32)
    for program_row in range(tl.program_id(0), tokens, tl.num_programs(0)):
        row = tl.cast(program_row, tl.int64)
        here = row * channels + column
        flowing = tl.load(gradient + here, mask=is_real, other=0.0).to(tl.float32)
        first = row * (channels // 128) + block
        values = _load(codes, scales, here, first, is_block, is_real, K, BITS, NATIVE, PAIRED=True)
        normalised, inverse = _normalised(values, is_real, channels, epsilon, CENTRED)
        to_weight += flowing * normalised
        to_bias += flowing
        weighted = flowing * factor
        inner = weighted - normalised * (tl.sum(tl.sum(weighted * normalised, axis=1), axis=0) / channels)
        if CENTRED:
            inner -= tl.sum(tl.sum(weighted, axis=1), axis=0) / channels
        out = (inner * inverse).to(of_input.dtype.element_ty)
        if ADDS:
            total = out.to(tl.float32) + tl.load(past + here, mask=is_real, other=0.0).to(tl.float32)
            out = total.to(of_input.dtype.element_ty)
        tl.store(of_input + here, out, mask=is_real)
        if NARROWS:
            tl.store(narrowed + here, out.to(narrowed.dtype.element_ty), mask=is_real)
    at = tl.program_id(0).to(tl.int64) * channels + column
    tl.store(of_weight + at, to_weight, mask=is_real)
    if HAS_BIAS:
        tl.store(of_bias + at, to_bias, mask=is_real)


# -- activations ---------------------------------------------------------------------------------


@triton.jit
def _activated(x, GATED: tl.constexpr):
    """SiLU (GATED) or GELU by tanh, and its derivative."""
    if GATED:
        share = sigmoid(x)
        return x * share, share * (1 + x * (1 - share))
    square = x * x * _CUBIC
    share = sigmoid(x * (square + 1) * _TWICE_ROOT)
    return x * share, share + x * share * (1 - share) * ((square * 3 + 1) * _TWICE_ROOT)


@triton.jit
def _blocks(numel, EVEN: tl.constexpr, R: tl.constexpr):
    """This program's blocks, offsets of their numbers [R, 128], and which are real. EVEN: blocks divide `numel`.

    `numel` is never a constant: ptxas 12.8 gives wrong codes of numbers that it knows to be 0 (see `encode`).
    """
    block = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    lane = tl.arange(0, 128)[None, :]
    is_block = block * 128 < numel
    at = block[:, None] * 128 + lane
    if EVEN:
        return block, at, is_block, is_block[:, None] & (lane < 128)
    return block, at, is_block, at < numel


@triton.jit(do_not_specialize=["numel"])
def activation_forward_kernel(
    x, up, y, codes, scales, up_codes, up_scales, maxima, numel,
    GATED: tl.constexpr, BITS: tl.constexpr, LARGEST: tl.constexpr, MAXIMA: tl.constexpr, NATIVE: tl.constexpr,
    EVEN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Codes of x, and of `up` where GATED; act(x)·up, or act(x)."""
    block, at, is_block, is_real = _blocks(numel, EVEN, R)
    values = tl.load(x + at, mask=is_real, other=0.0).to(tl.float32)
    if BITS != 0:
        _store_blocks(values, codes, scales, block, is_block, R, BITS, LARGEST, NATIVE)
    out, _ = _activated(values, GATED)
    if GATED:
        raised = tl.load(up + at, mask=is_real, other=0.0).to(tl.float32)
        if BITS != 0:
            _store_blocks(raised, up_codes, up_scales, block, is_block, R, BITS, LARGEST, NATIVE)
        out *= raised
    _store_rounded(out, y, at, is_real, maxima, MAXIMA)


@triton.jit(do_not_specialize=["numel"])
def activation_output_kernel(
    codes, scales, up_codes, up_scales, y, numel,
    GATED: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr, EVEN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The same of decoded numbers."""
    block, at, is_block, is_real = _blocks(numel, EVEN, R)
    out, _ = _activated(_load_blocks(codes, scales, block, is_block, R, BITS, NATIVE), GATED)
    if GATED:
        out *= _load_blocks(up_codes, up_scales, block, is_block, R, BITS, NATIVE)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize=["numel"])
def activation_backward_kernel(
    gradient, codes, scales, up_codes, up_scales, of_x, of_up, maxima, up_maxima, numel,
    GATED: tl.constexpr, BITS: tl.constexpr, MAXIMA: tl.constexpr, NATIVE: tl.constexpr, EVEN: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Gradients at the decoded numbers."""
    block, at, is_block, is_real = _blocks(numel, EVEN, R)
    flowing = tl.load(gradient + at, mask=is_real, other=0.0).to(tl.float32)
    out, slope = _activated(_load(codes, scales, at, block, is_block, is_real, R, BITS, NATIVE), GATED)
    if GATED:
        _store_rounded(flowing * out, of_up, at, is_real, up_maxima, MAXIMA)
        flowing *= _load(up_codes, up_scales, at, block, is_block, is_real, R, BITS, NATIVE)
    _store_rounded(flowing * slope, of_x, at, is_real, maxima, MAXIMA)


# -- any tensor ----------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["numel"])
def quantize_kernel(
    x,
    codes,
    scales,
    numel,
    BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
    R: tl.constexpr,
):
    """Codes of a contiguous tensor."""
    block, at, is_block, is_real = _blocks(numel, EVEN, R)
    values = tl.load(x + at, mask=is_real, other=0.0).to(tl.float32)
    _store_blocks(values, codes, scales, block, is_block, R, BITS, LARGEST, NATIVE)


@triton.jit(do_not_specialize=["numel"])
def dequantize_kernel(
    codes, scales, y, numel, BITS: tl.constexpr, NATIVE: tl.constexpr, EVEN: tl.constexpr, R: tl.constexpr
):
    """The decoded tensor."""
    block, at, is_block, is_real = _blocks(numel, EVEN, R)
    values = _load_blocks(codes, scales, block, is_block, R, BITS, NATIVE)
    tl.store(y + at, values.to(y.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize=["numel"])
def accumulate_kernel(
    gradient,
    past,
    past_scales,
    codes,
    scales,
    numel,
    HAS_PAST: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
    R: tl.constexpr,
):
    """E4M3 codes of a gradient added to what codes decode to; codes may take their place."""
    block, at, is_block, is_real = _blocks(numel, EVEN, R)
    values = tl.load(gradient + at, mask=is_real, other=0.0).to(tl.float32)
    if HAS_PAST:
        values += _load_blocks(past, past_scales, block, is_block, R, 8, NATIVE)
    _store_blocks(values, codes, scales, block, is_block, R, 8, 448.0, NATIVE)
