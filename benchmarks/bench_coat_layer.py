"""COAT's activations (§5): bytes by operator, norms with quantisation, one layer's memory and time (Tables 2, 12, 7).

    python benchmarks/bench_coat_layer.py                    (one CUDA device with FP8 units; about four minutes)
    python benchmarks/bench_coat_layer.py --small --out x    (a CPU, seconds: that it runs, no figures)

Writes OUT.md and OUT.json after each part. Layers: transformers' own Llama layer in bf16 (`bf16`), the same under
torch.compile (`bf16 compiled`), and tahq's FP8 flow (`coat`: in the course of a step; `coat, step begins`: with its
weights coded anew; `coat, codes not kept`: `keep_weight_codes: false`; `coat bf16 backward`: `backward_products:
bf16`). First with weights and residual stream in bf16, as in the paper, then as tahq trains, with both in fp32 under
autocast, whose copies of weights are made once for all micro-batches, and listed.

Every repetition runs all variants in turn; times are medians over repetitions, ratios are of medians. Memory is the
allocator's: what a forward leaves behind above what was there before (its output, 1 U, included), and the peak of
forward and backward above that; weights and their gradients are there before, and so are weights' FP8 codes or bf16
copies, which are listed.

Targets: memory at least 1.65 times lower, time at least 1.5 times shorter, norm with quantisation at most 5 % slower.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from coat_layer_parts import OPERATORS, PAPER_UNITS, Layer, Size, compiled, make_layer, saved_by_operator
from coat_norms import norm_times_us

from tahq.memory.config import CoatConfig
from tahq.models.deferred_gradients import sharing_weight_copies

RESULTS = Path(__file__).parent / "results"
SMALL = Size(192, 512, 3, 1, 64)
PAPER_SIZES = [
    Size(4096, 11008, 32, 4, 2048),
    Size(2048, 5504, 16, 4, 2048),
    Size(2048, 5504, 16, 4, 4096),
    Size(4096, 11008, 32, 4, 4096),
]
NORM_CHANNELS = (1024, 2048, 4096, 8192)
NORM_TOKENS = 4096
FIRST = "bf16"


class Report:
    """The result files, written again after every part."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._lines = [f"# One layer with COAT's FP8 flow\n\n{machine.describe()}\n"]
        self._data: dict[str, Any] = {"machine": machine.describe()}

    def add(self, key: str, data: Any, lines: list[str]) -> None:
        """One part."""
        self._data[key] = data
        self._lines += [*lines, ""]
        self._out.with_suffix(".md").write_text("\n".join(self._lines))
        self._out.with_suffix(".json").write_text(json.dumps(self._data, indent=1))
        print("\n".join(lines), flush=True)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def bytes_by_operator(size: Size, device: torch.device, report: Report) -> None:
    """COAT Table 2."""
    units: dict[str, dict[str, float]] = dict(PAPER_UNITS)
    for name, config, master in (
        ("bf16", None, False), ("coat", CoatConfig(), False),
        ("bf16 autocast", None, True), ("coat autocast", CoatConfig(), True),
    ):  # fmt: skip
        layer = Layer(size, device, make_layer(size, device, config, master=master), master=master)
        units[name] = {operator: nbytes / size.unit for operator, nbytes in saved_by_operator(layer).items()}
    rows = [
        [name, *(f"{of.get(operator, 0.0):.2f}" for operator in OPERATORS), f"{sum(of.values()):.2f}"]
        for name, of in units.items()
    ]
    text = [
        f"## Bytes kept for backward by operator, in U = {size.unit} bytes ({size}; Table 2)\n",
        "A tensor that two operators keep counts where it is kept first: attention's output is under FlashAttn here,",
        "under Linear in the paper. `autocast`: residual stream and weights in fp32; bf16 copies of weights, which all",
        "micro-batches share, do not count.\n",
        *table(["", *OPERATORS, "total"], rows),
    ]
    report.add("bytes", units, text)


def norms(shapes: list[tuple[int, int]], device: torch.device, repeats: int, report: Report) -> None:
    """COAT Table 12."""
    found = {f"({t}, {c})": norm_times_us(t, c, device, repeats) for t, c in shapes}
    names = list(next(iter(found.values())))
    rows = [
        [shape, *(f"{us[name]:.1f} ({us[name] / us['norm']:.2f})" for name in names)] for shape, us in found.items()
    ]
    text = [
        "## RMSNorm with quantisation, µs (ratio to `norm`; Table 12)\n",
        "`norm`: bf16 in, bf16 out. `+ maxima`: what the paper fuses, group scaling's first stage, of groups of 16 in",
        "fp32, which are 6 % more bytes, and of rows, as in tahq. `+ input codes + maxima`: tahq's first pass; it",
        "stores codes in place of bf16. `+ output codes`: with the second pass.\n",
        *table(["shape", *names], rows),
    ]
    report.add("norms", found, text)


