"""Large models by `tahq-launch` on a GPU of which another process leaves 8, 16 or 24 GB

    python benchmarks/bench_launched_memory.py [--output benchmarks/results/launched_memory_<hardware>_<yyyymm>.md]
    python benchmarks/bench_launched_memory.py --runs planned-0.5b-8gb --small --device cpu    # that it works

- `llama-…`, `qwen-…`: the shapes of Llama-2 and Qwen2.5 by the files in launch/examples: 7 billion parameters in 16 GB
  (14.9 GiB) by Q-GaLore, and by LLMQ's offload to host memory, which also trains 14 billion in 24 GB;
- `llama-70b-stage`: QLoRA of ten of the 80 layers of 70 billion parameters in 24 GB, with embedding, head and four
  micro-batches in flight, 15.6 GB by the estimate, more than any stage of that example;
- `planned-…`: a model of bench_models' sizes of which only model, data and batch are set, in bf16; `memory: auto`
  chooses what is recomputed and what is in host memory.

The card's memory is the highest use that nvidia-smi reported, every 50 ms, above that before the run, when the other
process holds its part already. It includes CUDA's context and libraries, and so does the cap. *At start* is until the
run's config.yaml is written, after measuring and planning. The host's is the most by which MemAvailable fell until the
last step, and in all, with the copy that a checkpoint is written from. *Estimated* is the dry run's figure for the
settings that were used, without CUDA's context, Python and fragments. A step is the median of those after the second;
percentages of the peak are bench_models'. Each run has an empty cache, so that it measures the memory it is left.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml
from bench_models import SIZES, WARM_STEPS, Work, peak_share
from default_rows import merged
from harness import Run, Table, launch, main, need_gpu, say

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import stage_estimate
from tahq.worker.assembly import resolved_spec

EXAMPLES = Path(__file__).parents[1] / "launch" / "examples"
GIB = 2**30
GB_8, GB_16, GB_24 = (gb * 1e9 / GIB for gb in (8, 16, 24))
SHORT = {"training": {"steps": 6, "warmup_steps": 4}}
COLUMNS = (
    *("run", "free at first, GiB", "recompute", "in host memory", "gradients", "micro-batch", "step, s", "tokens/s"),
    *("of the peak", "card: estimated, GiB", "at start", "in training", "reserved by torch"),
    *("host: estimated, GiB", "until the last step"),
    *("in all", "first two steps, s", "begins after, s", "last loss"),
)


def planned(size: str) -> dict[str, Any]:
    """A model of this size with all else open but the batch: 4 micro-batches of 4 · 1,024 tokens."""
    return Work("", size, "cuda", 1024, 4, 4, 4, None, profile=False).sections({}, precision="bf16")


QWEN_7B = {"model": planned("7b")["model"]}


def example(name: str, *changes: Mapping[str, Any]) -> dict[str, Any]:
    """A file of launch/examples with few steps, changed."""
    return merged(yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text()), SHORT, *changes)


STAGE_OF_EIGHT: dict[str, Any] = {
    "run": {"bind": "127.0.0.1:0", "advertise": None},
    "hosts": "local",
    "links": {"cap_up": None},
    "model": {"num_layers": 10},
    "pipeline": {"layers": None, "stages": 1, "schedule": "gpipe"},
    "training": {"global_batch": 4},
}
"""Ten layers with both ends, and four micro-batches in flight: more bytes than any stage of the file has."""
RUNS: dict[str, tuple[float, dict[str, Any]]] = {
    "llama-qgalore": (GB_16, example("llama_7b_qgalore", {"training": {"steps": 12}})),
    "qwen-qgalore": (GB_16, example("qwen_7b_qgalore", {"training": {"steps": 12}})),
    "llama-offload": (GB_16, example("llama_7b_16gb")),
    "qwen-offload": (GB_16, example("qwen_14b_24gb", QWEN_7B)),
    "qwen-14b-offload": (GB_24, example("qwen_14b_24gb")),
    "llama-70b-stage": (GB_24, example("llama_70b_qlora", STAGE_OF_EIGHT)),
    "planned-0.5b-8gb": (GB_8, planned("0.5b")),
    "planned-1.5b-16gb": (GB_16, planned("1.5b")),
    "planned-3b-16gb": (GB_16, planned("3b")),
    "planned-1.5b-24gb": (GB_24, planned("1.5b")),
    "planned-3b-24gb": (GB_24, planned("3b")),
}
"""GiB of the card, and cluster.yaml."""
Sample = tuple[float, float, float]
"""`time.time()`, GiB in use on the first visible GPU, and GiB available on the host."""


def made_small(config: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The same with a tiny model and short sequences."""
    model = {**planned("small")["model"], "num_kv_heads": SIZES["small"].heads}  # as Llama has them, too
    size = 4 if config["training"].get("qgalore") else 2  # a fused update takes a single micro-batch
    batch = {"global_batch": 4, "micro_batch": size, "steps": 4, "precision": "bf16"}
    return merged(
        config, {"model": model, "data": {"seq_len": 32}, "training": batch, "run": {"name": "small", "device": device}}
    )


