"""The planner's prediction and choice for small clusters, against training on networks like them.

    python benchmarks/bench_planner_measured.py --dry-run            # the plans, and what both simulators say of them
    python benchmarks/bench_planner_measured.py --clusters 0 1 2     # needs root and a quiet machine

The clusters of bench_planner: four hosts, twelve layers. The planner's choice is trained on a network of namespaces
with the cluster's links, caps and round trips, and so is the best of all plans where that is another one. Stages sleep
as long as their layers take; codecs, transport and schedule are real (`planned_runs`).

So that little of a step is codecs, which share this machine's cores, clusters are `--scale` times as slow: seconds of
compute times it, rates divided by it; round trips stay. Where one host alone is best, there is nothing to measure.
"""

import argparse
import time
from collections.abc import Iterator, Sequence

from bench_planner import SCHEDULES, model, small_cluster
from exhaustive_plans import best_of_all
from harness import Table, main, say
from planned_runs import ARGUMENTS, COLUMNS, WIRE, PlannedRun, outcome, ratio

from tahq.comm.config import LinksConfig
from tahq.errors import TahqError
from tahq.plan.cluster_numbers import ClusterNumbers, CodecTimes, LayerTimes
from tahq.plan.planner import plan
from tahq.plan.prediction import predict, step_time_s
from tahq.plan.problem import PlanProblem

CODEC_TIMES = {
    "tah": CodecTimes(encode_per_element=9.34e-3 / 3_276_800, decode_per_element=2.65e-3 / 3_276_800),
    "fixed:bits=6": CodecTimes(encode_per_element=6.71e-3 / 3_276_800, decode_per_element=3.87e-3 / 3_276_800),
}
"""By results/codec_cpu_epyc2_202611.md: a tensor of 3,276,800 float32 on one thread of an EPYC, backend cpu."""
MAX_PREDICTION_ERROR, MAX_SLOWER = 0.05, 0.05


def problem(seed: int, scale: float) -> PlanProblem:
    """What bench_planner asks of this cluster, slowed, with one codec per direction and frames in pieces."""
    cluster = slowed(small_cluster(seed), scale)
    codecs = {"activations": WIRE[:1], "gradients": WIRE[1:]}
    return PlanProblem(model(12, 8), cluster, **codecs, schedules=SCHEDULES, piece_nbytes=LinksConfig().piece)


def slowed(cluster: ClusterNumbers, scale: float) -> ClusterNumbers:
    """Compute takes `scale` times as long, rates are as much lower, round trips stay; every host codes alike."""

    def rates(of: object, *names: str) -> dict[str, float | None]:
        known = {name: getattr(of, name) for name in names}
        return {name: None if rate is None else rate / scale for name, rate in known.items()}

    def times(of: LayerTimes) -> LayerTimes:
        seconds = {name: scale * value for name, value in of.model_dump().items() if isinstance(value, float)}
        return of.model_copy(update=seconds)

    hosts = [
        host.model_copy(
            update={**rates(host, "up", "down"), "compute": list(map(times, host.compute)), "codecs": CODEC_TIMES}
        )
        for host in cluster.hosts
    ]
    paths = [path.model_copy(update=rates(path, "rate")) for path in cluster.paths]
    return cluster.model_copy(update={"hosts": hosts, "paths": paths})


def runs(seed: int, options: argparse.Namespace) -> list[PlannedRun]:
    """The planner's choice, and the best of all plans unless that is no faster in the simulator."""
    asked, begun_s = problem(seed, options.scale), time.monotonic()
    planned = plan(asked)
    chosen = {"planner": planned.best}
    if not options.planner_only:
        best, best_s, _ = best_of_all(asked)
        if best_s < (1 - 1e-9) * step_time_s(planned.table, planned.best.plan):
            chosen["best of all"] = predict(planned.table, best)
    say(f"cluster {seed}: searched for {time.monotonic() - begun_s:.1f} s")
    return [PlannedRun(choice, asked, prediction, options) for choice, prediction in chosen.items()]


def verdicts(found: Sequence[PlannedRun], *, planner_only: bool) -> Iterator[str]:
    """Both targets of a cluster: met, MISSED, or not measured."""
    own, *others = found
    error = None if own.step_s is None else own.predicted_s / own.step_s - 1
    is_met = abs(error or 0.0) <= MAX_PREDICTION_ERROR
    target = f"the planner's prediction within {MAX_PREDICTION_ERROR:.0%} of the step"
    yield f"{target}: {outcome(error, f'{error or 0.0:+.1%}', is_met=is_met)}"
    target = f"the planner's choice at most {MAX_SLOWER:.0%} slower than the best of all plans"
    if not planner_only and not others:
        yield f"{target}: by the simulator no plan is faster, met"
    for best in others:
        times = ratio(own, best)
        slower = (times or 1.0) - 1
        yield f"{target}: {outcome(times, f'{slower:+.1%}', is_met=slower <= MAX_SLOWER)}"


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    for seed in options.clusters:
        try:
            found = runs(seed, options)
        except TahqError as error:
            yield f"Cluster {seed}: {error}."
            continue
        yield Table(COLUMNS, (run.row() for run in found), heading=f"Cluster {seed}, {options.scale:g} times as slow")
        yield "\n\n".join(verdicts(found, planner_only=options.planner_only))


if __name__ == "__main__":
    main(
        __doc__,
        tables,
        {
            "--clusters": {
                "type": int,
                "nargs": "+",
                "default": [0, 1, 2],
                "help": "seeds of bench_planner's clusters",
            },
            "--scale": {"type": float, "default": 6.0, "help": "how many times as slow clusters are"},
            "--planner-only": {"action": "store_true", "help": "do not look for the best of all plans"},
            **ARGUMENTS,
        },
    )
