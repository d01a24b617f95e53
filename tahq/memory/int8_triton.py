"""`Int8Weight`'s decoding and update in Triton: the reference's results, to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tahq.memory.affine_groups import GROUP
from tahq.memory.int8_kernels import add_kernel, decode_kernel
from tahq.quant.gpu.launch import EXACT, on_device_of

if TYPE_CHECKING:
    from tahq.memory.int8_weight import Int8Weight

GROUPS_PER_PROGRAM = 8
OPTIONS: dict[str, Any] = {**EXACT, "num_warps": 4}
_INDEX_LIMIT = 2**31 - GROUP * GROUPS_PER_PROGRAM


def decoded(weight: Int8Weight, dtype: torch.dtype) -> torch.Tensor:
    """See `Int8Weight.decoded`."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.codes.device)
    grid = _grid(weight)
    with on_device_of(out):
        decode_kernel[grid](*_parts(weight), out, out.numel(), weight.scale.numel(), R=GROUPS_PER_PROGRAM, **OPTIONS)
    return out


def add(weight: Int8Weight, update: torch.Tensor, *, keep: float, rate: float, key: int | None) -> None:
    """See `Int8Weight.add`."""
    low, high = (_signed(word) for word in (key & 0xFFFFFFFF, key >> 32)) if key is not None else (0, 0)
    grid = _grid(weight)
    with on_device_of(update):
        add_kernel[grid](
            *_parts(weight),
            update.contiguous(),
            keep,
            rate,
            low,
            high,
            update.numel(),
            weight.scale.numel(),
            IS_STOCHASTIC=key is not None,
            R=GROUPS_PER_PROGRAM,
            **OPTIONS,
        )


def _parts(weight: Int8Weight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return weight.codes, weight.zero, weight.scale


def _grid(weight: Int8Weight) -> tuple[int]:
    if weight.codes.numel() > _INDEX_LIMIT:
        raise ValueError(f"a weight of {weight.codes.numel()} elements; the kernels count up to {_INDEX_LIMIT}")
    return (-(-weight.scale.numel() // GROUPS_PER_PROGRAM),)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
