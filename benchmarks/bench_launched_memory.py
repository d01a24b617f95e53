"""Large models by `tahq-launch` on a GPU of which another process leaves 8, 16 or 24 GB

    python benchmarks/bench_launched_memory.py [--output benchmarks/results/launched_memory_<hardware>_<yyyymm>.md]
    python benchmarks/bench_launched_memory.py --runs planned-0.5b-8gb --small --device cpu    # that it works

- `llama-…`, `qwen-…`: 7 billion parameters in 16 GB (14.9 GiB) by the files in launch/examples, and the same files with
  the shape of Llama-2 or Qwen2.5: Q-GaLore, and LLMQ's offload to host memory;
- `planned-…`: a model of bench_models' sizes of which only model, data and batch are set, in bf16; `memory: auto`
  chooses what is recomputed and what is in host memory.

Card: the highest use that nvidia-smi reported, every 50 ms, above that before the run; it counts measuring at start,
CUDA's context and libraries, and the cap counts them too. Host: the most by which the machine's available memory fell,
sampled ten times a second; it counts the page cache that a checkpoint makes unavailable. A step is the median of those
after the second. Percentages of the peak are bench_models'.
"""

import argparse
import re
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml
from bench_models import Work, peak_share
from bench_qgalore_7b import GIB, device_memory
from default_rows import merged
from harness import Run, Table, launch, main, need_gpu, say

from tahq.config.cluster import ClusterConfig
from tahq.worker.assembly import resolved_spec

EXAMPLES = Path(__file__).parents[1] / "launch" / "examples"
GB_8, GB_16, GB_24 = (gb * 1e9 / GIB for gb in (8, 16, 24))
QWEN_7B = {
    "family": "qwen2", "num_layers": 28, "hidden_size": 3584, "num_heads": 28, "num_kv_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152_064,
}  # fmt: skip
SHORT = {"training": {"steps": 7}}


def example(name: str, *changes: Mapping[str, Any]) -> dict[str, Any]:
    """A file of launch/examples with few steps, changed."""
    return merged(yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text()), SHORT, *changes)


def planned(size: str) -> dict[str, Any]:
    """A model of this size with all else open but the batch: 4 micro-batches of 4 · 1,024 tokens."""
    sections = Work("", size, "auto", 1024, 4, 4, SHORT["training"]["steps"], None, profile=False).sections({})
    return merged(sections, {"training": {"precision": "bf16"}})


RUNS: dict[str, tuple[float, dict[str, Any]]] = {
    "llama-qgalore": (GB_16, example("llama_7b_qgalore")),
    "qwen-qgalore": (GB_16, example("llama_7b_qgalore", {"model": QWEN_7B})),
    "llama-offload": (GB_16, example("llama_7b_16gb")),
    "qwen-offload": (GB_16, example("qwen_14b_24gb", {"model": QWEN_7B})),
    "planned-0.5b-8gb": (GB_8, planned("0.5b")),
    "planned-1.5b-16gb": (GB_16, planned("1.5b")),
    "planned-3b-16gb": (GB_16, planned("3b")),
    "planned-1.5b-24gb": (GB_24, planned("1.5b")),
}
"""GiB of the card, and cluster.yaml."""


@contextmanager
def only_free(gib: float) -> Iterator[None]:
    """Another process holds all of the GPU's free memory but so much."""
    command = [sys.executable, __file__, "--hold", str(gib)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                sys.exit("the process that holds the GPU's memory has ended")
            yield
        finally:
            process.stdin.close()


def hold(gib: float) -> None:
    """Hold it until the end of the input."""
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(0, int(free - gib * GIB)), dtype=torch.uint8, device="cuda")
    print(held.numel(), flush=True)
    sys.stdin.read()


@contextmanager
def least_available() -> Iterator[list[float]]:
    """The machine's available memory in GiB, before, and at least."""
    found, done = [_available_gib()] * 2, threading.Event()

    def sample() -> None:
        while not done.wait(0.1):
            found[1] = min(found[1], _available_gib())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def _available_gib() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemAvailable"))


def measured(name: str, options: argparse.Namespace) -> list[object]:
    """A row: the run, or the last line of one that failed."""
    gib, config = RUNS[name]
    if options.small:
        small = Work("", "small", options.device, 32, 2, 2, 3, None, profile=False).sections({})
        config = merged(config, {key: small[key] for key in ("model", "data", "training", "run")})
    is_cuda = options.device != "cpu"
    with device_memory() as samples, least_available() as available, only_free(gib) if is_cuda else nullcontext():
        before = _numbers(samples)
        try:
            run = launch(config)
        except SystemExit as error:
            return [name, f"{gib:.1f}", str(error).splitlines()[-1]]
        used = _numbers(samples)
    say(run.output)
    return cells(name, gib, config, run, max(used) / 1024 - before[-1] / 1024 if before else None, available)


def _numbers(samples: Path) -> list[int]:
    return [int(line) for line in samples.read_text().split() if line.isdigit()]


def cells(
    name: str, gib: float, config: Mapping[str, Any], run: Run, card_gib: float | None, available: list[float]
) -> list[object]:
    training = ClusterConfig.model_validate(config).training
    step_s = statistics.median(run.step_times_s(settle=2))
    seq_len = config["data"]["seq_len"]
    tokens = training.global_batch * seq_len
    spec = resolved_spec(ClusterConfig.model_validate(config), config["model"].get("vocab_size", 32_000))
    chosen = re.findall(r"(recompute \w+|in host memory: [\w, ]+?), since", run.output)
    set_keys = [f"{key} {value}" for key, value in config.get("memory", {}).items()]
    return [
        name, f"{gib:.1f}", "; ".join(chosen or set_keys),
        "" if card_gib is None else f"{card_gib:.2f}", f"{available[0] - available[1]:.0f}", f"{step_s:.2f}",
        f"{tokens / step_s:,.0f}", f"{100 * peak_share(spec, seq_len, tokens, 'bf16', step_s):.1f} %",
        f"{run.first_step_s:.0f}", f"{run.steps[-1]['loss']:.2f}",
    ]  # fmt: skip


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    need_gpu(options.device)
    columns = (
        *("run", "of the card, GiB", "memory", "used, GiB", "host, GiB", "step, s", "tokens/s", "of the peak"),
        *("first step after, s", "last loss"),
    )
    yield Table(columns, (measured(name, options) for name in options.runs))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--hold"]:
        hold(float(sys.argv[2]))
    else:
        main(
            __doc__,
            tables,
            {
                "--runs": {"nargs": "+", "choices": list(RUNS), "default": list(RUNS)},
                "--device": {"default": "cuda"},
                "--small": {"action": "store_true", "help": "a tiny model"},
            },
        )
