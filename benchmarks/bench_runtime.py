"""What the runtime itself costs: milliseconds per action, and seconds from start to first step.

One process per stage runs the real engine, boundary, sessions and ZMQ endpoint on loopback under 1F1B. The model is
one multiplication and the tensors are tiny, so what is left is the runtime: wait, decode, autograd, encode, send,
threads, sockets. A step of m micro-batches on P stages is a chain of 2(m + P − 1) actions. Measured are the wall time
of an action from its start to the next one's start, waiting for its frame included; a step's time divided by the
chain's length; and user and system time of all threads. On two cores, two stages have a core each. The start is that
of `tahq-launch` with four workers of a small GPT-2, from the command to the first line of metrics.jsonl.

    python benchmarks/bench_runtime.py [--output benchmarks/results/runtime_<hardware>_<yyyymm>.md]
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from types import SimpleNamespace

import torch
from harness import Table, launch, main

from tahq.comm.link.spec import PeerIdentity
from tahq.comm.zmq.endpoint import EndpointSettings, ZmqEndpoint
from tahq.models.keyed_dropout import RandomContext
from tahq.models.slice import ModelSlice
from tahq.pipeline.boundary import Boundary, CodecTable, CutIdentity
from tahq.pipeline.codec_lanes import ThreadedLanes
from tahq.pipeline.engine import Chunk, StageEngine, StepShape
from tahq.pipeline.schedule.generators import generate
from tahq.pipeline.spans import Stopwatch
from tahq.quant.config import WireConfig

WORKERS = 4
MICRO_BATCHES = 64
SHAPE = StepShape(MICRO_BATCHES, micro_batch=1, seq_len=8, hidden_size=16)
WARM_UP_STEPS = 5
START = {
    "run": {"name": "start", "threads": 1},
    "model": {"family": "gpt2", "num_layers": 4, "hidden_size": 64, "num_heads": 2},
    "data": {"text": "stdlib", "seq_len": 32},
    "training": {"steps": 2, "global_batch": 8, "micro_batch": 2},
    "pipeline": {"stages": WORKERS},
    "wire": {"activations": "raw:dtype=fp32", "gradients": "raw:dtype=fp32"},
}


class Multiplication(torch.nn.Module):
    """The least that a stage can compute and still have a gradient to send."""

    # as of a ModelSlice
    checkpoint_blocks, loss_chunks, z_loss, graphs = False, 1, 0.0, None
    loss = ModelSlice.loss

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, positions: None = None) -> torch.Tensor:
        return x * self.factor


class TinyBatch:
    """Tokens that the first stage multiplies, labels that the last one scores."""

    digest = ""
    num_tokens = SHAPE.num_micro_batches * SHAPE.seq_len

    def micro_batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(SHAPE.boundary), torch.zeros(SHAPE.boundary[:2], dtype=torch.int64)

    def micro_batch_positions(self, index: int) -> None:
        return None


@dataclass(frozen=True)
class StageReport:
    """What one process measured: seconds of each step, of each action, of activities, and of all cores."""

    times_s: list[float]
    actions_s: list[float]
    timings: list[dict[str, float]]
    cpu_s: float


def run_stage(stage: int, num_stages: int, pipe: Connection, num_steps: int) -> None:
    """One process: connect to the neighbours as the parent says, take the steps, report."""
    torch.set_num_threads(1)
    endpoint = ZmqEndpoint(
        PeerIdentity(1, 1, stage, "bench"),
        EndpointSettings(bind="127.0.0.1:0", peer_timeout_s=20.0, heartbeat_s=4.0),
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
    codecs = CodecTable(WireConfig(activations="raw:dtype=fp32", gradients="raw:dtype=fp32"))
    cuts = {
        link: Boundary(transport, CutIdentity(1, 0, link), codecs, torch.device("cpu"), stopwatch)
        for link, transport in links.items()
    }
    begins_s: list[float] = []
    engine = StageEngine(
        chunks={stage: Chunk(Multiplication(), cuts.get(stage - 1), cuts.get(stage))},
        actions=generate("1f1b", num_stages, MICRO_BATCHES).actions[stage],
        shape=SHAPE,
        batches=SimpleNamespace(train=lambda step: TinyBatch()) if stage in (0, num_stages - 1) else None,
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
            cpu_begin_s = time.process_time()
            actions_s.clear()
        begins_s.clear()
        begin_s = time.perf_counter()
        engine.run_step(step)
        end_s = time.perf_counter()
        times_s.append(end_s - begin_s)
        actions_s += [late - early for early, late in pairwise([*begins_s, end_s])]
        timings.append(stopwatch.take())
    cpu_s = time.process_time() - cpu_begin_s
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


def actions(options: argparse.Namespace) -> Iterator[list[str]]:
    for num_stages in (2, WORKERS):
        cost = pooled([measure_actions(num_stages, options.steps) for _ in range(options.repeats)])
        yield [f"{num_stages} stages, wall ms per action", *quantiles(cost.actions_ms)]
        yield [f"{num_stages} stages, mean over the chain, wall ms", *quantiles(cost.chain_ms)]
        yield [f"{num_stages} stages, core ms per action", f"{cost.core_ms:.2f}", "", ""]
        for name, share in sorted(cost.shares.items(), key=lambda item: -item[1]):
            yield [f"share of stage 1's time: {name}", f"{share:.0%}", "", ""]
    starts_s = [launch(START).first_step_s for _ in range(options.repeats)]
    yield ["command to first committed step, s", *quantiles(starts_s)]


def quantiles(values: list[float]) -> list[str]:
    """The median, the 5 % and the 95 % quantile."""
    cuts = statistics.quantiles(values, n=20) if len(values) > 1 else values
    return [f"{value:.2f}" for value in (statistics.median(values), cuts[0], cuts[-1])]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    caption = (
        f"One process per stage, 1F1B, {MICRO_BATCHES} micro-batches of [1, 8, 16], `raw:dtype=fp32`, no shaping; "
        f"{options.steps} steps after {WARM_UP_STEPS} of warm-up. The start: `tahq-launch` with four workers."
    )
    yield Table(("what", "median", "5 %", "95 %"), actions(options), caption)


if __name__ == "__main__":
    main(__doc__, tables, {"--steps": {"type": int, "default": 60}}, repeats=3)
