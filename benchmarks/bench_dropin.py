"""torch's own pipelining over slow links, stock and with packed stages: the losses, and tokens a second.

    python benchmarks/bench_dropin.py [--output benchmarks/results/dropin_<hardware>_<yyyymm>.md]
    python benchmarks/bench_dropin.py --tiny          # shows that it works, in two minutes

GPipe, 1F1B and interleaved 1F1B on 2 and 4 ranks over gloo, each rank in a network namespace of its own; needs root.
Stock sends fp32; packed is the same program with one call of `compress`. Two parts:

1. *Losses.* A small GPT-2 that is really computed and learns, links open. Said are the loss of the last step, and which
   runs are equal in all of them, to the bit: a key and a stream depend on the cut, not on the schedule, so runs that
   cut the model alike must be.
2. *Tokens a second* at a rate. Stages sleep for as long as they would compute (`model.sleep`), since four that compute
   share this machine's cores and would measure these; codecs, gloo, TCP and torch's schedules are real.
"""

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dropin_rank import SCHEDULES, STOCK
from harness import describe

from tahq.data.config import DataConfig
from tahq_netem.backends.network import Network
from tahq_netem.network.description import plan_network, uniform
from tahq_netem.runtimes.gloo_session import GlooSession
from tahq_netem.runtimes.session import SessionRequest, StepRecord
from tahq_netem.sweep.networks import apply_plan, calibrate_quickly, open_network
from tahq_netem.sweep.points import SessionKey
from tahq_netem.sweep.spec import SweepConfig
from tahq_netem.sweep.stage_times import StageTimes
from tahq_netem.sweep.workload import session_config

RANKS = (2, 4)
PACKED = ("tah", "fixed:bits=8")
WIRES = ((STOCK, STOCK), PACKED)
SETTLE_STEPS = 2
"""Not timed: torch asks for shapes in the first, and TCP finds its pace."""
START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Point:
    """One pipeline: the schedule, its ranks, what goes forward and backward."""

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
    """How much is measured; sleeping times are of the whole model's forward and backward of a micro-batch."""

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


class Bench:
    """Sessions on the hosts of a network.

    Args:
        size: what to run.
        network: as many hosts as ranks.
    """

    def __init__(self, size: Size, network: Network) -> None:
        self._size = size
        self._network = network

    def losses(self, point: Point) -> list[float]:
        """Of every step."""
        data = DataConfig(text="stdlib", seq_len=self._size.losses["seq_len"])
        records = self._run(point, sweep({**self._size.losses, "data": data}), None, self._size.num_loss_steps)
        return [float("nan") if record.loss is None else record.loss for record in records]

    def step_seconds(self, point: Point) -> list[float]:
        """Of the timed steps."""
        count = point.num_stages
        times = StageTimes((self._size.forward_s / count,) * count, (self._size.backward_s / count,) * count)
        records = self._run(point, sweep(self._size.speed), times, SETTLE_STEPS + self._size.num_timed_steps)
        return [record.seconds for record in records[SETTLE_STEPS:]]

    def _run(self, point: Point, config: SweepConfig, times: StageTimes | None, num_steps: int) -> list[StepRecord]:
        # The schedule's name is the program's business; tahq has no word in it.
        key = SessionKey("torch", "1f1b", *point.wire, point.num_stages, config.micro_batches[0], "real")
        with tempfile.TemporaryDirectory(prefix="tahq-dropin-") as folder:
            resolved = session_config(config, key, Path(folder), times)
            hosts = tuple(self._network.plan.hosts)
            request = SessionRequest(resolved, point.schedule, self._network, hosts, Path(folder))
            with GlooSession(request, "dropin_rank") as session:
                return [session.next_step(START_TIMEOUT_S) for _ in range(num_steps)]


def sweep(workload: dict[str, Any]) -> SweepConfig:
    return SweepConfig.model_validate({"name": "dropin", "runtimes": [{"name": "torch"}], **workload})


def measure(size: Size, rate_mbit: float) -> Iterator[tuple[Point, list[float], list[float]]]:
    """Each point's losses, and its steps' seconds."""
    for num_ranks in RANKS:
        points = [point for point in size.points if point.num_ranks == num_ranks]
        if not points:
            continue
        rate = 1e6 * rate_mbit
        with open_network(uniform(num_ranks, rate=rate), sweep(size.speed)) as network:
            calibrate_quickly(network)
            bench = Bench(size, network)
            for point in points:
                apply_plan(network, plan_network(uniform(num_ranks)))
                losses = bench.losses(point)
                apply_plan(network, plan_network(uniform(num_ranks, rate=rate)))
                yield point, losses, bench.step_seconds(point)


def groups(rows: Sequence[tuple[Point, list[float], list[float]]]) -> dict[Point, str]:
    """A letter for each point: points with the same one have equal losses in every step, to the bit."""
    letters: dict[tuple[float, ...], str] = {}
    for _, losses, _ in rows:
        letters.setdefault(tuple(losses), chr(ord("A") + len(letters)))
    return {point: letters[tuple(losses)] for point, losses, _ in rows}


def report(size: Size, rate_mbit: float, rows: list[tuple[Point, list[float], list[float]]]) -> str:
    speed, learned = size.speed, size.losses
    tokens = speed["global_batch"] * speed["seq_len"]
    rates = {point: tokens / statistics.fmean(seconds) for point, _, seconds in rows}
    letters = groups(rows)
    lines = [
        "# torch.distributed.pipelining, stock and with packed stages",
        "",
        f"{describe()}. `python benchmarks/bench_dropin.py`",
        "",
        f"Stock: fp32. Packed: `compress(stage, activations={PACKED[0]!r}, gradients={PACKED[1]!r})`. gloo, each",
        "rank in a network namespace.",
        "",
        f"Losses: a GPT-2 that is computed, 8 blocks of {learned['model']['hidden_size']} channels, sequences of "
        f"{learned['seq_len']}, the standard library's",
        f"source as bytes, links open; of step {size.num_loss_steps}, in nats a byte. Runs with the same letter",
        "have equal losses in every step, to the bit.",
        "",
        f"Tokens a second: {rate_mbit:g} Mbit/s up and down, 8 micro-batches of 4 × {speed['seq_len']} tokens, "
        f"{speed['model']['hidden_size']} channels; stages",
        f"sleep, {1e3 * size.forward_s:g} and {1e3 * size.backward_s:g} ms a micro-batch for the whole model; mean of "
        f"{size.num_timed_steps} steps after {SETTLE_STEPS}, with",
        "the slowest and the fastest step.",
        "",
        "| schedule | ranks | stages | stages are | loss | equal | tokens/s | times stock |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for point, losses, seconds in rows:
        stock = rates.get(Point(point.schedule, point.num_ranks, WIRES[0]))
        ratio = "" if point.name == "stock" or stock is None else f"{rates[point] / stock:.2f}"
        spread = f"{tokens / max(seconds):,.0f} to {tokens / min(seconds):,.0f}"
        lines.append(
            f"| {point.schedule} | {point.num_ranks} | {point.num_stages} | {point.name} | {losses[-1]:.4f} | "
            f"{letters[point]} | {rates[point]:,.0f} ({spread}) | {ratio} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    size = TINY if options.tiny else FULL
    rows = []
    for row in measure(size, options.rate):
        rows.append(row)
        point, losses, seconds = row
        print(f"{point}: loss {losses[-1]:.4f}, {statistics.fmean(seconds):.3f} s a step", flush=True)
    text = report(size, options.rate, rows)
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
