"""A stage's micro-batches under bf16, with one copy of each weight a step or one each: time, and memory in flight.

    python benchmarks/bench_weight_copies.py                 (a CUDA device: 12 blocks of GPT2-XL; a minute)
    python benchmarks/bench_weight_copies.py --device cpu --blocks 2 --hidden 768 --heads 12 --seq-len 256

A stage in the middle of a model runs steps of 1F1B with `--depth` micro-batches of one sample in flight, on random
activations; the two ways take turns. Time: of a micro-batch, forward and backward, the median of the steps. Memory, on
CUDA: the peak of a step above weights and gradients, by the allocator. Writes OUT.md and OUT.json.
"""

import argparse
import json
import statistics
import time
from collections import deque
from contextlib import nullcontext
from pathlib import Path

import machine
import torch

from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.slice import ModelSlice, Parts, build_parts
from tahq.models.weight_copies import sharing_weight_copies

RESULTS = Path(__file__).parent / "results"
WAYS = {"one each": nullcontext, "one a step": sharing_weight_copies}


def build_stage(options: argparse.Namespace, device: torch.device) -> ModelSlice:
    """Blocks of a GPT-2 with random weights, and gradients to add to."""
    config = ModelConfig(
        family="gpt2", num_layers=options.blocks + 2, hidden_size=options.hidden, num_heads=options.heads
    )
    spec = load_spec(config, vocab_size=50257, seq_len=options.seq_len)
    module = build_parts(spec, Parts(range(1, options.blocks + 1)), device=device, random=RandomContext(0)).train()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.zeros_like(parameter)
    return module


def run_step(module: ModelSlice, x: torch.Tensor, count: int, depth: int) -> None:
    """Forwards up to `depth` ahead of backwards."""
    in_flight: deque[torch.Tensor] = deque()
    for number in range(count + depth):
        if number >= depth:
            in_flight.popleft().sum().backward()
        if number < count:
            with torch.autocast(x.device.type, torch.bfloat16):
                in_flight.append(module(x.detach().requires_grad_()))


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, dict[str, float]]:
    """Milliseconds of a micro-batch, and peak bytes, either way."""
    module = build_stage(options, device)
    x = torch.randn(1, options.seq_len, options.hidden, device=device)
    times_ms: dict[str, list[float]] = {way: [] for way in WAYS}
    peaks: dict[str, int] = {}
    for repeat in range(options.repeats + 1):
        for way, context in WAYS.items():
            before = _begin(device)
            start_s = time.perf_counter()
            with context():
                run_step(module, x, options.micro_batches, options.depth)
            _wait(device)
            if repeat > 0:
                times_ms[way].append((time.perf_counter() - start_s) / options.micro_batches * 1e3)
            if device.type == "cuda":
                peaks[way] = torch.cuda.max_memory_allocated() - before
    return {
        way: {"ms": statistics.median(of), "least_ms": min(of), "most_ms": max(of), "peak_nbytes": peaks.get(way, 0)}
        for way, of in times_ms.items()
    }


def _begin(device: torch.device) -> int:
    _wait(device)
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def report(options: argparse.Namespace, found: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    size = f"{options.blocks} blocks of {options.hidden} channels, {options.heads} heads"
    lines = [
        "# bf16 copies of a stage's weights\n",
        f"{machine.describe_device()}. `python benchmarks/bench_weight_copies.py`\n",
        f"GPT-2, {size}; {options.micro_batches} micro-batches a step of one sample of {options.seq_len} tokens,",
        f"{options.depth} in flight; medians of {options.repeats} steps (least–most).\n",
        "| copies | forward and backward, ms | peak above weights and gradients, GiB |\n|---|---|---|",
    ]
    for way, row in found.items():
        peak = f"{row['peak_nbytes'] / 2**30:.2f}" if row["peak_nbytes"] else "not measured"
        lines.append(f"| {way} | {row['ms']:.2f} ({row['least_ms']:.2f}–{row['most_ms']:.2f}) | {peak} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1600)
    parser.add_argument("--heads", type=int, default=25)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--depth", type=int, default=8, help="micro-batches in flight")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS / "weight_copies_h200_202611")
    options = parser.parse_args()
    machine.need_gpu(options.device)
    found = measure(options, torch.device(options.device))
    text = report(options, found)
    options.out.with_suffix(".md").write_text(text)
    chosen = {name: str(value) for name, value in vars(options).items()}
    options.out.with_suffix(".json").write_text(json.dumps({"options": chosen, "ways": found}, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
