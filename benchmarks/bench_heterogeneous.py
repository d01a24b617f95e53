"""A cluster of unlike hosts: what a plan is worth against the hosts as listed and layers split evenly.

    python benchmarks/bench_heterogeneous.py --numbers numbers.yaml     # what the planner is told; measures nothing
    tahq plan benchmarks/heterogeneous.yaml --numbers numbers.yaml --json plan.json
    python benchmarks/bench_heterogeneous.py --plan plan.json           # the naive pipeline, and the planned one
    python benchmarks/bench_heterogeneous.py --plan plan.json --dry-run # what the simulator says of both

Four hosts in network namespaces, twelve layers asleep as long as each host would take (`heterogeneous_cluster`), TAH
and 6 bits unless the plan says otherwise. Needs root and a quiet machine. NAME.md and NAME.json have tokens a second
of both, the simulator's prediction of each, and whether the plan is worth 1.5 times the naive pipeline.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_rows import quartiles
from harness import describe
from heterogeneous_cluster import (
    CLUSTER,
    GLOBAL_BATCH,
    SEQ_LEN,
    ChosenPlan,
    cluster_numbers,
    load_plan,
    naive_plan,
    network_config,
)

from tahq.config.cluster import ClusterConfig
from tahq.errors import TahqError
from tahq_netem.network.description import plan_network
from tahq_netem.runtimes.session import SessionRequest
from tahq_netem.sweep.measurement import Measurement, check_busy, measure_point
from tahq_netem.sweep.networks import calibrate_quickly, open_network
from tahq_netem.sweep.prediction import CodecSeconds, predicted_step_s, schedule_with_depth
from tahq_netem.sweep.runner import RUNTIMES
from tahq_netem.sweep.spec import SweepConfig
from tahq_netem.sweep.workload import planned_work, session_config

RESULTS = Path(__file__).parent / "results"
MIN_TIMES_NAIVE = 1.5


def measure(plan: ChosenPlan, sweep: SweepConfig, *, calibrate: bool) -> dict[str, Any]:
    """Train so on the cluster; returns what was measured, and what the simulator says with the codecs' times of it.

    Raises:
        TahqError: no such network here, a session that was lost, or cores that did not suffice.
    """
    times = plan.times()
    work = planned_work(sweep, plan.key(), times)
    with open_network(network_config(), sweep) as network, tempfile.TemporaryDirectory(prefix="tahq-bench-") as name:
        calibration = calibrate_quickly(network) if calibrate else {"network": network.describe()}
        config = with_layers(session_config(sweep, plan.key(), Path(name), times), plan.layers)
        request = SessionRequest(config, plan.schedule, network, tuple(plan.hosts), Path(name))
        with RUNTIMES["tahq"](request) as session:
            measured = measure_point(session, sweep, network, work, times)
    check_busy(measured.busy, sweep.max_busy_cores)
    return figures(plan, sweep, measured) | {"calibration": calibration}


def with_layers(config: ClusterConfig, layers: Sequence[int]) -> ClusterConfig:
    """The configuration with so many layers on each stage."""
    pipeline = config.pipeline.model_copy(update={"layers": list(layers)})
    return ClusterConfig.model_validate(config.model_copy(update={"pipeline": pipeline}).model_dump())


def figures(plan: ChosenPlan, sweep: SweepConfig, measured: Measurement) -> dict[str, Any]:
    """A row, fit for JSON; the step is the median."""
    low_s, step_s, high_s = quartiles([step.seconds for step in measured.steps])
    codec = CodecSeconds.measured(measured.steps, plan.num_micro_batches)
    predicted_s = predict(plan, sweep, codec or CodecSeconds())
    return {
        "plan": plan.model_dump(),
        "step_s": step_s,
        "step_low_s": low_s,
        "step_high_s": high_s,
        "tokens_per_s": GLOBAL_BATCH * SEQ_LEN / step_s,
        "predicted_s": predicted_s,
        "prediction_error": predicted_s / step_s - 1,
        "busy_cores": measured.busy.own,
        "busy_cores_of_others": measured.busy.others,
    }


def predict(plan: ChosenPlan, sweep: SweepConfig, codec: CodecSeconds) -> float:
    """Seconds of a step in the simulator."""
    schedule = schedule_with_depth(plan.schedule, len(plan.hosts), plan.num_micro_batches, plan.in_flight)
    work = planned_work(sweep, plan.key(), plan.times())
    return predicted_step_s(schedule, work, plan_network(network_config()), codec, hosts=plan.hosts)


def report(rows: Mapping[str, Mapping[str, Any]], machine: str) -> str:
    """The result file, as Markdown."""
    return "\n".join(_lines(rows, machine)) + "\n"


def _lines(rows: Mapping[str, Mapping[str, Any]], machine: str) -> Iterator[str]:
    yield "# A cluster of unlike hosts\n"
    yield f"{machine}. `python benchmarks/bench_heterogeneous.py`\n"
    yield "| host | speed | up, Mbit/s | down, Mbit/s |\n|---|---|---|---|"
    for host in CLUSTER:
        yield f"| {host.name} | {host.speed:g} | {host.up_bits_per_s / 1e6:g} | {host.down_bits_per_s / 1e6:g} |"
    yield "\n| pipeline | order | layers | how | step, s | tokens/s | predicted, s | off by | busy cores |"
    yield "|" + "---|" * 9
    for name, row in rows.items():
        plan = row["plan"]
        depths = f" {plan['depths']}" if plan["depths"] else ""
        how = f"{plan['schedule']}{depths}, `{plan['activations']} / {plan['gradients']}`, by {plan['micro_batch']}"
        cells = [
            *(name, ", ".join(plan["hosts"]), ", ".join(map(str, plan["layers"])), how),
            f"{row['step_s']:.3f} ({row['step_low_s']:.3f}–{row['step_high_s']:.3f})",
            *(f"{row['tokens_per_s']:,.0f}", f"{row['predicted_s']:.3f}", f"{row['prediction_error']:+.1%}"),
            f"{row['busy_cores']:.2f} ({row['busy_cores_of_others']:.2f})",
        ]
        yield f"| {' | '.join(cells)} |"
    yield f"\n{verdict(rows)}"
    yield from (f"\n{name}: {row['plan']['explanation']}" for name, row in rows.items() if row["plan"]["explanation"])


def times_naive(rows: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Tokens a second of the planned pipeline, over those of the naive one; None where either is missing."""
    if not {"naive", "planned"} <= rows.keys():
        return None
    return float(rows["planned"]["tokens_per_s"] / rows["naive"]["tokens_per_s"])


