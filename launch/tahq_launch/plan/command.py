"""`tahq plan`: which hosts, in which order, with how many layers each, and why."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from tahq.config.cluster import ClusterConfig
from tahq.config.file import dump_yaml, load_config, placed_errors
from tahq.errors import ConfigError, UserError
from tahq.plan.cluster_numbers import host_labels
from tahq.plan.explanation import bottleneck, second_best, what_ifs
from tahq.plan.planner import Planned, plan
from tahq.plan.prediction import chunk_layers, predict
from tahq.plan.problem import PipelinePlan, PlanProblem, named
from tahq.plan.search.stages import StageCosts
from tahq.plan.search.table import ClusterTable
from tahq.typed_yaml.mistakes import Origins, one_line
from tahq.worker.assembly import resolved_spec
from tahq_launch.measured_links import needed_connections
from tahq_launch.plan.numbers import KnownNumbers, check_names, estimated_numbers, read_numbers
from tahq_launch.plan.problem import PlanChoices, given_plan, problem_of
from tahq_launch.plan.report import PlanExplanation, as_json, grid, report
from tahq_launch.start.resolution import resolve_for_run


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


@dataclass(frozen=True, slots=True)
class PlannedConfig:
    """A configuration, and what of the plan it cannot say."""

    config: ClusterConfig
    notes: tuple[str, ...]


def planned_config(config: ClusterConfig, table: ClusterTable, plan: PipelinePlan) -> PlannedConfig:
    """Put a plan into a configuration.

    Args:
        config: resolved; its profile, if any, put in place.
        table: the cluster that was planned for.
        plan: one pipeline.

    Raises:
        UserError: the plan's hosts are not the configuration's.
        ConfigError: the configuration with the plan in it makes no sense.
    """
    values = config.model_dump(mode="json")
    values["training"]["micro_batch"] = plan.micro_batch
    values["pipeline"] |= {
        "stages": plan.num_stages,
        "schedule": plan.schedule,
        "in_flight": list(plan.depths) or None,
        "chunks": plan.chunks_per_stage,
        "layers": list(chunk_layers(plan)),
    }
    needed = needed_connections(table.problem.cluster, named(table.problem, plan.hosts))
    values["links"] |= {"first": str(plan.first), "connections": max(config.links.connections, needed)}
    notes = _put_codecs(values, table.problem, plan)
    _put_hosts(config, values, table.problem, plan)
    _put_sleep(values, table, plan)
    try:
        return PlannedConfig(ClusterConfig.model_validate(values), tuple(notes))
    except ValidationError as error:
        raise ConfigError(
            one_line(error, values, ClusterConfig, Origins("the planned configuration", {}, {}))
        ) from error


def _put_codecs(values: dict[str, Any], problem: PlanProblem, plan: PipelinePlan) -> list[str]:
    """One codec a direction: where links differ, the one of fewest bits, with which no link is slower than planned."""
    notes = []
    for direction, codecs in (("activations", plan.activations), ("gradients", plan.gradients)):
        if not codecs:
            continue
        fewest = min(codecs, key=lambda codec: problem.frame_nbytes(codec, plan.micro_batch))
        values["wire"][direction] = fewest
        if set(codecs) != {fewest}:
            others = ", ".join(codec for codec in dict.fromkeys(codecs) if codec != fewest)
            notes.append(
                f"wire.{direction} is {fewest} on all links: cluster.yaml has one codec a direction, not {others} too"
            )
    return notes


def _put_hosts(config: ClusterConfig, values: dict[str, Any], problem: PlanProblem, plan: PipelinePlan) -> None:
    labels = host_labels(config.hosts, config.pipeline.stages)
    names = named(problem, plan.hosts)
    strange = [name for name in names if name not in labels]
    if strange and config.hosts != "local":
        raise UserError(f"--write: the plan has host {strange[0]}, cluster.yaml has {', '.join(labels)}")
    order = [labels.index(name) for name in names] if not strange else []
    if isinstance(config.hosts, list):
        values["hosts"] = [values["hosts"][index] for index in order]
    if config.hosts == "namespaces":
        _put_network(config, values, order)


def _put_network(config: ClusterConfig, values: dict[str, Any], order: Sequence[int]) -> None:
    """host0 runs stage 0, so hosts of namespaces change their names, and pairs with them."""
    hosts = values["links"]["hosts"]
    new_name = {f"host{index}": f"host{stage}" for stage, index in enumerate(order)}
    old_names = set(host_labels("namespaces", config.pipeline.stages))
    renamed = {new: hosts[old] for old, new in new_name.items() if old in hosts}
    values["links"]["hosts"] = dict(sorted(renamed.items(), key=lambda item: int(item[0].removeprefix("host"))))
    sites = {host.get("site") for host in renamed.values()}
    pairs = []
    for pair in values["links"]["pairs"]:
        between = [new_name.get(name, name) if name in old_names else name for name in pair["between"]]
        kept = all(name in new_name if name in old_names else name in sites for name in pair["between"])
        pairs += [{**pair, "between": between}] if kept else []
    values["links"]["pairs"] = pairs


def _put_sleep(values: dict[str, Any], table: ClusterTable, plan: PipelinePlan) -> None:
    """Stages that sleep do so for as long as the plan has them compute."""
    if values["model"]["sleep"] is None:
        return
    times = StageCosts.of(table, plan).times(np.array(plan.layers, dtype=float))
    for key, seconds in (("forward", times.forward), ("backward", times.backward)):
        values["model"]["sleep"][key] = [round(float(each), 9) for each in seconds]
