"""Matrix products in Triton that code their result, or decode an operand, for bench_layer.py (AGoQ §4.3, Table 11)."""

from collections.abc import Callable, Mapping

import torch
import triton
import triton.language as tl

from tahq.memory.agoq.stored_kernels import _load_blocks, _store_blocks
from tahq.memory.small_floats.block_codes import BLOCK, FORMATS, BlockCodes

_CONFIGS = [
    triton.Config({"ROWS": rows, "DEPTH": depth, "GROUP": 8}, num_warps=warps, num_stages=stages)
    for rows, depth, warps, stages in (
        (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 4), (256, 64, 8, 3), (128, 128, 8, 3), (64, 128, 4, 4),
    )
]  # fmt: skip
_COLUMNS = tl.constexpr(128)
"""Of a tile: those of one block of codes."""


@triton.jit
def _tile(m, n, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Rows and columns of this program's tile; tiles that share operands run at about the same time."""
    tiles_down, tiles_across = tl.cdiv(m, ROWS), tl.cdiv(n, _COLUMNS)
    program, band = tl.program_id(0), GROUP * tiles_across
    first = program // band * GROUP
    height = min(tiles_down - first, GROUP)
    down, across = first + program % band % height, program % band // height
    return down * ROWS + tl.arange(0, ROWS), across, across * _COLUMNS + tl.arange(0, _COLUMNS)


@triton.autotune(_CONFIGS, key=["m", "n", "k"])
@triton.jit
def product_kernel(
    a, b, c, codes, scales, m, n, k,
    CODED: tl.constexpr, BITS: tl.constexpr, LARGEST: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """C [m, n] = A [m, k]·Bᵀ, B [n, k], in bf16; CODED: also its codes, in blocks of 128 along n."""
    row, across, column = _tile(m, n, ROWS, GROUP)
    depth = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, _COLUMNS], tl.float32)
    for start in range(0, k, DEPTH):
        left = tl.load(a + row[:, None].to(tl.int64) * k + (start + depth)[None, :], mask=row[:, None] < m, other=0.0)
        right = tl.load(b + column[None, :].to(tl.int64) * k + (start + depth)[:, None])
        total = tl.dot(left, right, total)
    rounded = total.to(tl.bfloat16)
    tl.store(c + row[:, None].to(tl.int64) * n + column[None, :], rounded, mask=row[:, None] < m)
    if CODED:
        block = row.to(tl.int64) * (n // 128) + across
        _store_blocks(rounded.to(tl.float32), codes, scales, block, row < m, ROWS, BITS, LARGEST, False)


@triton.autotune([config for config in _CONFIGS if config.kwargs["DEPTH"] == 128], key=["m", "n", "k"])
@triton.jit
def decoding_product_kernel(
    codes, scales, b, c, m, n, k,
    BITS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """C [m, n] = A·Bᵀ in bf16, where A [m, k] is in codes, in blocks of 128 along k."""
    row, _, column = _tile(m, n, ROWS, GROUP)
    depth = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, _COLUMNS], tl.float32)
    for index in range(k // 128):
        block = row.to(tl.int64) * (k // 128) + index
        left = _load_blocks(codes, scales, block, row < m, ROWS, BITS, False).to(tl.bfloat16)
        right = tl.load(b + column[None, :].to(tl.int64) * k + (index * 128 + depth)[:, None])
        total = tl.dot(left, right, total)
    tl.store(c + row[:, None].to(tl.int64) * n + column[None, :], total.to(tl.bfloat16), mask=row[:, None] < m)


def product(a: torch.Tensor, b: torch.Tensor, bits: int | None) -> tuple[torch.Tensor, BlockCodes | None]:
    """A [m, k]·Bᵀ, B [n, k], in bf16, k and n multiples of 128; and codes of the result, unless `bits` is None."""
    (m, k), n = a.shape, b.shape[0]
    c, blocks = torch.empty(m, n, dtype=a.dtype, device=a.device), m * n // BLOCK
    format_ = FORMATS[bits or 4]
    codes = torch.empty(blocks, format_.block_nbytes, dtype=torch.uint8, device=a.device)
    scales = torch.empty(blocks, dtype=torch.bfloat16, device=a.device)
    product_kernel[_grid(m, n)](
        a, b, c, codes, scales.view(torch.int16), m, n, k, CODED=bits is not None, BITS=bits or 4,
        LARGEST=format_.largest,
    )  # fmt: skip
    return c, BlockCodes(codes, scales) if bits is not None else None


def decoding_product(coded: BlockCodes, b: torch.Tensor, m: int) -> torch.Tensor:
    """What codes of [m, k] decode to, times Bᵀ, B [n, k] in bf16."""
    n, k = b.shape
    c = torch.empty(m, n, dtype=b.dtype, device=b.device)
    decoding_product_kernel[_grid(m, n)](coded.codes, coded.scales.view(torch.int16), b, c, m, n, k, BITS=coded.bits)
    return c


def _grid(m: int, n: int) -> Callable[[Mapping[str, int]], tuple[int]]:
    return lambda meta: (triton.cdiv(m, meta["ROWS"]) * triton.cdiv(n, 128),)