def verdict(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The target, met or missed."""
    target = f"The planned pipeline at least {MIN_TIMES_NAIVE} × the naive one"
    times = times_naive(rows)
    if times is None:
        return f"{target}: not measured"
    return f"{target}: {times:.2f} ×, {'met' if times >= MIN_TIMES_NAIVE else 'MISSED'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, help="YAML or JSON: hosts, layers, schedule, depths, codecs")
    parser.add_argument("--numbers", type=Path, help="write the cluster for the planner here, and measure nothing")
    parser.add_argument("--dry-run", action="store_true", help="say what the simulator makes of it, measure nothing")
    parser.add_argument("--steps", type=int, default=5, help="that count")
    parser.add_argument("--settle", type=int, default=2, help="steps that go by before")
    parser.add_argument("--backend", default="auto", help="of the network; see tahq-netem probe")
    parser.add_argument("--no-calibration", action="store_true", help="do not measure the network first")
    parser.add_argument("--max-busy-cores", type=float, help="above, it is no measurement")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="heterogeneous")
    options = parser.parse_args()
    if options.numbers is not None:
        options.numbers.write_text(json.dumps(cluster_numbers(), indent=1) + "\n")  # JSON is YAML
        return 0
    try:
        run(options)
    except TahqError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> None:
    """Measure both pipelines, or simulate them, and write what came out."""
    plans = {"naive": naive_plan()} | ({"planned": load_plan(options.plan)} if options.plan is not None else {})
    rows: dict[str, dict[str, Any]] = {}
    for name, plan in plans.items():
        sweep = plan.sweep(
            num_steps=options.steps,
            settle=options.settle,
            backend=options.backend,
            max_busy_cores=options.max_busy_cores,
        )
        predicted_s = predict(plan, sweep, CodecSeconds())
        print(f"{name}: {predicted_s:.3f} s a step by the simulator without codecs", flush=True)
        if not options.dry_run:
            rows[name] = measure(plan, sweep, calibrate=not options.no_calibration)
    if rows:
        options.out.mkdir(parents=True, exist_ok=True)
        text, found = report(rows, describe()), {"machine": describe(), "rows": rows, "times_naive": times_naive(rows)}
        (options.out / f"{options.name}.md").write_text(text)
        (options.out / f"{options.name}.json").write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
        print(text)


if __name__ == "__main__":
    sys.exit(main())
