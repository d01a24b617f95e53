"""Optimizer states in groups of 128 FP8 codes with a bf16 scale and a one-byte power: 8.19 bits per number.

*Dynamic range expansion.* A group of optimizer states seldom spans the range of an FP8 format. COAT (§4.2) raises it to
a power k at which it does:

    y = sign(x)·(|x|/c)^k,   c = √(max·min),   k = log(Δmax/Δmin) / log(max/min);   code = round(y·Δmax/max|y|)

c cancels in the quotient (it only keeps powers within fp32): with M the group's largest magnitude,

    code = round(Δmax·(|x|/M)^k),   |x| = M·(code/Δmax)^(1/k)

so a group is stored as its codes, M and k. Devices round powers differently, so a code would sometimes differ
by one. But k is stored in a byte, so there are finitely many functions: tables hold, for each k and code, the value
(code/Δmax)^(1/k) and the largest ratio |x|/M that still rounds to that code. They are computed once, in fp64, and
rounded to fp32 in the direction that keeps them correct; the rest is one product and comparisons, bit-equal everywhere.

k lies on a grid of 28 powers per octave, 2^(j/28 − 4) for j from 0 to 252: from 1/16 to 32, 2.5 % apart. It is rounded
down, so that the smallest magnitude of a group is not below the format's smallest and does not become 0.

*Quantisation* is relative to scale and power *as stored*. The scale is the largest finite magnitude, to the nearest
bf16, but at most 2¹²⁶, so that its reciprocal is a normal number; a magnitude above it saturates.
- Numbers that are subnormal in fp32, or below 2⁻¹²⁶ of the scale, count as 0. Averages of gradients that have stopped
  decay to there, and must not widen the range of their group for good.
- A group of zeros has scale 0, and all its codes are 0 except for signs.
- Where all non-zero magnitudes are equal there is no range to expand: k = 1.
- NaN and infinities become NaN; the group's other numbers are stored as if these were absent.

Plain torch on any device, bit-equal on all of them and to the kernel of CUDA (`fp8_adamw_kernels`).

Shape letters: N numbers, P = ⌈N/128⌉ groups, the last padded with zeros, which change neither scale nor power.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from tahq.memory.coat.fp8_codes import FP8_FORMATS, LARGEST
from tahq.memory.small_floats.block_codes import in_blocks

NAN = 0x7F  # The code of every value that is not finite; torch reads it as NaN too
STEPS_PER_OCTAVE = 28
NUM_POWERS = 9 * STEPS_PER_OCTAVE + 1
UNEXPANDED = 4 * STEPS_PER_OCTAVE  # The index of k = 1
GROUP = 128
SMALLEST_NORMAL = 2.0**-126
LARGEST_SCALE = 2.0**126
_NUM_CODES = 128  # Codes without the sign; those after the last magnitude are NaN
_CPU = torch.device("cpu")


def magnitudes(fp8: torch.dtype) -> np.ndarray:
    """The finite magnitudes of a format, fp64, ascending from 0: a magnitude's index is its code without the sign."""
    values = torch.arange(_NUM_CODES, dtype=torch.uint8).view(fp8).double()
    return np.array(values[values.isfinite()].tolist())


def smallest_share(fp8: torch.dtype) -> float:
    """Δmin/Δmax: the reciprocal of the format's dynamic range, its smallest subnormal over its largest."""
    return float(magnitudes(fp8)[1]) / LARGEST[fp8]


class MomentFormat(NamedTuple):
    """How a moment is stored, with tables in fp32 on one device.

    `values`: [powers, 256], ±(code/Δmax)^(1/k) of every byte, the sign in bit 7; NaN where a byte is not a code.
    `uppers`: [powers, 128], the largest ratio that rounds to a code, to nearest, ties to even; ∞ for the last.
    `least`: [powers], the smallest ratio of a group's smallest magnitude to M for which k may be used.
    `exponents`: [powers], k.
    """

    fp8: torch.dtype
    expand: bool
    values: torch.Tensor
    uppers: torch.Tensor
    least: torch.Tensor
    exponents: torch.Tensor


