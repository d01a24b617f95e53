"""A trained weight stored in INT8, bf16 or fp32, updated by adding in fp32 and rounding.

There is no other copy of the weight. An update is added to the decoded weight in *fp32*, and only the sum is rounded:
adding in bf16 first would lose most updates, which are a thousandth of the weight.

*Codes* are affine, in groups of 256 values with a scale and a zero-point each, for INT8 weights and INT4 projections:

    value = (code − zero) · scale,  0 ≤ code ≤ levels

A group's range always includes 0 (otherwise clamping the zero-point would lose the largest value of a group of one
sign), so every group has a code for 0, and zeros that pad the last group change nothing. The scale is bf16, rounded
*up* so that the range still fits; bf16 has fp32's exponents, so weights of 1e-30 and of 1e30 have the same relative
error. Code minus zero has 9 bits and the scale 8: their product is exact in fp32, so decoding gives the same bits
everywhere.

*INT8*: a group's scale and zero-point are its grid. A new grid spans the group's range by 240 of 255 steps, with 7
spare codes at either end. It is kept while all elements fit with room to be rounded either way and it is at most a
third coarser than necessary. So no code is ever clamped, rounding is unbiased for a group's largest element too, and an
update of zero changes nothing. With a new grid from each step's range, as the paper seems to do, every element would be
rounded anew whenever the largest one moved: a whole rounding's noise at each step.

*bf16* has 8 significant bits: rounded to nearest, an update below a 512th of a weight is lost, however often it comes.
So with a key the sum is rounded stochastically, with the probability that makes the mean correct.

The draw for an element is a hash of its index in the weight and of the caller's key: the same on every device, and the
Triton kernels' codes are bit-equal.

Source: Q-GaLore §3.1, which leaves open how scale and zero-point are stored (3 bytes for 256 values here), and §3.4.
Shapes: G groups of 256 values.
"""

import math
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import torch
from torch.nn import functional

from tahq.kernel_launch import has_triton
from tahq.memory.small_floats.block_codes import in_blocks
from tahq.quant.stochastic_rounding import hashes, round_to_bf16, shift_right

GROUP = 256
SMALLEST_SCALE = 2.0**-126  # The smallest normal number; also the scale of a group of zeros
STEPS = 240
MARGIN = 7  # Spare codes at either end of a new grid
TOP_CODE = 255
FINER = 0.75  # A grid is replaced where a new one would have a step below this share of its step
OFFSET = 128  # Codes and zero-points from 0 to 255 are stored in int8 minus this
_SLAB = 2**20  # Elements that plain torch updates at a time, with temporaries of up to 40 bytes each


