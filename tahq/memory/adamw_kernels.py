"""A step of AdamW in one kernel: each tensor is read once and written once. See `adamw_step` and `adamw8bit`.

Compiled without fusing multiplications and additions, and with correctly rounded root and quotient: weights and
moments are the reference's, to the bit. Nothing is specialised on what changes from step to step.
Shape letters: R blocks a program, B elements a block.
"""

import triton
import triton.language as tl

from tahq.memory.blockwise8_kernels import decode_block, encode_block, largest_of, scales_of
from tahq.quant.gpu.tiles import IS_INTERPRETED

_NUMBERS = ["beta1", "rest1", "beta2", "rest2", "decay", "rate", "root_factor", "epsilon"]


@triton.jit
def _advance(weight, gradient, m, v, beta1, rest1, beta2, rest2, decay, rate, root_factor, epsilon):
    """Weight, m and v after the step, all fp32."""
    m = m * beta1 + gradient * rest1
    v = v * beta2 + (gradient * gradient) * rest2
    denominator = tl.sqrt_rn(v) * root_factor + epsilon
    return weight * decay - tl.div_rn(m, denominator) * rate, m, v


@triton.jit
def _rounded(values, like):
    """fp32 in the type of `like`, to the nearest, ties to even; which the interpreter, left alone, cuts off."""
    if IS_INTERPRETED and like.dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        values = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return values.to(like.dtype)


@triton.jit(do_not_specialize=_NUMBERS)
def adamw8bit_kernel(
    weights,
    m_codes,
    v_codes,
    m_scales,
    v_scales,
    tables,
    gradients,
    num_elements,
    beta1,
    rest1,
    beta2,
    rest2,
    decay,
    rate,
    root_factor,
    epsilon,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """R blocks of a parameter with 8-bit moments."""
    blocks = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    at = blocks[:, None] * B + tl.arange(0, B)[None, :]
    is_real, is_block = at < num_elements, blocks * B < num_elements
    gradient = tl.load(gradients + at, mask=is_real, other=0.0).to(tl.float32)
    weight = tl.load(weights + at, mask=is_real, other=0.0)
    m_code = tl.load(m_codes + at, mask=is_real, other=127)
    v_code = tl.load(v_codes + at, mask=is_real, other=0)
    m = decode_block(m_code, tl.load(m_scales + blocks, mask=is_block, other=0.0), tables, True)
    v = decode_block(v_code, tl.load(v_scales + blocks, mask=is_block, other=0.0), tables, False)
    moved, m, v = _advance(
        weight.to(tl.float32), gradient, m, v, beta1, rest1, beta2, rest2, decay, rate, root_factor, epsilon
    )
    tl.store(weights + at, _rounded(moved, weight), mask=is_real)
    m_largest, v_largest = largest_of(m), largest_of(v)
    tl.store(m_scales + blocks, scales_of(m_largest), mask=is_block)
    tl.store(v_scales + blocks, scales_of(v_largest), mask=is_block)
    tl.store(m_codes + at, encode_block(m, m_largest, tables, True).to(tl.uint8), mask=is_real)
    tl.store(v_codes + at, encode_block(v, v_largest, tables, False).to(tl.uint8), mask=is_real)


@triton.jit(do_not_specialize=_NUMBERS)
def plain_adamw_kernel(
    weights,
    ms,
    vs,
    gradients,
    num_elements,
    beta1,
    rest1,
    beta2,
    rest2,
    decay,
    rate,
    root_factor,
    epsilon,
    B: tl.constexpr,
):
    """B elements of a parameter whose moments are stored in fp32 or bf16."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    is_real = at < num_elements
    weight = tl.load(weights + at, mask=is_real, other=0.0)
    gradient = tl.load(gradients + at, mask=is_real, other=0.0).to(tl.float32)
    m = tl.load(ms + at, mask=is_real, other=0.0)
    v = tl.load(vs + at, mask=is_real, other=0.0)
    moved, new_m, new_v = _advance(
        weight.to(tl.float32),
        gradient,
        m.to(tl.float32),
        v.to(tl.float32),
        beta1,
        rest1,
        beta2,
        rest2,
        decay,
        rate,
        root_factor,
        epsilon,
    )
    tl.store(weights + at, _rounded(moved, weight), mask=is_real)
    tl.store(ms + at, _rounded(new_m, m), mask=is_real)
    tl.store(vs + at, _rounded(new_v, v), mask=is_real)
