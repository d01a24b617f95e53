"""Eight-bit formats as lists of the magnitudes that they have, in the order of their codes.

    E4M3: (−1)^s · 2^(e−7) · (1 + f/8), no infinity, NaN at 0x7F;   0, 2⁻⁹ … 448, 127 magnitudes
    E5M2: (−1)^s · 2^(e−15) · (1 + f/4), infinity and NaN above;    0, 2⁻¹⁶ … 57344, 124 magnitudes
    (Open Compute Project, OFP8 1.0; COAT §3)

DE8 is the dynamic exponent of 8-bit Adam (Dettmers et al. 2021, dynamic tree quantisation): each of seven
decades, 10⁻⁷ … 1, is cut into equal parts, twice as many as the decade below, and their middles are the
magnitudes. It has no NaN; it is there to be compared with (COAT §6.3.1), not to train with.
"""

from dataclasses import dataclass
from itertools import pairwise

NAN = 0x7F
"""What any value that is not finite becomes in E4M3 and E5M2; torch reads it as NaN too."""


@dataclass(frozen=True, slots=True)
class EightBitFormat:
    """One of them.

    `magnitudes`: finite, rising from 0; a value's place in it is the code, without the sign.
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
        """Codes without the sign; those behind the last magnitude are NaN."""
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
    """0, seven decades of middles of which the last becomes 1, so that the largest of a group is met."""
    middles = [middle for place in range(7) for middle in _middles(first_parts << place, place - 6)]
    return (0.0, *middles[:-1], 1.0)


E4M3 = EightBitFormat("e4m3", tuple(_minifloat(code, 3, 7) for code in range(127)))
E5M2 = EightBitFormat("e5m2", tuple(_minifloat(code, 2, 15) for code in range(124)))
DE8 = EightBitFormat("de8", _dynamic_exponent(1))
DE8_UNSIGNED = EightBitFormat("de8 unsigned", (*_dynamic_exponent(2),), is_signed=False)
"""Without a sign, for second moments: a bit more for the fraction."""

FP8_FORMATS = {each.name: each for each in (E4M3, E5M2)}
"""By their name in cluster.yaml."""
