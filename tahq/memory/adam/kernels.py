"""A step of AdamW in one kernel: each tensor is read once and written once. See `adamw_step` and `adamw8bit`.

Compiled without fusing multiplications and additions: codes, scales and moments are the reference's, to the bit.
Weights move by what the device's fast root and reciprocal give: within 2⁻²⁰ of the reference's change, and to the
bit in the interpreter. Nothing is specialised on what changes from step to step.
Shape letters: R blocks a program, B elements a block, in H rows of C.
"""

import triton
import triton.language as tl

from tahq.memory.adam.blockwise8_kernels import decode_blocks, encode_blocks, largest_of, scales_of
from tahq.memory.adam.filled_programs import load_once, store
from tahq.quant.gpu.tiles import IS_INTERPRETED

_NUMBERS = ["beta1", "rest1", "beta2", "rest2", "decay", "rate", "root_factor", "epsilon"]


@triton.jit
def _advance(weight, gradient, m, v, beta1, rest1, beta2, rest2, decay, rate, root_factor, epsilon):
    """Weight, m and v after the step, all fp32."""
    m = m * beta1 + gradient * rest1
    v = v * beta2 + (gradient * gradient) * rest2
    ratio = m * _inverse(_fma(_root(v), root_factor, epsilon))
    return _fma(ratio, -rate, weight * decay), m, v


@triton.jit
def _fma(a, b, c):
    """a·b + c: rounded once, but as the reference does it in the interpreter."""
    if IS_INTERPRETED:
        return a * b + c
    return tl.fma(a, b, c)


@triton.jit
def _root(values):
    """√x to 2 ulp, of subnormal numbers 0; correctly rounded in the interpreter."""
    if IS_INTERPRETED:
        return tl.sqrt_rn(values)
    return tl.inline_asm_elementwise(
        "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _inverse(values):
    """1/x to 1 ulp, of normal numbers; correctly rounded in the interpreter."""
    if IS_INTERPRETED:
        return 1.0 / values
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _rounded(values, like):
    """fp32 in the type of `like`, to the nearest, ties to even; which the interpreter, left alone, cuts off."""
    if IS_INTERPRETED:  # noqa: SIM102
        if like.dtype == tl.bfloat16:
            bits = values.to(tl.int32, bitcast=True)
            values = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return values.to(like.dtype)


@triton.jit(do_not_specialize=["first_program", "num_elements", *_NUMBERS])
def adamw8bit_kernel(
    weights,
    m_codes,
    v_codes,
    m_scales,
    v_scales,
    tables,
    gradients,
    first_program,
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
    C: tl.constexpr,
    MASKED: tl.constexpr,
):
    """R blocks of a parameter with 8-bit moments.

    A block is H rows of C elements, one warp wide where B allows it, of four each: so a warp has a block, finds
    its largest magnitudes alone, and reads and writes 16 bytes a thread of weights and gradients side by side.
    """
    H: tl.constexpr = B // C
    program = tl.program_id(0) + first_program
    # Where a program begins may be beyond 2³¹; what it adds to that is not.
    start = program.to(tl.int64) * (R * B)
    left = tl.minimum(num_elements - start, R * B).to(tl.int32)
    block = tl.arange(0, R)[:, None, None]
    within = tl.arange(0, H)[None, :, None] * C + tl.arange(0, C)[None, None, :]
    # Not more than four elements to a thread at a time, although of codes sixteen would be as easily read. The 2 is not
    # so, and does no more than rank dimensions: threads that a row leaves over take other blocks, not other rows.
    at = tl.max_contiguous(tl.multiple_of(block * B + within, [1, 1, 4]), [2, 1, 4])
    is_real, is_block = at < left, block * B < left
    weights += start
    gradients += start
    m_codes += start
    v_codes += start
    m_scales += program.to(tl.int64) * R
    v_scales += program.to(tl.int64) * R
    gradient = load_once(gradients + at, is_real, 0.0, MASKED).to(tl.float32)
    weight = load_once(weights + at, is_real, 0.0, MASKED)
    m_code = load_once(m_codes + at, is_real, 127, MASKED)
    v_code = load_once(v_codes + at, is_real, 0, MASKED)
    m_scale = load_once(m_scales + block, is_block, 0.0, MASKED)
    v_scale = load_once(v_scales + block, is_block, 0.0, MASKED)
    m, v = decode_blocks(m_code, v_code, m_scale, v_scale, tables)
    moved, m, v = _advance(
        weight.to(tl.float32), gradient, m, v, beta1, rest1, beta2, rest2, decay, rate, root_factor, epsilon
    )
    store(weights + at, _rounded(moved, weight), is_real, MASKED)
    m_largest, v_largest = largest_of(m, True), largest_of(v, False)
    _store_by_all(m_scales + block, scales_of(m_largest), is_block, MASKED)
    _store_by_all(v_scales + block, scales_of(v_largest), is_block, MASKED)
    m_code, v_code = encode_blocks(m, v, m_largest, v_largest, tables)
    store(m_codes + at, m_code, is_real, MASKED)
    store(v_codes + at, v_code, is_real, MASKED)


@triton.jit
def _store_by_all(pointers, values, is_real, MASKED: tl.constexpr):
    """By all threads that have a value: Triton would bring it to other threads first, which wait for each other."""
    if IS_INTERPRETED:
        tl.store(pointers, values, mask=is_real)
    else:
        is_real = is_real if MASKED else tl.full(values.shape, 1, tl.int1)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p st.global.f32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,f,r",
            [pointers.to(tl.int64), values, is_real.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


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
