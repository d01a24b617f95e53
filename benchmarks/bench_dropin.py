"""torch.distributed.pipelining, stock and with packed stages, over slow links: losses and tokens per second.

    python benchmarks/bench_dropin.py [--output benchmarks/results/dropin_<hardware>_<yyyymm>.md]
    python benchmarks/bench_dropin.py --tiny          # shows that it works, in two minutes

GPipe, 1F1B and interleaved 1F1B on 2 and 4 ranks over gloo, each rank in a network namespace; needs root. Stock sends
fp32; packed is the same program with one call of `compress`.

1. *Losses.* A small GPT-2 that computes and learns, links open: the loss of the last step, and which runs are equal in
   all steps, to the bit: keys and streams depend on the cut, not on the schedule, so runs with the same cuts must be.
2. *Tokens per second* at a rate. Stages sleep (`emulate.sleep`), since four that compute would share this machine's
   cores; codecs, gloo, TCP and torch's schedules are real.
"""

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dropin_rank import SCHEDULES, STOCK
from harness import Table, main, say

from tahq.data.config import DataConfig
from tahq_netem.backends.network import Network
from tahq_netem.network.description import plan_network, uniform
from tahq_netem.runtimes.gloo import GlooSession
from tahq_netem.runtimes.session import RuntimeStep, SessionRequest
from tahq_netem.sweep.measurement import open_network
from tahq_netem.sweep.points import SessionKey
from tahq_netem.sweep.spec import SweepConfig
from tahq_netem.sweep.stage_times import StageTimes
from tahq_netem.sweep.workload import session_config

RANKS = (2, 4)
PACKED = ("tah", "fixed:bits=8")
WIRES = ((STOCK, STOCK), PACKED)
SETTLE_STEPS = 2
"""Not timed: torch exchanges shapes in the first step, and TCP finds its rate."""
START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Point:
    """One pipeline: the schedule, its ranks, and the codecs."""

    schedule: str
    num_ranks: int
    wire: tuple[str, str]

    @property
    def num_stages(self) -> int:
        return self.num_ranks * (2 if self.schedule == "interleaved" else 1)

    @property
    def name(self) -> str:
        return "stock" if self.wire == WIRES[0] else "packed"


@dataclass(frozen=True)
class Size:
    """Both workloads; sleeping times are of the whole model's forward and backward of a micro-batch."""

    losses: dict[str, Any]
    speed: dict[str, Any]
    forward_s: float = 0.292
    backward_s: float = 0.608
    num_loss_steps: int = 40
    num_timed_steps: int = 6
    points: tuple[Point, ...] = field(
        default=tuple(Point(*axes) for axes in itertools.product(SCHEDULES, RANKS, WIRES))
    )


def gpt2(hidden_size: int, seq_len: int, **changes: Any) -> dict[str, Any]:
    model = {"family": "gpt2", "num_layers": 8, "hidden_size": hidden_size, "num_heads": 4, "vocab_size": 256}
    return {"model": model, "seq_len": seq_len, "global_batch": 32, "micro_batches": [4], **changes}


FULL = Size(losses=gpt2(64, 64), speed=gpt2(512, 256))
TINY = Size(
    losses=gpt2(32, 16),
    speed=gpt2(128, 64),
    forward_s=0.02,
    backward_s=0.04,
    num_loss_steps=3,
    num_timed_steps=2,
    points=tuple(Point("interleaved", 2, wire) for wire in WIRES),
)


def sweep(workload: dict[str, Any]) -> SweepConfig:
    return SweepConfig.model_validate({"name": "dropin", "runtimes": [{"name": "torch"}], **workload})


