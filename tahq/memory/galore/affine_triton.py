"""Decoding and updating INT8 weights and INT4 projections, and bf16 weights, in Triton: the plain path's results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tahq.memory.galore.affine_groups import GROUP
from tahq.memory.galore.affine_kernels import add8_kernel, add16_kernel, decode4_kernel, decode8_kernel
from tahq.quant.gpu.launch import EXACT, on_device_of

if TYPE_CHECKING:
    from tahq.memory.galore.int8_weight import Int8Weight
    from tahq.memory.galore.projection import Int4Projection

GROUPS_PER_PROGRAM = 8
ELEMENTS_PER_PROGRAM = GROUP * GROUPS_PER_PROGRAM
OPTIONS: dict[str, Any] = {**EXACT, "num_warps": 4}
_INDEX_LIMIT = 2**31 - GROUP * GROUPS_PER_PROGRAM


def decoded8(weight: Int8Weight, dtype: torch.dtype) -> torch.Tensor:
    """See `Int8Weight.decoded`."""
    return _decoded(decode8_kernel, weight.codes, weight.zero, weight.scale, weight.shape, dtype)


def decoded4(projection: Int4Projection, dtype: torch.dtype) -> torch.Tensor:
    """See `Int4Projection.decoded`."""
    return _decoded(decode4_kernel, projection.packed, projection.zero, projection.scale, projection.shape, dtype)


def add8(weight: Int8Weight, update: torch.Tensor, *, keep: float, rate: float, key: int | None) -> None:
    """See `Int8Weight.add`."""
    low, high = _words(key) if key is not None else (0, 0)
    with on_device_of(update):
        add8_kernel[_grid(weight.scale)](
            weight.codes,
            weight.zero,
            weight.scale,
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


def add16(values: torch.Tensor, update: torch.Tensor, *, keep: float, rate: float, key: int) -> None:
    """See `FullWeight.add`: contiguous bf16, rounded stochastically."""
    numel = values.numel()
    _check_count(numel)
    with on_device_of(values):
        add16_kernel[(-(-numel // ELEMENTS_PER_PROGRAM),)](
            values, update.contiguous(), keep, rate, *_words(key), numel, SIZE=ELEMENTS_PER_PROGRAM, **OPTIONS
        )


def _decoded(
    kernel: Any,
    codes: torch.Tensor,
    zero: torch.Tensor,
    scale: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    with on_device_of(out):
        kernel[_grid(scale)](codes, zero, scale, out, out.numel(), scale.numel(), R=GROUPS_PER_PROGRAM, **OPTIONS)
    return out


def _grid(scale: torch.Tensor) -> tuple[int]:
    _check_count(GROUP * scale.numel())
    return (-(-scale.numel() // GROUPS_PER_PROGRAM),)


def _check_count(numel: int) -> None:
    if numel > _INDEX_LIMIT:
        raise ValueError(f"a tensor of {numel} elements; the kernels count up to {_INDEX_LIMIT}")


def _words(key: int) -> tuple[int, int]:
    """A key's low and high half."""
    return _signed(key & 0xFFFFFFFF), _signed(key >> 32)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
