"""Optimizer states in groups of 128 eight-bit codes with a bf16 scale and a one-byte power: 8.19 bits per number.

Formats, as lists of their magnitudes in the order of the codes (Open Compute Project, OFP8 1.0; COAT §3):

    E4M3: (−1)^s · 2^(e−7) · (1 + f/8), no infinity, NaN at 0x7F;   0, 2⁻⁹ … 448, 127 magnitudes
    E5M2: (−1)^s · 2^(e−15) · (1 + f/4), infinity and NaN above;    0, 2⁻¹⁶ … 57344, 124 magnitudes

DE8 is the dynamic exponent of 8-bit Adam (Dettmers et al. 2021, dynamic tree quantisation): each of seven decades,
10⁻⁷ … 1, is cut into equal parts, twice as many as the decade below, and their middles are the magnitudes. It has no
NaN, and is here for comparison only (COAT §6.3.1).

*Dynamic range expansion.* A group of optimizer states seldom spans the range of an FP8 format. COAT (§4.2) raises it to
a power k at which it does:

    y = sign(x)·(|x|/c)^k,   c = √(max·min),   k = log(Δmax/Δmin) / log(max/min);   code = round(y·Δmax/max|y|)

c cancels in the quotient (it only keeps powers within fp32): with M the group's largest magnitude,

    code = round(Δmax·(|x|/M)^k),   |x| = M·(code/Δmax)^(1/k)

so a group is stored as its codes, M and k. Every device rounds powers in its own way, so a code would sometimes differ
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

Plain torch on any device, bit-equal on all of them and to the kernels of the CPU and CUDA (`fp8_adamw_numba`,
`fp8_adamw_kernels`).

Shape letters: N numbers, P = ⌈N/128⌉ groups, the last padded with zeros, which change neither scale nor power.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch.nn import functional

NAN = 0x7F
"""The code of every value that is not finite, in E4M3 and E5M2; torch reads it as NaN too."""
STEPS_PER_OCTAVE = 28
NUM_POWERS = 9 * STEPS_PER_OCTAVE + 1
UNEXPANDED = 4 * STEPS_PER_OCTAVE
"""The index of k = 1."""
GROUP = 128
SMALLEST_NORMAL = 2.0**-126
LARGEST_SCALE = 2.0**126


@dataclass(frozen=True, slots=True)
class EightBitFormat:
    """A format.

    `magnitudes`: finite, ascending from 0; a magnitude's index is its code without the sign.
    `is_signed`: bit 7 of a code is the sign, so there are at most 128 magnitudes; else at most 256.
    """

    name: str
    magnitudes: tuple[float, ...]
    is_signed: bool = True

    def __post_init__(self) -> None:
        assert self.magnitudes[0] == 0
        assert all(low < high for low, high in pairwise(self.magnitudes))
        assert len(self.magnitudes) <= self.num_codes

    @property
    def num_codes(self) -> int:
        """Codes without the sign; those after the last magnitude are NaN."""
        return 128 if self.is_signed else 256

    @property
    def largest(self) -> float:
        """Δmax."""
        return self.magnitudes[-1]

    @property
    def smallest_share(self) -> float:
        """Δmin/Δmax: the reciprocal of the format's dynamic range, its smallest subnormal over its largest."""
        return self.magnitudes[1] / self.largest


def _minifloat(code: int, fraction_bits: int, bias: int) -> float:
    exponent, fraction = code >> fraction_bits, code & (1 << fraction_bits) - 1
    if exponent == 0:
        return float(fraction * 2.0 ** (1 - bias - fraction_bits))
    return float(((1 << fraction_bits) + fraction) * 2.0 ** (exponent - bias - fraction_bits))


def _middles(parts: int, decade: int) -> list[float]:
    """The middles of [0.1, 1], cut into `parts`, times ten to the `decade`."""
    return [10.0**decade * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]


def _dynamic_exponent(first_parts: int) -> tuple[float, ...]:
    """0 and seven decades of middles, the last replaced by 1, so that the largest of a group is exact."""
    middles = [middle for place in range(7) for middle in _middles(first_parts << place, place - 6)]
    return (0.0, *middles[:-1], 1.0)


