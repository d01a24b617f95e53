"""How far a compressed gradient is from the true one, as three sums that can be added over parameters.

With e = ĝ − g the sums are ‖g‖², ‖e‖² and ⟨g, e⟩ in fp64. Relative error and cosine follow from them, for one
parameter, a stage or the whole model, without ever holding ĝ and g side by side twice.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True)
class ErrorSums:
    """‖g‖², ‖ĝ − g‖² and ⟨g, ĝ − g⟩ over some parameters."""

    signal: float
    error: float
    product: float

    @classmethod
    def over(cls, parts: Iterable[Self]) -> Self:
        """The sums over all parts together; exact whatever their order."""
        columns = list(zip(*((part.signal, part.error, part.product) for part in parts), strict=True))
        return cls(*(_exact_sum(column) for column in columns)) if columns else cls(0.0, 0.0, 0.0)

    @property
    def relative(self) -> float:
        """‖ĝ − g‖² / ‖g‖² (TAH-Quant Eq. 9 and 10); infinite where ĝ is not finite, or g alone is zero."""
        if self.error == 0:
            return 0.0
        return self.error / self.signal if math.isfinite(self.error) and self.signal > 0 else math.inf

    @property
    def cosine(self) -> float:
        """⟨g, ĝ⟩ / (‖g‖·‖ĝ‖), 1 where both are zero; NaN where ĝ is not finite."""
        if not math.isfinite(self.error):
            return math.nan
        compressed = max(0.0, self.signal + 2 * self.product + self.error)
        if self.signal == 0 or compressed == 0:
            return 1.0 if self.error == 0 else 0.0
        return max(-1.0, min(1.0, (self.signal + self.product) / math.sqrt(self.signal * compressed)))


GroupSums = Mapping[str, ErrorSums]
"""By group of parameters: embedding, each stage, head."""


def compare(reference: Mapping[str, torch.Tensor], error: Mapping[str, torch.Tensor]) -> ErrorSums:
    """The sums over some parameters; one device round trip.

    Args:
        reference: g by parameter name, any shape, fp32.
        error: ĝ − g by the same names.

    Example:
        g = (3, 4), ĝ = (3, 5): signal 25, error 1, product 4; relative error 0.04.
    """
    sums = [_sums(reference[name], error[name]) for name in error]
    rows = torch.stack(sums).tolist() if sums else []
    return ErrorSums.over(ErrorSums(*row) for row in rows)


def _sums(reference: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    g, e = reference.flatten().double(), error.flatten().double()
    return torch.stack([g.dot(g), e.dot(e), g.dot(e)])


def _exact_sum(values: Iterable[float]) -> float:
    """`math.fsum` that lets NaN and infinity through."""
    listed = list(values)
    return math.fsum(listed) if all(map(math.isfinite, listed)) else math.nan
