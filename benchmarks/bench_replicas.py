"""Two replicas of two stages against four stages in a row, on equal hosts: seconds of a step, and the planner's.

    python benchmarks/bench_replicas.py [--output benchmarks/results/replicas_<hardware>_<yyyymm>.md]

Four hosts in network namespaces; stages sleep for their compute, a fixed time per layer, so that two cores suffice.
All runs are planned by `tahq.plan` for the given network, written to cluster.yaml as `tahq plan --write` does, and
started with `tahq-launch`. A step is the median of those after the first two. Sleeping stages have no weights but a row
of channels, and the planner is told so: sums over replicas take two latencies (`bench_all_reduce.py` has large ones).

Needs root and a quiet machine.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from bench_engine import BACKWARD_S, FORWARD_S, HIDDEN_SIZE, SEQ_LEN
from harness import Table, launch, main

from tahq.config.file import dump_yaml, load_config
from tahq.plan.planner import plan
from tahq.plan.problem import MemoryOption
from tahq.units import write_duration
from tahq.worker.assembly import resolved_spec
from tahq_launch.plan.command import planned_config
from tahq_launch.plan.numbers import estimated_numbers
from tahq_launch.plan.problem import PlanChoices, problem_of
from tahq_launch.start.resolution import resolve_for_run

HOSTS, STEPS, SETTLE = 4, 8, 2
SHAPES = ((1, 4), (2, 2), (4, 1))
"""Replicas, stages."""


def config(mbits: float, round_trip_ms: float) -> dict[str, Any]:
    sleep = {"forward": f"{1e3 * FORWARD_S:g}ms", "backward": f"{1e3 * BACKWARD_S:g}ms"}
    return {
        "run": {"name": "replicas"},
        "model": {"family": "gpt2", "num_layers": HOSTS, "hidden_size": HIDDEN_SIZE, "num_heads": 8},
        "data": {"text": "stdlib", "seq_len": SEQ_LEN},
        "training": {"global_batch": 32, "micro_batch": 4, "steps": STEPS},
        "pipeline": {"stages": HOSTS},
        "emulate": {
            "sleep": sleep,
            "rate": f"{mbits:g}mbit",
            "delay": write_duration(round_trip_ms / 2e3),
            "congestion_control": "bbr",
            "tcp_slow_start_after_idle": False,
        },
        "hosts": "namespaces",
        "wire": {"activations": "tah", "gradients": "fixed:bits=8"},
    }


def rows(options: argparse.Namespace) -> Iterator[list[str]]:
    for mbits in options.rates:
        for round_trip_ms in options.round_trips_ms:
            first_s = None
            for replicas, stages in SHAPES:
                values, predicted_s = planned(config(mbits, round_trip_ms), replicas, stages)
                run = launch(values)
                step_s = statistics.median(run.step_times_s()[SETTLE:])
                first_s = first_s or step_s
                schedule = f"{run.steps[-1]['schedule']} {', '.join(map(str, run.steps[-1]['in_flight']))}"
                yield [
                    *(f"{mbits:g}", f"{round_trip_ms:g}", f"{replicas} × {stages}", schedule),
                    *(f"{step_s:.3f}", f"{predicted_s:.3f}", f"{100 * (predicted_s / step_s - 1):+.1f} %"),
                    f"{first_s / step_s:.2f}",
                ]


def planned(values: dict[str, Any], replicas: int, stages: int) -> tuple[dict[str, Any], float]:
    """cluster.yaml with the best plan of this shape, and predicted seconds of a step."""
    with tempfile.TemporaryDirectory(prefix="tahq-bench-") as name:
        path = Path(name) / "cluster.yaml"
        path.write_text(yaml.safe_dump(values))
        config = resolve_for_run(load_config(path))
    spec = resolved_spec(config, None)
    problem = problem_of(
        config, spec, estimated_numbers(config, spec)[0], PlanChoices(num_stages=stages, max_replicas=replicas)
    )
    size = config.training.micro_batch  # for which a layer's seconds are set
    option = MemoryOption({size: problem.model.options[0].held[size]}, block_nbytes=16.0 * HIDDEN_SIZE)
    trained = float(HIDDEN_SIZE), 0.0, 0.0
    found = plan(replace(problem, model=replace(problem.model, options=(option,), trained=trained)))
    plans = found.pipelines
    if len(plans) != replicas:
        raise AssertionError(f"planned {len(plans)} replicas, expected {replicas}")
    hosts = [host for each in plans for host in each.hosts]
    return yaml.safe_load(dump_yaml(planned_config(config, found.table, plans[0], hosts)[0])), found.step_s


def tables(options: argparse.Namespace) -> Iterator[Table]:
    columns = (
        "Mbit/s",
        "round trip, ms",
        "replicas × stages",
        "schedule",
        "step, s",
        "predicted, s",
        "off by",
        "1 × 4 / this",
    )
    caption = (
        f"{1e3 * FORWARD_S:g} and {1e3 * BACKWARD_S:g} ms per layer and micro-batch of 4, 4 layers, 8 micro-batches."
    )
    yield Table(columns, rows(options), caption)


if __name__ == "__main__":
    main(
        __doc__,
        tables,
        {
            "--rates": {"type": float, "nargs": "+", "default": [100, 300], "help": "Mbit/s"},
            "--round-trips-ms": {"type": float, "nargs": "+", "default": [0, 50]},
        },
    )
