"""Part of bench_layer.py: an RMSNorm with quantisation fused into it, against one without (COAT Table 12)."""

import statistics
from collections.abc import Callable

import torch
from harness import milliseconds
from torch.nn import functional as F

from tahq.memory.coat.fp8_codes import E4M3, kernels_for

EPSILON = 1e-5
CALLS = 20
"""Calls that are timed together, on the device in one CUDA graph: the host's part is left out."""

Work = Callable[[], object]


def norm_variants(tokens: int, channels: int, device: torch.device) -> dict[str, Work]:
    """The norms to compare; all but the first two are tahq's kernels (on a CPU: the reference)."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, channels, device=device, dtype=torch.bfloat16, generator=generator)
    weight = torch.ones(channels, device=device, dtype=torch.bfloat16)
    kernels = kernels_for(device)

    def plain(maxima_of: str = "nothing") -> torch.Tensor:
        """The norm alone, bf16 to bf16, by a similar kernel; with maxima of its output's groups, or rows."""
        if device.type == "cpu":
            y = F.rms_norm(x.float(), (channels,), weight.float(), EPSILON)
            if maxima_of != "nothing":
                y.abs().amax(-1)
            return y.bfloat16()
        from coat_norm_kernel import plain_norm

        return plain_norm(x, weight, EPSILON, maxima_of)

    def fused(layouts: str | None) -> None:
        norm = kernels.norm_forward(x, None, weight, EPSILON)
        if layouts is not None:
            scale = kernels.tensor_scale(norm.maxima, E4M3)
            kernels.norm_output(norm.codes, norm.rstd, weight, scale, layouts)

    def apart() -> None:
        y = plain()
        kernels.quantize_tensor(y, kernels.tensor_scale(kernels.group_maxima(y), E4M3), E4M3, "rows")

    return {
        "torch": lambda: F.rms_norm(x, (channels,), weight, EPSILON),
        "norm": plain,
        "norm + maxima of groups": lambda: plain("groups"),
        "norm + maxima of rows": lambda: plain("rows"),
        "norm + input codes + maxima": lambda: fused(None),
        "… + output codes": lambda: fused("rows"),
        "… + output codes, two layouts": lambda: fused("both"),
        "norm, then quantised apart": apart,
    }


def norm_times_us(tokens: int, channels: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Median microseconds of a call, repetitions of all variants in turn."""
    works = {name: _repeated(work, device) for name, work in norm_variants(tokens, channels, device).items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(milliseconds(work, device) * 1e3 / CALLS)
    return {name: statistics.median(each) for name, each in times.items()}


def _repeated(work: Work, device: torch.device) -> Work:
    """CALLS calls."""

    def all_calls() -> None:
        for _ in range(CALLS):
            work()

    if device.type == "cpu":
        return all_calls
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_calls()
    return graph.replay
