"""Bits that follow the bandwidth: a host's rate falls in the middle of a run and recovers, beside every fixed rung.

    python benchmarks/bench_follow.py [--output benchmarks/results/follow_<hardware>_<yyyymm>]
    python benchmarks/bench_follow.py --steps 24 --forward 5ms --backward 10ms --hidden-size 256   # a quick try

Four stages that sleep in place of computing, in network namespaces, all hosts at the high rate. After a third of the
steps the rate of one host becomes the low one, both ways; after two thirds it recovers. The same is measured with
`wire.follow`, and with each rung of its ladder fixed, in one run. Then the losses: a small model that really computes
is trained with `wire.follow` under the same kind of fall, and again from its record, on links that do not change.

Said of the run that follows: how many steps after the fall the last change down was in force, at most three; whether
its slowest step from then to the recovery was within a half of their median, so nothing stood still; tokens a second
in each third and in all. Steps are counted from the first that counts, after `--settle`.

Needs root and a quiet machine. NAME.md and NAME.json have every step's time and codecs, every change with its reason,
and what was done to the network when.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import describe

from tahq.config.cluster import ClusterConfig
from tahq.config.file import resolve
from tahq.errors import TahqError
from tahq.units import format_rate, parse_duration, parse_rate
from tahq_netem.backends.choice import build_network
from tahq_netem.backends.network import Network
from tahq_netem.network.description import NetworkConfig
from tahq_netem.network.fault_player import play
from tahq_netem.network.faults import Timeline
from tahq_netem.runtimes.session import SessionRequest
from tahq_netem.runtimes.tahq_runtime import TahqSession
from tahq_netem.sweep.workload import MANY_STEPS

STAGES = 4
MICRO_BATCHES = 8
FOLLOWED_WITHIN = 3
"""Steps from the fall to the last change that answers it."""
SLOWEST_OVER_MEDIAN = 1.5
PATIENCE_S = 120.0
Values = dict[str, Any]


@dataclass(frozen=True)
class Fall:
    """A host's rate, before and during; in force after so many steps."""

    host: str
    high: str
    low: str
    at: int
    until: int

    def timeline(self) -> Timeline:
        rates = [(self.at, self.low), (self.until, self.high)]
        faults = [{"step": step, "link": self.host, "what": "rate", "to": rate} for step, rate in rates]
        return Timeline.parse(json.dumps(faults))

    def network(self, delay: str) -> Network:
        hosts = {f"host{stage}": {"up": self.high, "down": self.high, "delay": delay} for stage in range(STAGES)}
        return build_network(NetworkConfig.model_validate({"hosts": hosts}, context={"units": "written"}))


@dataclass(frozen=True)
class Trained:
    """Steps as metrics.jsonl has them, from the first that counts, and what was done to the network."""

    rows: tuple[Values, ...]
    faults: tuple[Values, ...]

    def seconds(self, begin: int, end: int) -> list[float]:
        return [row["step_time_s"] for row in self.rows[begin:end]]

    def tokens_per_s(self, begin: int = 0, end: int | None = None) -> float:
        rows = self.rows[begin:end]
        return sum(row["tokens"] for row in rows) / sum(row["step_time_s"] for row in rows)

    def changes(self) -> list[Values]:
        """Those decided with each step, which is counted from 1 here."""
        return [{"step": n, **change} for n, row in enumerate(self.rows, 1) for change in row["codec_changes"]]

    def fell_at(self) -> int:
        """Steps that were done when the rate fell."""
        return int(self.faults[0]["step"]) if self.faults else 0


def train(config: ClusterConfig, network: Network, timeline: Timeline, num_steps: int, settle: int) -> Trained:
    """So many steps of a run on this network, with faults once it has settled.

    Raises:
        TahqError: a step took longer than `PATIENCE_S`, or a process ended.
    """
    hosts = tuple(f"host{stage}" for stage in range(STAGES))
    with tempfile.TemporaryDirectory(prefix="tahq-bench-") as name:
        request = SessionRequest(config, config.pipeline.schedule, network, hosts, Path(name))
        with TahqSession(request) as session:
            for _ in range(settle):
                session.next_step(PATIENCE_S)
            done: list[object] = []
            with play(timeline, network, step_source=lambda: len(done)) as faults:
                while len(done) < num_steps:
                    done.append(session.next_step(PATIENCE_S))
                events = tuple(event.as_dict() for event in faults.log)
        metrics = Path(name) / config.run.dir / config.run.name / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        return Trained(tuple(rows[settle : settle + num_steps]), events)


