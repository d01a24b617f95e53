"""Measures what each codec costs and loses on one tensor: bytes, errors, bias and speed.

Squared error alone misleads (an error that repeats on every token hurts a gradient more than a larger one that averages
out), so a report has several yardsticks: the error of the whole tensor, of its worst token, and what of it remains in
the mean over draws of a randomised codec. Beside them stands the rate-distortion bound: the least error of any codec if
values were independent Gaussians with the variance of their tile, the mean square of its G consecutive channels, and
both ends knew the variances at no cost. At G = 64 and 3.8 bits it says 0.070 of GPT-2 small's boundary activations and
0.042 to 0.048 of its gradients, whose energy differs more between tokens; one variance for all says 2^−3.8 = 0.072 of
any tensor. Codes of real values may do better where neighbours depend on each other, or channels differ (a variance per
channel says 0.064 to 0.069 of these activations, but 0.070 to 0.072 of the gradients).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tahq.errors import CodecError
from tahq.quant import AUTO, get_codec
from tahq.quant.codec import Codec
from tahq.quant.tiling import Tiling, check_encodable
from tahq.randomness import derive_seed

USUAL_SPECS = (
    "fixed:bits=8",
    "fixed:bits=6",
    "fixed:bits=4",
    "fixed:bits=3",
    "tah",
    "tah:tau=0",
    "tah:low=2,high=3",
    "aqsgd:cache=none",
    "eden:bits=2",
    "eden:bits=3",
    "eden:bits=4",
    "wf:bits=3",
    "wf:bits=3.5",
    "wf:bits=4",
)
"""The codecs that are compared by default."""


@dataclass(frozen=True, slots=True)
class CodecReport:
    """One codec on one tensor x of N elements; x̂ is what a draw decodes to, in fp32.

    Attributes:
        spec: canonical.
        nbytes: of the stream.
        bits_per_element: 8·nbytes/N, metadata included.
        relative_error: ‖x̂ − x‖/‖x‖, root mean square over draws.
        gaussian_bound: the least relative error at these bits if values were Gaussian (`relative_error_bound`).
        max_error: largest |x̂ − x| of any element in any draw, in the unit of x.
        cosine: ⟨x̂, x⟩/(‖x̂‖·‖x‖), mean over draws.
        bias: ‖E x̂ − x‖/‖x‖, corrected for the small number of draws: the root of (‖Σe‖² − Σ‖e‖²)/(d·(d − 1)),
            e = x̂ − x, whose expectation is ‖E e‖², and 0 where that is negative. For a codec without
            randomness, the relative error.
        worst_token_error: largest relative error of a row of C channels in any draw, except rows of zeros.
        draws: d, how many keys were tried; 1 for a codec that ignores its key.
        encode_elements_per_s: of the fastest repetition.
        decode_elements_per_s: of the fastest repetition, to the type of x.
    """

    spec: str
    nbytes: int
    bits_per_element: float
    relative_error: float
    gaussian_bound: float
    max_error: float
    cosine: float
    bias: float
    worst_token_error: float
    draws: int
    encode_elements_per_s: float
    decode_elements_per_s: float


def compare(
    x: torch.Tensor,
    specs: Sequence[str] = USUAL_SPECS,
    *,
    draws: int = 16,
    backend: str = AUTO,
    threads: int = 1,
    repeats: int = 3,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[CodecReport]:
    """Encode and decode x with every codec, and measure.

    Codecs that remember samples are given no sample ids: each tensor is new to them, and stays so.

    Args:
        x: [..., C], fp32, bf16 or fp16, finite and not all zero; the device it lies on does the work.
        specs: in the order of the reports.
        draws: number of keys for a codec that uses its key, 2 or more.
        backend: as in `get_codec`.
        threads: as in `get_codec`.
        repeats: how often encoding and decoding are timed; the first call of each codec is not.
        seed: of the keys.
        clock: seconds, for the timing alone.

    Raises:
        ConfigError: an unknown spec or backend.
        CodecError: x is empty, all zero, not finite, or of another type, or the backend cannot take it.
    """
    check_comparable(x)
    keys = [derive_seed(seed, "codec comparison", draw) for draw in range(draws)]
    codecs = [get_codec(spec, backend=backend, threads=threads) for spec in specs]
    return [_report(x.detach(), codec, keys, repeats, clock) for codec in codecs]


def check_comparable(x: torch.Tensor) -> None:
    """Refuse a tensor that no error can be measured on: empty, all zero, not finite, or of another type."""
    check_encodable(x)
    if not x.numel() or not x.any():
        got = "all zeros" if x.numel() else "no elements"
        raise CodecError(f"comparing codecs needs a tensor with nonzero values; got shape {list(x.shape)}, {got}")
    if num_bad := int((~x.isfinite()).sum()):
        raise CodecError(f"comparing codecs needs finite values; {num_bad} of {x.numel()} are NaN or infinite")


def _report(
    x: torch.Tensor, codec: Codec, keys: Sequence[int], repeats: int, clock: Callable[[], float]
) -> CodecReport:
    exact = x.double()
    norm, tokens, total = _norm(exact), exact.norm(dim=-1), torch.zeros_like(exact)
    squared, largest, cosines, worst_token = [], [], [], []
    for key in keys if codec.is_keyed else keys[:1]:
        back = codec.decode(codec.encode(x, key=key), x.shape, torch.float32, key=key).double()
        error = back - exact
        total += error
        squared.append(_norm(error) ** 2)
        largest.append(float(error.abs().max()))
        cosines.append(float((exact * back).sum()) / (norm * _norm(back) or 1.0))
        worst_token.append(float(torch.where(tokens > 0, error.norm(dim=-1) / tokens, 0.0).max()))
    draws, sum_squared = len(squared), sum(squared)
    bias = math.sqrt(sum_squared)
    if draws > 1 and math.isfinite(sum_squared):
        bias = math.sqrt(max(0.0, _norm(total) ** 2 - sum_squared) / (draws * (draws - 1)))
    buf = codec.encode(x, key=keys[0])
    encode_s = _fastest_s(lambda: codec.encode(x, key=keys[0]), repeats, clock, x.device)
    decode_s = _fastest_s(lambda: codec.decode(buf, x.shape, x.dtype, key=keys[0]), repeats, clock, x.device)
    num_bits = 8 * buf.numel() / x.numel()
    return CodecReport(
        spec=str(codec.spec),
        nbytes=buf.numel(),
        bits_per_element=num_bits,
        relative_error=math.sqrt(sum_squared / draws) / norm,
        gaussian_bound=relative_error_bound(x, num_bits),
        max_error=max(largest),
        cosine=sum(cosines) / draws,
        bias=bias / norm,
        worst_token_error=max(worst_token),
        draws=draws,
        encode_elements_per_s=x.numel() / encode_s,
        decode_elements_per_s=x.numel() / decode_s,
    )


def _norm(x: torch.Tensor) -> float:
    return float(x.double().norm())


def _fastest_s(
    action: Callable[[], torch.Tensor], repeats: int, clock: Callable[[], float], device: torch.device
) -> float:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock()

    times = []
    for _ in range(repeats):
        start = now()
        action()
        times.append(now() - start)
    return min(times)


def relative_error_bound(x: torch.Tensor, bits: float, group: int = 64) -> float:
    """The rate-distortion bound as a relative error ‖x̂ − x‖/‖x‖ = √(D(R)/mean x²); 0 for zeros.

    Args:
        x: [..., C], finite, any floating-point type, with at least one element.
        bits: R, bits per element.
        group: G of the tiles, as for codecs: reduced to a number that divides C (`Tiling`).

    Raises:
        CodecError: x has no dimension.
    """
    tiling = Tiling.of(x.shape, group)
    energy = tiling.split(x.detach()).double().square().sum(dim=-1)
    channels = torch.full_like(energy, tiling.group)
    channels[..., -1] -= tiling.padding
    total = float(energy.sum())
    return math.sqrt(distortion(energy / channels, bits, channels) / (total / x.numel())) if total else 0.0


def distortion(variances: torch.Tensor, bits: float, weights: torch.Tensor | None = None) -> float:
    """Least mean squared error of independent Gaussian components at a mean rate, by reverse water-filling.

    D(R) = Σ wᵢ·min(vᵢ, θ), where the water level θ spends the rate: Σ wᵢ·max(0, ½·log2(vᵢ/θ)) = R
    (Cover and Thomas, Elements of Information Theory, Theorem 10.3.3). Were only the k largest components
    coded, θ would follow in closed form; the right k is the one whose θ is highest, as leaving out one that
    deserves bits, or coding one that does not, lowers it.

    Example:
        Variances 4 and 1 at one bit per component: θ = ½, rates 1.5 and 0.5, D = 0.5.

    Args:
        variances: not negative, any shape.
        bits: R, mean rate in bits per component, 0 or above.
        weights: of each component in both means, the same shape; equal if left out.

    Returns:
        D, in the unit of the variances.
    """
    order = variances.flatten().double().sort(descending=True)
    weight = torch.ones_like(order.values) if weights is None else weights.flatten().double()[order.indices]
    weight = weight / weight.sum()
    log_levels = ((weight * order.values.log()).cumsum(0) - 2 * math.log(2) * bits) / weight.cumsum(0)
    return float((weight * order.values.clamp(max=log_levels.max().exp())).sum())
