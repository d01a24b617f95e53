"""One layer with stored activations as torch keeps them, by AGoQ and by COAT: bytes by operator, memory and time.

    python benchmarks/bench_layer.py [--output benchmarks/results/layer_<hardware>_<yyyymm>.md]
    python benchmarks/bench_layer.py --parts layer --layers bf16 fp8   # only these, in a minute
    python benchmarks/bench_layer.py --small       # on the CPU, in seconds: that it works, no figures

AGoQ Tables 1, 5, 6, 7 and 11 (`--parts agoq`: the last four); COAT Tables 2, 7 and 12 (norms with quantisation). Needs
a CUDA device with FP8 units; about ten minutes.
Layers: transformers' own Llama layer in bf16 (`bf16`), the same under torch.compile (`bf16 compiled`), or computed
again in the backward (`bf16 recomputed`); AGoQ's stored inputs (`agoq`: 4 bits); COAT's FP8 flow (`coat`: in the
course of a step; `coat, step begins`: with its weights coded anew; `coat, codes not kept`: `keep_weight_codes: false`;
`coat bf16 backward`: `backward_products: bf16`); and `training.precision: fp8` (`fp8`; `fp8 e5m2 backward`). First with
weights and residual stream in bf16, as in the papers, then as tahq trains, with both in fp32 under autocast, whose
copies of weights are made once for all micro-batches, and listed.

Every repetition runs all variants in turn; times are medians, ratios are of medians. Memory is the allocator's: what a
forward leaves allocated (its output, 1 U, included), and the peak of forward and backward. Weights, their gradients,
and their FP8 codes or bf16 copies are allocated before and not included; the copies are listed.
"""

import argparse
import gc
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import coded_gemm
import torch
from coat_norms import norm_times_us
from harness import Table, main, need_gpu, say
from layer_parts import (
    AGOQ_PAPER_UNITS,
    OPERATORS,
    PAPER_UNITS,
    PARTS,
    Layer,
    LayerConfig,
    PartMarks,
    Size,
    compiled,
    make_layer,
    saved_by_operator,
)

from tahq.memory.config import AgoqConfig, CoatConfig, Fp8Config
from tahq.models.deferred_gradients import sharing_weight_copies

SMALL = Size(192, 512, 3, 1, 64)
PAPER_SIZES = [
    Size(4096, 11008, 32, 4, 2048),
    Size(2048, 5504, 16, 4, 2048),
    Size(2048, 5504, 16, 4, 4096),
    Size(4096, 11008, 32, 4, 4096),
]
AGOQ_SIZES = [
    Size(4096, 16384, 32, 4, 2048),
    Size(4096, 11008, 32, 4, 2048),
    Size(4096, 14336, 32, 4, 2048, kv_heads=8),
]
LENGTHS = (2048, 4096, 8192)
NORM_SHAPES = [(4096, channels) for channels in (1024, 2048, 4096, 8192)]


def bytes_by_operator(size: Size, device: torch.device) -> Iterator[list[str]]:
    units: dict[str, dict[str, float]] = dict(AGOQ_PAPER_UNITS if size.inner == 4 * size.hidden else {})
    units |= PAPER_UNITS if size in PAPER_SIZES else {}
    configs = {"bf16": None, "coat": CoatConfig(), "agoq": AgoqConfig(), "fp8": Fp8Config()}
    for name, config in configs.items():
        for suffix, master in (("", False), (" autocast", True)):
            layer = Layer(size, device, make_layer(size, device, config, master=master), master=master)
            units[name + suffix] = {
                operator: nbytes / size.unit for operator, nbytes in saved_by_operator(layer).items()
            }
    for name, of in units.items():
        yield [name, *(f"{of.get(operator, 0.0):.2f}" for operator in OPERATORS), f"{sum(of.values()):.2f}"]


def variants(size: Size, device: torch.device, only: Sequence[str] = (), *, master: bool) -> dict[str, Layer]:
    """The layers to compare, warmed up, `bf16` first; `only`: names of those that are wanted."""

    def made(config: LayerConfig) -> Layer:
        return Layer(size, device, make_layer(size, device, config, master=master), master=master)

    layers, coat, again = {"bf16": made(None)}, made(CoatConfig()), made(None)
    again.module.checkpoint_blocks = True
    if device.type == "cuda" and (not only or "bf16 compiled" in only):
        layers["bf16 compiled"] = compiled(made(None))
    layers |= {
        "bf16 recomputed": again,
        "agoq": made(AgoqConfig(bits=4)),
        "agoq 8 bits": made(AgoqConfig(bits=8)),
        "coat": coat,
        "coat, step begins": coat,
        "coat, codes not kept": made(CoatConfig(keep_weight_codes=False)),
        "coat bf16 backward": made(CoatConfig(backward_products="bf16")),
        "fp8": made(Fp8Config()),
        "fp8 e5m2 backward": made(Fp8Config(backward="e5m2")),
    }
    layers = {name: layer for name, layer in layers.items() if not only or name in only}
    for name, layer in list(layers.items()):
        try:
            for _ in range(3):
                layer.backward(layer.forward())
        except Exception as error:
            if name != "bf16 compiled":
                raise
            say(f"without torch.compile: {type(error).__name__}: {str(error)[:300]}")
            del layers[name]
    return layers


