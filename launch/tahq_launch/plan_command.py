"""`tahq plan`: which hosts, in which order, with how many layers each, and why."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tahq.config.cluster import ClusterConfig
from tahq.config.file import dump_yaml, load_config, placed_errors
from tahq.errors import UserError
from tahq.plan.explanation import bottleneck, second_best, what_ifs
from tahq.plan.planner import Planned, plan
from tahq.plan.prediction import predict
from tahq.worker.assembly import resolved_spec
from tahq_launch.plan_numbers import KnownNumbers, check_names, estimated_numbers, read_numbers
from tahq_launch.plan_problem import PlanChoices, given_plan, problem_of
from tahq_launch.plan_report import PlanExplanation, as_json, grid, report
from tahq_launch.planned_config import planned_config
from tahq_launch.resolution import resolve_for_run


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a person asked for on the command line of `tahq plan`."""

    config_path: Path
    numbers: Path | None = None
    overrides: tuple[str, ...] = ()
    choices: PlanChoices = field(default_factory=PlanChoices)
    write: Path | None = None
    json_path: Path | None = None
    draw: bool = False


def plan_cluster(request: PlanRequest) -> None:
    """Plan, print the plan and why, and write what was asked for.

    Raises:
        UserError: whatever in the request or its files does not fit; no choice of hosts has the memory.
    """
    _check_writable(request.write, request.json_path)
    # timing the layers is for a run; here the numbers say how long they take
    overrides = [*request.overrides, "pipeline.balance=counted"]
    with placed_errors(request.config_path, overrides):
        config = resolve_for_run(load_config(request.config_path, overrides))
        spec = resolved_spec(config, None)
    known = _numbers(request, config) or estimated_numbers(config, spec)
    problem = problem_of(config, spec, known.cluster, request.choices)
    planned, given = plan(problem), given_plan(config, problem)
    explained = PlanExplanation(
        planned=planned,
        origins=(*known.origins, *_not_measured(planned), *_codecs_not_measured(planned)),
        given=predict(planned.table, given) if given is not None else None,
        bottleneck=bottleneck(planned.table, planned.best),
        second=second_best(planned),
        what_ifs=what_ifs(planned),
    )
    print(report(explained))
    if request.draw:
        print(f"\n{grid(planned)}")
    if request.json_path is not None:
        _write(request.json_path, json.dumps(as_json(explained), indent=1, allow_nan=False) + "\n")
    if request.write is not None:
        for line in write_planned(request.write, config, planned):
            print(line)


def _numbers(request: PlanRequest, config: ClusterConfig) -> KnownNumbers | None:
    if request.numbers is None:
        return None
    known = read_numbers(request.numbers)
    check_names(config, known.cluster, request.numbers)
    return known


def _not_measured(planned: Planned) -> Sequence[str]:
    """A line where the plan's size of micro-batch is none that was measured."""
    best = planned.best.plan
    measured = [
        {times.micro_batch for times in planned.table.problem.cluster.hosts[host].compute} for host in best.hosts
    ]
    if all(best.micro_batch in sizes for sizes in measured):
        return ()
    known = ", ".join(str(size) for size in sorted(set.union(*measured)))
    return (f"compute of micro-batches of {best.micro_batch} is reckoned from those of {known}",)


def _codecs_not_measured(planned: Planned) -> Sequence[str]:
    """A line for each codec whose times on a host of the plan are another's; where none was measured, all are 0."""
    table, plan = planned.table, planned.best.plan
    used = dict.fromkeys((*plan.activations, *plan.gradients))
    stand_ins = dict.fromkeys((codec, table.codec_stand_in(host, codec)) for codec in used for host in plan.hosts)
    return [
        f"{codec} was not measured on every host: there it is taken to be as slow as {other}"
        for codec, other in stand_ins
        if other not in (None, codec)
    ]


def write_planned(path: Path, config: ClusterConfig, planned: Planned) -> Sequence[str]:
    """Write a cluster.yaml with the plan put in; returns what to tell about it.

    Raises:
        UserError: the plan cannot be said in a cluster.yaml, or the file cannot be written.
    """
    if planned.replicas is not None:
        raise UserError("--write: cluster.yaml describes one pipeline, not replicas; leave --max-replicas at 1")
    done = planned_config(config, planned.table, planned.best.plan)
    _write(path, f"# Planned by tahq plan: {planned.tokens_per_s:,.0f} tokens/s predicted.\n{dump_yaml(done.config)}")
    return [f"\nwritten to {path}", *(f"note: {note}" for note in done.notes)]


def _check_writable(*paths: Path | None) -> None:
    """Before the work: what cannot be written afterwards would be lost."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UserError(f"{path} cannot be written: expected a file in a folder that exists")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
