"""A cluster of unlike hosts: the planner's pipeline against the hosts as listed with layers split evenly.

    python benchmarks/bench_heterogeneous.py [--output benchmarks/results/heterogeneous_<hardware>_<yyyymm>.md]
    python benchmarks/bench_heterogeneous.py --dry-run      # what both simulators say of the two

Compute is 1 : 2 : 4, links are 50 to 1000 Mbit/s and not the same up and down. Four hosts in network namespaces, twelve
layers asleep as long as each host would take, TAH and 6 bits (`planned_runs`); needs root and a quiet machine.
"""

import argparse
from collections.abc import Iterator

from bench_planner import SCHEDULES
from harness import Table, main
from planned_runs import ARGUMENTS, COLUMNS, WIRE, PlannedRun, outcome, ratio

from tahq.comm.config import LinksConfig
from tahq.comm.network_model import GOODPUT_SHARE
from tahq.plan.cluster_numbers import ClusterNumbers, HostNumbers, LayerTimes
from tahq.plan.planner import plan
from tahq.plan.prediction import predict
from tahq.plan.problem import HeldBytes, ModelNumbers, PipelinePlan, PlanProblem

NUM_LAYERS, MICRO_BATCH, GLOBAL_BATCH = 12, 4, 64
MODEL = ModelNumbers(NUM_LAYERS, 512, 256, GLOBAL_BATCH, {size: HeldBytes() for size in (1, 2, 4, 8)})
LAYER_S = 0.030, 0.060
"""Forward and backward of a micro-batch on a host of speed 1."""
HOSTS = (
    ("desk", 1, 50e6, 200e6),
    ("tower", 4, 300e6, 1000e6),
    ("laptop", 2, 100e6, 500e6),
    ("server", 1, 1000e6, 1000e6),
)
"""Name, speed, and bit/s up and down of each host, in the order in which a user might list them."""
MIN_TIMES_NAIVE = 1.5


def problem() -> PlanProblem:
    """The cluster as the planner reads it: rates as TCP has them."""
    hosts = [
        HostNumbers(
            name=name,
            up=GOODPUT_SHARE * up,
            down=GOODPUT_SHARE * down,
            compute=[
                LayerTimes(micro_batch=MICRO_BATCH, block_forward=LAYER_S[0] / speed, block_backward=LAYER_S[1] / speed)
            ],
        )
        for name, speed, up, down in HOSTS
    ]
    codecs = {"activations": WIRE[:1], "gradients": WIRE[1:]}
    return PlanProblem(
        MODEL, ClusterNumbers(hosts=hosts), **codecs, schedules=SCHEDULES, piece_nbytes=LinksConfig().piece
    )


def naive_plan() -> PipelinePlan:
    """The hosts as they are listed, as many layers for each, and 1F1B."""
    count, cuts = len(HOSTS), len(HOSTS) - 1
    return PipelinePlan(
        hosts=tuple(range(count)),
        layers=(NUM_LAYERS // count,) * count,
        micro_batch=MICRO_BATCH,
        num_micro_batches=GLOBAL_BATCH // MICRO_BATCH,
        schedule="1f1b",
        activations=(WIRE[0],) * cuts,
        gradients=(WIRE[1],) * cuts,
    )


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    yield Table(
        ("host", "speed", "up, Mbit/s", "down, Mbit/s"),
        ([name, speed, f"{up / 1e6:g}", f"{down / 1e6:g}"] for name, speed, up, down in HOSTS),
    )
    asked = problem()
    planned = plan(asked)
    naive, chosen = (
        PlannedRun(choice, asked, prediction, options)
        for choice, prediction in (("naive", predict(planned.table, naive_plan())), ("planned", planned.best))
    )
    yield Table(COLUMNS, (run.row() for run in (naive, chosen)))
    times = ratio(naive, chosen)
    target = f"The planned pipeline at least {MIN_TIMES_NAIVE} × as fast as the naive one"
    yield f"{target}: {outcome(times, f'{times or 0.0:.2f} ×', is_met=(times or 0.0) >= MIN_TIMES_NAIVE)}"


if __name__ == "__main__":
    main(__doc__, tables, ARGUMENTS)
