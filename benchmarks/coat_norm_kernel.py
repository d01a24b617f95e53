"""An RMSNorm in Triton without quantisation, bf16 to bf16, for bench_coat_layer.py to compare with."""

import torch
import triton
import triton.language as tl


@triton.jit
def _plain_norm_kernel(
    x, weight, y, rstd, maxima, channels, groups, epsilon, MAXIMA: tl.constexpr, G: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, G)
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    is_real = column < channels
    values = tl.load(x + token * channels + column, mask=is_real, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(values * values, axis=1), axis=0) / channels
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon))
    tl.store(rstd + token, inverse)
    factor = tl.load(weight + column, mask=is_real, other=0.0).to(tl.float32)
    normalised = values * inverse * factor
    tl.store(y + token * channels + column, normalised.to(tl.bfloat16), mask=is_real)
    if MAXIMA:
        largest = tl.max(normalised.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        tl.store(maxima + token * groups + group, largest, mask=group < groups)


def plain_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, *, maxima: bool) -> torch.Tensor:
    """x·rstd·w, in the same blocks as the kernel with quantisation; with `maxima`, those of groups of 16 as well."""
    tokens, channels = x.shape
    groups = -(-channels // 16)
    y, rstd = torch.empty_like(x), torch.empty(tokens, device=x.device)
    found = torch.empty(tokens * groups if maxima else 1, dtype=torch.int32, device=x.device)
    block = triton.next_power_of_2(groups)
    _plain_norm_kernel[(tokens,)](
        x, weight, y, rstd, found, channels, groups, epsilon,
        MAXIMA=maxima, G=block, num_warps=min(16, max(1, block * 16 // 512)),
    )  # fmt: skip
    return y
