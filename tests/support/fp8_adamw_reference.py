"""COAT's optimizer step as the paper writes it: formulas in fp64, no tables, nothing fused.

The oracle of `fp8_groups` and of the kernels. Weights, moments and gradients are fp32, as in a run; only the expansion
is computed in fp64. Codes, scales, powers, decoded values and weights of a step are all equal to theirs to the
bit, unless Δmax·(|x|/M)^k comes within some 2⁻⁴⁸ of the middle of two magnitudes, where a power in fp64 errs too.

Shape letters: P groups of 128.
"""

import torch

from tahq.memory.coat.fp8_groups import UNEXPANDED, as_groups, magnitudes

NAN = 0x7F
STEPS_PER_OCTAVE = 28


def magnitudes_of(x: torch.Tensor) -> torch.Tensor:
    """|x|; 0 where x is not finite, or subnormal."""
    return torch.where(x.isfinite() & (x.abs() >= 2.0**-126), x.abs(), 0.0)


def scale_as_stored(x: torch.Tensor) -> torch.Tensor:
    """M of groups [P, 128]: max|x| over what is finite, at most 2¹²⁶, to the nearest bf16 [P]."""
    return magnitudes_of(x).amax(1).clamp(max=2.0**126).to(torch.bfloat16)


def ratios_(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """|x|/M as fp32 has it, by the reciprocal, fp64 [P, 128]; 0 where it is subnormal, or x is not finite."""
    inverse = torch.where(scales > 0, 1.0 / scales.float(), 0.0)[:, None]
    ratios = (magnitudes_of(x) * inverse).double()
    return torch.where(ratios >= 2.0**-126, ratios, 0.0)


def power_index(ratios: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """j of k = log(Δmax/Δmin) / log(M/min|x|) (COAT §4.2), min over what is not 0, in [1/16, 32], down to 2^(j/28 − 4).

    `ratios`: |x|/M of groups, fp64 [P, 128]. int64 [P]; 112 (k = 1) where max = min.
    """
    smallest = torch.where(ratios > 0, ratios, torch.inf).amin(1)
    k = torch.log(magnitudes[-1] / magnitudes[1]) / torch.log(smallest.clamp(max=1.0)).abs()  # ∞ at ratio 1, so 32
    index = torch.floor(STEPS_PER_OCTAVE * (torch.log2(k.clamp(1 / 16, 32)) + 4))
    return torch.where(smallest < ratios.amax(1), index, 4.0 * STEPS_PER_OCTAVE).long()


def nearest_code(y: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """The code of the nearest magnitude, the even one of two as near; beyond the last, the last. int64."""
    upper = torch.searchsorted(magnitudes, y).clamp(1, len(magnitudes) - 1)
    lower = upper - 1
    from_lower, to_upper = y - magnitudes[lower], magnitudes[upper] - y
    goes_up = (to_upper < from_lower) | ((to_upper == from_lower) & (upper % 2 == 0))
    return torch.where(goes_up, upper, lower)


def encode_reference(
    x: torch.Tensor, magnitudes: torch.Tensor, *, expand: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q(f(x)): codes uint8 [P, 128], scales bf16 [P], indices of powers uint8 [P] of groups fp32 [P, 128]."""
    scales = scale_as_stored(x)
    ratios = ratios_(x, scales)
    index = power_index(ratios, magnitudes) if expand else torch.full((len(x),), 4 * STEPS_PER_OCTAVE)
    k = 2.0 ** (index.double() / STEPS_PER_OCTAVE - 4)
    codes = nearest_code(magnitudes[-1] * ratios ** k[:, None], magnitudes)
    codes = torch.where(x.isfinite(), codes + 128 * x.signbit(), NAN)
    return codes.to(torch.uint8), scales, index.to(torch.uint8)


def decode_reference(
    codes: torch.Tensor, scales: torch.Tensor, index: torch.Tensor, magnitudes: torch.Tensor
) -> torch.Tensor:
    """f⁻¹(DQ(codes)): ±M·(code/Δmax)^(1/k), fp32 [P, 128]; the share is rounded to fp32 before the product."""
    place = codes.long() % 128
    is_number = place < len(magnitudes)
    k = 2.0 ** (index.double() / STEPS_PER_OCTAVE - 4)
    shares = (magnitudes[torch.where(is_number, place, 0)] / magnitudes[-1]) ** (1 / k[:, None])
    values = torch.where(is_number, shares, torch.nan).float() * scales.float()[:, None]
    return torch.where(codes > 127, -values, values)


def step_reference(weights: torch.Tensor, gradients: torch.Tensor, moments, numbers) -> None:
    """AdamW (Loshchilov & Hutter 2019, Alg. 2) on dequantised moments; COAT's Eq. 1 has ε inside the root, torch not.

    m ← m + (1 − β₁)(g − m);  v ← β₂·v + (1 − β₂)·g²;  w ← w·(1 − η·λ) − η/(1 − β₁ᵗ) · m/(√v/√(1 − β₂ᵗ) + ε)

    Takes what `step_in_torch` does; moments are quantised only after the weights have used them.
    """
    count = weights.numel()
    w, g = as_groups(weights), as_groups(gradients)
    m, v = (
        decode_reference(
            as_groups(codes),
            scales,
            torch.full(scales.shape, UNEXPANDED) if powers is None else powers,
            torch.from_numpy(magnitudes(by.fp8)),
        )
        for codes, scales, powers, by in moments
    )
    m = m + numbers.rest1 * (g - m)
    v = numbers.beta2 * v + (numbers.rest2 * g) * g
    denominator = v.double().sqrt().float() * numbers.root_factor + numbers.epsilon
    w = w * numbers.decay - numbers.rate * (m / denominator)
    weights.copy_(w.view(-1)[:count])
    for moment, value in zip(moments, (m, v), strict=True):
        codes, scales, powers = encode_reference(
            value, torch.from_numpy(magnitudes(moment.by.fp8)), expand=moment.by.expand
        )
        moment.codes.copy_(codes.view(-1)[:count])
        moment.scales.copy_(scales)
        if moment.powers is not None:
            moment.powers.copy_(powers)
