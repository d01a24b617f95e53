"""What the runtime itself costs: milliseconds an action, and seconds from start to first step.

Two measurements, both with real processes and real sockets on loopback:

1. *An action.* One process a stage runs the real engine, boundary, sessions and ZMQ endpoint under 1F1B. The
   model is one multiplication and the tensors are tiny, so what is left is the runtime: wait, decode,
   autograd's bookkeeping, encode, send, threads, GIL, sockets, the kernel. A step of m micro-batches on P stages is a
   chain of 2(m + P − 1) actions. Given are: the wall time of an action, from its start to the next one's, waiting
   for its frame included, as the median over all actions of all stages; the mean over the chain, which is a
   step's time divided by its length; and the cost, user and system time of all threads. With two stages each has
   a core of two; with four, two stages share one, and the mean over the chain is about twice the cost.
2. *The start.* `tahq-launch` with four workers of a small GPT-2: from the command to the first line of
   metrics.jsonl.

Run:  python benchmarks/bench_runtime.py [--output benchmarks/results/runtime_<hardware>_<yyyymm>.md]
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from harness import describe

from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.zmq.endpoint import ZmqEndpoint
from tahq.models.keyed_dropout import RandomContext
from tahq.pipeline.boundary import Boundary, CodecTable, CutIdentity, Stopwatch
from tahq.pipeline.chunk import Chunk, StepShape
from tahq.pipeline.codec_lanes import ThreadedLanes
from tahq.pipeline.engine import StageEngine
from tahq.pipeline.schedule.generators import generate

WORKERS = 4
MICRO_BATCHES = 64
SHAPE = StepShape(MICRO_BATCHES, micro_batch=1, seq_len=8, hidden_size=16)
WARM_UP_STEPS = 5


class Multiplication(torch.nn.Module):
    """The least that a stage can compute and still have a gradient to send."""

    checkpoint_blocks = False  # a ModelSlice says so

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class TinyBatch:
    """Tokens that the first stage multiplies, labels that the last one scores."""

    digest = ""
    num_tokens = SHAPE.num_micro_batches * SHAPE.seq_len

    def micro_batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(SHAPE.boundary), torch.zeros(SHAPE.boundary[:2], dtype=torch.int64)


class TinyBatches:
    """The same batch at every step."""

    def train(self, step: int) -> TinyBatch:
        return TinyBatch()


@dataclass(frozen=True)
class StageReport:
    """What one process measured: seconds of each step, of each action, of activities, and of all cores."""

    times_s: list[float]
    actions_s: list[float]
    timings: list[dict[str, float]]
    cpu_s: float


def cpu_seconds() -> float:
    """User and system time of this process so far, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run_stage(stage: int, num_stages: int, pipe: Connection, num_steps: int) -> None:
    """One process: connect to the neighbours as the parent says, take the steps, report."""
    torch.set_num_threads(1)
    endpoint = ZmqEndpoint(
        identity=PeerIdentity(1, 1, stage, "bench"),
        bind="127.0.0.1:0",
        advertise=None,
        shaping=Shaping(),
        peer_timeout_s=20.0,
        heartbeat_s=4.0,
    )
    pipe.send(endpoint.address)
    addresses = pipe.recv()
    links = {}
    if stage > 0:
        links[stage - 1] = endpoint.open_link(stage - 1, stage - 1, addresses[stage - 1], addresses[stage - 1])
    if stage < num_stages - 1:
        links[stage] = endpoint.open_link(stage, stage + 1, addresses[stage + 1], "")
    endpoint.wait_connected(20.0)
    stopwatch = Stopwatch()
    codecs = CodecTable("raw:dtype=fp32", "raw:dtype=fp32")
    cuts = {
        link: Boundary(transport, CutIdentity(1, 0, link), codecs, torch.device("cpu"), stopwatch)
        for link, transport in links.items()
    }
    begins_s: list[float] = []
    engine = StageEngine(
        chunks={stage: Chunk(Multiplication(), cuts.get(stage - 1), cuts.get(stage))},
        actions=generate("1f1b", num_stages, MICRO_BATCHES).actions[stage],
        shape=SHAPE,
        batches=TinyBatches() if stage in (0, num_stages - 1) else None,
        random=RandomContext(0),
        device=torch.device("cpu"),
        stopwatch=stopwatch,
        on_action=lambda step, action: begins_s.append(time.perf_counter()),
        lanes=ThreadedLanes(torch.device("cpu"), stopwatch),
    )
    times_s, actions_s, timings, cpu_begin_s = [], [], [], 0.0
    for step in range(WARM_UP_STEPS + num_steps):
        pipe.send("ready")
        pipe.recv()
        if step == WARM_UP_STEPS:
            cpu_begin_s = cpu_seconds()
            actions_s.clear()
        begins_s.clear()
        begin_s = time.perf_counter()
        result = engine.run_step(step)
        end_s = time.perf_counter()
        times_s.append(end_s - begin_s)
        actions_s += [late - early for early, late in pairwise([*begins_s, end_s])]
        timings.append(result.timing)
    cpu_s = cpu_seconds() - cpu_begin_s
    pipe.send(StageReport(times_s[WARM_UP_STEPS:], actions_s, timings[WARM_UP_STEPS:], cpu_s))
    endpoint.close()


