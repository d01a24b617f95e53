"""The kernels of our AdamWs, launched without waiting for the device: one a parameter, or two, see `_plans8bit`."""

from functools import lru_cache

import torch

from tahq.memory.adam import kernels as kernels
from tahq.memory.adam.blockwise8 import BLOCK, borders, dynamic_map
from tahq.memory.adam.step import AdamwNumbers
from tahq.quant.gpu import launch
from tahq.quant.gpu.launch import BoundLaunches, Launch

ELEMENTS = 1024
"""Of a program: of several warps, as one alone would look up tables by shuffles, at three times the instructions."""
ELEMENTS_PER_WARP = 256
"""Eight a thread."""
_PLAIN_ELEMENTS_PER_WARP = 128
"""Four a thread: 16 bytes of fp32."""
_ROW = 128
"""Elements of a block that a warp reads at a time."""


def adamw8bit_step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    m_codes: torch.Tensor,
    v_codes: torch.Tensor,
    m_scales: torch.Tensor,
    v_scales: torch.Tensor,
    numbers: AdamwNumbers,
    block: int = BLOCK,
) -> None:
    """See `adamw8bit.adamw8bit_step`; contiguous tensors that begin at multiples of 16 bytes, on a CUDA device."""
    bound = bind_adamw8bit(weight, gradient, m_codes, v_codes, m_scales, v_scales, block)
    bound(gradient, numbers.in_order())


def plain_adamw_step(
    weight: torch.Tensor, gradient: torch.Tensor, m: torch.Tensor, v: torch.Tensor, numbers: AdamwNumbers
) -> None:
    """See `adamw_step.adamw_step`; m and v in fp32, or both in bf16, to which they are rounded."""
    bind_plain_adamw(weight, gradient, m, v)(gradient, numbers.in_order())


def bind_adamw8bit(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    m_codes: torch.Tensor,
    v_codes: torch.Tensor,
    m_scales: torch.Tensor,
    v_scales: torch.Tensor,
    block: int = BLOCK,
) -> BoundLaunches:
    """`adamw8bit_step` on these tensors, and any gradient like this one."""
    tensors = (weight, m_codes, v_codes, m_scales, v_scales, _tables(weight.device), gradient)
    return BoundLaunches(_plans8bit(weight.numel(), block, ELEMENTS, ELEMENTS_PER_WARP), tensors, moving=6)


def bind_plain_adamw(weight: torch.Tensor, gradient: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> BoundLaunches:
    """`plain_adamw_step`, likewise."""
    return BoundLaunches((_plain_plan(weight.numel(), m.dtype),), (weight, m, v, gradient), moving=3)


@lru_cache(maxsize=1024)
def _plans8bit(num_elements: int, block: int, elements: int, per_warp: int) -> tuple[Launch, ...]:
    """The programs that are filled, which need no masks, and the last one where it is not."""
    elements = max(block, elements)
    constants = {
        "R": elements // block,
        "B": block,
        "C": min(block, _ROW),
        "num_warps": elements // per_warp,
        **launch.EXACT,
    }
    whole, left = divmod(num_elements, elements)
    parts = ((0, whole, False), (whole, int(left > 0), True))
    return tuple(
        Launch(kernels.adamw8bit_kernel, (programs, 1, 1), (first, num_elements), constants | {"MASKED": is_masked})
        for first, programs, is_masked in parts
        if programs
    )


@lru_cache(maxsize=1024)
def _plain_plan(num_elements: int, dtype: torch.dtype) -> Launch:
    """A plan of its own for each type of the moments, which a Launch does not look at."""
    grid = (-(-num_elements // ELEMENTS), 1, 1)
    constants = {"B": ELEMENTS, "num_warps": ELEMENTS // _PLAIN_ELEMENTS_PER_WARP, **launch.EXACT}
    return Launch(kernels.plain_adamw_kernel, grid, (num_elements,), constants)


@lru_cache(maxsize=32)
def _tables(device: torch.device) -> torch.Tensor:
    """Both maps and both tables of borders, 256 entries each."""
    tables = torch.zeros(4, 256)
    for row, values in enumerate((dynamic_map(True), dynamic_map(False), borders(True), borders(False))):
        tables[row, : len(values)] = values
    return tables.to(device)
