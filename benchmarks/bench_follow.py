"""Bits that follow the bandwidth: a host's rate falls in the middle of a run and recovers.

    python benchmarks/bench_follow.py [--output benchmarks/results/follow_<hardware>_<yyyymm>.md]
    python benchmarks/bench_follow.py --steps 24 --loss-steps 12 --forward 5ms --backward 10ms   # a quick try

Four stages that sleep instead of computing, in network namespaces, all hosts at 300 Mbit/s. After a third of the steps
host1 falls to 50 Mbit/s, both ways; after two thirds it recovers. First with default settings, beside the simulator's
best plan for each of the two networks, run on it alone (`default_rows`); then with `wire.follow`, and with each setting
of its ladder fixed. Then a small model that computes is trained with `wire.follow` under a similar fall, and again from
its record on links that do not change: losses and codecs must be the same. *Followed after*: steps from the fall to the
last change that answers it. Needs root and a quiet machine.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from default_rows import Case, best_plans, settled
from harness import Table, launch, main, say

from tahq.comm.network_config import NetworkConfig
from tahq.config.cluster import ClusterConfig
from tahq.config.file import resolve
from tahq.units import WRITTEN_BY_HAND
from tahq_netem.backends.choice import build_network
from tahq_netem.backends.network import Network
from tahq_netem.network.faults import Timeline, play
from tahq_netem.runtimes.session import SessionRequest, TahqSession
from tahq_netem.sweep.workload import MANY_STEPS

STAGES, MICRO_BATCHES, SETTLE_STEPS = 4, 8, 8
BITS = (2, 3, 4, 6, 8)
HOST, HIGH, LOW, LOSS_LOW, DELAY = "host1", "300mbit", "50mbit", "2mbit", "1ms"
FOLLOWED_WITHIN = 3
"""Steps from the fall to the last change that answers it: the target."""
PATIENCE_S = 120.0
Values = dict[str, Any]


def fall(num_steps: int, low: str) -> Timeline:
    """HOST's rate is low in the second third of the steps."""
    rates = [(num_steps // 3, low), (2 * (num_steps // 3), HIGH)]
    return Timeline.parse(
        json.dumps([{"step": step, "link": HOST, "what": "rate", "to": rate} for step, rate in rates])
    )


def network() -> Network:
    hosts = {f"host{stage}": {"up": HIGH, "down": HIGH, "delay": DELAY} for stage in range(STAGES)}
    return build_network(NetworkConfig.model_validate({"hosts": hosts}, context={"units": "written"}))


@dataclass(frozen=True)
class Trained:
    """Steps as metrics.jsonl has them, without those before the network was settled; and when the rate fell."""

    rows: tuple[Values, ...]
    fell_at: int

    def seconds(self, begin: int = 0, end: int | None = None) -> list[float]:
        return [row["step_time_s"] for row in self.rows[begin:end]]

    def tokens_per_s(self, begin: int = 0, end: int | None = None) -> float:
        return sum(row["tokens"] for row in self.rows[begin:end]) / sum(self.seconds(begin, end))

    def changes(self) -> list[Values]:
        """Changes of codecs, each with the step that it was decided with, from 1."""
        return [{"step": n, **change} for n, row in enumerate(self.rows, 1) for change in row["codec_changes"]]

    def codecs(self) -> list[list[object]]:
        """Codecs and bits of every step and link."""
        return [[(link["codec"], link["bits_per_element"]) for link in row["links"]] for row in self.rows]


def train(config: ClusterConfig, timeline: Timeline, num_steps: int, settle: int) -> Trained:
    """Train on a network of namespaces, with faults once it has settled."""
    hosts = tuple(f"host{stage}" for stage in range(STAGES))
    with network() as built, tempfile.TemporaryDirectory(prefix="tahq-bench-") as name:
        request = SessionRequest(config, config.pipeline.schedule, built, hosts, Path(name))
        with TahqSession(request) as session:
            for _ in range(settle):
                session.next_step(PATIENCE_S)
            done: list[object] = []
            with play(timeline, built, step_source=lambda: len(done)) as faults:
                while len(done) < num_steps:
                    done.append(session.next_step(PATIENCE_S))
                events = [event.as_dict() for event in faults.log]
        metrics = Path(name) / config.run.dir / config.run.name / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        return Trained(tuple(rows[settle : settle + num_steps]), int(events[0]["step"]) if events else 0)


def cluster(options: argparse.Namespace, wire: Values, *, sleeps: bool = True) -> ClusterConfig:
    """The configuration of `keys` with these codecs."""
    return resolve(ClusterConfig.model_validate(keys(options, sleeps=sleeps) | {"wire": wire}, context=WRITTEN_BY_HAND))


def keys(options: argparse.Namespace, *, sleeps: bool = True) -> Values:
    """One sample per micro-batch; stages that sleep, or (not `sleeps`) a small model that computes."""
    sleep = {"forward": options.forward, "backward": options.backward}
    model = {"family": "gpt2", "num_layers": STAGES, "num_heads": 4, "vocab_size": 256}
    return {
        "run": {"name": "session", "threads": 1, "device": "cpu", "peer_timeout": "60s", "seed": 1},
        "model": model | {"hidden_size": 1024 if sleeps else 256},
        "data": {"text": "stdlib", "seq_len": 512 if sleeps else 64},
        "training": {
            "steps": MANY_STEPS,
            "global_batch": MICRO_BATCHES,
            "micro_batch": 1,
            "lr": 1e-4 if sleeps else 1e-3,
        },
        "pipeline": {"stages": STAGES},
        "emulate": {"sleep": sleep if sleeps else None},
    }


def fixed(bits: int) -> Values:
    return {"activations": f"wf:bits={bits}", "gradients": f"eden:bits={bits}"}


def follow() -> Values:
    """Both ladders; a run begins at the top."""
    ladders = {"activations": [f"wf:bits={bits}" for bits in BITS], "gradients": [f"eden:bits={bits}" for bits in BITS]}
    return {**fixed(BITS[-1]), "follow": {**ladders, "raise_after": 5}}


def default_settings(options: argparse.Namespace) -> Iterator[list[str]]:
    """Rows: default settings in the second half of each third of the steps, beside the best plan for its network."""
    third, config = options.steps // 3, ClusterConfig.model_validate(keys(options), context=WRITTEN_BY_HAND)
    trained = train(config, fall(options.steps, LOW), options.steps, SETTLE_STEPS)
    codecs = {link["direction"]: link["codec"] for link in trained.rows[-1]["links"]}
    pair = codecs["activations"], codecs["gradients"]
    best_s = {}
    for rate in (HIGH, LOW):
        given = keys(options)
        network = {"rate": HIGH, "delay": DELAY, "hosts": {HOST: {"up": rate, "down": rate}}}
        like_the_other = {"emulate": given["emulate"] | network, "hosts": "namespaces", "security": {"curve": False}}
        case = Case(rate, "default", given | like_the_other)
        [(values, _, _)] = best_plans(case, pair, 1)
        best_s[rate] = statistics.median(step["step_time_s"] for step in settled(launch(values)))
    for number, rate in enumerate((HIGH, LOW, HIGH)):
        end = (number + 1) * third
        rows = trained.rows[end - third // 2 : end]
        step_s = statistics.median(row["step_time_s"] for row in rows)
        chosen = f"{rows[-1]['schedule']}, {rows[-1]['in_flight']}"
        yield [rate, " / ".join(pair), chosen, f"{step_s:.3f}", f"{best_s[rate]:.3f}", f"{best_s[rate] / step_s:.3f}"]


def followed_after(trained: Trained, third: int) -> tuple[int, float]:
    """Steps until the last change that answers the fall; then the slowest step of the low rate over the median."""
    fell_at = trained.fell_at
    down = [each["step"] for each in trained.changes() if each["reason"] == "bottleneck" and each["step"] > fell_at]
    answered = max((step for step in down if step <= fell_at + 2 * FOLLOWED_WITHIN), default=fell_at)
    low = trained.seconds(min(answered + 1, 2 * third - 1), 2 * third)
    return answered - fell_at, max(low) / statistics.median(low)


def speed_row(name: str, trained: Trained, third: int) -> list[str]:
    rates = [trained.tokens_per_s(), *(trained.tokens_per_s(n * third, (n + 1) * third) for n in range(3))]
    return [name, *(f"{rate:.0f}" for rate in rates), f"{max(trained.seconds()):.2f} s"]


def change_text(change: Mapping[str, Any]) -> str:
    old, new = (str(change[which]).partition(",")[0] for which in ("old", "new"))
    where = f"link {change['link']}, {change['direction']}"
    return f"- after step {change['step']}: {where}: {old} to {new} ({change['reason']}: {change['detail']})"


def repeated(options: argparse.Namespace) -> str:
    """Train a real model under a fall, and again from its record where nothing falls."""
    first = train(cluster(options, follow(), sleeps=False), fall(options.loss_steps, LOSS_LOW), options.loss_steps, 0)
    with tempfile.TemporaryDirectory(prefix="tahq-bench-") as name:
        record = Path(name) / "metrics.jsonl"
        record.write_text("".join(json.dumps(row) + "\n" for row in first.rows))
        config = cluster(options, {**follow(), "replay": str(record)}, sleeps=False)
        again = train(config, Timeline(), options.loss_steps, 0)
    losses = [[row["loss"] for row in each.rows] for each in (first, again)]
    same = losses[0] == losses[1], first.codecs() == again.codecs()
    found = f"same losses: {'yes' if same[0] else 'NO'}, same codecs: {'yes' if same[1] else 'NO'}"
    return f"Repeated from its record, {len(first.changes())} changes in {options.loss_steps} steps: {found}."


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    third = options.steps // 3
    columns = (HOST, "codecs", "schedule, in flight", "default: step, s", "best plan for this rate: step, s", "ratio")
    yield Table(columns, default_settings(options), heading="Default settings")
    if options.only_default:
        return
    wires = {"follow": follow(), **{f"{bits} bits": fixed(bits) for bits in BITS}}
    trained = {}
    for name, wire in wires.items():
        trained[name] = train(cluster(options, wire), fall(options.steps, LOW), options.steps, SETTLE_STEPS)
        say(f"{name}: {trained[name].tokens_per_s():.0f} tokens/s")
    yield Table(
        ("wire", "tokens/s", "before", "while low", "after", "slowest step"),
        (speed_row(name, each, third) for name, each in trained.items()),
        f"{STAGES} stages that sleep {options.forward} and {options.backward} per micro-batch, {MICRO_BATCHES} "
        f"micro-batches of 512 × 1024 elements. {HOST} falls from {HIGH} to {LOW} after step {third} of "
        f"{options.steps} and recovers after step {2 * third}.",
    )
    steps, ratio = followed_after(trained["follow"], third)
    yield f"Followed after {steps} steps; from then to the recovery the slowest step took {ratio:.2f} times the median."
    yield "\n".join(map(change_text, trained["follow"].changes()))
    yield repeated(options)


if __name__ == "__main__":
    main(
        __doc__,
        tables,
        {
            "--steps": {"type": int, "default": 60, "help": f"steps per wire, after {SETTLE_STEPS} that do not count"},
            "--only-default": {"action": "store_true"},
            "--loss-steps": {"type": int, "default": 30},
            "--forward": {"default": "20ms"},
            "--backward": {"default": "40ms"},
        },
    )
