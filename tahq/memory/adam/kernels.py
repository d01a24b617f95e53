"""A step of AdamW with moments in fp32 or bf16 as one kernel per parameter, and the parts that all AdamW kernels share.

Each tensor is read once and written once. Compiled without fusing multiplications and additions: moments are bit-equal
to the reference (`adamw.step_in_torch`). Weights use the device's fast root and reciprocal: within 2⁻²⁰ of the
reference's change before they are rounded, and bit-equal in the interpreter. Stochastic rounding has the reference's
draws. Nothing is specialised on numbers that change from step to step.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from tahq.quant.gpu.launch import EXACT, BoundLaunches, Launch
from tahq.quant.gpu.tiles import IS_INTERPRETED, rounded_to_bf16
from tahq.quant.gpu.words import approximate_inverse

_ELEMENTS = 1024
_ELEMENTS_PER_WARP = 128  # Four per thread: 16 bytes of fp32
NUMBERS = ["beta1", "rest1", "beta2", "rest2", "decay", "rate", "root_factor", "epsilon"]
KEY = ["key_low", "key_high"]


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
def advance(weight, gradient, m, v, beta1, rest1, beta2, rest2, decay, rate, root_factor, epsilon):
    """Weight, m and v after the step, all fp32."""
    m = m * beta1 + gradient * rest1
    v = v * beta2 + (gradient * gradient) * rest2
    return moved_weight(weight, m, v, decay, rate, root_factor, epsilon), m, v


@triton.jit
def moved_weight(weight, m, v, decay, rate, root_factor, epsilon):
    """w·decay − m/(√v·root_factor + ε)·rate; root and reciprocal are one approximate instruction each.

    Correctly rounded they would take two dozen. A subnormal v counts as 0: its root is below 10⁻¹⁹.
    """
    ratio = m * approximate_inverse(_fma(_root(v), root_factor, epsilon))
    return _fma(ratio, -rate, weight * decay)


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
def rounded(values, like):
    """fp32 in the type of `like`, to nearest, ties to even; the interpreter alone would truncate."""
    if IS_INTERPRETED:  # noqa: SIM102
        if like.dtype == tl.bfloat16:
            bits = values.to(tl.int32, bitcast=True)
            values = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return values.to(like.dtype)


@triton.jit
def _stored(values, like, at, key_low, key_high, tensor: tl.constexpr, IS_STOCHASTIC: tl.constexpr):
    """fp32 in the type of `like`, rounded with the draws of this tensor's number; see `adamw.step_in_torch`."""
    if IS_STOCHASTIC:  # noqa: SIM102
        if like.dtype == tl.bfloat16:
            return rounded_to_bf16(values, at.to(tl.int32), key_low, key_high ^ tensor)
    return rounded(values, like)


@triton.jit(do_not_specialize=[*NUMBERS, *KEY])
def plain_adamw_kernel(
    weights, ms, vs, gradients, num_elements, beta1, rest1, beta2, rest2, decay, rate, root_factor, epsilon,
    key_low, key_high, B: tl.constexpr, IS_STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """B elements of a parameter; weights and moments are stored in fp32 or bf16, which may be rounded by draws."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    is_real = at < num_elements
    weight = tl.load(weights + at, mask=is_real, other=0.0)
    gradient = tl.load(gradients + at, mask=is_real, other=0.0).to(tl.float32)
    m = tl.load(ms + at, mask=is_real, other=0.0)
    v = tl.load(vs + at, mask=is_real, other=0.0)
    wide, wide_m, wide_v = weight.to(tl.float32), m.to(tl.float32), v.to(tl.float32)
    moved, new_m, new_v = advance(
        wide, gradient, wide_m, wide_v, beta1, rest1, beta2, rest2, decay, rate, root_factor, epsilon
    )
    tl.store(weights + at, _stored(moved, weight, at, key_low, key_high, 0, IS_STOCHASTIC), mask=is_real)
    tl.store(ms + at, _stored(new_m, m, at, key_low, key_high, 1, IS_STOCHASTIC), mask=is_real)
    tl.store(vs + at, _stored(new_v, v, at, key_low, key_high, 2, IS_STOCHASTIC), mask=is_real)


def bind_plain_adamw(
    weight: torch.Tensor, gradient: torch.Tensor, m: torch.Tensor, v: torch.Tensor, is_stochastic: bool
) -> BoundLaunches:
    """Launches of a step on these tensors and any gradient like this one; m and v in fp32, or both in bf16.

    With `is_stochastic` the halves of a key follow the step's numbers.
    """
    plan = _plain_plan(weight.numel(), m.dtype, is_stochastic)
    return BoundLaunches((plan,), (weight, m, v, gradient), moving=3)


@lru_cache(maxsize=1024)
def _plain_plan(num_elements: int, dtype: torch.dtype, is_stochastic: bool) -> Launch:
    """One plan per dtype of the moments, which a `Launch` does not distinguish."""
    grid = (-(-num_elements // _ELEMENTS), 1, 1)
    unused = {} if is_stochastic else dict.fromkeys(KEY, 0)
    constants = {"B": _ELEMENTS, "IS_STOCHASTIC": is_stochastic, "num_warps": _ELEMENTS // _ELEMENTS_PER_WARP, **EXACT}
    return Launch(plain_adamw_kernel, grid, (num_elements,), unused | constants)
