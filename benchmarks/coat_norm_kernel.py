"""An RMSNorm in Triton without quantisation, bf16 to bf16, for bench_layer.py to compare with."""

import torch
import triton
import triton.language as tl

from tahq.memory.coat import fp8_flow_triton


@triton.jit
def _plain_norm_kernel(
    x, weight, y, rstd, maxima, channels, groups, epsilon, MAXIMA_OF: tl.constexpr, EVEN: tl.constexpr, G: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, G)
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    is_real = column >= 0 if EVEN else column < channels
    values = tl.load(x + token * channels + column, mask=is_real, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(values * values, axis=1), axis=0) / channels
    inverse = tl.rsqrt(mean + epsilon)
    tl.store(rstd + token, inverse)
    factor = tl.load(weight + column, mask=is_real, other=0.0).to(tl.float32)
    normalised = values * inverse * factor
    tl.store(y + token * channels + column, normalised.to(tl.bfloat16), mask=is_real)
    if MAXIMA_OF != "nothing":
        largest = tl.max(normalised.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        if MAXIMA_OF == "groups":
            tl.store(maxima + token * groups + group, largest, mask=group < groups)
        else:
            tl.store(maxima + token, tl.max(largest, axis=0))


def plain_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, maxima_of: str) -> torch.Tensor:
    """x·rstd·w, in the blocks of the kernel with quantisation; and maxima of `groups` of 16, `rows` or `nothing`."""
    tokens, channels = x.shape
    groups = -(-channels // 16)
    y, rstd = torch.empty_like(x), torch.empty(tokens, device=x.device)
    found = torch.empty(tokens * groups, dtype=torch.int32, device=x.device)
    block = triton.next_power_of_2(groups)
    warps = min(16, max(1, block * 16 // fp8_flow_triton.NORM_ELEMENTS_PER_WARP))
    _plain_norm_kernel[(tokens,)](
        x, weight, y, rstd, found, channels, groups, epsilon,
        MAXIMA_OF=maxima_of, EVEN=block * 16 == channels, G=block, num_warps=warps,
    )  # fmt: skip
    return y
