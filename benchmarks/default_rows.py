"""Rows with default settings: `tahq-launch` with nothing set but model, data, batch, links, and the best of all plans.

A default row is a run whose cluster.yaml leaves open whatever tahq chooses. Beside it, the best schedules and depths
by the simulator are run through the same command, with both set, and with the codecs that the default has chosen.
"""

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from engine_points import BACKWARD_S, CONGESTION_CONTROL, FORWARD_S, HIDDEN_SIZE, MICRO_BATCH, SEQ_LEN, Place
from harness import Run, Table, append_row, launch, read_rows, rows_path, say

from tahq.config.file import load_config
from tahq.errors import ScheduleError
from tahq.pipeline.schedule.generators import generate
from tahq.plan.planner import plan
from tahq.plan.prediction import predict, step_time_s
from tahq.plan.problem import PipelinePlan
from tahq.plan.search.table import ClusterTable
from tahq.units import write_duration
from tahq.worker.assembly import resolved_spec
from tahq_launch.plan.numbers import estimated_numbers
from tahq_launch.plan.problem import PlanChoices, problem_of
from tahq_launch.start.resolution import resolve_for_run

Values = dict[str, Any]
Codecs = tuple[str, str]
FP32 = "raw:dtype=fp32"
WIRES: dict[str, Codecs | None] = {
    "default": None,
    "fp32": (FP32, FP32),
    "tah6": ("tah", "fixed:bits=6"),
    "tah8": ("tah", "fixed:bits=8"),
}
STEPS, SET_STEPS, SETTLE = 13, 5, 2
"""Steps of a default run and of a run with a set plan, and those after a start or a change that do not count."""
MAX_ALL = 5_000
"""Up to so many plans all are simulated; of more those that the planner tries with a large budget."""
BUDGET_ACTIONS = 2_000_000
COLUMNS = (
    *("network", "micro-batches", "wire", "how", "schedule", "in flight", "changes"),
    *("step, s", "tokens/s", "predicted, s", "default / best"),
)
DEFAULT_CAPTION = (
    f"*default*: `tahq-launch cluster.yaml`, with codecs set or, in rows called default, not; {STEPS} steps. "
    f"*best n*: the nth of all different plans by the simulator, set, with the default's codecs; {SET_STEPS} steps. "
    f"One run each, in turn; a step is the median of those after the last change of the schedule and {SETTLE} more. "
    "*default / best*: tokens/s over those of the fastest of the best."
)


def values(place: Place, count: int, codecs: Codecs | None, pipeline: Values, steps: int) -> Values:
    """A cluster.yaml in network namespaces like those of the other rows."""
    sleep = {"forward": f"{1e3 * FORWARD_S:g}ms", "backward": f"{1e3 * BACKWARD_S:g}ms"}
    rate = {} if place.rate_bits_per_s is None else {"rate": f"{place.rate_bits_per_s / 1e6:g}mbit"}
    tcp = {"congestion_control": CONGESTION_CONTROL, "tcp_slow_start_after_idle": False}
    return {
        "run": {"name": "default"},
        "model": {"family": "gpt2", "num_layers": place.stages, "hidden_size": HIDDEN_SIZE, "num_heads": 8}
        | {"sleep": sleep},
        "data": {"text": "stdlib", "seq_len": SEQ_LEN},
        "training": {"steps": steps, "global_batch": count * MICRO_BATCH, "micro_batch": MICRO_BATCH},
        "pipeline": {"stages": place.stages, **pipeline},
        "links": {**rate, "delay": write_duration(place.round_trip_s / 2), **tcp},
        "hosts": "namespaces",
    } | ({} if codecs is None else {"wire": dict(zip(("activations", "gradients"), codecs, strict=True))})


def best_plans(place: Place, count: int, codecs: Codecs, num: int) -> list[tuple[PipelinePlan, float]]:
    """The fastest plans by the simulator that differ in the order of some stage's actions, with predicted seconds."""
    with tempfile.TemporaryDirectory(prefix="tahq-bench-") as name:
        path = Path(name) / "cluster.yaml"
        path.write_text(yaml.safe_dump(values(place, count, codecs, {}, 1)))
        config = resolve_for_run(load_config(path))
    spec = resolved_spec(config, None)
    problem = problem_of(config, spec, estimated_numbers(config, spec)[0], PlanChoices(num_stages=place.stages))
    held = {MICRO_BATCH: problem.model.held[MICRO_BATCH]}
    problem = replace(problem, in_order=True, model=replace(problem.model, held=held))
    table = ClusterTable(problem)
    planned = plan(problem)
    every = [planned.best.plan, *itertools.islice(_all(planned.best.plan), MAX_ALL)]
    if len(every) > MAX_ALL:
        planned = plan(problem, BUDGET_ACTIONS)
        every = [planned.best.plan, *planned.others]
    seconds = {}
    for each in every:
        try:
            seconds[each] = step_time_s(table, each)
        except ScheduleError:  # it would deadlock
            continue
    different: dict[object, PipelinePlan] = {}
    for each in sorted(seconds, key=seconds.__getitem__):
        different.setdefault(generate(each.schedule, place.stages, count, depths=each.depths or None).actions, each)
    found = [(each, predict(table, each).step_s) for each in list(different.values())[: 10 * num]]
    return sorted(found, key=lambda pair: pair[1])[:num]


