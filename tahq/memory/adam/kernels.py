"""A step of AdamW with moments in fp32 or bf16, one launch for many parameters, and what all AdamW kernels share.

Each tensor is read once and written once. Compiled without fusing multiplications and additions: moments are bit-equal
to the reference (`adamw.step_in_torch`). Weights use the device's fast root and reciprocal: within 2⁻²⁰ of the
reference's change before they are rounded, and bit-equal in the interpreter. Stochastic rounding has the reference's
draws. Nothing is specialised on numbers that change from step to step.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl

from tahq.kernel_launch import ALIGNMENT, on_device_of
from tahq.quant.gpu.launch import EXACT, Launch
from tahq.quant.gpu.tiles import IS_INTERPRETED, rounded_to_bf16
from tahq.quant.gpu.words import approximate_inverse
from tahq.quant.stochastic_rounding import key_halves

_ELEMENTS = 1024
_ELEMENTS_PER_WARP = 256
_CHUNK = 4 * _ELEMENTS  # A program's, which first searches the table for its parameter
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
NUMBERS = ["beta1", "rest1", "beta2", "rest2", "decay", "rate", "root_factor", "epsilon"]


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


@triton.jit(do_not_specialize=NUMBERS)
def plain_adamw_kernel(
    table, beta1, rest1, beta2, rest2, decay, rate, root_factor, epsilon, ROWS: tl.constexpr, WEIGHT: tl.constexpr,
    MOMENT: tl.constexpr, GRADIENT: tl.constexpr, DIVISOR: tl.constexpr, CHUNK: tl.constexpr, B: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """A chunk of one of up to ROWS parameters, whose numbers of elements are multiples of DIVISOR.

    table [8, ROWS]: each one's first chunk, its elements, addresses of weight, m, v and gradient, and halves of a key.
    """
    chunk = tl.program_id(0)
    row = table + tl.sum((tl.load(table + tl.arange(0, ROWS)) <= chunk).to(tl.int32)) - 1
    start, size = (chunk - tl.load(row)) * CHUNK, tl.multiple_of(tl.load(row + ROWS), DIVISOR)
    weights = tl.multiple_of(tl.load(row + 2 * ROWS).to(tl.pointer_type(WEIGHT)), 16)
    ms = tl.multiple_of(tl.load(row + 3 * ROWS).to(tl.pointer_type(MOMENT)), 16)
    vs = tl.multiple_of(tl.load(row + 4 * ROWS).to(tl.pointer_type(MOMENT)), 16)
    gradients = tl.multiple_of(tl.load(row + 5 * ROWS).to(tl.pointer_type(GRADIENT)), 16)
    key_low, key_high = tl.load(row + 6 * ROWS).to(tl.int32), tl.load(row + 7 * ROWS).to(tl.int32)
    for first in range(start, tl.minimum(start + CHUNK, size), B):
        at = first + tl.arange(0, B)
        is_real = at < size
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


def step_plain(
    parameters: Sequence[Sequence[torch.Tensor]], numbers: tuple[float, ...], keys: Sequence[int | None]
) -> None:
    """A step on parameters of one device, in one launch; the bits of one do not depend on the others.

    Args:
        parameters: weight, gradient, m and v of each, as kernels read them, and of the first one's types.
        keys: of the draws that round bf16; None, for all: to nearest.
    """
    weight, gradient, m, _ = parameters[0]
    sizes = [each[0].numel() for each in parameters]
    *firsts, num_chunks = accumulate((-(-size // _CHUNK) for size in sizes), initial=0)
    addresses = [[each[part].data_ptr() for each in parameters] for part in (0, 2, 3, 1)]
    halves = zip(*[(0, 0) if key is None else key_halves(key) for key in keys], strict=True)
    rows, spare = triton.next_power_of_2(len(parameters)), [1 << 62]  # beyond every chunk
    padded = [[*column, *spare * (rows - len(parameters))] for column in (firsts, sizes, *addresses, *halves)]
    table = torch.tensor(padded, dtype=torch.int64, pin_memory=weight.is_cuda).to(weight.device, non_blocking=True)
    types = (weight.dtype, m.dtype, gradient.dtype)
    with on_device_of(weight):
        _plain_plan(num_chunks, rows, types, math.gcd(*sizes, ALIGNMENT), keys[0] is not None)(table, last=numbers)


@lru_cache(maxsize=1024)
def _plain_plan(
    num_chunks: int, rows: int, types: tuple[torch.dtype, ...], divisor: int, is_stochastic: bool
) -> Launch:
    names = dict(zip(("WEIGHT", "MOMENT", "GRADIENT"), (_TYPES[each] for each in types), strict=True))
    sizes = {"ROWS": rows, "DIVISOR": divisor, "CHUNK": _CHUNK, "B": _ELEMENTS, "IS_STOCHASTIC": is_stochastic}
    options = {"num_warps": _ELEMENTS // _ELEMENTS_PER_WARP, **EXACT}
    return Launch(plain_adamw_kernel, (num_chunks, 1, 1), (), {**sizes, **names, **options})