def variants(size: Size, device: torch.device, *, master: bool, with_compile: bool) -> dict[str, Layer]:
    """The layers to compare, the first being what the others are compared with."""

    def made(config: CoatConfig | None) -> Layer:
        return Layer(size, device, make_layer(size, device, config, master=master), master=master)

    layers = {FIRST: made(None)}
    if with_compile:
        layers["bf16 compiled"] = compiled(made(None))
    coat = made(CoatConfig())
    return layers | {
        "coat": coat,
        "coat, step begins": coat,
        "coat, codes not kept": made(CoatConfig(keep_weight_codes=False)),
        "coat bf16 backward": made(CoatConfig(backward_products="bf16")),
    }


@sharing_weight_copies()
def layer(size: Size, device: torch.device, repeats: int, report: Report, *, master: bool) -> None:
    """COAT Table 7; weights stay as they are."""
    try:
        layers = variants(size, device, master=master, with_compile=device.type == "cuda")
        for each in layers.values():
            for _ in range(3):
                each.backward(each.forward())
    except Exception as error:  # whatever torch.compile stumbles over on this machine
        print(f"without torch.compile: {type(error).__name__}: {str(error)[:300]}", flush=True)
        layers = variants(size, device, master=master, with_compile=False)
        for each in layers.values():
            each.backward(each.forward())
    marks: dict[str, list[tuple[Any, ...]]] = {name: [] for name in layers}
    for _ in range(repeats):
        for name, each in layers.items():
            if name == "coat, step begins":
                each.begin_step()
            marks[name].append(_marks(each, device))
        _wait(device)
    times = {name: [_times_ms(each, device) for each in of] for name, of in marks.items()}
    found = {name: _figures(each, times[name], device) for name, each in layers.items()}
    of_first = found[FIRST]
    rows = [
        [
            name, f"{one['forward_ms']:.2f}", f"{one['backward_ms']:.2f}", f"{one['total_ms']:.2f}",
            f"{of_first['total_ms'] / one['total_ms']:.2f}×",
            f"{one['kept'] / 2**20:.0f}", f"{of_first['kept'] / max(one['kept'], 1):.2f}×",
            f"{one['peak'] / 2**20:.0f}", f"{of_first['peak'] / max(one['peak'], 1):.2f}×",
            f"{one['weight_codes'] / 2**20:.0f}",
        ]
        for name, one in found.items()
    ]  # fmt: skip
    kind = "fp32 weights and residual stream, autocast" if master else "weights and residual stream in bf16"
    head = ["", "forward ms", "backward ms", "total", "faster", "kept MiB", "less", "peak MiB", "less", "copies MiB"]
    text = [f"## A layer of {size}; {kind} (Table 7)\n", *table(head, rows)]
    report.add(f"layer {size}, {'fp32' if master else 'bf16'}", found, text)


def _marks(layer: Layer, device: torch.device) -> tuple[Any, ...]:
    """When a micro-batch's forward began, its backward, and the end."""
    now = _clock(device)
    begin, y = now(), layer.forward()
    middle = now()
    layer.backward(y)
    return begin, middle, now()


def _times_ms(marks: tuple[Any, ...], device: torch.device) -> tuple[float, float]:
    """Forward and backward."""
    begin, middle, end = marks
    if device.type == "cpu":
        return (middle - begin) * 1e3, (end - middle) * 1e3
    return begin.elapsed_time(middle), middle.elapsed_time(end)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _clock(device: torch.device) -> Callable[[], Any]:
    if device.type == "cpu":
        return time.perf_counter

    def recorded() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return recorded


def _figures(layer: Layer, times: list[tuple[float, float]], device: torch.device) -> dict[str, float]:
    kept, peak = _memory(layer) if device.type == "cuda" else (0, 0)
    return {
        "forward_ms": statistics.median(forward for forward, _ in times),
        "backward_ms": statistics.median(backward for _, backward in times),
        "total_ms": statistics.median(map(sum, times)),
        "kept": kept,
        "peak": peak,
        "weight_codes": layer.weight_codes_nbytes,
    }


def _memory(layer: Layer) -> tuple[int, int]:
    """Bytes that a forward leaves, and the peak of forward and backward, above what was there."""
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = layer.forward()
    kept = torch.cuda.memory_allocated() - before
    layer.backward(y)
    torch.cuda.synchronize()
    return kept, torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small layer on the CPU")
    parser.add_argument("--out", type=Path, default=RESULTS / "coat_layer_h200_202611")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--sizes", type=int, default=1, help="how many of Table 7's four sizes")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.small else "cuda")
    machine.need_gpu(device.type)
    sizes = [SMALL] if arguments.small else PAPER_SIZES[: arguments.sizes]
    repeats = 2 if arguments.small else arguments.repeats
    report = Report(arguments.out)
    bytes_by_operator(sizes[0], device, report)
    shapes = [(64, 256)] if arguments.small else [(NORM_TOKENS, channels) for channels in NORM_CHANNELS]
    norms(shapes, device, repeats, report)
    for size in sizes:
        for master in (False, True):
            layer(size, device, repeats, report, master=master)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