def cluster(options: argparse.Namespace, wire: Values, **changes: Values) -> ClusterConfig:
    """The run that is measured: one sample a micro-batch, and a learning rate that changes nothing to speak of."""
    values: Values = {
        "run": {"name": "session", "threads": 1, "device": "cpu", "peer_timeout": 60.0, "seed": 1},
        "model": {
            "family": "gpt2",
            "num_layers": STAGES,
            "hidden_size": options.hidden_size,
            "num_heads": 4,
            "vocab_size": 256,
            "sleep": {"forward": [parse_duration(options.forward)], "backward": [parse_duration(options.backward)]},
        },
        "data": {"text": "stdlib", "seq_len": options.seq_len},
        "training": {"steps": MANY_STEPS, "global_batch": MICRO_BATCHES, "micro_batch": 1, "lr": 1e-4},
        "pipeline": {"stages": STAGES, "schedule": options.schedule},
        "wire": wire,
    }
    merged = {name: {**section, **changes.get(name, {})} for name, section in values.items()}
    return resolve(ClusterConfig.model_validate(merged))


def follow(options: argparse.Namespace, start: int) -> Values:
    """`wire:` with both ladders; a run begins on the rung of this index."""
    up = [f"wf:bits={bits}" for bits in options.bits]
    down = [f"eden:bits={bits}" for bits in options.bits]
    ladders = {"activations": up, "gradients": down, "raise_after": options.raise_after}
    return {"activations": up[start], "gradients": down[start], "follow": ladders}


def fixed(options: argparse.Namespace, rung: int) -> Values:
    return {key: value for key, value in follow(options, rung).items() if key != "follow"}


def measure_throughput(options: argparse.Namespace, say: Callable[[str], None]) -> Values:
    """Every wire under the same fall, the one that follows first."""
    third = options.steps // 3
    fall = Fall(options.host, options.high, options.low, third, 2 * third)
    wires = {"follow": follow(options, len(options.bits) - 1)}
    wires |= {f"{bits} bits": fixed(options, rung) for rung, bits in enumerate(options.bits)}
    rows = {}
    for name, wire in wires.items():
        with fall.network(options.delay) as network:
            trained = train(cluster(options, wire), network, fall.timeline(), options.steps, options.settle)
        rows[name] = figures(trained, third)
        say(f"{name}: {rows[name]['tokens_per_s']:.0f} tokens/s")
    return {"fall": asdict(fall), "rows": rows, "verdict": verdict(rows["follow"])}


def figures(trained: Trained, third: int) -> Values:
    fell_at = trained.fell_at()
    down = [c["step"] for c in trained.changes() if c["reason"] == "bottleneck" and fell_at < c["step"] <= 2 * third]
    answered = max((step for step in down if step <= fell_at + 2 * FOLLOWED_WITHIN), default=fell_at)
    low = trained.seconds(min(answered + 1, 2 * third - 1), 2 * third)
    return {
        "tokens_per_s": trained.tokens_per_s(),
        "tokens_per_s_by_third": [trained.tokens_per_s(n * third, (n + 1) * third) for n in range(3)],
        "followed_after_steps": answered - fell_at,
        "slowest_over_median_while_low": max(low) / statistics.median(low),
        "slowest_step_s": max(trained.seconds(0, len(trained.rows))),
        "changes": trained.changes(),
        "steps": [{"seconds": row["step_time_s"], "codecs": codecs(row)} for row in trained.rows],
        "faults": trained.faults,
    }


def codecs(row: Mapping[str, Any]) -> dict[str, Values]:
    """Spec and bits an element by link and direction."""
    return {
        f"{link['from']}-{link['to']}": {"codec": link["codec"], "bits_per_element": link["bits_per_element"]}
        for link in row["links"]
    }


def verdict(row: Mapping[str, Any]) -> Values:
    """What was to be shown of the run that follows."""
    return {
        "bits_fell": bool(row["followed_after_steps"]),
        "followed_in_time": 0 < row["followed_after_steps"] <= FOLLOWED_WITHIN,
        "nothing_stood_still": row["slowest_over_median_while_low"] <= SLOWEST_OVER_MEDIAN,
        "both_recorded": len(row["faults"]) == 2 and bool(row["changes"]),
    }