@sharing_weight_copies()
def layer_rows(
    size: Size, device: torch.device, repeats: int, only: Sequence[str] = (), *, master: bool
) -> list[list[str]]:
    """COAT Table 7, with AGoQ and products in FP8; weights stay the same."""
    layers = variants(size, device, only, master=master)
    marks: dict[str, list[list[Any]]] = {name: [] for name in layers}
    for _ in range(repeats):
        for name, layer in layers.items():
            if name == "coat, step begins":
                layer.begin_step()
            begin, y = mark(device), layer.forward()
            middle = mark(device)
            layer.backward(y)
            marks[name].append([begin, middle, mark(device)])
        if device.type == "cuda":
            torch.cuda.synchronize()
    found = []
    for name, layer in layers.items():
        times = [(between_ms(begin, middle), between_ms(middle, end)) for begin, middle, end in marks[name]]
        forward_ms, backward_ms = (statistics.median(each) for each in zip(*times, strict=True))
        total_ms = statistics.median(map(sum, times))
        kept, peak = memory(layer) if device.type == "cuda" else (0, 0)
        found.append((name, forward_ms, backward_ms, total_ms, kept, peak, layer.weight_codes_nbytes))
    _, _, _, first_ms, first_kept, first_peak, _ = found[0]
    return [
        [
            name, f"{forward_ms:.2f}", f"{backward_ms:.2f}", f"{total_ms:.2f}", f"{first_ms / total_ms:.2f}×",
            f"{kept / 2**20:.0f}", f"{first_kept / max(kept, 1):.2f}×",
            f"{peak / 2**20:.0f}", f"{first_peak / max(peak, 1):.2f}×", f"{copies / 2**20:.0f}",
        ]
        for name, forward_ms, backward_ms, total_ms, kept, peak, copies in found
    ]  # fmt: skip


