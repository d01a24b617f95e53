"""COAT's FP8 precision flow on CUDA: the kernels, launched by `fp8_flow_triton`.

Two shapes of work: rows, or runs of groups of 16 channels, where something is reduced; and tiles of a matrix where each
element is coded independently, and codes are stored plain and transposed.

Letters: T tokens, C channels, G groups per block, M × N the size of a tile.
"""

import triton
import triton.language as tl

from tahq.memory.small_floats.device_bits import (
    code_groups,
    decode,
    encode,
    from_bf16_bits,
    inverse_root,
    largest_magnitude,
    reciprocal,
    scale_of,
    sigmoid,
)
from tahq.quant.gpu.tiles import magnitude_bits


@triton.jit
def maxima_kernel(x, maxima, count, BLOCK: tl.constexpr):
    """Largest magnitude of every BLOCK elements."""
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(maxima + program, tl.max(magnitude_bits(values), axis=0))


@triton.jit(do_not_specialize=["count"])
def scale_kernel(maxima, scale, count, RECIPROCAL: tl.constexpr, BLOCK: tl.constexpr):
    """A tensor's scale, from the bits of its parts' maxima, in one program."""
    largest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(maxima + at, mask=at < count, other=0))
    tl.store(scale, scale_of(tl.max(largest, axis=0), RECIPROCAL))


