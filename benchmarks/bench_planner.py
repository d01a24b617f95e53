"""How good and how fast the planner is: against all plans of small clusters, and on up to 1,000 hosts.

    python benchmarks/bench_planner.py [--clusters 3] [--exhaustive] [--output benchmarks/results/planner_….md]

1. *Against all plans.* Random clusters of four hosts (compute 1 : 2 : 4, links of 20 to 1000 Mbit/s, up and down apart,
   paths of 5 to 150 ms, some with little memory) and a model of twelve layers. All orders of all subsets, all
   divisions, sizes of micro-batch, schedules and profiles of in-flight depths are simulated, except those whose lower
   bound is above the best so far, which cannot win; `--exhaustive` leaves none out, and takes hours.
2. *Many hosts.* Seconds of processor time for clusters of up to 1,000 hosts in 50 sites, replicas allowed.
"""

import argparse
import random
import time
from collections.abc import Iterator
from itertools import combinations

from exhaustive_plans import best_of_all
from harness import Table, main

from tahq.plan.cluster_numbers import ClusterNumbers, HostNumbers, LayerTimes, PathNumbers
from tahq.plan.planner import plan
from tahq.plan.prediction import step_time_s
from tahq.plan.problem import HeldBytes, MemoryOption, ModelNumbers, PlanProblem, divisors

HIDDEN, SEQ_LEN, VOCABULARY = 768, 256, 50_257
RATES = (20e6, 50e6, 100e6, 1e9)
ROUND_TRIPS = (0.005, 0.03, 0.15)
SCHEDULES = ("1f1b", "gpipe", "zero-bubble")


def model(num_layers: int, global_batch: int) -> ModelNumbers:
    tensor = 4 * SEQ_LEN * HIDDEN
    held = {
        size: HeldBytes(size * 20 * tensor, size * tensor, size * 4 * SEQ_LEN * VOCABULARY, size * tensor)
        for size in divisors(global_batch)
    }
    ends = 16 * VOCABULARY * HIDDEN
    option = MemoryOption(held, 16 * 12 * HIDDEN * HIDDEN, ends, ends)
    return ModelNumbers(num_layers, HIDDEN, SEQ_LEN, global_batch, (option,))


def host(index: int, draw: random.Random, site: str | None, memory: int | None) -> HostNumbers:
    forward = draw.choice([0.004, 0.008, 0.016])
    times = [
        LayerTimes(micro_batch=size, block_forward=each, block_backward=2 * each, last_forward=each, last_backward=each)
        for size, each in ((1, forward), (8, 6 * forward))
    ]
    up, down = draw.choice(RATES), draw.choice(RATES)
    return HostNumbers(name=f"h{index}", up=up, down=down, site=site, memory=memory, compute=times)


def small_cluster(seed: int) -> ClusterNumbers:
    draw = random.Random(seed)
    memory = draw.choice([None, 6_000_000_000])
    hosts = [host(index, draw, None, memory) for index in range(4)]
    paths = [
        PathNumbers(
            source=one.name, target=other.name, rate=draw.choice([None, 30e6]), round_trip=draw.choice(ROUND_TRIPS)
        )
        for one, other in combinations(hosts, 2)
    ]
    return ClusterNumbers(hosts=hosts, paths=paths)


def large_cluster(num_hosts: int) -> ClusterNumbers:
    draw = random.Random(num_hosts)
    sites = [f"site{index}" for index in range(max(1, num_hosts // 20))]
    hosts = [host(index, draw, draw.choice(sites), 16_000_000_000) for index in range(num_hosts)]
    used = sorted({each.site for each in hosts if each.site is not None})
    inside = [PathNumbers(source=site, target=site, round_trip=0.002) for site in used]
    return ClusterNumbers(hosts=hosts, paths=inside, round_trip=0.04)


def against_all(options: argparse.Namespace) -> Iterator[list[object]]:
    for seed in range(options.clusters):
        problem = PlanProblem(model(12, 8), small_cluster(seed), schedules=SCHEDULES)
        begun = time.process_time()
        planned = plan(problem)
        own_s = time.process_time() - begun
        _, best_s, simulated = best_of_all(problem, prune=not options.exhaustive)
        all_s = time.process_time() - begun - own_s
        chosen_s = step_time_s(planned.table, planned.best.plan)
        steps = f"{chosen_s:.4f}", f"{best_s:.4f}", f"{chosen_s / best_s - 1:.2%}"
        yield [seed, *steps, f"{own_s:.1f}", f"{all_s:.1f}", f"{simulated:,}"]


def many_hosts(options: argparse.Namespace) -> Iterator[list[object]]:
    for num_hosts in options.hosts:
        begun = time.process_time()
        planned = plan(PlanProblem(model(48, 256), large_cluster(num_hosts), max_replicas=4))
        replicas = len(planned.replicas.plans) if planned.replicas else 1
        stages, tokens_per_s = planned.best.plan.num_stages, f"{planned.tokens_per_s:,.0f}"
        yield [num_hosts, stages, replicas, tokens_per_s, f"{time.process_time() - begun:.1f}"]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    columns = ("cluster", "planner, s per step", "best of all", "slower by", "planner, s", "all, s", "simulated")
    yield Table(columns, against_all(options), heading="Against all plans")
    columns = ("hosts", "stages", "replicas", "tokens/s", "processor time, s")
    yield Table(columns, many_hosts(options), heading="Many hosts")


if __name__ == "__main__":
    main(
        __doc__,
        tables,
        {
            "--clusters": {"type": int, "default": 3, "help": "random clusters of four hosts"},
            "--exhaustive": {"action": "store_true", "help": "simulate all plans, however hopeless"},
            "--hosts": {"type": int, "nargs": "*", "default": [10, 100, 1000], "help": "sizes of large clusters"},
        },
    )