def run(
    network: Network, point: Point, config: SweepConfig, times: StageTimes | None, num_steps: int
) -> list[RuntimeStep]:
    """Train on the hosts of a network, as many as ranks."""
    # The schedule's name is dropin_rank's business: the session key takes one that tahq knows.
    key = SessionKey("torch", "1f1b", *point.wire, point.num_stages, config.micro_batches[0], "real")
    with tempfile.TemporaryDirectory(prefix="tahq-dropin-") as folder:
        resolved = session_config(config, key, Path(folder), times)
        request = SessionRequest(resolved, point.schedule, network, tuple(network.plan.hosts), Path(folder))
        with GlooSession(request, "dropin_rank") as session:
            return [session.next_step(START_TIMEOUT_S) for _ in range(num_steps)]


def measure(size: Size, rate: float) -> Iterator[tuple[Point, list[float], list[float]]]:
    """Each point's losses, and the seconds of its timed steps."""
    learning = sweep({**size.losses, "data": DataConfig(text="stdlib", seq_len=size.losses["seq_len"])})
    for num_ranks in RANKS:
        points = [point for point in size.points if point.num_ranks == num_ranks]
        if not points:
            continue
        with open_network(uniform(num_ranks, rate=rate), sweep(size.speed)) as network:
            for point in points:
                network.set_plan(plan_network(uniform(num_ranks)))
                learned = run(network, point, learning, None, size.num_loss_steps)
                network.set_plan(plan_network(uniform(num_ranks, rate=rate)))
                count = point.num_stages
                times = StageTimes((size.forward_s / count,) * count, (size.backward_s / count,) * count)
                timed = run(network, point, sweep(size.speed), times, SETTLE_STEPS + size.num_timed_steps)
                losses = [float("nan") if record.loss is None else record.loss for record in learned]
                yield point, losses, [record.seconds for record in timed[SETTLE_STEPS:]]


def rows(size: Size, rate: float) -> Iterator[list[object]]:
    tokens = size.speed["global_batch"] * size.speed["seq_len"]
    rates: dict[Point, float] = {}
    letters: dict[tuple[float, ...], str] = {}
    for point, losses, seconds in measure(size, rate):
        rates[point] = tokens / statistics.fmean(seconds)
        letter = letters.setdefault(tuple(losses), chr(ord("A") + len(letters)))
        stock = rates.get(Point(point.schedule, point.num_ranks, WIRES[0]))
        ratio = "" if point.name == "stock" or stock is None else f"{rates[point] / stock:.2f}"
        speed = f"{rates[point]:,.0f} ({tokens / max(seconds):,.0f} to {tokens / min(seconds):,.0f})"
        say(f"{point}: loss {losses[-1]:.4f}, {speed} tokens/s")
        yield [point.schedule, point.num_ranks, point.num_stages, point.name, f"{losses[-1]:.4f}", letter, speed, ratio]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    size = TINY if options.tiny else FULL
    speed, learned = size.speed, size.losses
    caption = (
        f"Stock: fp32. Packed: `compress(stage, activations={PACKED[0]!r}, gradients={PACKED[1]!r})`. gloo, each rank "
        f"in a network namespace. Losses: a GPT-2 of 8 blocks of {learned['model']['hidden_size']} channels, sequences "
        f"of {learned['seq_len']} bytes, links open; of step {size.num_loss_steps}, in nats per byte. Runs with the "
        f"same letter have equal losses in every step, to the bit. Tokens per second: {options.rate:g} Mbit/s up and "
        f"down, 8 micro-batches of 4 × {speed['seq_len']} tokens, {speed['model']['hidden_size']} channels; stages "
        f"sleep, {1e3 * size.forward_s:g} and {1e3 * size.backward_s:g} ms per micro-batch for the whole model; mean "
        f"of {size.num_timed_steps} steps after {SETTLE_STEPS}, with the slowest and the fastest step."
    )
    columns = ("schedule", "ranks", "stages", "stages are", "loss", "equal", "tokens/s", "times stock")
    yield Table(columns, rows(size, 1e6 * options.rate), caption)


if __name__ == "__main__":
    main(
        __doc__,
        tables,
        {
            "--rate": {"type": float, "default": 100.0, "help": "Mbit/s"},
            "--tiny": {"action": "store_true", "help": "a small model, to try the script"},
        },
    )
