"""The step of `fp8_adamw_step` on CUDA, as one kernel: see `fp8_adamw_kernels`.

Codes, scales and powers are equal to `step_in_torch`'s to the bit, at every step, for equal gradients. Powers of two
and logarithms, which every device rounds in its own way, decide nothing that their error could change. What is added
to a weight is within `UPDATE_ERROR` of that in `step_in_torch`, relative.

Programs that are filled run without masks, the last one of a tensor with them.
"""

from functools import lru_cache

import torch

from tahq.memory.adam.step import AdamwNumbers
from tahq.memory.coat.fp8_adamw_kernels import step_kernel
from tahq.memory.coat.fp8_codes import has_fp8_units
from tahq.memory.coat.fp8_groups import GROUP, MomentFormat, StoredGroups
from tahq.quant.gpu.launch import EXACT, BoundLaunches, Launch, aligned, on_device_of
from tahq.quant.gpu.tiles import IS_INTERPRETED
from tahq.quant.stream import ALIGNMENT

ROWS, WARPS = 2, 1
"""Groups of a program, and its warps."""
_FRACTIONS = {"e4m3": 3, "e5m2": 2}
"""Bits of the fraction, by which the kernel knows the format."""
Kinds = tuple[tuple[bool, str], ...]
"""Of both moments: whether ranges are expanded, and the format's name."""


def step_on_cuda(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    moments: tuple[StoredGroups, StoredGroups],
    formats: tuple[MomentFormat, MomentFormat],
    numbers: AdamwNumbers,
) -> None:
    """As `step_in_torch`, for tensors on a CUDA device; the host waits for nothing.

    What is compiled for a shape is launched by itself from the second step on: in Triton's way a launch takes longer
    than most tensors of a model.
    """
    gradients = aligned(gradients)
    launches = bind_step(weights, gradients, moments, formats)
    if launches is not None:
        launches(gradients, numbers.in_order())
        return
    with on_device_of(weights):
        # A launch that is kept takes aligned tensors only.
        for launch in _launches.__wrapped__(weights.numel(), *_kinds(weights.device, formats)):
            launch(*_tensors(weights, gradients, moments, formats), last=numbers.in_order())


def bind_step(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    moments: tuple[StoredGroups, StoredGroups],
    formats: tuple[MomentFormat, MomentFormat],
) -> BoundLaunches | None:
    """`step_on_cuda` on these tensors, and any gradient like this one; None where a tensor is not aligned."""
    tensors = _tensors(weights, gradients, moments, formats)
    if any(tensor.data_ptr() % ALIGNMENT for tensor in tensors):
        return None
    return BoundLaunches(_launches(weights.numel(), *_kinds(weights.device, formats)), tensors, moving=1)


def _tensors(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    moments: tuple[StoredGroups, StoredGroups],
    formats: tuple[MomentFormat, MomentFormat],
) -> list[torch.Tensor]:
    """As the kernel takes them."""
    tensors = [weights, gradients]
    for moment, by in zip(moments, formats, strict=True):
        powers = moment.codes if moment.powers is None else moment.powers
        tables = (by.tables.values, by.tables.uppers, by.tables.least, by.tables.exponents)
        tensors += [moment.codes, moment.scales.view(torch.int16), powers, *tables]
    return tensors


def _kinds(device: torch.device, formats: tuple[MomentFormat, MomentFormat]) -> tuple[Kinds, bool, int, int]:
    """Formats, whether codes may be found fast, and the shape of a program."""
    fast = bool(IS_INTERPRETED.value) or has_fp8_units(device)
    return tuple((by.expand, by.format.name) for by in formats), fast, ROWS, WARPS


@lru_cache(maxsize=4096)
def _launches(count: int, kinds: Kinds, fast: bool, rows: int, warps: int) -> tuple[Launch, ...]:
    """The programs that are filled, and the last one, which is not."""
    constants: dict[str, int | bool] = {"R": rows, "num_warps": warps, **EXACT}
    for name, (expand, format) in zip(("FIRST", "SECOND"), kinds, strict=True):
        constants |= {f"{name}_EXPAND": expand, f"{name}_FRACTION": _FRACTIONS[format]}
    whole, left = divmod(count, rows * GROUP)
    parts = ((0, whole, False), (whole, int(left > 0), True))
    return tuple(
        Launch(
            step_kernel, (programs, 1, 1), (first, count), constants | {"MASKED": masked, "FAST": fast and not masked}
        )
        for first, programs, masked in parts
        if programs
    )