@lru_cache(maxsize=32)
def moment_format(name: str, expand: bool, device: torch.device = _CPU) -> MomentFormat:
    """A format by its name in cluster.yaml; `expand`: whether ranges are expanded.

    Its tables are 253 · (256 + 128 + 2) numbers, 0.4 megabytes, computed in milliseconds.
    """
    fp8 = FP8_FORMATS[name]
    shares = magnitudes(fp8) / LARGEST[fp8]
    inverses = np.array([1 / 2.0 ** (index / STEPS_PER_OCTAVE - 4) for index in range(NUM_POWERS)])[:, None]
    values = np.full((NUM_POWERS, _NUM_CODES), np.nan, np.float32)
    values[:, : len(shares)] = shares**inverses
    uppers = np.full((NUM_POWERS, _NUM_CODES), np.inf, np.float32)
    uppers[:, : len(shares) - 1] = _largest_below_middles(fp8, inverses)
    least = _rounded(smallest_share(fp8) ** inverses[:, 0], upwards=True)
    exponents = (1 / inverses[:, 0]).astype(np.float32)
    tables = (np.concatenate((values, -values), axis=1), uppers, least, exponents)
    return MomentFormat(fp8, expand, *(torch.from_numpy(table).to(device) for table in tables))


def _largest_below_middles(fp8: torch.dtype, inverses: np.ndarray) -> np.ndarray:
    """The largest fp32 not above the middle of two magnitudes; below the middle where a tie rounds up to even."""
    each = magnitudes(fp8)
    middles = ((each[1:] + each[:-1]) / 2 / LARGEST[fp8]) ** inverses
    found = _rounded(middles, upwards=False)
    goes_up = np.arange(len(each) - 1) % 2 == 1
    return np.where(goes_up & (found == middles), np.nextafter(found, np.float32(0)), found)


def _rounded(exact: np.ndarray, *, upwards: bool) -> np.ndarray:
    nearest = exact.astype(np.float32)
    is_wrong = nearest < exact if upwards else nearest > exact
    return np.where(is_wrong, np.nextafter(nearest, np.float32(math.inf if upwards else 0)), nearest)


class StoredMoment(NamedTuple):
    """A stored moment and its format.

    `codes`: uint8 [N]; `scales`: bf16 [P]; `powers`: uint8 [P], or None where all are 1.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    powers: torch.Tensor | None
    by: MomentFormat


Moments = tuple[StoredMoment, StoredMoment]  # m and v


def num_groups(numel: int) -> int:
    """P = ⌈N/128⌉."""
    return -(-numel // GROUP)


def as_groups(flat: torch.Tensor) -> torch.Tensor:
    """[P, 128] from [N]; a view unless padding is needed."""
    return in_blocks(flat, GROUP)


def encode(groups: torch.Tensor, by: MomentFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [P, 128], scales bf16 [P] and powers uint8 [P] of groups fp32 [P, 128].

    code = round(Δmax·(|x|/M)^k), to nearest, ties to even (COAT §4.2, Eq. of f and Q).
    """
    is_finite = groups.isfinite()
    sizes = _without_subnormals(torch.where(is_finite, groups.abs(), 0.0))
    scales = sizes.amax(1).clamp(max=LARGEST_SCALE).to(torch.bfloat16)
    wide = scales.float()
    ratios = _without_subnormals(sizes * torch.where(wide > 0, 1.0 / wide, 0.0)[:, None])
    powers = _powers(ratios, by)
    codes = torch.searchsorted(by.uppers[powers.long()], ratios, out_int32=True)  # of the nearest magnitudes
    codes.bitwise_or_(groups.signbit().to(torch.int32) << 7)
    return torch.where(is_finite, codes, NAN).to(torch.uint8), scales, powers.to(torch.uint8)


def decode(codes: torch.Tensor, scales: torch.Tensor, powers: torch.Tensor | None, by: MomentFormat) -> torch.Tensor:
    """x = ±M·(code/Δmax)^(1/k): fp32 [P, 128] from codes uint8 [P, 128], scales bf16 [P], powers uint8 [P]."""
    rows = UNEXPANDED if powers is None else powers.long()[:, None]
    return by.values.take(codes.long() + 256 * rows) * scales.float()[:, None]


def _without_subnormals(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x < SMALLEST_NORMAL, 0.0, x)


def _powers(ratios: torch.Tensor, by: MomentFormat) -> torch.Tensor:
    """The index of each group's k [P]: the largest that keeps the smallest non-zero magnitude in the format."""
    if not by.expand:
        return torch.full(ratios.shape[:1], UNEXPANDED, device=ratios.device)
    smallest = torch.where(ratios > 0, ratios, torch.inf).amin(1)
    usable = torch.searchsorted(by.least, smallest, right=True) - 1
    return torch.where(smallest < ratios.amax(1), usable.clamp(min=0), UNEXPANDED)
