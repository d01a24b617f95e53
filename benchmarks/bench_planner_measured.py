"""What the planner says of small clusters, and what training on networks like them takes.

    python benchmarks/bench_planner_measured.py --dry-run            # the plans, and what both simulators say of them
    python benchmarks/bench_planner_measured.py --clusters 0 1 2     # needs root and a quiet machine

The clusters of bench_planner: four hosts, twelve layers. The planner's choice is trained on a network of namespaces
with the cluster's links, caps and round trips, and so is the best of all plans where that is another one. Stages sleep
as long as their layers take; codecs, transport and schedule are real.

So that little of a step is codecs, which share this machine's cores, clusters are `--scale` times as slow: seconds of
compute times it, rates divided by it; round trips stay. There is one codec a direction, as in any run. A path's rate
holds one way, as the planner reads it. Where one host alone is best, there is nothing to measure.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench_heterogeneous import with_layers
from exhaustive_plans import best_of_all
from harness import describe
from planner_rows import BEST, PLANNER, Row, figures, report, verdicts
from small_clusters import (
    SCHEDULES,
    WIRE,
    codec_seconds,
    network_config,
    network_plan,
    problem,
    session_key,
    stage_times,
    sweep,
)

from tahq.errors import TahqError
from tahq.plan.planner import plan as planned_for
from tahq.plan.prediction import Prediction, predict, step_time_s
from tahq.plan.problem import PipelinePlan, PlanProblem, named
from tahq_netem.backends.network import Network
from tahq_netem.measure.calibration import calibrate
from tahq_netem.runtimes.session import SessionRequest
from tahq_netem.sweep.measurement import check_busy, measure_point
from tahq_netem.sweep.networks import apply_plan, open_network
from tahq_netem.sweep.prediction import CodecSeconds, predicted_step_s, schedule_with_depth
from tahq_netem.sweep.runner import RUNTIMES
from tahq_netem.sweep.spec import SweepConfig
from tahq_netem.sweep.workload import planned_work, session_config

RESULTS = Path(__file__).parent / "results"
_AS_FAST = 1 - 1e-9


def choices(asked: PlanProblem, *, planner_only: bool) -> dict[str, Prediction]:
    """The planner's choice, and the best of all plans unless that is no faster in the simulator."""
    planned = planned_for(asked)
    chosen = {PLANNER: planned.best}
    if not planner_only:
        best, best_s, _ = best_of_all(asked)
        if best_s < _AS_FAST * step_time_s(planned.table, planned.best.plan):
            chosen[BEST] = predict(planned.table, best)
    return chosen


def measure(asked: PlanProblem, plan: PipelinePlan, config: SweepConfig, *, calibrated: bool) -> Row:
    """Train so on the cluster's network.

    Raises:
        TahqError: no such network here, a session that was lost, or cores that did not suffice.
    """
    key, times, hosts = session_key(asked, plan), stage_times(asked, plan), named(asked, plan.hosts)
    work = planned_work(config, key, times)
    network_of_hosts = network_config(asked.cluster)
    with open_network(network_of_hosts, config) as network, tempfile.TemporaryDirectory(prefix="tahq-bench-") as name:
        apply_plan(network, network_plan(asked.cluster))
        calibration = _calibration(network, hosts) if calibrated else {"network": network.describe()}
        of_workers = with_layers(session_config(config, key, Path(name), times), plan.layers)
        with RUNTIMES["tahq"](SessionRequest(of_workers, plan.schedule, network, hosts, Path(name))) as session:
            measured = measure_point(session, config, network, work, times)
    check_busy(measured.busy, config.max_busy_cores)
    codec = CodecSeconds.measured(measured.steps, plan.num_micro_batches)
    simulated_s = simulated(asked, plan, config, codec or CodecSeconds())
    return figures(measured) | {"simulated_s": simulated_s, "calibration": calibration}


def _calibration(network: Network, hosts: Sequence[str]) -> dict[str, Any]:
    """What the paths were measured to be that the pipeline takes."""
    pairs = [pair for one, other in itertools.pairwise(hosts) for pair in ((one, other), (other, one))]
    found = calibrate(network, pairs=pairs, quick=True)
    found.check()
    return found.as_dict()