@dataclass(frozen=True)
class ActionCost:
    """Of one number of stages: wall milliseconds of every action, their mean in each step, core milliseconds."""

    num_stages: int
    actions_ms: list[float]
    chain_ms: list[float]
    core_ms: float
    shares: dict[str, float]
    """Of stage 1's time, by activity; medians."""


def measure_actions(num_stages: int, num_steps: int) -> ActionCost:
    """Run the stages in step, and take the longest of each step."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for stage in range(num_stages):
        ours, theirs = context.Pipe()
        process = context.Process(target=run_stage, args=(stage, num_stages, theirs, num_steps), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    addresses = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(addresses)
    for _ in range(WARM_UP_STEPS + num_steps):
        for pipe in pipes:
            pipe.recv()
        for pipe in pipes:
            pipe.send("go")
    reports: list[StageReport] = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    chain = 2 * (MICRO_BATCHES + num_stages - 1)
    longest_s = [max(times) for times in zip(*(report.times_s for report in reports), strict=True)]
    actions = 2 * MICRO_BATCHES * num_stages * num_steps
    timings = reports[1].timings
    shares = {name: statistics.median(t.get(name, 0.0) / sum(t.values()) for t in timings) for name in timings[0]}
    return ActionCost(
        num_stages,
        [1e3 * seconds for report in reports for seconds in report.actions_s],
        [1e3 * seconds / chain for seconds in longest_s],
        1e3 * sum(report.cpu_s for report in reports) / actions,
        shares,
    )


def pooled(runs: list[ActionCost]) -> ActionCost:
    """Several runs as one: all actions and steps of all of them, medians of the rest."""
    return ActionCost(
        runs[0].num_stages,
        [value for run in runs for value in run.actions_ms],
        [value for run in runs for value in run.chain_ms],
        statistics.median(run.core_ms for run in runs),
        {name: statistics.median(run.shares[name] for run in runs) for name in runs[0].shares},
    )


def measure_start() -> float:
    """Seconds from `tahq-launch` to the first committed step of four workers."""
    config = {
        "run": {"name": "start", "threads": 1},
        "model": {"family": "gpt2", "num_layers": 4, "hidden_size": 64, "num_heads": 2},
        "data": {"text": "stdlib", "seq_len": 32},
        "training": {"steps": 2, "global_batch": 8, "micro_batch": 2},
        "pipeline": {"stages": WORKERS},
        "wire": {"activations": "raw:dtype=fp32", "gradients": "raw:dtype=fp32"},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        metrics = Path(folder) / "runs/start/metrics.jsonl"
        begin = time.perf_counter()
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("tahq-launch")), str(path)],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
        while not (metrics.is_file() and metrics.stat().st_size) and process.poll() is None:
            time.sleep(0.02)
        seconds = time.perf_counter() - begin
        if process.wait() != 0:
            raise SystemExit("tahq-launch failed")
    return seconds


def report(costs: list[ActionCost], starts_s: list[float]) -> str:
    """The result file."""
    rows = []
    for cost in costs:
        what = f"{cost.num_stages} stages, an action,"
        rows.append((f"{what} wall ms", cost.actions_ms, *_tails(cost.actions_ms), "< 1.0"))
        rows.append((f"{what} mean over the chain, wall ms", cost.chain_ms, *_tails(cost.chain_ms), ""))
        rows.append((f"{what} core ms", [cost.core_ms], cost.core_ms, cost.core_ms, ""))
    rows.append(("command to first committed step, s", starts_s, min(starts_s), max(starts_s), "< 20"))
    shares = sorted(costs[-1].shares.items(), key=lambda item: -item[1])
    return "\n".join(
        [
            "# What the runtime itself costs",
            "",
            f"{describe()}. `python benchmarks/bench_runtime.py`",
            "",
            f"One process a stage, 1F1B, {MICRO_BATCHES} micro-batches of [1, 8, 16], `raw:dtype=fp32`, no shaping;",
            f"{len(costs[0].chain_ms)} steps after {WARM_UP_STEPS} of warm-up, each a chain of 2(m + P − 1) actions.",
            f"The start: `tahq-launch` with four workers of a small GPT-2, {len(starts_s)} times (least and most).",
            "",
            "| what | median | 5 % | 95 % | target |",
            "|---|---|---|---|---|",
            *(
                f"| {what} | {statistics.median(values):.2f} | {low:.2f} | {high:.2f} | {target} |"
                for what, values, low, high, target in rows
            ),
            "",
            f"Stage 1 of {costs[-1].num_stages}: {', '.join(f'{name} {share:.0%}' for name, share in shares)}.",
            "",
        ]
    )


def _tails(values: list[float]) -> tuple[float, float]:
    """The 5 % and the 95 % quantile."""
    quantiles = statistics.quantiles(values, n=20)
    return quantiles[0], quantiles[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    costs = [
        pooled([measure_actions(num_stages, options.steps) for _ in range(options.repeats)])
        for num_stages in (2, WORKERS)
    ]
    text = report(costs, [measure_start() for _ in range(options.starts)])
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
