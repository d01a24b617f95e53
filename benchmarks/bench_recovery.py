"""What protection costs, and how long a stage takes to come back.

    python benchmarks/bench_recovery.py [--output benchmarks/results/recovery_<hardware>_<yyyymm>]
    python benchmarks/bench_recovery.py --blocks 1 --steps 20 --every 10 --only sleeping      # a quick try
    python benchmarks/bench_recovery.py --together A.json B.json --output NAME                # of runs with --only

Four stages in network namespaces, every host at 300 Mbit/s both ways. First, in turns, runs with a snapshot every K
steps and the log of sent frames, and runs with neither; a block is one run of each. What is compared is the mean time
of the steps after the first few, snapshots included, within a block; the figure is the median of the blocks' ratios.
Twice: stages that sleep in place of computing, and send what a model of 1,024 channels would send (what the log
costs), and a model of 26 million parameters that really computes, with as many threads a stage as leave it a core for
all else where there are cores (what snapshots cost). The journal of the coordinator is always kept.

Then a stage's worker is killed a given number of steps after a snapshot, and what the coordinator says of its
return is read: seconds from the loss to where the others are, and steps computed again in them.

Needs root and a quiet machine. NAME.md and NAME.json.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from harness import describe

STAGES = 4
PARTS = ("sleeping", "computing", "recovery")
THREADS = max(1, len(os.sched_getaffinity(0)) // STAGES - 1)
"""Compute threads of a stage."""
SETTLE = 5
"""Steps at the start that are not counted."""
AFTER = 4
"""Steps after a snapshot that it may still be written beside."""
_BACK = re.compile(r"is back after ([0-9.]+) s")
Values = dict[str, Any]


@dataclass(frozen=True)
class Pipeline:
    """What is trained."""

    name: str
    model: Values
    training: Values
    seq_len: int

    def config(self, folder: Path, name: str, steps: int, rate: str, run: Values) -> Path:
        common = {"name": name, "dir": str(folder / "runs"), "seed": 1, "threads": THREADS, "device": "cpu"}
        values = {
            "run": common | run,
            "model": self.model,
            "data": {"text": "stdlib", "seq_len": self.seq_len},
            "training": {"steps": steps, **self.training},
            "pipeline": {"stages": STAGES},
            "wire": {"activations": "tah", "gradients": "fixed:bits=6"},
            "links": {"rate": rate},
            "hosts": "namespaces",
        }
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path


SLEEPING = Pipeline(
    "sleeping",
    {
        "family": "gpt2",
        "num_layers": 4,
        "hidden_size": 1024,
        "num_heads": 8,
        "sleep": {"forward": "20ms", "backward": "40ms"},
    },
    {"global_batch": 8, "micro_batch": 1},
    512,
)
COMPUTING = Pipeline(
    "computing",
    {"family": "gpt2", "num_layers": 8, "hidden_size": 512, "num_heads": 8},
    {"global_batch": 8, "micro_batch": 2},
    256,
)


@dataclass(frozen=True)
class Run:
    """A run that ended well."""

    step_times_s: tuple[float, ...]
    output: str
    log_nbytes_a_step: float = 0.0

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.step_times_s[SETTLE:])


@dataclass
class Results:
    """All that was measured, as it stands in the file."""

    machine: str
    rate: str
    every: int
    steps: int
    overhead: list[Values] = field(default_factory=list)
    recovery: list[Values] = field(default_factory=list)


def train(config: Path, faults: str = "") -> Run:
    """Have tahq-launch do it."""
    values = yaml.safe_load(config.read_text())
    folder = Path(values["run"]["dir"]) / values["run"]["name"]
    marks = config.parent / f"{config.stem}-faults"
    marks.mkdir()
    env = {**os.environ, "TAHQ_FAULTS": faults, "TAHQ_FAULTS_FOLDER": str(marks)}
    command = [sys.executable, "-m", "tahq_launch.cli", "launch", str(config)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    nbytes = [sum(link["payload_bytes"] for link in row["links"]) for row in rows]
    return Run(tuple(row["step_time_s"] for row in rows), done.stdout, statistics.fmean(nbytes))


def blocks(pipeline: Pipeline, arguments: argparse.Namespace, folder: Path) -> Iterator[Values]:
    """Runs with and without protection, in turns; which comes first changes from block to block."""
    protected = {"snapshot_every": arguments.every}
    bare = {"frame_log": 0}
    for block in range(arguments.blocks):
        order = [("protected", protected), ("bare", bare)]
        runs: dict[str, Run] = {}
        for name, keys in order if block % 2 == 0 else reversed(order):
            label = f"{pipeline.name}-{block}-{name}"
            runs[name] = train(pipeline.config(folder, label, arguments.steps, arguments.rate, keys))
            print(f"{label}: {runs[name].mean_s:.4f} s a step", flush=True)
        yield {
            "pipeline": pipeline.name,
            "block": block,
            "bare_s": runs["bare"].mean_s,
            "protected_s": runs["protected"].mean_s,
            "ratio": runs["protected"].mean_s / runs["bare"].mean_s,
            "log_bytes_a_step": runs["protected"].log_nbytes_a_step,
            "step_times_s": {name: run.step_times_s for name, run in runs.items()},
        }


def recoveries(arguments: argparse.Namespace, folder: Path) -> Iterator[Values]:
    """A worker of a middle stage is killed so many steps after a snapshot."""
    for behind in arguments.behind:
        for attempt in range(arguments.blocks):
            every = max(arguments.behind) + 5
            label = f"recovery-{behind}-{attempt}"
            steps = every + behind + 3
            config = SLEEPING.config(folder, label, steps, arguments.rate, {"snapshot_every": every})
            run = train(config, f"kill@forward:stage=1:step={every + behind}")
            found = _BACK.search(run.output)
            if found is None:
                raise SystemExit(f"{label}: nobody came back: {run.output[-2000:]}")
            usual_s = statistics.median(run.step_times_s[SETTLE:])
            row = {"steps_behind": behind, "seconds": float(found[1]), "step_s": usual_s}
            print(f"{label}: {row}", flush=True)
            yield row


def table(results: Results) -> str:
    """NAME.md."""
    lines = [
        "# What protection costs, and how long a stage takes to come back",
        "",
        f"{results.machine}. Written by `benchmarks/bench_recovery.py`.",
        f"{STAGES} stages in namespaces, {results.rate} up and down each; TAH-Quant forward, 6 bits backward.",
        f"With: a snapshot every {results.every} steps and the frame log; without: neither.",
        f"{results.steps} steps a run, the first {SETTLE} not counted. The log's MB are those of all links in a step.",
        f"Runs differ by more than protection costs, so the {AFTER} steps after a snapshot are also held against the",
        f"median of their own run: what they took longer, as a share of {results.every} steps (without: beside it).",
    ]
    lines += _overhead_table(results) if results.overhead else []
    lines += _recovery_table(results) if results.recovery else []
    return "\n".join(lines) + "\n"


def _overhead_table(results: Results) -> list[str]:
    lines = [
        "",
        "| pipeline | blocks | without, s a step | with | with / without, median | least and most "
        "| after a snapshot, median | the same steps without | log, MB a step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(row["pipeline"] for row in results.overhead):
        rows = [row for row in results.overhead if row["pipeline"] == name]
        spread = f"{min(row['ratio'] for row in rows):.4f}, {max(row['ratio'] for row in rows):.4f}"
        without, with_, ratio = (_median(rows, key) for key in ("bare_s", "protected_s", "ratio"))
        log_mb = _median(rows, "log_bytes_a_step") / 1e6
        after = (f"{_after_snapshots(rows, kind, results.every):.2%}" for kind in ("protected", "bare"))
        figures = f"{without:.4f} | {with_:.4f} | {ratio:.4f} | {spread} | {' | '.join(after)} | {log_mb:.2f}"
        lines.append(f"| {name} | {len(rows)} | {figures} |")
    return lines


def _recovery_table(results: Results) -> list[str]:
    lines = [
        "",
        "| steps since the snapshot | tries | seconds until it is back, median | least and most | a step takes, s |",
        "|---:|---:|---:|---:|---:|",
    ]
    for behind in dict.fromkeys(row["steps_behind"] for row in results.recovery):
        rows = [row for row in results.recovery if row["steps_behind"] == behind]
        spread = f"{min(row['seconds'] for row in rows):.1f}, {max(row['seconds'] for row in rows):.1f}"
        seconds, step_s = _median(rows, "seconds"), _median(rows, "step_s")
        lines.append(f"| {behind} | {len(rows)} | {seconds:.1f} | {spread} | {step_s:.3f} |")
    return lines


def _after_snapshots(rows: Sequence[Mapping[str, Any]], kind: str, every: int) -> float:
    """How much longer the steps after a snapshot took than the median of their run, as a share of all."""
    shares = []
    for row in rows:
        times_s = row["step_times_s"][kind]
        usual_s = statistics.median(times_s[SETTLE:])
        firsts = range(every, len(times_s) - AFTER + 1, every)
        longer_s = [sum(times_s[first : first + AFTER]) - AFTER * usual_s for first in firsts]
        shares.append(statistics.fmean(longer_s) / (every * usual_s))
    return statistics.median(shares)


def _median(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(statistics.median(row[key] for row in rows))


def together(paths: Sequence[Path]) -> Results:
    """What was measured part by part, on one kind of machine with the same settings; on several days, perhaps."""
    parts = [Results(**json.loads(path.read_text())) for path in paths]
    machines = [part.machine.rpartition(", ") for part in parts]
    steps = {part.steps for part in parts if part.overhead} or {parts[0].steps}  # recoveries take as many as they need
    if len({(what, part.rate, part.every) for (what, *_), part in zip(machines, parts, strict=True)} | steps) != 2:
        raise SystemExit("these were not measured on one kind of machine with the same settings")
    days = ", ".join(dict.fromkeys(day for *_, day in machines))
    first = Results(f"{machines[0][0]}, {days}", parts[0].rate, parts[0].every, steps.pop())
    for part in parts:
        first.overhead += part.overhead
        first.recovery += part.recovery
    return first


def write(results: Results, output: Path | None) -> None:
    if output is not None:
        output.with_suffix(".json").write_text(json.dumps(asdict(results), indent=1) + "\n")
        output.with_suffix(".md").write_text(table(results))


def main() -> None:
    """Measure, and write after each block."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="without ending; default: print only")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=105)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--rate", default="300mbit")
    parser.add_argument("--behind", type=int, nargs="*", default=[1, 10, 25, 50])
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--together", type=Path, nargs="*", help="measure nothing: put these files together")
    arguments = parser.parse_args()
    if arguments.together:
        write(together(arguments.together), arguments.output)
        return
    results = Results(describe(), arguments.rate, arguments.every, arguments.steps)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in arguments.only:
            if name == "recovery":
                rows, kept = recoveries(arguments, folder), results.recovery
            else:
                rows, kept = blocks(SLEEPING if name == "sleeping" else COMPUTING, arguments, folder), results.overhead
            for row in rows:
                kept.append(row)
                write(results, arguments.output)
    print(table(results))


if __name__ == "__main__":
    main()
