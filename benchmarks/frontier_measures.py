"""Figures of one codec on one boundary tensor, and on the weight gradient that it has a part in.

The weight gradient is that of a linear map at the cut, ΔW = Xᵀ·G over all tokens, with activation X and gradient G;
a forward codec makes X̂ᵀ·G of it, a backward one Xᵀ·Ĝ. With e_t the error of token t and o_t the other tensor's row,
its error is Σ_t e_t⊗o_t: were the e_t independent and of mean zero, its square would be Σ_t ‖e_t‖²·‖o_t‖² on average.
The ratio of the two roots is `coherence`: 1 says that the errors of tokens average out, more that they add up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from boundary_tensors import Cut
from frontier_codecs import Candidate

from tahq.quant.gaussian_bound import relative_error_bound

_RATES = torch.arange(0.0, 20.0, 0.05).tolist()


@dataclass(frozen=True, slots=True)
class Figures:
    """One codec, one direction, one cut; with K draws of a codec that looks at its key, else K = 1.

    Attributes:
        family: what a curve joins.
        label: the codec.
        direction: activations or gradients.
        block: behind which the cut lies.
        draws: K.
        bits: an element, of all that is sent.
        error: ‖x̂ − x‖/‖x‖, root mean square over draws.
        mean_error: ‖mean of x̂ − x over draws‖/‖x‖; noise alone would leave error/√K.
        bound: the least error at these bits, were values Gaussian.
        bits_above_bound: what the bound needs fewer for this error; NaN where there is no error.
        cosine: between x̂ and x, mean over draws.
        weight_error: of ΔW, relative, root mean square over draws.
        weight_mean_error: of the mean of ΔW over draws.
        weight_cosine: between the two ΔW, mean over draws.
        coherence: see above; NaN where there is no error.
        code_bits: bits an element of codes alone; NaN where there are none.
        entropy: what an ideal coder would take for them; NaN where there are none.
    """

    family: str
    label: str
    direction: str
    block: int
    draws: int
    bits: float
    error: float
    mean_error: float
    bound: float
    bits_above_bound: float
    cosine: float
    weight_error: float
    weight_mean_error: float
    weight_cosine: float
    coherence: float
    code_bits: float
    entropy: float

    @property
    def noise_alone(self) -> float:
        """What the mean over draws of an unbiased codec has as its error."""
        return self.error / math.sqrt(self.draws)

    @property
    def saved_by_entropy(self) -> float:
        """Bits an element that an ideal coder of the codes would save."""
        return self.code_bits - self.entropy


class Bound:
    """The Gaussian bound of one tensor, both ways."""

    def __init__(self, x: torch.Tensor) -> None:
        self.errors = [relative_error_bound(x, rate) for rate in _RATES]

    def bits_of(self, error: float) -> float:
        """The rate at which the bound is this error; linear in log(error) between tabulated rates, NaN beyond them."""
        if error >= self.errors[0]:
            return 0.0
        if error < self.errors[-1]:
            return math.nan
        place = next(i for i, bound in enumerate(self.errors) if bound <= error)
        above, below = math.log(self.errors[place - 1]), math.log(self.errors[place])
        return _RATES[place - 1] + (_RATES[place] - _RATES[place - 1]) * (above - math.log(error)) / (above - below)


class _Sums:
    """Of one tensor over draws, in fp64."""

    def __init__(self, x: torch.Tensor, other: torch.Tensor, *, is_activation: bool) -> None:
        self._rows, self._other, self._is_activation = _rows(x), _rows(other), is_activation
        self._other_energy = self._other.double().square().sum(dim=1)
        self.tensor = _Drawn(self._rows.double())
        self.weight = _Drawn(self._weight(self._rows))
        self.independent = 0.0
        """Σ over draws of Σ_t ‖e_t‖²·‖o_t‖²."""

    def _weight(self, rows: torch.Tensor) -> torch.Tensor:
        product = rows.T @ self._other if self._is_activation else self._other.T @ rows
        return product.double()

    def add(self, back: torch.Tensor) -> None:
        """Count what came back of one draw."""
        error = _rows(back) - self._rows
        by_token = self.tensor.add(error.double())
        self.weight.add(self._weight(error))
        self.independent += float(by_token @ self._other_energy)


class _Drawn:
    """Something true, and its errors over draws."""

    def __init__(self, true: torch.Tensor) -> None:
        self._true, self._total = true, torch.zeros_like(true)
        self._norm = float(true.norm())
        self._draws, self._squared, self._cosines = 0, 0.0, 0.0

    def add(self, error: torch.Tensor) -> torch.Tensor:
        """Count one error; its square by row."""
        by_row = error.square().sum(dim=1)
        squared, along = float(by_row.sum()), float((self._true * error).sum())
        self._total += error
        self._draws += 1
        self._squared += squared
        self._cosines += (self._norm**2 + along) / (self._norm * math.sqrt(self._norm**2 + 2 * along + squared))
        return by_row

    @property
    def squared(self) -> float:
        """Σ‖e‖²."""
        return self._squared

    @property
    def error(self) -> float:
        """Relative, root mean square."""
        return math.sqrt(self._squared / self._draws) / self._norm

    @property
    def mean_error(self) -> float:
        """Relative, of the mean over draws."""
        return float(self._total.norm()) / self._draws / self._norm

    @property
    def cosine(self) -> float:
        """Mean over draws."""
        return self._cosines / self._draws


def measure(candidate: Candidate, cut: Cut, direction: str, keys: Sequence[int], bound: Bound) -> Figures:
    """Send the tensor under every key (under one, if the codec ignores it) and look at what arrives."""
    x, is_activation = cut.of(direction), direction == "activations"
    sums = _Sums(x, cut.gradient if is_activation else cut.activation, is_activation=is_activation)
    keys = keys if candidate.is_keyed else keys[:1]
    for key in keys:
        sent = candidate.send(x, key)
        sums.add(sent.values)
    codes, bits = sent.read_codes(), 8 * sent.nbytes / x.numel()
    return Figures(
        family=candidate.family,
        label=candidate.label,
        direction=direction,
        block=cut.block,
        draws=len(keys),
        bits=bits,
        error=sums.tensor.error,
        mean_error=sums.tensor.mean_error,
        bound=relative_error_bound(x, bits),
        bits_above_bound=bits - bound.bits_of(sums.tensor.error),
        cosine=sums.tensor.cosine,
        weight_error=sums.weight.error,
        weight_mean_error=sums.weight.mean_error,
        weight_cosine=sums.weight.cosine,
        coherence=math.sqrt(sums.weight.squared / sums.independent) if sums.independent else math.nan,
        code_bits=codes.num_bits / x.numel() if codes else math.nan,
        entropy=codes.entropy_bits / x.numel() if codes else math.nan,
    )


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).float()
