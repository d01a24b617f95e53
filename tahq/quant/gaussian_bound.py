"""The rate-distortion bound: the least error of any codec if values were Gaussian, to compare with measured errors.

The model: elements are independent zero-mean Gaussians whose variance is that of their tile, the mean square
of its G consecutive channels, and both ends know the variances for nothing. At G = 64 and 3.8 bits it says
0.070 of GPT-2 small's boundary activations and 0.042 to 0.048 of its gradients, whose energy differs more
between tokens; one variance for all says 2^−3.8 = 0.072 of any tensor. Codes of real values may do better
where neighbours depend on each other, or channels differ (a variance a channel says 0.064 to 0.069 of these
activations, but 0.070 to 0.072 of the gradients).
"""

import math

import torch

from tahq.quant.tiling import Tiling


def distortion(variances: torch.Tensor, bits: float, weights: torch.Tensor | None = None) -> float:
    """Least mean squared error of independent Gaussian components at a mean rate, by reverse water-filling.

    D(R) = Σ wᵢ·min(vᵢ, θ), where the water level θ spends the rate: Σ wᵢ·max(0, ½·log2(vᵢ/θ)) = R
    (Cover and Thomas, Elements of Information Theory, Theorem 10.3.3). Were only the k largest components
    coded, θ would follow in closed form; the right k is the one whose θ is highest, as leaving out one that
    deserves bits, or coding one that does not, lowers it.

    Example:
        Variances 4 and 1 at one bit a component: θ = ½, rates 1.5 and 0.5, D = 0.5.

    Args:
        variances: not negative, any shape.
        bits: R, mean rate in bits a component, 0 or above.
        weights: of each component in both means, the same shape; equal if left out.

    Returns:
        D, in the unit of the variances.
    """
    order = variances.flatten().double().sort(descending=True)
    weight = torch.ones_like(order.values) if weights is None else weights.flatten().double()[order.indices]
    weight = weight / weight.sum()
    coded = weight.cumsum(0)
    log_levels = ((weight * order.values.log()).cumsum(0) - 2 * math.log(2) * bits) / coded
    return float((weight * order.values.clamp(max=log_levels.max().exp())).sum())


def relative_error_bound(x: torch.Tensor, bits: float, group: int = 64) -> float:
    """The bound as a relative error ‖x̂ − x‖/‖x‖ = √(D(R)/mean x²), 0 for zeros.

    Args:
        x: [..., C], finite, any floating-point type, with at least one element.
        bits: R, bits per element.
        group: G of the tiles, as codecs take it: cut down to what divides C (`Tiling`).

    Raises:
        CodecError: x has no dimension.
    """
    tiling = Tiling.of(x.shape, group)
    energy = tiling.split(x.detach()).double().square().sum(dim=-1)
    channels = torch.full_like(energy, tiling.group)
    channels[..., -1] -= tiling.padding
    total = float(energy.sum())
    mean_square = total / x.numel()
    return math.sqrt(distortion(energy / channels, bits, channels) / mean_square) if total else 0.0