# -- memory of the card and the host -----------------------------------------------------------------


@contextmanager
def only_free(gib: float) -> Iterator[float]:
    """Another process holds all of the GPU's free memory but so much; yields the GiB that are left."""
    command = [sys.executable, __file__, "--hold", str(gib)]
    # closes its input at the end, and waits
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            sys.exit("the process that holds the GPU's memory has ended")
        yield float(line)


def hold(gib: float) -> None:
    """Hold it until the end of the input, and print the GiB that are left."""
    held = torch.empty(int(torch.cuda.mem_get_info()[0] - gib * GIB), dtype=torch.uint8, device="cuda")
    print(torch.cuda.mem_get_info(held.device)[0] / GIB, flush=True)
    sys.stdin.read()


@contextmanager
def sampled() -> Iterator[list[Sample]]:
    """A list that grows every 50 ms, and has a few samples already."""
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", index, "--loop-ms=50"]
    samples = list[Sample]()
    with subprocess.Popen(["nvidia-smi", *query], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        thread = threading.Thread(target=_read_samples, args=(process.stdout, samples))
        thread.start()
        try:
            while len(samples) < 5 and process.poll() is None:
                time.sleep(0.05)
            yield samples
        finally:
            process.terminate()
            thread.join()


def _read_samples(lines: Iterable[str], samples: list[Sample]) -> None:
    for line in lines:
        (available,) = re.findall(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
        samples.append((time.time(), int(line) / 2**10, int(available) / 2**20))


def memory_cells(before: list[Sample], during: list[Sample], run: Run) -> dict[str, str]:
    """Peaks above what was used before the run."""
    _, used, available = map(statistics.median, zip(*before, strict=True))
    start = [card - used for time_s, card, _ in during if time_s < run.planned_at_s]
    training = [card - used for time_s, card, _ in during if time_s >= run.planned_at_s]
    host = [available - left for time_s, _, left in during if time_s <= run.trained_at_s]
    return {
        "at start": f"{max(start, default=0.0):.2f}",
        "in training": f"{max(training, default=0.0):.2f}",
        "until the last step": f"{max(host, default=0.0):.1f}",
        "in all": f"{max((available - left for *_, left in during), default=0.0):.1f}",
    }


# -- the table ---------------------------------------------------------------------------------------


def run_cells(run: Run, device: str) -> dict[str, object]:
    """What the run used, by its config.yaml, and how fast it was."""
    config = ClusterConfig.model_validate(run.config)
    memory, training, seq_len = config.memory, config.training, config.data.seq_len
    spec = resolved_spec(config, None)
    estimate = stage_estimate(config, spec, 0, device=device)
    step_s, tokens = statistics.median(run.step_times_s(WARM_STEPS)), training.global_batch * seq_len
    share = peak_share(spec, seq_len, tokens, "bf16", step_s)
    return {
        "recompute": memory.recompute,
        "in host memory": ", ".join(map(str, memory.offload)) or "nothing",
        "gradients": memory.gradients,
        "micro-batch": training.micro_batch,
        "step, s": f"{step_s:.2f}",
        "tokens/s": f"{tokens / step_s:,.0f}",
        "of the peak": f"{100 * share:.1f} %",
        "card: estimated, GiB": f"{estimate.total / GIB:.2f}",
        "reserved by torch": f"{max(step['stages'][0]['peak_bytes'] for step in run.steps) / GIB:.2f}",
        "host: estimated, GiB": f"{estimate.host_total / GIB:.1f}",
        "first two steps, s": ", ".join(f"{step:.1f}" for step in run.step_times_s()[:2]),
        "begins after, s": f"{run.first_step_s - run.steps[0]['step_time_s']:.0f}",
        "last loss": f"{run.steps[-1]['loss']:.2f}",
    }


def row(name: str, options: argparse.Namespace) -> list[object]:
    """The run, or the reason of one that failed."""
    gib, config = RUNS[name]
    is_cuda = options.device != "cpu"
    config = made_small(config, options.device) if options.small else config
    cap: AbstractContextManager[float] = only_free(gib) if is_cuda else nullcontext(0.0)
    watch: AbstractContextManager[list[Sample]] = sampled() if is_cuda else nullcontext([])
    with tempfile.TemporaryDirectory(prefix="tahq-cache-") as cache, cap as free_gib, watch as samples:
        found: dict[str, object] = {"run": name, "free at first, GiB": f"{free_gib:.2f}" if is_cuda else ""}
        num_before = len(samples)
        try:
            run = launch(config, {"TAHQ_CACHE": cache})
        except SystemExit as error:
            say(str(error))
            found["recompute"] = (re.findall("tahq(?:-launch)?: (.*)", str(error)) or str(error).splitlines())[-1]
        else:
            say(run.output)
            found |= run_cells(run, "cuda" if is_cuda else "cpu")
            found |= memory_cells(samples[:num_before], samples[num_before:], run) if is_cuda else {}
    return [found.get(column, "") for column in COLUMNS]


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    need_gpu(options.device)
    yield Table(COLUMNS, (row(name, options) for name in options.runs))


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