@triton.jit
def _tile(tokens, channels, M: tl.constexpr, N: tl.constexpr):
    """This program's rows [M, 1] and columns [1, N], and a mask of the real ones."""
    across = tl.cdiv(channels, N)
    row = (tl.program_id(0) // across) * M + tl.arange(0, M)[:, None]
    column = (tl.program_id(0) % across) * N + tl.arange(0, N)[None, :]
    return row, column, (row < tokens) & (column < channels)


@triton.jit
def _store_tile(
    codes, rows, columns, row, column, is_real, tokens, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    if ROWS:
        tl.store(rows + row.to(tl.int64) * channels + column, codes, mask=is_real)
    if COLUMNS:
        at = tl.trans(column).to(tl.int64) * tokens + tl.trans(row)
        tl.store(columns + at, tl.trans(codes), mask=tl.trans(is_real))


@triton.jit
def _load_grouped(codes, scales, tokens, channels, groups, M: tl.constexpr, N: tl.constexpr, NATIVE: tl.constexpr):
    """Values [M, N] of this program's tile of a tensor in groups; a scale is loaded once for its group."""
    across = tl.cdiv(channels, N)
    row = (tl.program_id(0) // across) * M + tl.arange(0, M)
    group = (tl.program_id(0) % across) * (N // 16) + tl.arange(0, N // 16)
    at = row.to(tl.int64)[:, None] * groups + group[None, :]
    scale = from_bf16_bits(tl.load(scales + at, mask=(row < tokens)[:, None] & (group < groups)[None, :], other=0))
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    is_real = (row < tokens)[:, None, None] & (column < channels)[None, :, :]
    code = tl.load(codes + row.to(tl.int64)[:, None, None] * channels + column[None, :, :], mask=is_real, other=0)
    return tl.reshape(decode(code, 4, 3, NATIVE) * scale[:, :, None], [M, N])


@triton.jit
def quantize_kernel(
    x, scale, rows, columns, tokens, channels,
    MANTISSA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, NATIVE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Codes with one scale, in one layout or both."""
    row, column, is_real = _tile(tokens, channels, M, N)
    values = tl.load(x + row.to(tl.int64) * channels + column, mask=is_real, other=0.0).to(tl.float32)
    factor = reciprocal(tl.load(scale + tl.arange(0, 1)))
    codes = encode(values * factor[:, None], 7 - MANTISSA, MANTISSA, NATIVE)
    _store_tile(codes, rows, columns, row, column, is_real, tokens, channels, ROWS, COLUMNS)


@triton.jit
def norm_forward_kernel(
    x, added, weight, total, codes, scales, rstd, maxima, channels, groups, epsilon,
    ADDED: tl.constexpr, NATIVE: tl.constexpr, EVEN: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """One row: the sum with a branch, its codes in groups, rstd, and the largest magnitude of the norm's output.

    Scales and rstd are multiplied once per group. EVEN: a row fills its block.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, G)
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    is_real, is_group = column < channels, group < groups
    if EVEN:
        is_real, is_group = column >= 0, group >= 0
    values = tl.load(x + token * channels + column, mask=is_real, other=0.0)
    if ADDED:
        branch = tl.load(added + token * channels + column, mask=is_real, other=0.0)
        values = (values.to(tl.float32) + branch.to(tl.float32)).to(values.dtype)
        tl.store(total + token * channels + column, values, mask=is_real)
    code, scale_bits, decoded, scale = code_groups(values.to(tl.float32), NATIVE)
    tl.store(codes + token * channels + column, code, mask=is_real)
    tl.store(scales + token * groups + group, scale_bits, mask=is_group)
    mean = tl.sum(tl.sum(decoded * decoded, axis=1) * (scale * scale), axis=0) / channels
    inverse = inverse_root(mean + epsilon)
    tl.store(rstd + token, inverse)
    factor = tl.load(weight + column, mask=is_real, other=0.0).to(tl.float32)
    largest = largest_magnitude(decoded * factor, 1) * (scale * inverse)
    tl.store(maxima + token, tl.max(magnitude_bits(largest), axis=0))


@triton.jit
def norm_output_kernel(
    codes, scales, rstd, weight, scale, rows, columns, tokens, channels, groups,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, NATIVE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A tile of a norm's output, from the codes of its input."""
    row, column, is_real = _tile(tokens, channels, M, N)
    values = _load_grouped(codes, scales, tokens, channels, groups, M, N, NATIVE)
    inverse = tl.load(rstd + row, mask=row < tokens, other=0.0)
    factor = tl.load(weight + column, mask=column < channels, other=0.0).to(tl.float32)
    to_code = reciprocal(tl.load(scale + tl.arange(0, 1)))
    y = encode(values * inverse * factor * to_code[:, None], 4, 3, NATIVE)
    _store_tile(y, rows, columns, row, column, is_real, tokens, channels, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["tokens"])
def norm_backward_kernel(
    first, second, third, codes, scales, rstd, weight, residual, of_input, of_weight, tokens, channels, groups,
    NUM: tl.constexpr, NATIVE: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Rows of the input's gradient and their part of the weight's; each program takes a share of the rows."""
    group = tl.arange(0, G)
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    is_real = column < channels
    factor = tl.load(weight + column, mask=is_real, other=0.0).to(tl.float32)
    share = tl.zeros([G, 16], tl.float32)
    for row in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = tl.cast(row, tl.int64)
        at = token * channels + column
        gradient = tl.load(first + at, mask=is_real, other=0.0).to(tl.float32)
        if NUM > 1:
            gradient += tl.load(second + at, mask=is_real, other=0.0).to(tl.float32)
        if NUM > 2:
            gradient += tl.load(third + at, mask=is_real, other=0.0).to(tl.float32)
        scale = from_bf16_bits(tl.load(scales + token * groups + group, mask=group < groups, other=0))
        inverse = tl.load(rstd + token)
        coded = decode(tl.load(codes + at, mask=is_real, other=0), 4, 3, NATIVE) * scale[:, None]
        normalised = tl.where(is_real, coded * inverse, 0.0)
        share += gradient * normalised
        weighted = gradient * factor
        mean = tl.sum(tl.sum(weighted * normalised, axis=1), axis=0) / channels
        past = tl.load(residual + at, mask=is_real, other=0.0)
        inner = (weighted - normalised * mean) * inverse
        tl.store(of_input + at, (past.to(tl.float32) + inner).to(past.dtype), mask=is_real)
    tl.store(of_weight + tl.program_id(0).to(tl.int64) * channels + column, share, mask=is_real)


@triton.jit
def _groups(num_groups, channels, groups, G: tl.constexpr, EVEN: tl.constexpr):
    """This program's groups [G], the offsets of their elements [G, 16], and masks of the real ones.

    EVEN: groups divide the channels, so that a tensor is one run of groups.
    """
    group = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G)
    lane = tl.arange(0, 16)[None, :]
    is_group = group < num_groups
    if EVEN:
        return group, group[:, None] * 16 + lane, is_group, is_group[:, None] & (lane < 16)
    within = (group % groups)[:, None] * 16 + lane
    at = (group // groups)[:, None] * channels + within
    return group, at, is_group, is_group[:, None] & (within < channels)


@triton.jit
def gated_forward_kernel(
    gate, up, gate_codes, gate_scales, up_codes, up_scales, maxima, num_groups, channels, groups,
    EVEN: tl.constexpr, NATIVE: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Codes of gate and up in groups, and the largest magnitude of SiLU(gate)·up."""
    group, at, is_group, is_real = _groups(num_groups, channels, groups, G, EVEN)
    codes, scales, decoded, scale = code_groups(tl.load(gate + at, mask=is_real, other=0.0).to(tl.float32), NATIVE)
    opened = decoded * scale[:, None]
    tl.store(gate_codes + at, codes, mask=is_real)
    tl.store(gate_scales + group, scales, mask=is_group)
    codes, scales, decoded, scale = code_groups(tl.load(up + at, mask=is_real, other=0.0).to(tl.float32), NATIVE)
    raised = decoded * scale[:, None]
    tl.store(up_codes + at, codes, mask=is_real)
    tl.store(up_scales + group, scales, mask=is_group)
    largest = largest_magnitude(tl.where(is_real, opened * sigmoid(opened) * raised, 0.0), 1)
    tl.store(maxima + tl.program_id(0), tl.max(magnitude_bits(largest), axis=0))


@triton.jit
def gated_output_kernel(
    gate_codes, gate_scales, up_codes, up_scales, scale, rows, columns, tokens, channels, groups,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, NATIVE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A tile of SiLU(gate)·up, from the codes of both."""
    row, column, is_real = _tile(tokens, channels, M, N)
    opened = _load_grouped(gate_codes, gate_scales, tokens, channels, groups, M, N, NATIVE)
    raised = _load_grouped(up_codes, up_scales, tokens, channels, groups, M, N, NATIVE)
    to_code = reciprocal(tl.load(scale + tl.arange(0, 1)))
    y = encode(opened * sigmoid(opened) * raised * to_code[:, None], 4, 3, NATIVE)
    _store_tile(y, rows, columns, row, column, is_real, tokens, channels, ROWS, COLUMNS)


@triton.jit
def _through_gate(flowing, opened, raised):
    """The gate's gradient."""
    open_share = sigmoid(opened)
    return flowing * raised * (open_share * (1 + opened * (1 - open_share)))


@triton.jit
def gated_backward_kernel(
    gradient, gate_codes, gate_scales, up_codes, up_scales, of_gate, of_up, num_groups, channels, groups,
    STORED: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up, or, unless STORED, only their largest magnitudes, one per program."""
    group, at, is_group, is_real = _groups(num_groups, channels, groups, G, EVEN)
    incoming = tl.load(gradient + at, mask=is_real, other=0.0)
    flowing = incoming.to(tl.float32)
    gate_scale = from_bf16_bits(tl.load(gate_scales + group, mask=is_group, other=0))
    up_scale = from_bf16_bits(tl.load(up_scales + group, mask=is_group, other=0))
    opened = decode(tl.load(gate_codes + at, mask=is_real, other=0), 4, 3, NATIVE) * gate_scale[:, None]
    raised = decode(tl.load(up_codes + at, mask=is_real, other=0), 4, 3, NATIVE) * up_scale[:, None]
    to_gate = _through_gate(flowing, opened, raised)
    to_up = flowing * (opened * sigmoid(opened))
    if STORED:
        tl.store(of_gate + at, to_gate.to(incoming.dtype), mask=is_real)
        tl.store(of_up + at, to_up.to(incoming.dtype), mask=is_real)
    else:
        gate_bits = tl.where(is_real, magnitude_bits(to_gate), 0)
        up_bits = tl.where(is_real, magnitude_bits(to_up), 0)
        tl.store(of_gate + tl.program_id(0), tl.max(tl.max(gate_bits, axis=1), axis=0))
        tl.store(of_up + tl.program_id(0), tl.max(tl.max(up_bits, axis=1), axis=0))


@triton.jit
def gated_gradient_kernel(
    gradient, gate_codes, gate_scales, up_codes, up_scales, scale, rows, columns, tokens, channels, groups,
    UP: tl.constexpr, MANTISSA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, NATIVE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of gate, or of UP, coded with one scale."""
    row, column, is_real = _tile(tokens, channels, M, N)
    flowing = tl.load(gradient + row.to(tl.int64) * channels + column, mask=is_real, other=0.0).to(tl.float32)
    opened = _load_grouped(gate_codes, gate_scales, tokens, channels, groups, M, N, NATIVE)
    if UP:
        values = flowing * (opened * sigmoid(opened))
    else:
        raised = _load_grouped(up_codes, up_scales, tokens, channels, groups, M, N, NATIVE)
        values = _through_gate(flowing, opened, raised)
    to_code = reciprocal(tl.load(scale + tl.arange(0, 1)))
    codes = encode(values * to_code[:, None], 7 - MANTISSA, MANTISSA, NATIVE)
    _store_tile(codes, rows, columns, row, column, is_real, tokens, channels, ROWS, COLUMNS)


@triton.jit
def rotary_kernel(
    x, cosine, sine, rotated, angles, heads, half,
    SIGN: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """All heads of a token: pairs of channels (i, i + half) rotated by the position's angles; SIGN −1: rotated back.

    Cosine and sine of both channels of a pair are looked up, since the tables' halves need not be equal.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, H)[:, None]
    pair = tl.arange(0, D)[None, :]
    is_real = (head < heads) & (pair < half)
    at = (token * heads + head) * (2 * half) + pair
    angle = (token % angles) * (2 * half) + pair
    is_angle = pair < half
    first = tl.load(x + at, mask=is_real, other=0.0).to(tl.float32)
    second = tl.load(x + at + half, mask=is_real, other=0.0).to(tl.float32)
    cos1 = tl.load(cosine + angle, mask=is_angle, other=0.0).to(tl.float32)
    cos2 = tl.load(cosine + angle + half, mask=is_angle, other=0.0).to(tl.float32)
    sin1 = tl.load(sine + angle, mask=is_angle, other=0.0).to(tl.float32)
    sin2 = tl.load(sine + angle + half, mask=is_angle, other=0.0).to(tl.float32)
    if SIGN > 0:
        low, high = first * cos1 - second * sin1, second * cos2 + first * sin2
    else:
        low, high = first * cos1 + second * sin2, second * cos2 - first * sin1
    tl.store(rotated + at, low.to(rotated.dtype.element_ty), mask=is_real)
    tl.store(rotated + at + half, high.to(rotated.dtype.element_ty), mask=is_real)
