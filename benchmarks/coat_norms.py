"""Part of bench_coat_layer.py: an RMSNorm with quantisation fused into it, against one without (COAT Table 12)."""

import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from tahq.memory.coat.fp8_codes import E4M3, kernels_for

EPSILON = 1e-5
CALLS = 20
"""Calls that are timed together, on the device in one CUDA graph: the host's part is left out."""

Work = Callable[[], object]


def norm_variants(tokens: int, channels: int, device: torch.device) -> dict[str, Work]:
    """What is compared; all but the first two are tahq's kernels (on a CPU: the reference)."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, channels, device=device, dtype=torch.bfloat16, generator=generator)
    weight = torch.ones(channels, device=device, dtype=torch.bfloat16)
    kernels = kernels_for(device)
    plain = _plain(x, weight)

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
        "norm + maxima of groups": _plain(x, weight, "groups"),
        "norm + maxima of rows": _plain(x, weight, "rows"),
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
            times[name].append(work() / CALLS)
    return {name: statistics.median(each) for name, each in times.items()}


def _plain(x: torch.Tensor, weight: torch.Tensor, maxima_of: str = "nothing") -> Callable[[], torch.Tensor]:
    """The norm alone, bf16 to bf16, by a kernel of the same make; with maxima of its output's groups, or rows."""
    if x.device.type == "cpu":

        def on_cpu() -> torch.Tensor:
            y = F.rms_norm(x.float(), (x.shape[1],), weight.float(), EPSILON)
            if maxima_of != "nothing":
                y.abs().amax(-1)
            return y.bfloat16()

        return on_cpu
    from coat_norm_kernel import plain_norm

    return lambda: plain_norm(x, weight, EPSILON, maxima_of)


def _repeated(work: Work, device: torch.device) -> Callable[[], float]:
    """Microseconds of CALLS calls."""
    if device.type == "cpu":

        def by_clock() -> float:
            begin = time.perf_counter()
            for _ in range(CALLS):
                work()
            return (time.perf_counter() - begin) * 1e6

        return by_clock
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()

    def replayed() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    return replayed
