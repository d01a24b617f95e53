"""What protection costs, and how long a lost stage takes to come back.

Four stages in network namespaces, every host at 300 Mbit/s both ways. First, in turns, runs with a checkpoint every K
steps and the log of sent frames, and runs with neither; the figure is the median over blocks (one run of each) of the
ratio of their mean step times, checkpoints included. Once with stages that sleep instead of computing and send
tensors of 1,024 channels (what the log costs), once with a model of 26 million parameters that computes (what
checkpoints cost). Then a worker is killed some steps after a checkpoint, and the coordinator reports its return.

    python benchmarks/bench_recovery.py [--output benchmarks/results/recovery_<hardware>_<yyyymm>.md]
    python benchmarks/bench_recovery.py --repeats 1 --steps 20 --every 10     # a quick try

Needs root and a quiet machine.
"""

import argparse
import os
import re
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

from harness import Run, Table, launch, main, spread

STAGES = 4
THREADS = max(1, len(os.sched_getaffinity(0)) // STAGES - 1)
SETTLE = 5
"""Steps at the start that are not counted."""
PIPELINES: dict[str, dict[str, Any]] = {
    "sleeping": {
        "model": {"family": "gpt2", "num_layers": 4, "hidden_size": 1024, "num_heads": 8},
        "emulate": {"sleep": {"forward": "20ms", "backward": "40ms"}},
        "training": {"global_batch": 8, "micro_batch": 1},
        "data": {"text": "stdlib", "seq_len": 512},
    },
    "computing": {
        "model": {"family": "gpt2", "num_layers": 8, "hidden_size": 512, "num_heads": 8},
        "training": {"global_batch": 8, "micro_batch": 2},
        "data": {"text": "stdlib", "seq_len": 256},
    },
}


def train(name: str, options: argparse.Namespace, steps: int, run: dict[str, Any], faults: str = "") -> Run:
    sections = PIPELINES[name]
    config = sections | {
        "run": {"name": name, "seed": 1, "threads": THREADS, "device": "cpu"} | run,
        "training": {"steps": steps} | sections["training"],
        "pipeline": {"stages": STAGES},
        "wire": {"activations": "tah", "gradients": "fixed:bits=6"},
        "emulate": {"rate": options.rate} | sections.get("emulate", {}),
        "hosts": "namespaces",
    }
    with tempfile.TemporaryDirectory() as marks:
        return launch(config, {"TAHQ_FAULTS": faults, "TAHQ_FAULTS_FOLDER": marks})


def overhead(options: argparse.Namespace) -> Iterator[list[str]]:
    """With and without protection, in turns; which comes first changes from block to block."""
    settings = {"with": {"checkpoint_every": options.every}, "without": {"frame_log": 0, "checkpoint_every": "never"}}
    for name in PIPELINES:
        means: dict[str, list[float]] = {each: [] for each in settings}
        for block in range(options.repeats):
            for each in list(settings)[:: 1 if block % 2 else -1]:
                run = train(name, options, options.steps, settings[each])
                means[each].append(statistics.fmean(run.step_times_s(SETTLE)))
        ratios = [with_ / without for with_, without in zip(means["with"], means["without"], strict=True)]
        yield [name, spread(means["without"], 4), spread(means["with"], 4), spread(ratios, 4)]


def recoveries(options: argparse.Namespace) -> Iterator[list[str]]:
    every = max(options.behind) + 5
    for behind in options.behind:
        seconds, step_s = [], []
        for _ in range(options.repeats):
            fault = f"kill@forward:stage=1:step={every + behind}"
            run = train("sleeping", options, every + behind + 3, {"checkpoint_every": every}, fault)
            seconds += [float(found) for found in re.findall(r"is back after ([0-9.]+) s", run.output)]
            step_s.append(statistics.median(run.step_times_s(SETTLE)))
        yield [str(behind), spread(seconds, 1), f"{statistics.median(step_s):.3f}"]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    columns = ("pipeline", "without, s per step", "with", "with / without")
    yield Table(columns, overhead(options), f"A checkpoint every {options.every} steps, {options.rate}.")
    columns = ("steps since the checkpoint", "seconds until it is back", "a step takes, s")
    yield Table(columns, recoveries(options), "A worker of stage 1 is killed.")


if __name__ == "__main__":
    main(
        __doc__,
        tables,
        {
            "--steps": {"type": int, "default": 105},
            "--every": {"type": int, "default": 50, "help": "steps between checkpoints"},
            "--rate": {"default": "300mbit"},
            "--behind": {"type": int, "nargs": "*", "default": [1, 10, 25, 50], "help": "steps after a checkpoint"},
        },
        repeats=5,
    )
