"""Dynamic range expansion as tables, which make codes and values equal to the bit on every device.

A group of optimizer states seldom spans the range of an FP8 format. COAT (§4.2) raises it to a power k that makes it:

    y = sign(x)·(|x|/c)^k,   c = √(max·min),   k = log(Δmax/Δmin) / log(max/min);   code = round(y·Δmax/max|y|)

c falls out of the quotient (it only keeps powers within fp32): with M the group's largest magnitude,

    code = round(Δmax·(|x|/M)^k),   |x| = M·(code/Δmax)^(1/k)

so a group is stored as its codes, M and k. A power is rounded otherwise on every device, and a code then now
and again by one step. But k is stored in a byte, and so there is a finite number of functions: for each k and code the
value (code/Δmax)^(1/k), and the largest ratio |x|/M that is still rounded to that code. Both are computed here
once, in fp64, and rounded to fp32 in the direction that keeps them right; after that nothing is left to do but one
product and comparisons, which are the same everywhere.

k lies on a grid of 28 powers an octave, 2^(j/28 − 4) for j from 0 to 252: from 1/16 to 32, 2.5 % apart. It is rounded
down, so that the smallest magnitude of a group is not below the smallest of the format, and does not become 0.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from tahq.memory.coat.fp8_formats import EightBitFormat

STEPS_PER_OCTAVE = 28
NUM_POWERS = 9 * STEPS_PER_OCTAVE + 1
UNEXPANDED = 4 * STEPS_PER_OCTAVE
"""The index of k = 1."""


def power(index: int) -> float:
    """k by its index: 1/16 … 32."""
    return float(2.0 ** (index / STEPS_PER_OCTAVE - 4))


@dataclass(frozen=True, slots=True)
class ExpansionTables:
    """All functions that a group may be stored by; fp32, on one device.

    `values`: [powers, 256], ±(code/Δmax)^(1/k) of every byte, in signed formats with the sign in bit 7; NaN where a
    byte is no code.
    `uppers`: [powers, codes], the largest ratio that is rounded to a code, nearest and ties to even; ∞ for the last.
    `least`: [powers], the smallest ratio of a group's smallest magnitude to M that k may be used for.
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
    """Tables of a format: 253 · (256 + 128 + 2) numbers, 0.4 megabytes, in some milliseconds."""
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
    """The largest fp32 not above the middle of each two magnitudes; below it where a tie goes up, to an even code."""
    magnitudes = np.array(format.magnitudes)
    middles = ((magnitudes[1:] + magnitudes[:-1]) / 2 / format.largest) ** inverses
    found = _rounded(middles, upwards=False)
    goes_up = np.arange(len(magnitudes) - 1) % 2 == 1
    return np.where(goes_up & (found == middles), np.nextafter(found, np.float32(0)), found)


def _rounded(exact: np.ndarray, *, upwards: bool) -> np.ndarray:
    """fp64 as the nearest fp32 on one side."""
    nearest = exact.astype(np.float32)
    is_wrong = nearest < exact if upwards else nearest > exact
    return np.where(is_wrong, np.nextafter(nearest, np.float32(math.inf if upwards else 0)), nearest)
