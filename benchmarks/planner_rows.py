"""What bench_planner_measured makes of its rows: held to the targets, and as a result file."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine_rows import quartiles

from tahq_netem.sweep.measurement import Measurement

MAX_PREDICTION_ERROR, MAX_SLOWER = 0.05, 0.05
PLANNER, BEST = "planner", "best of all"
Row = dict[str, Any]
"""A choice for a cluster, fit for JSON; `failed` says why it was not measured."""

_TITLES = (
    *("cluster", "choice", "hosts", "layers", "schedule", "depths", "micro-batch", "wire", "predicted, s"),
    *("simulated, s", "step, s", "off by", "busy cores", "best, s"),
)


def figures(measured: Measurement) -> Row:
    """What was seen, fit for JSON; the step is the median."""
    low_s, step_s, high_s = quartiles([step.seconds for step in measured.steps])
    return {
        "step_s": step_s,
        "step_low_s": low_s,
        "step_high_s": high_s,
        "steps": [step.seconds for step in measured.steps],
        "busy_cores": measured.busy.own,
        "busy_cores_of_others": measured.busy.others,
    }


def off_by(row: Mapping[str, Any]) -> float:
    """The prediction over the step, less 1."""
    return float(row["predicted_s"] / row["step_s"] - 1)


def verdicts(rows: Sequence[Row], *, planner_only: bool = False) -> Iterator[str]:
    """Both targets for each cluster: met, MISSED, or not measured."""
    for seed in dict.fromkeys(row["cluster"] for row in rows):
        by_choice = {row["choice"]: row for row in rows if row["cluster"] == seed}
        yield f"Cluster {seed}: {_prediction_verdict(by_choice[PLANNER])}"
        if not planner_only:
            yield f"Cluster {seed}: {_choice_verdict(by_choice[PLANNER], by_choice.get(BEST))}"


def _prediction_verdict(row: Row) -> str:
    target = f"the planner's prediction within {MAX_PREDICTION_ERROR:.0%} of the step"
    if "failed" in row:
        return f"{target}: not measured, {row['failed']}"
    return f"{target}: {off_by(row):+.1%}, {_met(abs(off_by(row)) <= MAX_PREDICTION_ERROR)}"


def _choice_verdict(own: Row, best: Row | None) -> str:
    target = f"the planner's choice at most {MAX_SLOWER:.0%} slower than the best of all plans"
    if "failed" in own:
        return f"{target}: not measured, {own['failed']}"
    if best is None:
        return f"{target}: by the simulator no plan is faster, met"
    if "failed" in best:
        return f"{target}: the best of all was not measured, {best['failed']}"
    slower = own["step_s"] / best["step_s"] - 1
    return f"{target}: {slower:+.1%}, {_met(slower <= MAX_SLOWER)}"


def _met(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def report(found: Mapping[str, Any]) -> str:
    """The result file, as Markdown."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield "# The planner, measured\n"
    yield f"{found['machine']}. `python benchmarks/bench_planner_measured.py --scale {found['scale']:g}`\n"
    yield f"Clusters of bench_planner, {found['scale']:g} times as slow. Predicted is by the planner, with a round trip"
    yield "for the commit and codecs as in codec_cpu_epyc2_202611.md; simulated is by the simulator of sweeps, with"
    yield "codecs as in this run and a stage's way to the coordinator in place of the round trip. Steps are medians"
    yield "(quartiles); busy cores are the run's own (others'); best is the step of the best of all plans, measured.\n"
    yield f"| {' | '.join(_TITLES)} |\n{'|---' * len(_TITLES)}|"
    best_s = _best_steps(found["rows"], planner_only=found["planner_only"])
    for row in found["rows"]:
        yield f"| {' | '.join([*_cells(row), _seconds(best_s.get(row['cluster']))])} |"
    for seed, cluster in found["clusters"].items():
        links = ", ".join(f"{host['name']} {_mbit(host['up'])} / {_mbit(host['down'])}" for host in cluster["hosts"])
        yield f"\nCluster {seed}, up / down in Mbit/s as TCP has them: {links}."
    yield from (f"\n{verdict}" for verdict in found["verdicts"])


def _best_steps(rows: Sequence[Row], *, planner_only: bool) -> dict[int, float | None]:
    """By cluster: the planner's own step where no plan is faster in the simulator; nothing where nobody looked."""
    steps = {row["cluster"]: row.get("step_s") for row in rows if row["choice"] == PLANNER and not planner_only}
    return steps | {row["cluster"]: row.get("step_s") for row in rows if row["choice"] == BEST}


def _cells(row: Row) -> list[str]:
    names = [str(row["cluster"]), row["choice"], ", ".join(row["hosts"]), ", ".join(map(str, row["layers"]))]
    depths = ", ".join(map(str, row["depths"])) or "all"
    how = [row["schedule"], depths, str(row["micro_batch"]), f"`{row['wire']}`", _seconds(row["predicted_s"])]
    if "failed" in row:
        return [*names, *how, "", "not measured", "", ""]
    step = f"{row['step_s']:.3f} ({row['step_low_s']:.3f}–{row['step_high_s']:.3f})"
    busy = f"{row['busy_cores']:.2f} ({row['busy_cores_of_others']:.2f})"
    return [*names, *how, _seconds(row["simulated_s"]), step, f"{off_by(row):+.1%}", busy]


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f}"


def _mbit(rate: float | None) -> str:
    return "unshaped" if rate is None else f"{rate / 1e6:.4g}"