def _all(like: PipelinePlan) -> Iterator[PipelinePlan]:
    """Every schedule with every profile of depths that never rises."""
    stages, count = like.num_stages, like.num_micro_batches
    yield replace(like, schedule="gpipe", depths=())
    for schedule, most in (("1f1b", count), ("zero-bubble", count + stages - 1)):
        for depths in itertools.combinations_with_replacement(range(most, 0, -1), stages):
            yield replace(like, schedule=schedule, depths=depths)


def settled(run: Run) -> list[Values]:
    """The steps after the last change, without those that settle."""
    changed = max((index + 1 for index, step in enumerate(run.steps) if step["schedule_change"]), default=0)
    return run.steps[changed + SETTLE :] or run.steps[-1:]


def _row(place: Place, count: int, wire: str, how: str, run: Run, predicted_s: float | None = None) -> Values:
    steps = settled(run)
    step_s = statistics.median(step["step_time_s"] for step in steps)
    codecs = {link["direction"]: link["codec"] for link in steps[-1]["links"]}
    point = {"place": place.title, "count": count, "wire": wire, "how": how, "predicted_s": predicted_s}
    chosen = {"schedule": steps[-1]["schedule"], "in_flight": steps[-1]["in_flight"]}
    chosen["codecs"] = [codecs["activations"], codecs["gradients"]]
    changes = [step["schedule_change"] for step in run.steps if step["schedule_change"]]
    planned = [line.strip() for line in run.output.splitlines() if line.startswith(("planned for", "  schedule"))]
    return point | chosen | {"step_s": step_s, "all_s": run.step_times_s(), "changes": changes, "plan": planned}


def measure(place: Place, count: int, wire: str, num_best: int) -> Iterator[Values]:
    """The default's row, then those of the best plans."""
    default = launch(values(place, count, WIRES[wire], {}, STEPS))
    yield (row := _row(place, count, wire, "default", default))
    codecs = WIRES[wire] or (row["codecs"][0], row["codecs"][1])
    for number, (each, predicted_s) in enumerate(best_plans(place, count, codecs, num_best), 1):
        depths = {"in_flight": list(each.depths)} if each.depths else {}
        pipeline = {"schedule": each.schedule, "layers": list(each.layers), **depths}
        run = launch(values(place, count, codecs, pipeline, SET_STEPS))
        yield _row(place, count, wire, f"best {number}", run, predicted_s)


def default_table(places: Sequence[Place], options: argparse.Namespace) -> Table:
    """Measure what the file of rows does not have yet; every network with its fewest micro-batches."""
    path = rows_path(options).with_suffix(".default.jsonl")
    for place, wire in itertools.product(places, options.wires):
        count = min(place.micro_batches)
        if not any((row["place"], row["count"], row["wire"]) == (place.title, count, wire) for row in read_rows(path)):
            for row in list(measure(place, count, wire, options.best)):  # all of them or none
                append_row(path, row)
                say(f"{row['place']}, {wire}: {row['how']} {row['schedule']} {row['in_flight']} {row['step_s']:.3f} s")
    return Table(COLUMNS, _cells(read_rows(path)), DEFAULT_CAPTION, heading="Default settings")


def _cells(rows: Sequence[Values]) -> Iterator[list[str]]:
    for _, group in itertools.groupby(rows, key=lambda row: (row["place"], row["count"], row["wire"])):
        of_group = list(group)
        best_s = min([row["step_s"] for row in of_group if row["how"] != "default"], default=None)
        for row in of_group:
            ratio = f"{best_s / row['step_s']:.3f}" if best_s and row["how"] == "default" else ""
            predicted = f"{row['predicted_s']:.3f}" if row["predicted_s"] else ""
            tokens_per_s = row["count"] * MICRO_BATCH * SEQ_LEN / row["step_s"]
            yield [
                *(row["place"], str(row["count"]), f"{row['wire']}: `{' / '.join(row['codecs'])}`", row["how"]),
                *(row["schedule"], ", ".join(map(str, row["in_flight"])), str(len(row["changes"]))),
                *(f"{row['step_s']:.3f}", f"{tokens_per_s:,.0f}", predicted, ratio),
            ]
