"""`tahq plan`: which hosts, in which order, with how many layers each, and why."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tahq.comm.topology import Grid
from tahq.config.cluster import ClusterConfig
from tahq.config.file import load_config, placed_errors
from tahq.errors import UserError
from tahq.plan.cluster_numbers import host_labels
from tahq.plan.explanation import Bottleneck, WhatIf, bottleneck, second_best, shares, what_ifs
from tahq.plan.planner import Planned, plan
from tahq.plan.prediction import Prediction, chunk_layers, memory_options, predict
from tahq.plan.problem import MemoryOption, PipelinePlan, PlanProblem, named
from tahq.plan.search.stages import StageCosts
from tahq.plan.search.table import ClusterTable
from tahq.plan.simulate.simulator import draw_grid
from tahq.typed_yaml.mistakes import Origins, validated
from tahq.units import format_rate, format_size
from tahq.worker.assembly import resolved_spec
from tahq_launch.command_line import check_writable, plain_table, progress_of
from tahq_launch.plan.numbers import check_names, estimated_numbers, read_numbers
from tahq_launch.plan.planned_file import write_planned
from tahq_launch.plan.problem import PlanChoices, given_plan, problem_of
from tahq_launch.plan.replicas import most_replicas
from tahq_launch.start.resolution import needed_connections, resolve_for_run

_GRID_WIDTH = 100


@dataclass(frozen=True, slots=True)
class PlanExplanation:
    """A plan, its bottleneck and its alternatives; `given` is cluster.yaml unchanged, if the numbers have its hosts."""

    planned: Planned
    origins: tuple[str, ...]
    given: Prediction | None
    bottleneck: Bottleneck
    second: Prediction | None
    what_ifs: tuple[WhatIf, ...]


def plan_cluster(
    config_path: Path,
    overrides: Sequence[str],
    numbers: Path | None,
    choices: PlanChoices,
    *,
    write: Path | None = None,
    prints_json: bool = False,
    draws_step: bool = False,
) -> None:
    """Plan with the numbers of a file, or with estimates; print the plan and its explanation, and write a file.

    With `prints_json` one JSON object is all of stdout, and `draws_step` has no effect.
    """
    if write is not None:
        check_writable(write)
    # the layers' times come from the numbers, so do not time them here
    given_overrides, overrides = overrides, [*overrides, "pipeline.balance=counted"]
    with placed_errors(config_path, overrides):
        config = resolve_for_run(load_config(config_path, overrides))
        spec = resolved_spec(config, None)
    if choices.max_replicas is None:
        choices = replace(choices, max_replicas=most_replicas(config))
    if numbers is None:
        cluster, origins = estimated_numbers(config, spec)
    else:
        cluster = read_numbers(numbers)
        check_names(config, cluster, numbers)
        origins = (f"all numbers: {numbers}" + (f" ({cluster.source})" if cluster.source else ""),)
    problem = problem_of(config, spec, cluster, choices)
    planned = plan(problem, progress=progress_of("planning"))
    given = given_plan(config, problem)
    explained = PlanExplanation(
        planned=planned,
        origins=(*origins, *interpolated_times(planned), *_stand_ins(planned)),
        given=predict(planned.table, given) if given is not None else None,
        bottleneck=bottleneck(planned.table, planned.slowest),
        second=second_best(planned),
        what_ifs=what_ifs(planned),
    )
    if prints_json:
        print(json.dumps(as_json(explained), allow_nan=False))
    else:
        print(report(explained))
    if draws_step and not prints_json:
        print(f"\n{draw_grid(planned.best.timeline, _GRID_WIDTH)}")
    if write is not None:
        notes = _write_planned(write, config_path, given_overrides, config, planned)
        stream = sys.stderr if prints_json else sys.stdout
        print("", f"written to {write}", *(f"note: {note}" for note in notes), sep="\n", file=stream)


def interpolated_times(planned: Planned) -> list[str]:
    """A line if the plan's micro-batch was not measured."""
    table, plan = planned.table, planned.slowest.plan
    measured = [{times.micro_batch for times in table.problem.cluster.hosts[host].compute} for host in plan.hosts]
    if all(plan.micro_batch in sizes for sizes in measured):
        return []
    known = ", ".join(map(str, sorted(set.union(*measured))))
    return [f"compute of micro-batches of {plan.micro_batch} is interpolated from those of {known}"]