def simulated(asked: PlanProblem, plan: PipelinePlan, config: SweepConfig, codec: CodecSeconds) -> float:
    """Seconds of a step by the simulator of sweeps: without the commit's way back, and without frames' headers."""
    schedule = schedule_with_depth(plan.schedule, plan.num_stages, plan.num_micro_batches, plan.depths or None)
    work = planned_work(config, session_key(asked, plan), stage_times(asked, plan))
    return predicted_step_s(schedule, work, network_plan(asked.cluster), codec, hosts=named(asked, plan.hosts))


def described(seed: int, who: str, asked: PlanProblem, choice: Prediction) -> Row:
    """What is known of a row before anything is measured."""
    plan = choice.plan
    return {
        "cluster": seed,
        "choice": who,
        "hosts": list(named(asked, plan.hosts)),
        **{name: list(getattr(plan, name)) for name in ("layers", "depths")},
        **{name: getattr(plan, name) for name in ("schedule", "micro_batch", "num_micro_batches")},
        "wire": " / ".join(WIRE),
        "predicted_s": choice.step_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, nargs="+", default=[0, 1, 2], help="seeds of bench_planner's clusters")
    parser.add_argument("--scale", type=float, default=6.0, help="how many times as slow clusters are")
    parser.add_argument("--dry-run", action="store_true", help="say what the simulators make of it, measure nothing")
    parser.add_argument("--planner-only", action="store_true", help="do not look for the best of all plans")
    parser.add_argument("--steps", type=int, default=5, help="that count")
    parser.add_argument("--settle", type=int, help="steps that go by before; default: until 64 frames of a link have")
    parser.add_argument("--backend", default="auto", help="of the network; see tahq-netem probe")
    parser.add_argument("--no-calibration", action="store_true", help="do not measure the network first")
    parser.add_argument("--max-busy-cores", type=float, help="above, it is no measurement")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="planner_measured")
    options = parser.parse_args()
    rows: list[Row] = []
    for row in run(options):
        rows.append(row)
        if not options.dry_run:
            write(options, rows)
    return 2 if any("failed" in row for row in rows) else 0


def run(options: argparse.Namespace) -> Iterator[Row]:
    """Row by row; what cannot be measured says why, and the rest of its cluster is left out."""
    for seed in options.clusters:
        asked, begun_s = problem(seed, options.scale), time.monotonic()
        chosen = choices(asked, planner_only=options.planner_only)
        print(f"cluster {seed}: searched for {time.monotonic() - begun_s:.1f} s", file=sys.stderr, flush=True)
        for who, choice in chosen.items():
            row = described(seed, who, asked, choice)
            try:
                row |= _tried(asked, choice.plan, options)
            except TahqError as error:
                row["failed"] = str(error)
            print(json.dumps({key: row[key] for key in row if key != "calibration"}), flush=True)
            yield row
            if "failed" in row:
                break


def _tried(asked: PlanProblem, plan: PipelinePlan, options: argparse.Namespace) -> Row:
    """Measured, or only simulated."""
    session_key(asked, plan)  # refuses one host alone before a sweep is made for it
    config = sweep(
        asked,
        plan,
        num_steps=options.steps,
        settle=options.settle,
        backend=options.backend,
        max_busy_cores=options.max_busy_cores,
    )
    if options.dry_run:
        return {"simulated_s": simulated(asked, plan, config, codec_seconds(asked, plan))}
    return measure(asked, plan, config, calibrated=not options.no_calibration)


def write(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """What is measured so far."""
    seeds = dict.fromkeys(row["cluster"] for row in rows)
    found = {
        "machine": describe(),
        "scale": options.scale,
        "planner_only": options.planner_only,
        "schedules": SCHEDULES,
        "clusters": {seed: problem(seed, options.scale).cluster.model_dump(mode="json") for seed in seeds},
        "rows": rows,
        "verdicts": list(verdicts(rows, planner_only=options.planner_only)),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.name}.md").write_text(report(found), encoding="utf-8")
    (options.out / f"{options.name}.json").write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