def mark(device: torch.device) -> Any:
    """The time now, on a GPU by an event in its queue, so that launching is hidden."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_ms(begin: Any, end: Any) -> float:
    return (end - begin) * 1e3 if isinstance(begin, float) else float(begin.elapsed_time(end))


@sharing_weight_copies()
def part_rows(size: Size, device: torch.device, repeats: int) -> Iterator[list[str]]:
    """AGoQ Tables 5 and 6, without what tensor parallelism adds."""
    configs: dict[str, AgoqConfig | None] = {"bf16": None, "agoq": AgoqConfig(bits=4)}
    for name, config in configs.items():
        layer = Layer(size, device, make_layer(size, device, config, master=True), master=True)
        marks, times = PartMarks(layer, partial(mark, device)), dict[tuple[str, str], list[float]]()
        for repeat in range(3 + repeats):
            layer.backward(layer.forward())
            if device.type == "cuda":
                torch.cuda.synchronize()
            for phase, of_parts in (("forward", marks.forward), ("backward", marks.backward)):
                for part, (begin, end) in of_parts.items() if repeat >= 3 else ():
                    times.setdefault((phase, part), []).append(between_ms(begin, end))
        for phase in ("forward", "backward"):
            yield [name, phase, *(f"{statistics.median(times[phase, part]):.2f}" for part in PARTS)]


def length_rows(device: torch.device, repeats: int, sizes: Sequence[Size]) -> Iterator[list[str]]:
    """AGoQ Table 7 for one layer: tokens per second of each variant, in rows by sequence length."""
    for size in sizes:
        rows = layer_rows(size, device, repeats, master=True)
        speeds = {row[0]: size.batch * size.seq_len / float(row[3]) * 1e3 for row in rows}
        yield [f"{size.seq_len}", *(f"{speeds.get(name, math.nan):,.0f}" for name in SPEEDS)]


def memory(layer: Layer) -> tuple[int, int]:
    """Bytes that a forward leaves allocated, and the peak of forward and backward, above what was there before."""
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = layer.forward()
    kept = torch.cuda.memory_allocated() - before
    layer.backward(y)
    torch.cuda.synchronize()
    return kept, torch.cuda.max_memory_allocated() - before


def norm_table(shapes: list[tuple[int, int]], device: torch.device, repeats: int) -> Table:
    found = {shape: norm_times_us(*shape, device, repeats) for shape in shapes}
    rows = (
        [str(shape), *(f"{us:.1f} ({us / times['norm']:.2f})" for us in times.values())]
        for shape, times in found.items()
    )
    caption = (
        "`norm`: bf16 in, bf16 out. `+ maxima`: what the paper fuses, group scaling's first stage, of groups of 16 in "
        "fp32, which are 6 % more bytes, and of rows, as in tahq. `+ input codes + maxima`: tahq's first pass; it "
        "stores codes in place of bf16. `+ output codes`: with the second pass."
    )
    heading = "RMSNorm with quantisation, µs (ratio to `norm`; Table 12)"
    return Table(("shape", *found[shapes[0]]), rows, caption, heading)


SPEEDS = ("bf16", "bf16 compiled", "bf16 recomputed", "agoq", "coat", "fp8")


def agoq_tables(options: argparse.Namespace, device: torch.device, repeats: int) -> Iterator[Table]:
    """Shapes of AGoQ's Tables 5, 6, 7 and 11."""
    size = SMALL if options.small else PAPER_SIZES[0]
    heading = f"A layer by its parts, ms ({size}; autocast; AGoQ Tables 5 and 6)"
    yield Table(("", "", *PARTS), part_rows(size, device, repeats), heading=heading)
    lengths = [SMALL] if options.small else [replace(size, batch=16384 // length, seq_len=length) for length in LENGTHS]
    tokens = lengths[0].batch * lengths[0].seq_len
    heading = f"Tokens per second of a layer by sequence length, {tokens} tokens (AGoQ Table 7)"
    yield Table(("", *SPEEDS), length_rows(device, repeats, lengths), heading=heading)
    if device.type == "cuda":
        columns = (*"mkn", *coded_gemm.NAMES, "quantised: fused / apart", "dequantised: fused / apart")
        rows = (coded_gemm.gemm_rows(shape, device, repeats) for shape in coded_gemm.SHAPES)
        caption = f"C = A·Bᵀ, A [m, k], in bf16; codes of {coded_gemm.BITS} bits in blocks of 128."
        yield Table(columns, rows, caption, "Products with codes, ms (AGoQ Table 11)")


def layer_tables(options: argparse.Namespace, device: torch.device, repeats: int) -> Iterator[Table]:
    """Bytes, norms, and a whole layer."""
    sizes = [SMALL] if options.small else PAPER_SIZES[: options.sizes]
    caption = (
        "A tensor that two operators keep counts where it is kept first: attention's output is under FlashAttn here, "
        "under Linear in the paper. `autocast`: residual stream and weights in fp32; bf16 copies of weights, which all "
        "micro-batches share, do not count."
    )
    for size in () if options.layers else [SMALL] if options.small else AGOQ_SIZES:
        heading = f"Bytes kept for backward by operator, in U = {size.unit} bytes ({size}; AGoQ Table 1, COAT Table 2)"
        yield Table(("", *OPERATORS, "total"), bytes_by_operator(size, device), caption, heading)
    if not options.layers:
        yield norm_table([(64, 256)] if options.small else NORM_SHAPES, device, repeats)
    for size in sizes:
        for master in (False, True):
            kind = "fp32 weights and residual stream, autocast" if master else "weights and residual stream in bf16"
            columns = ("", "forward ms", "backward ms", "total", "faster", "kept MiB", "less", "peak MiB", "less")
            rows = layer_rows(size, device, repeats, options.layers, master=master)
            yield Table((*columns, "copies MiB"), rows, heading=f"A layer of {size}; {kind}")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def tables(options: argparse.Namespace) -> Iterator[Table]:
    device = torch.device("cpu" if options.small else "cuda")
    need_gpu(device.type)
    repeats = 2 if options.small else options.repeats
    if "layer" in options.parts:
        yield from layer_tables(options, device, repeats)
    if "agoq" in options.parts:
        yield from agoq_tables(options, device, repeats)


if __name__ == "__main__":
    main(
        __doc__,
        tables,
        {
            "--parts": {
                "nargs": "+",
                "default": ["layer", "agoq"],
                "choices": ["layer", "agoq"],
                "help": "tables to make",
            },
            "--layers": {"nargs": "+", "default": [], "help": "only a whole layer, in these variants"},
            "--small": {"action": "store_true", "help": "a small layer on the CPU"},
            "--sizes": {"type": int, "default": 1, "help": "how many of Table 7's four sizes"},
        },
        repeats=30,
    )
