"""A step of AdamW as one kernel per parameter, launched without waiting for the device.

Each tensor is read once and written once. Compiled without fusing multiplications and additions: codes, scales and
moments are bit-equal to the reference (`adamw.step_in_torch`). Weights use the device's fast root
and reciprocal: within 2⁻²⁰ of the reference's change, and bit-equal in the interpreter. Nothing is specialised on
numbers that change from step to step. Shape letters: R blocks per program, B elements per block, in H rows of C.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from tahq.memory.adam.blockwise8 import BLOCK, borders, dynamic_map
from tahq.memory.adam.blockwise8_kernels import decode_blocks, encode_blocks, largest_of, scales_of
from tahq.quant.gpu.launch import EXACT, BoundLaunches, Launch
from tahq.quant.gpu.tiles import IS_INTERPRETED

ELEMENTS = 1024
"""Per program, of several warps: a single warp would look up tables by shuffles, at three times the instructions."""
ELEMENTS_PER_WARP = 256
"""Eight per thread."""
_PLAIN_ELEMENTS_PER_WARP = 128
"""Four per thread: 16 bytes of fp32."""
_ROW = 128
"""Elements of a block that a warp reads at a time."""
_NUMBERS = ["beta1", "rest1", "beta2", "rest2", "decay", "rate", "root_factor", "epsilon"]


@triton.jit
def load_once(pointers, is_real, other, MASKED: tl.constexpr):
    """Load numbers that are read once, to be evicted from the cache before tables are."""
    if MASKED:
        return tl.load(pointers, mask=is_real, other=other, eviction_policy="evict_first")
    return tl.load(pointers, eviction_policy="evict_first")


@triton.jit
def store(pointers, values, is_real, MASKED: tl.constexpr):
    """Store values, where they are real if MASKED."""
    if MASKED:
        tl.store(pointers, values, mask=is_real)
    else:
        tl.store(pointers, values)


@triton.jit
def _advance(weight, gradient, m, v, beta1, rest1, beta2, rest2, decay, rate, root_factor, epsilon):
    """Weight, m and v after the step, all fp32."""
    m = m * beta1 + gradient * rest1
    v = v * beta2 + (gradient * gradient) * rest2
    ratio = m * _inverse(_fma(_root(v), root_factor, epsilon))
    return _fma(ratio, -rate, weight * decay), m, v


@triton.jit
def _fma(a, b, c):
    """a·b + c, rounded once; in the interpreter rounded twice, as the reference does."""
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
    """fp32 in the type of `like`, to nearest, ties to even; the interpreter alone would truncate."""
    if IS_INTERPRETED:  # noqa: SIM102
        if like.dtype == tl.bfloat16:
            bits = values.to(tl.int32, bitcast=True)
            values = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return values.to(like.dtype)


@triton.jit(do_not_specialize=["first_program", "num_elements", *_NUMBERS])
def adamw8bit_kernel(
    weights, m_codes, v_codes, m_scales, v_scales, tables, gradients, first_program, num_elements, beta1, rest1,
    beta2, rest2, decay, rate, root_factor, epsilon,
    R: tl.constexpr, B: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """R blocks of a parameter with 8-bit moments.

    A block is H rows of C elements, one warp wide if B allows it, four elements per thread: so a warp finds a block's
    largest magnitudes alone, and a thread reads and writes 16 contiguous bytes of weights and gradients.
    """
    H: tl.constexpr = B // C
    program = tl.program_id(0) + first_program
    # A program may begin beyond 2³¹; offsets within it do not exceed that.
    start = program.to(tl.int64) * (R * B)
    left = tl.minimum(num_elements - start, R * B).to(tl.int32)
    block = tl.arange(0, R)[:, None, None]
    within = tl.arange(0, H)[None, :, None] * C + tl.arange(0, C)[None, None, :]
    # At most four elements per thread at a time, although sixteen codes could be read at once. The 2 is not true; it
    # only ranks dimensions, so that threads left over by a row take other blocks, not other rows.
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
    """Store from all threads with a value: Triton would first move it to other threads, which wait for each other."""
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
    weights, ms, vs, gradients, num_elements, beta1, rest1, beta2, rest2, decay, rate, root_factor, epsilon,
    B: tl.constexpr,
):  # fmt: skip
    """B elements of a parameter whose moments are stored in fp32 or bf16."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    is_real = at < num_elements
    weight = tl.load(weights + at, mask=is_real, other=0.0)
    gradient = tl.load(gradients + at, mask=is_real, other=0.0).to(tl.float32)
    m = tl.load(ms + at, mask=is_real, other=0.0)
    v = tl.load(vs + at, mask=is_real, other=0.0)
    wide, wide_m, wide_v = weight.to(tl.float32), m.to(tl.float32), v.to(tl.float32)
    moved, new_m, new_v = _advance(
        wide, gradient, wide_m, wide_v, beta1, rest1, beta2, rest2, decay, rate, root_factor, epsilon
    )
    tl.store(weights + at, _rounded(moved, weight), mask=is_real)
    tl.store(ms + at, _rounded(new_m, m), mask=is_real)
    tl.store(vs + at, _rounded(new_v, v), mask=is_real)


def bind_adamw8bit(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    m_codes: torch.Tensor,
    v_codes: torch.Tensor,
    m_scales: torch.Tensor,
    v_scales: torch.Tensor,
    block: int = BLOCK,
) -> BoundLaunches:
    """Launches of a step with 8-bit moments on these tensors and any gradient of the same shape and dtype.

    All are contiguous and aligned to 16 bytes.
    """
    tensors = (weight, m_codes, v_codes, m_scales, v_scales, _tables(weight.device), gradient)
    return BoundLaunches(_plans8bit(weight.numel(), block, ELEMENTS, ELEMENTS_PER_WARP), tensors, moving=6)


def bind_plain_adamw(weight: torch.Tensor, gradient: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> BoundLaunches:
    """Launches of `adamw_step`, likewise; m and v in fp32, or both in bf16."""
    return BoundLaunches((_plain_plan(weight.numel(), m.dtype),), (weight, m, v, gradient), moving=3)


@lru_cache(maxsize=1024)
def _plans8bit(num_elements: int, block: int, elements: int, per_warp: int) -> tuple[Launch, ...]:
    """The full programs, which need no masks, and the last one if it is partial."""
    elements = max(block, elements)
    constants = {"R": elements // block, "B": block, "C": min(block, _ROW), "num_warps": elements // per_warp, **EXACT}
    whole, left = divmod(num_elements, elements)
    parts = ((0, whole, False), (whole, int(left > 0), True))
    return tuple(
        Launch(adamw8bit_kernel, (programs, 1, 1), (first, num_elements), constants | {"MASKED": is_masked})
        for first, programs, is_masked in parts
        if programs
    )


@lru_cache(maxsize=1024)
def _plain_plan(num_elements: int, dtype: torch.dtype) -> Launch:
    """One plan per dtype of the moments, which a `Launch` does not distinguish."""
    grid = (-(-num_elements // ELEMENTS), 1, 1)
    constants = {"B": ELEMENTS, "num_warps": ELEMENTS // _PLAIN_ELEMENTS_PER_WARP, **EXACT}
    return Launch(plain_adamw_kernel, grid, (num_elements,), constants)


@lru_cache(maxsize=32)
def _tables(device: torch.device) -> torch.Tensor:
    """Both maps and both tables of borders, 256 entries each."""
    tables = torch.zeros(4, 256)
    for row, values in enumerate((dynamic_map(True), dynamic_map(False), borders(True), borders(False))):
        tables[row, : len(values)] = values
    return tables.to(device)
