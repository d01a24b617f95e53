"""The report of `tahq plan`, as text and as JSON."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tahq.plan.explanation import Bottleneck, WhatIf, shares
from tahq.plan.planner import Planned
from tahq.plan.prediction import Prediction, predict
from tahq.plan.problem import PipelinePlan, named
from tahq.units import format_rate, format_size
from tahq_launch.command_line import plain_table

_RESOURCES = {
    "compute": "compute of",
    "uplink": "the uplink of",
    "downlink": "the downlink of",
    "encoder": "encoding on",
    "decoder": "decoding on",
    "depth": "waiting on",
}


@dataclass(frozen=True, slots=True)
class PlanExplanation:
    """A plan, its bottleneck and its alternatives; `given` is cluster.yaml unchanged, if the numbers have its hosts."""

    planned: Planned
    origins: tuple[str, ...]
    given: Prediction | None
    bottleneck: Bottleneck
    second: Prediction | None
    what_ifs: tuple[WhatIf, ...]


def report(explained: PlanExplanation) -> str:
    """The text, at most about 100 columns wide."""
    planned = explained.planned
    bottleneck = f"Bottleneck: {_bottleneck(planned, explained.bottleneck)}"
    parts = [_head(explained), _stages(planned), _links(planned), _replicas(planned), bottleneck]
    return "\n\n".join(part for part in [*parts, _alternatives(explained)] if part)


def _head(explained: PlanExplanation) -> str:
    planned, plan = explained.planned, explained.planned.best.plan
    chunks = f" with {plan.chunks_per_stage} chunks per stage" if plan.chunks_per_stage > 1 else ""
    tokens = planned.table.problem.tokens_per_step()
    lines = [
        f"Predicted: {_tokens(planned.tokens_per_s)}, {planned.step_s:.3f} s per step of {tokens:,} tokens",
        f"  {_plural(plan.num_stages, 'stage')} on {plan.num_stages} of {_plural(planned.table.num_hosts, 'host')}; "
        f"schedule {plan.schedule}{chunks}; "
        f"{_plural(plan.num_micro_batches, 'micro-batch')} of {_plural(plan.micro_batch, 'sample')}",
        *([f"  {plan.first} go first on an uplink"] if plan.first != "oldest" else []),
        f"  {_plural(planned.num_simulated, 'plan')} simulated",
    ]
    return "\n".join([*lines, *(f"  {origin}" for origin in explained.origins)])


def _stages(planned: Planned) -> str:
    best, table = planned.best, planned.table
    needed, hosts = shares(table, best), best.plan.hosts
    rows = [
        [
            str(stage),
            name,
            str(best.plan.layers[stage]),
            str(best.in_flight[stage]),
            format_size(best.memory_nbytes[stage]),
            format_size(table.memory[host]) if table.memory[host] < math.inf else "–",
            *(f"{needed[kind, stage]:.0%}" for kind in ("compute", "uplink", "downlink")),
        ]
        for stage, (name, host) in enumerate(zip(named(table.problem, hosts), hosts, strict=True))
    ]
    titles = ["stage", "host", "layers", "in flight", "memory", "limit", "compute", "uplink", "downlink"]
    return "Stages, and the share of the step that each resource is busy\n" + plain_table(titles, rows, left=(1,))


def _links(planned: Planned) -> str:
    table, plan = planned.table, planned.best.plan
    names = named(table.problem, plan.hosts)
    rows = []
    for cut in range(plan.num_stages - 1):
        before, after = plan.hosts[cut], plan.hosts[cut + 1]
        for codec, source, target, arrow in (
            (plan.activations[cut], before, after, "→"),
            (plan.gradients[cut], after, before, "←"),
        ):
            nbytes = table.problem.frame_nbytes(codec, plan.micro_batch)
            rate = float(table.pair_rate[source, target])
            rows.append(
                [
                    str(cut),
                    f"{names[cut]} {arrow} {names[cut + 1]}",
                    codec,
                    format_size(nbytes),
                    format_rate(rate) if rate < math.inf else "–",
                    f"{8000 * nbytes / rate:.3g}",
                    f"{1000 * table.latency_s[source, target]:.3g}",
                ]
            )
    titles = ["link", "from-to", "codec", "frame", "rate", "ms", "latency, ms"]
    return "Links: activations →, gradients ←\n" + plain_table(titles, rows, left=(1, 2)) if rows else ""


def _replicas(planned: Planned) -> str:
    if planned.replicas is None:
        return ""
    replicas = planned.replicas
    rows = [
        [
            str(index),
            ", ".join(named(planned.table.problem, plan.hosts)),
            "+".join(map(str, plan.layers)),
            plan.schedule,
            ", ".join(map(str, plan.depths)) or "all",
            str(plan.num_micro_batches),
        ]
        for index, plan in enumerate(replicas.plans)
    ]
    title = f"{len(rows)} replicas; averaging their gradients takes {replicas.all_reduce_s:.3f} s per step"
    titles = ["replica", "hosts", "layers", "schedule", "in flight", "micro-batches"]
    return f"{title}\n" + plain_table(titles, rows, left=(1, 2, 3, 4))


def _bottleneck(planned: Planned, limit: Bottleneck) -> str:
    kind, index = limit.resource
    names = named(planned.table.problem, planned.best.plan.hosts)
    share = f"{limit.share:.0%} of the step"
    if kind == "fill":
        return (
            "filling and draining the pipeline, with too few micro-batches to hide them; "
            f"the busiest resource is needed for {share}"
        )
    if kind in ("activations", "gradients"):
        source, target = (index, index + 1) if kind == "activations" else (index + 1, index)
        return f"the path {names[source]} → {names[target]} (link {index}, {kind}), needed for {share}"
    resource = f"{_RESOURCES[kind]} stage {index} ({names[index]})"
    if kind != "depth":
        return f"{resource}, needed for {share}"
    return (
        f"{resource}, whose {planned.best.in_flight[index]} micro-batches in flight do not cover the round trip of "
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
        "plan": _plan_json(planned, planned.best),
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
