"""Groups of 128 numbers in eight bits each, with a scale in bf16 and a power in a byte: 8.19 bits a number.

Plain torch on any device, by the tables of `range_expansion`; equal to the bit on all of them, and to the CPU's and
CUDA's kernels (`fp8_adamw_numba`, `fp8_adamw_triton`). `fp8_adamw_reference` has the paper's formulas, without tables.

What is quantised is relative to scale and power *as stored*. The scale is the largest finite magnitude, to the
nearest bf16, but at most 2¹²⁶, so that its reciprocal is a normal number; a magnitude above it saturates.
- What is subnormal in fp32 counts as 0, and so does what is less than 2⁻¹²⁶ of the scale. Averages of gradients that no
  longer come decay to there, and must not widen the range of their group for good.
- A group of zeros has scale 0, and all its codes are 0, but for signs.
- Where all non-zero magnitudes are equal there is no range to expand: k = 1.
- NaN and infinities become NaN; the group's other numbers are stored as if these were not there.

Shape letters: N numbers, P = ⌈N/128⌉ groups, the last filled up with zeros, which change neither scale nor power.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from tahq.memory.coat.fp8_formats import NAN, EightBitFormat
from tahq.memory.coat.range_expansion import UNEXPANDED, ExpansionTables

GROUP = 128
SMALLEST_NORMAL = 2.0**-126
LARGEST_SCALE = 2.0**126


@dataclass(frozen=True, slots=True)
class MomentFormat:
    """How one of the two moments is stored: its format, whether ranges are expanded, and the tables for it."""

    format: EightBitFormat
    expand: bool
    tables: ExpansionTables


@dataclass(frozen=True, slots=True)
class StoredGroups:
    """A tensor as it is kept: `codes` uint8 [N], `scales` bf16 [P], `powers` uint8 [P], or None where all are 1."""

    codes: torch.Tensor
    scales: torch.Tensor
    powers: torch.Tensor | None


def num_groups(numel: int) -> int:
    """P = ⌈N/128⌉."""
    return -(-numel // GROUP)


def as_groups(flat: torch.Tensor) -> torch.Tensor:
    """[P, 128] from [N]; a view where nothing has to be filled up."""
    padding = num_groups(flat.numel()) * GROUP - flat.numel()
    return (functional.pad(flat, (0, padding)) if padding else flat).view(-1, GROUP)


def encode(groups: torch.Tensor, by: MomentFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise: code = round(Δmax·(|x|/M)^k), to nearest, ties to even (COAT §4.2, Eq. of f and Q).

    Args:
        groups: fp32 [P, 128].
        by: format and tables, on the same device.

    Returns:
        codes uint8 [P, 128], scales bf16 [P], powers uint8 [P].
    """
    is_finite = groups.isfinite()
    magnitudes = _without_subnormals(torch.where(is_finite, groups.abs(), 0.0))
    scales = stored_scales(magnitudes.amax(1))
    ratios = _without_subnormals(magnitudes * _reciprocals(scales)[:, None])
    powers = _powers(ratios, by)
    codes = torch.searchsorted(by.tables.uppers[powers.long()], ratios).to(torch.uint8)
    if by.format.is_signed:
        codes = torch.where(is_finite, codes | groups.signbit().to(torch.uint8) << 7, NAN)
    return codes, scales, powers


def decode(codes: torch.Tensor, scales: torch.Tensor, powers: torch.Tensor | None, by: MomentFormat) -> torch.Tensor:
    """x = ±M·(code/Δmax)^(1/k): fp32 [P, 128] from codes uint8 [P, 128], scales bf16 [P], powers uint8 [P]."""
    if powers is None:
        shares = by.tables.values[UNEXPANDED][codes.long()]
    else:
        shares = by.tables.values[powers.long()].gather(1, codes.long())
    return shares * scales.float()[:, None]


def stored_scales(largest: torch.Tensor) -> torch.Tensor:
    """M as it is stored: bf16 [P] of the largest finite magnitudes, fp32 [P], 0 or normal."""
    return largest.clamp(max=LARGEST_SCALE).to(torch.bfloat16)


def _without_subnormals(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x < SMALLEST_NORMAL, 0.0, x)


def _reciprocals(scales: torch.Tensor) -> torch.Tensor:
    wide = scales.float()
    return torch.where(wide > 0, 1.0 / wide, 0.0)


def _powers(ratios: torch.Tensor, by: MomentFormat) -> torch.Tensor:
    """The index of each group's k, uint8 [P]: the largest that keeps the smallest non-zero magnitude in the format."""
    if not by.expand:
        return torch.full(ratios.shape[:1], UNEXPANDED, dtype=torch.uint8, device=ratios.device)
    smallest = torch.where(ratios > 0, ratios, torch.inf).amin(1)
    usable = torch.searchsorted(by.tables.least, smallest, right=True) - 1
    has_range = smallest < ratios.amax(1)
    return torch.where(has_range, usable.clamp(min=0), UNEXPANDED).to(torch.uint8)
