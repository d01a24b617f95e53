"""`tahq plan`: which hosts, in which order, with how many layers each, and why."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tahq.config.cluster import ClusterConfig
from tahq.config.file import dump_yaml, load_config, placed_errors
from tahq.errors import UserError
from tahq.plan.cluster_numbers import host_labels
from tahq.plan.explanation import bottleneck, second_best, what_ifs
from tahq.plan.planner import Planned, plan
from tahq.plan.prediction import chunk_layers, predict
from tahq.plan.problem import PipelinePlan, PlanProblem, named
from tahq.plan.search.stages import StageCosts
from tahq.plan.search.table import ClusterTable
from tahq.plan.simulate.simulator import draw_grid
from tahq.typed_yaml.mistakes import Origins, validated
from tahq.worker.assembly import resolved_spec
from tahq_launch.command_line import check_writable, write_text
from tahq_launch.plan.numbers import check_names, estimated_numbers, read_numbers
from tahq_launch.plan.problem import PlanChoices, given_plan, problem_of
from tahq_launch.plan.report import PlanExplanation, as_json, report
from tahq_launch.start.resolution import needed_connections, resolve_for_run

_GRID_WIDTH = 100


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One command line of `tahq plan`."""

    config_path: Path
    numbers: Path | None = None
    overrides: tuple[str, ...] = ()
    choices: PlanChoices = field(default_factory=PlanChoices)
    write: Path | None = None
    json_path: Path | None = None
    draw: bool = False


def plan_cluster(request: PlanRequest) -> None:
    """Plan, print the plan and its explanation, and write the requested files."""
    for path in (request.write, request.json_path):
        if path is not None:
            check_writable(path)
    # timing the layers is for a run; here the numbers say how long they take
    overrides = [*request.overrides, "pipeline.balance=counted"]
    with placed_errors(request.config_path, overrides):
        config = resolve_for_run(load_config(request.config_path, overrides))
        spec = resolved_spec(config, None)
    if request.numbers is None:
        cluster, origins = estimated_numbers(config, spec)
    else:
        cluster = read_numbers(request.numbers)
        check_names(config, cluster, request.numbers)
        origins = (f"all numbers: {request.numbers}" + (f" ({cluster.source})" if cluster.source else ""),)
    problem = problem_of(config, spec, cluster, request.choices)
    planned, given = plan(problem), given_plan(config, problem)
    explained = PlanExplanation(
        planned=planned,
        origins=(*origins, *_not_measured(planned)),
        given=predict(planned.table, given) if given is not None else None,
        bottleneck=bottleneck(planned.table, planned.best),
        second=second_best(planned),
        what_ifs=what_ifs(planned),
    )
    print(report(explained))
    if request.draw:
        print(f"\n{draw_grid(planned.best.timeline, _GRID_WIDTH)}")
    if request.json_path is not None:
        write_text(request.json_path, json.dumps(as_json(explained), indent=1, allow_nan=False) + "\n")
    if request.write is not None:
        _write_planned(request.write, config, planned)


def _not_measured(planned: Planned) -> list[str]:
    """A line if the plan's micro-batch was not measured, and one for each codec that takes its times from another."""
    table, plan = planned.table, planned.best.plan
    measured = [{times.micro_batch for times in table.problem.cluster.hosts[host].compute} for host in plan.hosts]
    lines = []
    if not all(plan.micro_batch in sizes for sizes in measured):
        known = ", ".join(map(str, sorted(set.union(*measured))))
        lines.append(f"compute of micro-batches of {plan.micro_batch} is interpolated from those of {known}")
    used = dict.fromkeys((*plan.activations, *plan.gradients))
    stand_ins = dict.fromkeys((codec, table.codec_stand_in(host, codec)) for codec in used for host in plan.hosts)
    return lines + [
        f"{codec} was not measured on every host: there it is assumed to be as slow as {other}"
        for codec, other in stand_ins
        if other not in (None, codec)
    ]


def _write_planned(path: Path, config: ClusterConfig, planned: Planned) -> None:
    """Write a cluster.yaml with the plan in it."""
    if planned.replicas is not None:
        raise UserError("--write: cluster.yaml describes one pipeline, not replicas; leave --max-replicas at 1")
    done, notes = planned_config(config, planned.table, planned.best.plan)
    write_text(path, f"# Planned by tahq plan: {planned.tokens_per_s:,.0f} tokens/s predicted.\n{dump_yaml(done)}")
    print("", f"written to {path}", *(f"note: {note}" for note in notes), sep="\n")


def planned_config(
    config: ClusterConfig, table: ClusterTable, plan: PipelinePlan
) -> tuple[ClusterConfig, Sequence[str]]:
    """Put a plan into a resolved configuration; also returns notes on parts of the plan that it cannot express."""
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
    if values["model"]["sleep"] is not None:  # stages sleep as long as the plan has them compute
        times = StageCosts.of(table, plan).times(np.array(plan.layers, dtype=float))
        for key, seconds in (("forward", times.forward), ("backward", times.backward)):
            values["model"]["sleep"][key] = [round(float(each), 9) for each in seconds]
    return validated(ClusterConfig, values, Origins("the planned configuration")), notes


def _put_codecs(values: dict[str, Any], problem: PlanProblem, plan: PipelinePlan) -> list[str]:
    """One codec per direction: the smallest of the links' codecs, with which no link is slower than planned."""
    notes = []
    for direction, codecs in (("activations", plan.activations), ("gradients", plan.gradients)):
        if not codecs:
            continue
        fewest = min(codecs, key=lambda codec: problem.frame_nbytes(codec, plan.micro_batch))
        values["wire"][direction] = fewest
        others = ", ".join(codec for codec in dict.fromkeys(codecs) if codec != fewest)
        if others:
            notes.append(
                f"wire.{direction} is {fewest} on all links: cluster.yaml has one codec per direction, so {others} "
                "had to be left out"
            )
    return notes


def _put_hosts(config: ClusterConfig, values: dict[str, Any], problem: PlanProblem, plan: PipelinePlan) -> None:
    labels = host_labels(config.hosts, config.pipeline.stages)
    names = named(problem, plan.hosts)
    unknown = [name for name in names if name not in labels]
    if unknown and config.hosts != "local":
        raise UserError(f"--write: the plan has host {unknown[0]}, cluster.yaml has {', '.join(labels)}")
    order = [labels.index(name) for name in names] if not unknown else []
    if isinstance(config.hosts, list):
        values["hosts"] = [values["hosts"][index] for index in order]
    if config.hosts == "namespaces":
        _put_network(labels, values["links"], order)


def _put_network(labels: Sequence[str], links: dict[str, Any], order: Sequence[int]) -> None:
    """Rename the hosts of namespaces, because host0 runs stage 0; and their pairs."""
    new_name = {f"host{index}": f"host{stage}" for stage, index in enumerate(order)}
    renamed = {new: links["hosts"][old] for old, new in new_name.items() if old in links["hosts"]}
    links["hosts"] = dict(sorted(renamed.items(), key=lambda item: int(item[0].removeprefix("host"))))
    sites = {host.get("site") for host in renamed.values()}
    links["pairs"] = [
        {**pair, "between": [new_name.get(name, name) for name in pair["between"]]}
        for pair in links["pairs"]
        if all(name in new_name if name in labels else name in sites for name in pair["between"])
    ]