def _stand_ins(planned: Planned) -> list[str]:
    """A line for each codec that takes its times from another."""
    table, plan = planned.table, planned.slowest.plan
    used = dict.fromkeys((*plan.activations, *plan.gradients))
    stand_ins = dict.fromkeys((codec, table.codec_stand_in(host, codec)) for codec in used for host in plan.hosts)
    return [
        f"{codec} was not measured on every host: there it is assumed to be as slow as {other}"
        for codec, other in stand_ins
        if other not in (None, codec)
    ]


def _write_planned(
    path: Path, config_path: Path, overrides: Sequence[str], config: ClusterConfig, planned: Planned
) -> Sequence[str]:
    """Write a cluster.yaml with the plan in it; returns notes on what it cannot express."""
    hosts = [host for plan in planned.pipelines for host in plan.hosts]
    done, notes = planned_config(config, planned.table, planned.slowest.plan, hosts)
    write_planned(path, config_path, overrides, done, planned.tokens_per_s)
    return notes


def planned_config(
    config: ClusterConfig, table: ClusterTable, plan: PipelinePlan, hosts: Sequence[int] = ()
) -> tuple[ClusterConfig, Sequence[str]]:
    """Put a plan into a resolved configuration; also returns notes on parts of the plan that it cannot express.

    `hosts`: of all replicas, one after the other; empty: the plan's.
    """
    hosts = hosts or plan.hosts
    grid = Grid(plan.num_stages, len(hosts) // plan.num_stages, plan.chunks_per_stage)
    values = config.model_dump(mode="json")
    values["training"]["micro_batch"] = plan.micro_batch
    options = [_leanest(each, plan.micro_batch) for each in zip(*_options(table, plan, hosts), strict=True)]
    for key in ("recompute", "offload"):
        by_stage = [getattr(each, key) for each in options]
        if getattr(config.memory, key) == "auto":
            values["memory"][key] = by_stage if len(set(by_stage)) > 1 else by_stage[0]
    values["pipeline"] |= {
        "stages": plan.num_stages,
        "replicas": grid.replicas,
        "schedule": plan.schedule,
        "in_flight": list(plan.depths) or None,
        "chunks": plan.chunks_per_stage,
        "layers": list(chunk_layers(plan)),
    }
    needed = needed_connections(table.problem.cluster, grid.pairs(named(table.problem, hosts)))
    values["links"] |= {"first": str(plan.first), "connections": max(config.links.connections, needed)}
    notes = _put_codecs(values, table.problem, plan)
    _put_hosts(config, values, table.problem, hosts)
    if values["emulate"]["sleep"] is not None:  # stages sleep for the compute times of the plan
        times = StageCosts.of(table, plan).times_of(plan)
        for key, seconds in (("forward", times.forward), ("backward", times.backward)):
            values["emulate"]["sleep"][key] = [round(float(each), 9) for each in seconds]
    return validated(ClusterConfig, values, Origins("the planned configuration")), notes


def _options(table: ClusterTable, plan: PipelinePlan, hosts: Sequence[int]) -> Iterator[tuple[MemoryOption, ...]]:
    """Of each replica's stages."""
    for begin in range(0, len(hosts), plan.num_stages):
        yield memory_options(table, replace(plan, hosts=tuple(hosts[begin : begin + plan.num_stages])))


def _leanest(options: Sequence[MemoryOption], micro_batch: int) -> MemoryOption:
    """What a stage may have on all of its hosts."""
    return min(options, key=lambda each: each.block_nbytes + each.held[micro_batch].block)


def _put_codecs(values: dict[str, Any], problem: PlanProblem, plan: PipelinePlan) -> list[str]:
    """One codec per direction: the smallest of the links' codecs, with which no link is slower than planned."""
    notes = []
    for direction, codecs in (("activations", plan.activations), ("gradients", plan.gradients)):
        if not codecs:
            continue
        fewest = min(codecs, key=lambda codec: problem.frame_nbytes(codec, plan.micro_batch))
        values["wire"][direction] = fewest
        if others := ", ".join(codec for codec in dict.fromkeys(codecs) if codec != fewest):
            reason = "cluster.yaml has one codec per direction"
            notes.append(f"wire.{direction} is {fewest} on all links: {reason}, so {others} had to be left out")
    return notes


def _put_hosts(config: ClusterConfig, values: dict[str, Any], problem: PlanProblem, hosts: Sequence[int]) -> None:
    labels = host_labels(config.hosts, config.pipeline.num_workers)
    names = named(problem, hosts)
    unknown = [name for name in names if name not in labels]
    if unknown and config.hosts != "local":
        raise UserError(f"--output: the plan has host {unknown[0]}, cluster.yaml has {', '.join(labels)}")
    order = [labels.index(name) for name in names] if not unknown else []
    if isinstance(config.hosts, list):
        values["hosts"] = [values["hosts"][index] for index in order]
    if config.hosts != "namespaces":
        return
    # Rename the hosts, because host0 runs stage 0; and their pairs.
    emulate = values["emulate"]
    new_name = {f"host{index}": f"host{stage}" for stage, index in enumerate(order)}
    renamed = {new: emulate["hosts"][old] for old, new in new_name.items() if old in emulate["hosts"]}
    emulate["hosts"] = dict(sorted(renamed.items(), key=lambda item: int(item[0].removeprefix("host"))))
    sites = {host.get("site") for host in renamed.values()}
    emulate["pairs"] = [
        {**pair, "between": [new_name.get(name, name) for name in pair["between"]]}
        for pair in emulate["pairs"]
        if all(name in new_name if name in labels else name in sites for name in pair["between"])
    ]


_RESOURCES = {
    "compute": "compute of",
    "gpu": "the GPU of",
    "uplink": "the uplink of",
    "downlink": "the downlink of",
    "encoder": "encoding on",
    "decoder": "decoding on",
    "depth": "waiting on",
}


def report(explained: PlanExplanation) -> str:
    """The text, at most about 100 columns wide."""
    planned = explained.planned
    bottleneck = f"Bottleneck: {_bottleneck(planned, explained.bottleneck)}"
    parts = [_head(explained), _stages(planned), _links(planned), _replicas(planned), bottleneck]
    return "\n\n".join(part for part in [*parts, _alternatives(explained)] if part)


def _head(explained: PlanExplanation) -> str:
    planned, plan = explained.planned, explained.planned.slowest.plan
    chunks = f" with {plan.chunks_per_stage} chunks per stage" if plan.chunks_per_stage > 1 else ""
    tokens = planned.table.problem.tokens_per_step()
    count = len(planned.pipelines)
    times, num_hosts = f"{count} replicas of " * (count > 1), count * plan.num_stages
    lines = [
        f"Predicted: {_tokens(planned.tokens_per_s)}, {planned.step_s:.3f} s per step of {tokens:,} tokens",
        f"  {times}{_plural(plan.num_stages, 'stage')} on {num_hosts} of {_plural(planned.table.num_hosts, 'host')}; "
        f"schedule {plan.schedule}{chunks}; "
        f"{_plural(plan.num_micro_batches, 'micro-batch')} of {_plural(plan.micro_batch, 'sample')}",
        *([f"  {plan.first} go first on an uplink"] if plan.first != "oldest" else []),
        f"  {_plural(planned.num_simulated, 'plan')} simulated",
    ]
    return "\n".join([*lines, *(f"  {origin}" for origin in explained.origins)])


def _stages(planned: Planned) -> str:
    best, table = planned.slowest, planned.table
    needed, hosts = shares(table, best), best.plan.hosts
    rows = []
    for stage, (name, host) in enumerate(zip(named(table.problem, hosts), hosts, strict=True)):
        limit = format_size(table.memory[host]) if table.memory[host] < math.inf else "–"
        busy = [f"{needed[kind, stage]:.0%}" for kind in ("compute", "uplink", "downlink")]
        memory = format_size(best.memory_nbytes[stage])
        rows.append([stage, name, best.plan.layers[stage], best.in_flight[stage], memory, limit, *busy])
    titles = ["stage", "host", "layers", "in flight", "memory", "limit", "compute", "uplink", "downlink"]
    return "Stages, and the share of the step that each resource is busy\n" + plain_table(titles, rows, left=(1,))


def _links(planned: Planned) -> str:
    table, plan = planned.table, planned.slowest.plan
    names = named(table.problem, plan.hosts)
    rows = []
    for cut in range(plan.num_stages - 1):
        before, after = plan.hosts[cut], plan.hosts[cut + 1]
        for codec, source, target, arrow, num in (
            (plan.activations[cut], before, after, "→", table.problem.model.num_forwards),
            (plan.gradients[cut], after, before, "←", 1),
        ):
            nbytes = table.problem.frame_nbytes(codec, plan.micro_batch, num)
            rate = float(table.pair_rate[source, target])
            ends, shown_rate = f"{names[cut]} {arrow} {names[cut + 1]}", format_rate(rate) if rate < math.inf else "–"
            shown_rate += " (relayed)" * bool(table.relayed[source, target])
            times = f"{8000 * nbytes / rate:.3g}", f"{1000 * table.latency_s[source, target]:.3g}"
            rows.append((cut, ends, codec, format_size(nbytes), shown_rate, *times))
    titles = ["link", "from-to", "codec", "frame", "rate", "ms", "latency, ms"]
    return "Links: activations →, gradients ←\n" + plain_table(titles, rows, left=(1, 2)) if rows else ""


def _replicas(planned: Planned) -> str:
    if planned.replicas is None:
        return ""
    replicas = planned.replicas
    rows = []
    for index, each in enumerate(replicas.plans):
        hosts, layers = ", ".join(named(planned.table.problem, each.hosts)), "+".join(map(str, each.layers))
        depths = ", ".join(map(str, each.depths)) or "all"
        rows.append((index, hosts, layers, each.schedule, depths, each.num_micro_batches))
    title = f"{len(rows)} replicas; summing their gradients takes {replicas.all_reduce_s:.3f} s per step"
    titles = ["replica", "hosts", "layers", "schedule", "in flight", "micro-batches"]
    return f"{title}\n" + plain_table(titles, rows, left=(1, 2, 3, 4))


def _bottleneck(planned: Planned, limit: Bottleneck) -> str:
    kind, index = limit.resource
    names = named(planned.table.problem, planned.slowest.plan.hosts)
    share = f"{limit.share:.0%} of the step"
    if kind == "fill":
        return (
            "filling and draining the pipeline, with too few micro-batches to hide them; "
            f"the busiest resource is needed for {share}"
        )
    if kind == "relay":
        return f"uplink or downlink of the coordinator's machine, which relays links, needed for {share}"
    if kind in ("activations", "gradients"):
        source, target = (index, index + 1) if kind == "activations" else (index + 1, index)
        return f"the path {names[source]} → {names[target]} (link {index}, {kind}), needed for {share}"
    resource = f"{_RESOURCES[kind]} stage {index} ({names[index]})"
    if kind != "depth":
        return f"{resource}, needed for {share}"
    return (
        f"{resource}, whose {planned.slowest.in_flight[index]} micro-batches in flight do not cover the round trip of "
        f"their gradients: at least {share}"
    )


def _alternatives(explained: PlanExplanation) -> str:
    planned, given, second = explained.planned, explained.given, explained.second
    alternatives = []
    if given is not None:
        alternatives.append((f"cluster.yaml unchanged{_exceeded_memory(planned, given)}", given.tokens_per_s))
    if second is not None:
        alternatives.append((f"second best: {_in_short(planned, second.plan)}", second.tokens_per_s))
    alternatives += [(each.change, each.tokens_per_s) for each in explained.what_ifs]
    best = planned.best.tokens_per_s
    rows = [(name, _tokens(rate), f"{rate / best - 1:+.1%}") for name, rate in alternatives]
    title = "Alternatives (one pipeline; a change keeps hosts and layers, and chooses schedule and depths again)"
    return f"{title}\n" + plain_table(["", "predicted", ""], [("the plan", _tokens(best), ""), *rows], left=(0,))


def _exceeded_memory(planned: Planned, given: Prediction) -> str:
    """The first host whose memory is too small; empty: all have enough."""
    names = named(planned.table.problem, given.plan.hosts)
    for name, host, nbytes in zip(names, given.plan.hosts, given.memory_nbytes, strict=True):
        if nbytes > planned.table.memory[host]:
            return f", if it fitted: {name} needs {format_size(nbytes)}"
    return ""


def _in_short(planned: Planned, plan: PipelinePlan) -> str:
    names: Sequence[str] = named(planned.table.problem, plan.hosts)
    names = names if len(names) <= 6 else [*names[:5], "…", names[-1]]
    layers = "+".join(str(count) for count in plan.layers) if len(plan.layers) <= 8 else f"{len(plan.layers)} stages"
    return f"{' '.join(names)}, layers {layers}, {plan.num_micro_batches} × {plan.micro_batch}, {plan.schedule}"


def _tokens(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f} tokens/s"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "es" if word.endswith("ch") else "s")


def as_json(explained: PlanExplanation) -> dict[str, Any]:
    """The same as plain values; rates in tokens per second, times in seconds, sizes in bytes."""
    planned, limit, replicas = explained.planned, explained.bottleneck, explained.planned.replicas
    plans = [] if replicas is None else replicas.plans
    return {
        "tokens_per_s": planned.tokens_per_s,
        "step_s": planned.step_s,
        "plan": _plan_json(planned, planned.slowest),
        "bottleneck": {"resource": limit.resource[0], "index": limit.resource[1], "share": limit.share},
        "given": _plan_json(planned, explained.given),
        "second_best": _plan_json(planned, explained.second),
        "what_if": [{"change": each.change, "tokens_per_s": each.tokens_per_s} for each in explained.what_ifs],
        "replicas": replicas
        and {
            "all_reduce_s": replicas.all_reduce_s,
            "hosts": [list(named(planned.table.problem, plan.hosts)) for plan in plans],
            "num_micro_batches": [plan.num_micro_batches for plan in plans],
            "plans": [_plan_json(planned, predict(planned.table, plan)) for plan in plans],
        },
        "simulated": planned.num_simulated,
        "origins": list(explained.origins),
    }


def _plan_json(planned: Planned, prediction: Prediction | None) -> dict[str, Any] | None:
    if prediction is None:
        return None
    plan = prediction.plan
    return {
        "hosts": list(named(planned.table.problem, plan.hosts)),
        "layers": list(plan.layers),
        "micro_batch": plan.micro_batch,
        "schedule": plan.schedule,
        "in_flight": list(prediction.in_flight),
        "activations": list(plan.activations),
        "gradients": list(plan.gradients),
        "first": str(plan.first),
        "chunks_per_stage": plan.chunks_per_stage,
        "memory_bytes": [round(nbytes) for nbytes in prediction.memory_nbytes],
        "step_s": prediction.step_s,
        "tokens_per_s": prediction.tokens_per_s,
    }