def measure_losses(options: argparse.Namespace, say: Callable[[str], None]) -> Values:
    """A real model under a fall, and the same run from its record where nothing falls."""
    third = options.loss_steps // 3
    fall = Fall(options.host, options.high, options.loss_low, third, 2 * third)
    real: dict[str, Values] = {
        "model": {"sleep": None, "hidden_size": 256},
        "data": {"seq_len": 64},
        "training": {"lr": 1e-3},
    }
    wire = follow(options, len(options.bits) - 1)
    with tempfile.TemporaryDirectory(prefix="tahq-bench-") as name:
        with fall.network(options.delay) as network:
            first = train(cluster(options, wire, **real), network, fall.timeline(), options.loss_steps, 0)
        record = Path(name) / "metrics.jsonl"
        record.write_text("".join(json.dumps(row) + "\n" for row in first.rows))
        replayed = {**wire, "replay": str(record)}
        with fall.network(options.delay) as network:
            again = train(cluster(options, replayed, **real), network, Timeline(), options.loss_steps, 0)
    losses = [[row["loss"] for row in trained.rows] for trained in (first, again)]
    found = {
        "losses": losses[0],
        "losses_replayed": losses[1],
        "changes": first.changes(),
        "same_losses": losses[0] == losses[1],
        "same_codecs": [codecs(row) for row in first.rows] == [codecs(row) for row in again.rows],
        "tokens_per_s": [first.tokens_per_s(), again.tokens_per_s()],
    }
    say(f"{len(found['changes'])} changes; replayed losses the same: {found['same_losses']}")
    return found


def report(options: argparse.Namespace, speed: Mapping[str, Any], losses: Mapping[str, Any]) -> str:
    fall = speed["fall"]
    lines = [
        "# Bits that follow the bandwidth",
        "",
        f"{describe()}. `python benchmarks/bench_follow.py {' '.join(sys.argv[1:])}`",
        "",
        f"{STAGES} stages asleep for {options.forward} and {options.backward} a micro-batch, {MICRO_BATCHES} of them, "
        f"{options.seq_len} × {options.hidden_size} elements each. {fall['host']} falls from "
        f"{format_rate(parse_rate(fall['high']))} to {format_rate(parse_rate(fall['low']))} after step {fall['at']} "
        f"and recovers after step {fall['until']} of {options.steps}.",
        "",
        "| wire | tokens/s | before | while low | after | slowest step |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, row in speed["rows"].items():
        thirds = " | ".join(f"{tokens:.0f}" for tokens in row["tokens_per_s_by_third"])
        lines.append(f"| {name} | {row['tokens_per_s']:.0f} | {thirds} | {row['slowest_step_s']:.2f} s |")
    followed = speed["rows"]["follow"]
    lines += [
        "",
        f"Followed after {followed['followed_after_steps']} steps. Verdict: {yes_and_no(speed['verdict'])}.",
        "",
    ]
    lines += [f"- after step {change['step']}: {change_text(change)}" for change in followed["changes"]]
    same = yes_and_no({name: losses[name] for name in ("same_losses", "same_codecs")})
    lines += ["", f"Repeated from its record, {len(losses['changes'])} changes in {options.loss_steps} steps: {same}."]
    return "\n".join([*lines, ""])


def yes_and_no(verdicts: Mapping[str, bool]) -> str:
    return ", ".join(f"{name.replace('_', ' ')}: {'yes' if holds else 'no'}" for name, holds in verdicts.items())


def change_text(change: Mapping[str, Any]) -> str:
    old, new = (str(change[which]).partition(",")[0] for which in ("old", "new"))
    return f"link {change['link']}, {change['direction']}: {old} to {new} ({change['reason']}: {change['detail']})"


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="that count, of each wire")
    parser.add_argument("--settle", type=int, default=8, help="steps before them")
    parser.add_argument("--loss-steps", type=int, default=30)
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4, 6, 8])
    parser.add_argument("--raise-after", type=int, default=5)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--forward", default="20ms")
    parser.add_argument("--backward", default="40ms")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--host", default="host1", help="whose rate falls")
    parser.add_argument("--high", default="300mbit")
    parser.add_argument("--low", default="50mbit")
    parser.add_argument("--loss-low", default="2mbit", help="what it falls to for the small model")
    parser.add_argument("--delay", default="1ms", help="one way")
    parser.add_argument("--output", type=Path, help="without its ending")
    return parser.parse_args(argv)


def main() -> None:
    options = parse_options()
    losses = measure_losses(options, print)
    speed = measure_throughput(options, print)
    text = report(options, speed, losses)
    print(text)
    if options.output is not None:
        options.output.with_suffix(".md").write_text(text)
        options.output.with_suffix(".json").write_text(json.dumps({"speed": speed, "losses": losses}, indent=1))
    if not (all(speed["verdict"].values()) and losses["same_losses"] and losses["same_codecs"]):
        raise SystemExit("not all was as it should be")


if __name__ == "__main__":
    try:
        main()
    except TahqError as error:
        raise SystemExit(f"bench_follow: {error}") from error