E4M3 = EightBitFormat("e4m3", tuple(_minifloat(code, 3, 7) for code in range(127)))
E5M2 = EightBitFormat("e5m2", tuple(_minifloat(code, 2, 15) for code in range(124)))
DE8 = EightBitFormat("de8", _dynamic_exponent(1))
DE8_UNSIGNED = EightBitFormat("de8 unsigned", (*_dynamic_exponent(2),), is_signed=False)
"""Unsigned, for second moments: one more bit for the fraction."""

FP8_FORMATS = {each.name: each for each in (E4M3, E5M2)}
"""By their name in cluster.yaml."""


def power(index: int) -> float:
    """k by its index: 1/16 … 32."""
    return float(2.0 ** (index / STEPS_PER_OCTAVE - 4))


@dataclass(frozen=True, slots=True)
class ExpansionTables:
    """The tables of a format, fp32, on one device.

    `values`: [powers, 256], ±(code/Δmax)^(1/k) of every byte, in signed formats with the sign in bit 7; NaN where a
    byte is not a code.
    `uppers`: [powers, codes], the largest ratio that rounds to a code, to nearest, ties to even; ∞ for the last.
    `least`: [powers], the smallest ratio of a group's smallest magnitude to M for which k may be used.
    `exponents`: [powers], k.
    """

    values: torch.Tensor
    uppers: torch.Tensor
    least: torch.Tensor
    exponents: torch.Tensor

    def to(self, device: torch.device) -> "ExpansionTables":
        """The same on another device."""
        tables = (self.values, self.uppers, self.least, self.exponents)
        return ExpansionTables(*(table.to(device) for table in tables))


def make_tables(format: EightBitFormat) -> ExpansionTables:
    """Tables of a format: 253 · (256 + 128 + 2) numbers, 0.4 megabytes, computed in milliseconds."""
    count, codes = len(format.magnitudes), format.num_codes
    inverses = np.array([1 / power(index) for index in range(NUM_POWERS)])[:, None]
    shares = np.array(format.magnitudes) / format.largest
    values = np.full((NUM_POWERS, codes), np.nan, np.float32)
    values[:, :count] = shares**inverses
    values = np.concatenate((values, -values), axis=1) if format.is_signed else values
    uppers = np.full((NUM_POWERS, codes), np.inf, np.float32)
    uppers[:, : count - 1] = _largest_below_middles(format, inverses)
    least = _rounded(format.smallest_share ** inverses[:, 0], upwards=True)
    exponents = (1 / inverses[:, 0]).astype(np.float32)
    return ExpansionTables(*map(torch.from_numpy, (values, uppers, least, exponents)))


def _largest_below_middles(format: EightBitFormat, inverses: np.ndarray) -> np.ndarray:
    """The largest fp32 not above the middle of two magnitudes; below the middle where a tie rounds up to even."""
    magnitudes = np.array(format.magnitudes)
    middles = ((magnitudes[1:] + magnitudes[:-1]) / 2 / format.largest) ** inverses
    found = _rounded(middles, upwards=False)
    goes_up = np.arange(len(magnitudes) - 1) % 2 == 1
    return np.where(goes_up & (found == middles), np.nextafter(found, np.float32(0)), found)


def _rounded(exact: np.ndarray, *, upwards: bool) -> np.ndarray:
    """fp64 rounded to fp32 in one direction."""
    nearest = exact.astype(np.float32)
    is_wrong = nearest < exact if upwards else nearest > exact
    return np.where(is_wrong, np.nextafter(nearest, np.float32(math.inf if upwards else 0)), nearest)


@dataclass(frozen=True, slots=True)
class MomentFormat:
    """How a moment is stored: its format, whether ranges are expanded, and the tables."""

    format: EightBitFormat
    expand: bool
    tables: ExpansionTables


@dataclass(frozen=True, slots=True)
class StoredGroups:
    """A stored tensor: `codes` uint8 [N], `scales` bf16 [P], `powers` uint8 [P], or None where all are 1."""

    codes: torch.Tensor
    scales: torch.Tensor
    powers: torch.Tensor | None


def num_groups(numel: int) -> int:
    """P = ⌈N/128⌉."""
    return -(-numel // GROUP)


def as_groups(flat: torch.Tensor) -> torch.Tensor:
    """[P, 128] from [N]; a view unless padding is needed."""
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
    """The stored M: bf16 [P] of the largest finite magnitudes, fp32 [P], 0 or normal."""
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
