"""Rows with default settings: `tahq-launch` with nothing set but model, data, batch, links, and the best of all plans.

A default row is a run whose cluster.yaml leaves open whatever tahq chooses. Beside it run, through the same command and
with the codecs that the default has chosen, a plan set by hand and the best plans by the simulator.
"""

import argparse
import itertools
import re
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from harness import Run, Table, append_row, launch, read_rows, rows_path, say

from tahq.config.file import dump_yaml, load_config
from tahq.errors import ScheduleError
from tahq.pipeline.schedule.generators import generate
from tahq.plan.planner import plan
from tahq.plan.prediction import predict, step_time_s
from tahq.plan.problem import PipelinePlan
from tahq.plan.search.stages import plan_bound_s
from tahq.plan.search.table import ClusterTable
from tahq.worker.assembly import resolved_spec
from tahq_launch.plan.command import planned_config
from tahq_launch.plan.first_plan import first_plan
from tahq_launch.plan.numbers import estimated_numbers
from tahq_launch.plan.problem import PlanChoices, given_plan, problem_of
from tahq_launch.start.prepared_run import StartRequest
from tahq_launch.start.resolution import resolve_for_run

Values = Mapping[str, Any]
Codecs = tuple[str, str]
STEPS, SET_STEPS, SETTLE = 13, 5, 2
"""Steps of a default run and of a run with a set plan, and those after a start or a change that do not count."""
MAX_ALL = 5_000
"""Up to so many plans all are simulated; of more those that the planner tries with a large budget."""
BUDGET_ACTIONS = 2_000_000
COLUMNS = (
    *("case", "wire", "how", "schedule", "in flight", "changes", "step, s", "tokens/s", "predicted, s"),
    *("bound / step", "default / best"),
)
DEFAULT_CAPTION = (
    f"*default*: `tahq-launch cluster.yaml`, with codecs set or, in rows called default, not; {STEPS} steps. "
    f"*by hand*, and *best n*, the nth of all different plans by the simulator: set, with the default's codecs; "
    f"{SET_STEPS} steps. One run each, in turn; a step is the median of those after the last change of the schedule "
    f"and {SETTLE} more. *bound*: the least that any schedule needs for the same compute, bytes, rates and delays. "
    "*default / best*: tokens/s over those of the fastest of the others."
)


@dataclass(frozen=True, slots=True)
class Case:
    """A cluster.yaml that leaves the plan open, and the codecs, too, if they are None.

    `by_hand` gives the keys that someone sets by hand, for the default's codecs.
    """

    title: str
    wire: str
    values: Values
    codecs: Codecs | None = None
    by_hand: Callable[[Codecs], Values] | None = None
    in_order: bool = True

    def with_keys(self, codecs: Codecs | None, steps: int, keys: Values) -> dict[str, Any]:
        """The file with keys set."""
        wire = {"wire": dict(zip(("activations", "gradients"), codecs, strict=True))} if codecs else {}
        return merged(self.values, wire, {"training": {"steps": steps}}, keys)


def merged(*parts: Values) -> dict[str, Any]:
    """Sections of several files; later ones win, key by key."""
    sections: dict[str, Any] = {}
    for name, section in (pair for part in parts for pair in part.items()):
        sections[name] = {**sections.get(name, {}), **section} if isinstance(section, Mapping) else section
    return sections


def best_plans(case: Case, codecs: Codecs, num: int) -> list[tuple[dict[str, Any], float, float]]:
    """The fastest plans by the simulator that differ in the order of some stage's actions.

    Each as a file, with predicted seconds of a step, and seconds that no schedule is faster than.
    """
    with tempfile.TemporaryDirectory(prefix="tahq-bench-") as name:
        path = Path(name) / "cluster.yaml"
        path.write_text(yaml.safe_dump(case.with_keys(codecs, SET_STEPS, {})))
        config = resolve_for_run(load_config(path))
    spec, stages = resolved_spec(config, None), config.pipeline.stages
    problem = problem_of(config, spec, estimated_numbers(config, spec)[0], PlanChoices(num_stages=stages))
    size = config.training.micro_batch
    problem = replace(problem, in_order=case.in_order, model=problem.model.with_sizes([size]))
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
        schedule = generate(each.schedule, stages, each.num_micro_batches, depths=each.depths or None)
        different.setdefault((each.hosts, each.layers, schedule.actions), each)
    found = [(each, predict(table, each).step_s) for each in list(different.values())[: 10 * num]]
    fastest = sorted(found, key=lambda pair: pair[1])[:num]
    return [
        (
            yaml.safe_load(dump_yaml(planned_config(config, table, each)[0])),
            predicted_s,
            plan_bound_s(table, replace(each, schedule="zero-bubble", depths=())),
        )
        for each, predicted_s in fastest
    ]


