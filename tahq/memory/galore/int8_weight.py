"""A weight in INT8, changed by adding in fp32 and rounding stochastically.

There is no other copy of the weight. An update is added to the decoded weight in *fp32*, and only the sum is rounded:
adding in bf16 first would lose most updates, which are a thousandth of the weight.

A group's scale and zero-point are its grid. A new one spans the group's range by 240 of 255 steps, with 7 spare codes
at either end. It is kept for as long as all elements fit with room to be rounded either way, and it is not a third
coarser than need be. So no code is ever clamped, rounding is unbiased for the largest element of a group as for any
other, and an update of nothing changes nothing. With a grid from each step's range, as the paper seems to have, every
element is rounded anew whenever the largest one has moved: the noise of a whole rounding at each step.

The draw for an element is a hash of its place in the weight and of the caller's key: the same on every device, and
under Triton the codes are the reference's to the bit.

Source: Q-GaLore §3.1 and §3.4.
"""

import torch
from torch.nn import functional

from tahq.memory.galore.affine_backend import affine_kernels
from tahq.memory.galore.affine_groups import GROUP, as_groups, decode, num_groups, scales
from tahq.quant.stochastic_rounding import hashes, shift_right

STEPS = 240
MARGIN = 7
"""Spare codes at either end of a new grid."""
TOP_CODE = 255
FINER = 0.75
"""A grid is given up where a new one would have a step below this share of its own."""
OFFSET = 128
"""Codes and zero-points 0 to 255 lie in int8 less this."""
_SLAB = 2**20
"""Elements that the plain path changes at a time: its temporaries are 40 bytes each."""


class Int8Weight:
    """Codes, scales and zero-points of one weight.

    Args:
        shape: the weight's.
        device: where it lies; uninitialised until it is assigned or loaded.
    """

    bits = 8

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.shape = torch.Size(shape)
        self.codes = torch.zeros(shape, dtype=torch.int8, device=device)
        groups = num_groups(self.codes.numel())
        self.zero = torch.zeros(groups, dtype=torch.int8, device=device)
        self.scale = torch.zeros(groups, dtype=torch.bfloat16, device=device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the folder of a snapshot that they are kept in; the tensors themselves."""
        return {"model": self.codes, "model_zero": self.zero, "model_scale": self.scale}

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, in memory of its own."""
        kernels = affine_kernels(self.codes)
        if kernels is not None:
            out: torch.Tensor = kernels.decoded8(self, dtype)
            return out
        flat = decode(as_groups(self.codes.view(-1)), self.zero, self.scale, dtype).view(-1)
        return flat[: self.codes.numel()].view(self.shape)

    def rows(self, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows [..., n] of the weight [m, n] for int64 indices [...]; no other row is decoded."""
        columns = self.shape[1]
        codes = functional.embedding(indices.reshape(-1), self.codes)
        first = indices.reshape(-1, 1) * columns
        if columns % GROUP == 0:
            group = first // GROUP + torch.arange(columns // GROUP, device=indices.device)
            codes = codes.view(-1, GROUP)
        else:  # rows begin within groups: each element looks its own up
            group = (first + torch.arange(columns, device=indices.device)) // GROUP
            codes = codes.view(-1, 1)
        group = group.view(-1)
        return decode(codes, self.zero[group], self.scale[group], dtype).view(*indices.shape, columns)

    @torch.no_grad()
    def assign(self, values: torch.Tensor) -> None:
        """Take these values (of any float type), rounded to nearest."""
        flat = values.reshape(-1)
        for first in range(0, flat.numel(), _SLAB):
            values = flat[first : first + _SLAB].to(self.codes.device, torch.float32)
            groups = as_groups(values)
            self._store(first, values.numel(), groups, *_new_grid(groups), None)

    @torch.no_grad()
    def add(self, update: torch.Tensor, *, keep: float, rate: float, key: int | None) -> None:
        """W ← keep · W + rate · update, in fp32, then rounded.

        Args:
            update: the weight's shape, fp32 or bf16.
            keep: what weight decay leaves of the weight.
            rate: negative to descend.
            key: 64 bits, of the stochastic rounding; None: to nearest.
        """
        kernels = affine_kernels(self.codes)
        if kernels is not None:
            kernels.add8(self, update, keep=keep, rate=rate, key=key)
            return
        flat = update.reshape(-1)
        for first in range(0, flat.numel(), _SLAB):
            part = flat[first : first + _SLAB]
            place = self._groups(first, part.numel())
            zero, scale = self.zero[place], self.scale[place]
            weight = decode(as_groups(self.codes.view(-1)[first : first + _SLAB]), zero, scale, torch.float32)
            # two roundings, not a fused one: every device gets the same bits
            weight = weight.mul_(keep).add_(as_groups(part).to(torch.float32).mul(rate))
            grid = _kept_grid(weight, scale.to(torch.float32), zero.to(torch.float32) + OFFSET)
            self._store(first, part.numel(), weight, *grid, key)

    def _store(
        self,
        first: int,
        count: int,
        groups: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor,
        key: int | None,
    ) -> None:
        """Round fp32 [G, 256] and keep it as `count` elements from `first` on, a multiple of 256."""
        steps = groups / scale[:, None]
        codes = steps.round_() if key is None else _round_stochastic(steps, first, key)
        codes = codes.add_(zero[:, None] - OFFSET).to(torch.int8)
        place = self._groups(first, count)
        self.codes.view(-1)[first : first + count] = codes.view(-1)[:count]
        self.zero[place] = (zero - OFFSET).to(torch.int8)
        self.scale[place] = scale.to(torch.bfloat16)

    @staticmethod
    def _groups(first: int, count: int) -> slice:
        return slice(first // GROUP, first // GROUP + num_groups(count))


def _new_grid(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [G] scale and zero-point (0 to 255) for fp32 [G, 256]."""
    scale, zero = scales(groups, STEPS)
    return scale, zero.ceil_().add_(MARGIN)


def _kept_grid(groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The grid that [G, 256] was on, and a new one where it does not fit."""
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