def num_groups(numel: int) -> int:
    """Groups of this many values, the last one possibly partial."""
    return -(-numel // GROUP)


def scales(groups: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and the exact zero-point of groups.

    scale = (max(x, 0) − min(x, 0)) / steps, rounded up to bf16; zero = −min(x, 0) / scale, in [0, steps], not yet a
    whole number; both fp32 [G], of finite groups fp32 [G, 256].
    """
    high = groups.amax(1).clamp_(min=0.0)
    low = groups.amin(1).clamp_(max=0.0)
    # A tensor: CUDA divides by a number by multiplying with its reciprocal, which rounds differently.
    number = torch.full((), float(steps), device=groups.device)
    # divided before they are subtracted: the range of the largest numbers is infinite
    exact = (high / number - low / number).clamp_(min=SMALLEST_SCALE)
    scale = exact.view(torch.int32).add(0xFFFF).bitwise_and_(-0x10000).view(torch.float32)  # up to the next bf16
    return scale, -low / scale


def decode(codes: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(code − zero) · scale in fp32 [G, 256], then rounded to `dtype`; codes and zero [G] of any integer type."""
    return codes.float().sub_(zero.float()[:, None]).mul_(scale.float()[:, None]).to(dtype)


def affine_nbytes(shape: tuple[int, ...], bits: int) -> int:
    """Bytes of a tensor of this shape in codes of this many bits, with scales (2 per group) and zero-points (1)."""
    numel = math.prod(shape)
    return -(-numel * bits // 8) + 3 * num_groups(numel)


def affine_kernels(codes: torch.Tensor) -> ModuleType | None:
    """The Triton kernels, for codes on CUDA where triton is installed; None: plain torch."""
    return import_module("tahq.memory.galore.affine_kernels") if codes.is_cuda and has_triton() else None


class Int8Weight:
    """A weight in INT8: codes, scales and zero-points, all zeros until they are assigned or loaded."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.shape = torch.Size(shape)
        self.codes = torch.zeros(shape, dtype=torch.int8, device=device)
        groups = num_groups(self.codes.numel())
        self.zero = torch.zeros(groups, dtype=torch.int8, device=device)
        self.scale = torch.zeros(groups, dtype=torch.bfloat16, device=device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors themselves, by the end of their folder's name in a checkpoint."""
        return {"": self.codes, "_zero": self.zero, "_scale": self.scale}

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, in new memory."""
        kernels = affine_kernels(self.codes)
        if kernels is not None:
            out: torch.Tensor = kernels.decoded8(self, dtype)
            return out
        flat = decode(in_blocks(self.codes.view(-1), GROUP), self.zero, self.scale, dtype).view(-1)
        return flat[: self.codes.numel()].view(self.shape)

    def rows(self, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows [..., n] of the weight [m, n] for int64 indices [...]; only these are decoded."""
        columns = self.shape[1]
        codes = functional.embedding(indices.reshape(-1), self.codes)
        first = indices.reshape(-1, 1) * columns
        if columns % GROUP == 0:
            group = first // GROUP + torch.arange(columns // GROUP, device=indices.device)
            codes = codes.view(-1, GROUP)
        else:  # rows begin within groups, so each element has its own group
            group = (first + torch.arange(columns, device=indices.device)) // GROUP
            codes = codes.view(-1, 1)
        group = group.view(-1)
        return decode(codes, self.zero[group], self.scale[group], dtype).view(*indices.shape, columns)

    @torch.no_grad()
    def assign(self, values: torch.Tensor) -> None:
        """Store these values (of any float type), rounded to nearest."""
        flat = values.reshape(-1)
        for first in range(0, flat.numel(), _SLAB):
            values = flat[first : first + _SLAB].to(self.codes.device, torch.float32)
            groups = in_blocks(values, GROUP)
            self._store(first, values.numel(), groups, _new_grid(groups), None)

    @torch.no_grad()
    def add(self, update: torch.Tensor, *, keep: float, rate: float, key: int | None) -> None:
        """W ← keep · W + rate · update, in fp32, then rounded.

        `update`: fp32 or bf16; `keep`: the factor of weight decay; `rate`: negative to descend; `key`: 64 bits, of the
        stochastic rounding; None: to nearest.
        """
        kernels = affine_kernels(self.codes)
        if kernels is not None:
            kernels.add8(self, update, keep=keep, rate=rate, key=key)
            return
        flat = update.reshape(-1)
        for first in range(0, flat.numel(), _SLAB):
            part = flat[first : first + _SLAB]
            place = slice(first // GROUP, first // GROUP + num_groups(part.numel()))
            zero, scale = self.zero[place], self.scale[place]
            weight = decode(in_blocks(self.codes.view(-1)[first : first + _SLAB], GROUP), zero, scale, torch.float32)
            # two roundings, not fused, for the same bits on every device
            weight = weight.mul_(keep).add_(in_blocks(part, GROUP).to(torch.float32).mul(rate))
            grid = _kept_grid(weight, scale.to(torch.float32), zero.to(torch.float32) + OFFSET)
            self._store(first, part.numel(), weight, grid, key)

    def _store(
        self, first: int, count: int, groups: torch.Tensor, grid: tuple[torch.Tensor, torch.Tensor], key: int | None
    ) -> None:
        """Round fp32 [G, 256] and keep it as `count` elements from `first` on, a multiple of 256."""
        scale, zero = grid
        steps = groups / scale[:, None]
        codes = steps.round_() if key is None else _round_stochastic(steps, first, key)
        codes = codes.add_(zero[:, None] - OFFSET).to(torch.int8)
        place = slice(first // GROUP, first // GROUP + len(groups))
        self.codes.view(-1)[first : first + count] = codes.view(-1)[:count]
        self.zero[place] = (zero - OFFSET).to(torch.int8)
        self.scale[place] = scale.to(torch.bfloat16)


def _new_grid(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [G] scale and zero-point (0 to 255) for fp32 [G, 256]."""
    scale, zero = scales(groups, STEPS)
    return scale, zero.ceil_().add_(MARGIN)


def _kept_grid(groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The current grid of [G, 256], replaced by a new one where it does not fit."""
    new_scale, new_zero = _new_grid(groups)
    above = (groups.amax(1).clamp_(min=0.0) / scale).ceil_()
    below = (-groups.amin(1).clamp_(max=0.0) / scale).ceil_()
    fits = (above + zero <= TOP_CODE) & (below <= zero) & (new_scale >= FINER * scale)
    return torch.where(fits, scale, new_scale), torch.where(fits, zero, new_zero)


def _round_stochastic(steps: torch.Tensor, first: int, key: int) -> torch.Tensor:
    """⌊y⌋ + [u < y − ⌊y⌋] with u of 24 bits; element i of [G, 256] has the draw of number `first` + i."""
    draw = shift_right(hashes(first, steps.numel(), key, steps.device), 8).to(torch.float32).mul_(2.0**-24)
    floor = steps.floor()
    return steps.sub_(floor).gt_(draw.view(steps.shape)).add_(floor)


class FullWeight:
    """A weight or a projection in fp32 or bf16; an update is added in fp32, and only the sum is rounded."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
        self.shape = torch.Size(shape)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensor itself; see `Int8Weight.tensors`."""
        return {"": self.values}

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight; the tensor itself where it has this type."""
        return self.values.to(dtype)

    def rows(self, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows [..., n] of the weight [m, n] for int64 indices [...]."""
        return functional.embedding(indices, self.values).to(dtype)

    @torch.no_grad()
    def assign(self, values: torch.Tensor) -> None:
        """Store these values (of any float type), rounded to nearest."""
        self.values.copy_(values)

    @torch.no_grad()
    def add(self, update: torch.Tensor, *, keep: float, rate: float, key: int | None) -> None:
        """W ← keep · W + rate · update, in fp32; see `Int8Weight.add`. For fp32 nothing is drawn."""
        if key is not None and self.values.dtype == torch.bfloat16:
            self._add_stochastic(update, keep, rate, key)
            return
        if keep == 1.0:  # torch adds bf16 in fp32 and rounds once
            self.values.add_(update, alpha=rate)
            return
        weight = self.values.mul_(keep) if self.values.dtype == torch.float32 else self.values.float().mul_(keep)
        weight.add_(update.to(torch.float32), alpha=rate)
        if weight is not self.values:
            self.values.copy_(weight)

    def _add_stochastic(self, update: torch.Tensor, keep: float, rate: float, key: int) -> None:
        kernels = affine_kernels(self.values)
        if kernels is not None:
            kernels.add16(self.values, update, keep=keep, rate=rate, key=key)
            return
        flat, values = update.reshape(-1), self.values.view(-1)
        for first in range(0, flat.numel(), _SLAB):
            part = values[first : first + _SLAB]
            # two roundings, not fused, for the same bits on every device
            weight = part.float().mul_(keep).add_(flat[first : first + _SLAB].to(torch.float32).mul(rate))
            part.copy_(round_to_bf16(weight, first, key))


def snapshot_weight(name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """A model's weight from a checkpoint, in fp32 whatever it was trained in, by its canonical name.

    `read`: a tensor by its name in the checkpoint, such as `model/<name>`.
    """
    stored = read(f"model/{name}")
    if stored.dtype != torch.int8:
        return stored.float()
    weight = Int8Weight(tuple(stored.shape), stored.device)
    for ending, tensor in weight.tensors().items():
        tensor.copy_(read(f"model{ending}/{name}"))
    return weight.decoded(torch.float32)