def measured_bound_s(case: Case, run: Run) -> float | None:
    """Seconds that no schedule is faster than, by what this default run was planned with; None: it kept no figures.

    A run drops the figures that its steps contradict, as they may where several runs share a GPU.
    """
    with tempfile.TemporaryDirectory(prefix="tahq-bench-") as name:
        path, chosen = Path(name) / "cluster.yaml", Path(name) / "config.yaml"
        path.write_text(yaml.safe_dump(case.with_keys(case.codecs, STEPS, {})))
        chosen.write_text(yaml.safe_dump(run.config))
        found, config = first_plan(load_config(path), StartRequest(path), measures=False), load_config(chosen)
    if found is None or found.figures is None:
        return None
    problem = problem_of(config, resolved_spec(config, None), found.figures, PlanChoices())
    given = given_plan(config, problem)
    return given and plan_bound_s(ClusterTable(problem), replace(given, schedule="zero-bubble", depths=()))


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


def _row(case: Case, how: str, run: Run, predicted_s: float | None = None) -> dict[str, Any]:
    steps = settled(run)
    if planned := re.search(r"planned for ([\d,]+) tokens/s", run.output):
        predicted_s = steps[-1]["tokens"] / float(planned[1].replace(",", ""))
    codecs = {link["direction"]: link["codec"] for link in steps[-1]["links"]}
    return {
        "case": case.title,
        "wire": case.wire,
        "how": how,
        "predicted_s": predicted_s,
        "schedule": steps[-1]["schedule"],
        "in_flight": steps[-1]["in_flight"],
        "tokens": steps[-1]["tokens"],
        "codecs": [codecs["activations"], codecs["gradients"]],
        "step_s": statistics.median(step["step_time_s"] for step in steps),
        "first_step_s": run.first_step_s,
        "all_s": run.step_times_s(),
        "changes": [step["schedule_change"] for step in run.steps if step["schedule_change"]],
        "plan": [line.strip() for line in run.output.splitlines() if line.startswith(("planned for", "  "))],
    }


def measure(case: Case, num_best: int, steps: int = STEPS) -> Iterator[dict[str, Any]]:
    """The default's row, then those of the plan set by hand and of the best plans."""
    run = launch(case.with_keys(case.codecs, steps, {}), stop_after=steps)
    row = _row(case, "default", run)
    codecs = case.codecs or (row["codecs"][0], row["codecs"][1])
    plans = best_plans(case, codecs, num_best) if num_best else []
    yield {**row, "bound_s": min((bound_s for _, _, bound_s in plans), default=None) or measured_bound_s(case, run)}
    if case.by_hand is not None:
        set_by_hand = case.with_keys(codecs, SET_STEPS, case.by_hand(codecs))
        yield _row(case, "by hand", launch(set_by_hand, stop_after=SET_STEPS))
    for number, (values, predicted_s, _) in enumerate(plans, 1):
        yield _row(case, f"best {number}", launch(values, stop_after=SET_STEPS), predicted_s)


def default_table(cases: Iterable[Case], options: argparse.Namespace, steps: int = STEPS, at_once: int = 1) -> Table:
    """Measure what the file of rows does not have yet, so many cases at once; one that fails is said and left out."""
    path = rows_path(options).with_suffix(".default.jsonl")
    done = {(row["case"], row["wire"]) for row in read_rows(path)}
    with ThreadPoolExecutor(at_once) as pool:
        left = [case for case in cases if (case.title, case.wire) not in done]
        measured = [pool.submit(list, measure(case, options.best, steps)) for case in left]  # all rows or none
        for each in as_completed(measured):
            if isinstance(error := each.exception(), SystemExit):
                say(str(error))
                continue
            for row in each.result():
                append_row(path, {**row, "at_once": at_once})
                how = f"{row['how']} {row['schedule']} {row['in_flight']}"
                say(f"{row['case']}, {row['wire']}: {how} {row['step_s']:.3f} s")
    return Table(COLUMNS, _cells(read_rows(path)), DEFAULT_CAPTION, heading="Default settings")


def _cells(rows: Sequence[Values]) -> Iterator[list[str]]:
    for _, group in itertools.groupby(rows, key=lambda row: (row["case"], row["wire"])):
        of_group = list(group)
        best_s = min((row["step_s"] for row in of_group if row["how"] != "default"), default=None)
        bound_s = of_group[0]["bound_s"]
        for row in of_group:
            is_default, at_once = row["how"] == "default", row.get("at_once", 1)
            how = f"{row['how']}, {at_once} at once" if at_once > 1 else row["how"]
            if is_default and len(row["all_s"]) != STEPS:
                how += f", {len(row['all_s'])} steps"
            yield [
                *(row["case"], f"{row['wire']}: `{' / '.join(row['codecs'])}`", how, row["schedule"]),
                *(", ".join(map(str, row["in_flight"])), str(len(row["changes"]))),
                *(f"{row['step_s']:.3f}", f"{row['tokens'] / row['step_s']:,.0f}"),
                f"{row['predicted_s']:.3f}" if row["predicted_s"] else "",
                f"{bound_s / row['step_s']:.3f}" if bound_s else "",
                f"{best_s / row['step_s']:.3f}" if best_s and is_default else "",
            ]
