"""Decoding NF4 in Triton, the scales within the same kernel; bit-equal to `nf4.py`.

Shape letters: R blocks per program, 64 weights per block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tahq.kernel_launch import launch
from tahq.memory.adam import blockwise8
from tahq.memory.small_floats.device_bits import store_rounded
from tahq.memory.small_floats.nf4 import BLOCK, values
from tahq.quant.gpu.launch import EXACT

if TYPE_CHECKING:
    from tahq.memory.small_floats.nf4 import Nf4Weight

BLOCKS_PER_PROGRAM = 32
_BLOCK, _GROUP = tl.constexpr(BLOCK), tl.constexpr(blockwise8.BLOCK)


@triton.jit
def decode_kernel(
    codes, scales, groups, mean, scale_values, code_values, out, numel, num_blocks, R: tl.constexpr
):  # fmt: skip
    """out ← value(code) · (value(scale) · group + mean)."""
    block = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    is_block = block < num_blocks
    of_scale = tl.load(scale_values + tl.load(scales + block, mask=is_block, other=0).to(tl.int32))
    scale = of_scale * tl.load(groups + block // _GROUP, mask=is_block, other=0.0) + tl.load(mean)
    at = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    is_real = at < numel
    pair = tl.load(codes + at // 2, mask=is_real, other=0).to(tl.int32)
    code = (pair >> (4 - at % 2 * 4).to(tl.int32)) & 15
    store_rounded(out, at, tl.load(code_values + code) * scale[:, None], is_real)


def decode(weight: Nf4Weight, out: torch.Tensor) -> None:
    """Write the weights to `out` [N], in its type."""
    device, num_blocks = out.device, len(weight.codes)
    tables = blockwise8.dynamic_map(True, device), values(device)
    launch(
        decode_kernel, -(-num_blocks // BLOCKS_PER_PROGRAM),
        weight.codes, weight.scales, weight.groups, weight.mean, *tables, out, out.numel(), num_blocks,
        R=BLOCKS_PER_PROGRAM, **EXACT, num_warps=4,
    )  # fmt: skip
