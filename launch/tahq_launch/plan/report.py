"""What `tahq plan` prints, and the same as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tahq.plan.explanation import Bottleneck, WhatIf, shares
from tahq.plan.planner import Planned
from tahq.plan.prediction import Prediction, predict
from tahq.plan.problem import PipelinePlan, named
from tahq.plan.simulate.bound import Resource
from tahq.plan.simulate.simulator import draw_grid
from tahq.units import format_rate, format_size
from tahq_launch.tables import plain_table


@dataclass(frozen=True, slots=True)
class PlanExplanation:
    """A plan and all that is said of it; `given` is cluster.yaml as it was, where the numbers have its hosts."""

    planned: Planned
    origins: tuple[str, ...]
    given: Prediction | None
    bottleneck: Bottleneck
    second: Prediction | None
    what_ifs: tuple[WhatIf, ...]


def report(explained: PlanExplanation) -> str:
    """The text, at most about 100 columns wide."""
    planned = explained.planned
    parts = [
        _head(explained),
        _stages(planned),
        _links(planned),
        _replicas(planned),
        _why(explained),
        _instead(explained),
    ]
    return "\n\n".join(part for part in parts if part)


def grid(planned: Planned, width: int = 100) -> str:
    """The simulated step, drawn."""
    return draw_grid(planned.best.timeline, width)


def _head(explained: PlanExplanation) -> str:
    planned, plan = explained.planned, explained.planned.best.plan
    problem = planned.table.problem
    chunks = f", {plan.chunks_per_stage} chunks a stage" if plan.chunks_per_stage > 1 else ""
    tokens, hosts = problem.tokens_per_step(), _plural(planned.table.num_hosts, "host")
    lines = [
        f"Predicted: {_tokens(planned.tokens_per_s)}, {planned.step_s:.3f} s a step of {tokens:,} tokens",
        f"  {_plural(plan.num_stages, 'stage')} of {hosts}; schedule {plan.schedule}{chunks}; "
        f"{_plural(plan.num_micro_batches, 'micro-batch')} of {_plural(plan.micro_batch, 'sample')}",
        f"  {_plural(planned.num_simulated, 'plan')} simulated",
        *(f"  {origin}" for origin in explained.origins),
    ]
    if plan.first != "oldest":
        lines.insert(2, f"  on an uplink {plan.first} go first")
    return "\n".join(lines)


def _stages(planned: Planned) -> str:
    best, table = planned.best, planned.table
    needed = shares(table, best)
    rows = [
        [
            str(stage),
            name,
            str(best.plan.layers[stage]),
            str(best.in_flight[stage]),
            format_size(best.memory_nbytes[stage]),
            _of(table.memory[host]),
            *(f"{needed[kind, stage]:.0%}" for kind in ("compute", "uplink", "downlink")),
        ]
        for stage, (name, host) in enumerate(zip(named(table.problem, best.plan.hosts), best.plan.hosts, strict=True))
    ]
    titles = ["stage", "host", "layers", "in flight", "memory", "of", "computes", "sends", "receives"]
    return "Stages, and the share of the step that each is busy\n" + plain_table(titles, rows, left=(1,))


def _of(memory: float) -> str:
    return format_size(memory) if memory < float("inf") else "–"


def _links(planned: Planned) -> str:
    best, table = planned.best, planned.table
    plan, names = best.plan, named(table.problem, best.plan.hosts)
    rows = []
    for cut in range(plan.num_stages - 1):
        ends = plan.hosts[cut], plan.hosts[cut + 1]
        for codec, (source, target), arrow in (
            (plan.activations[cut], ends, f"{names[cut]} → {names[cut + 1]}"),
            (plan.gradients[cut], ends[::-1], f"{names[cut]} ← {names[cut + 1]}"),
        ):
            nbytes = table.problem.frame_nbytes(codec, plan.micro_batch)
            rate = float(table.pair_rate[source, target])
            rows.append(
                [
                    str(cut),
                    arrow,
                    codec,
                    format_size(nbytes),
                    format_rate(rate) if rate < float("inf") else "–",
                    f"{8000 * nbytes / rate:.3g}",
                    f"{1000 * table.latency_s[source, target]:.3g}",
                ]
            )
    if not rows:
        return ""
    titles = ["link", "from-to", "codec", "a frame", "alone at", "ms", "latency, ms"]
    return "Links: activations →, gradients ←\n" + plain_table(titles, rows, left=(1, 2))


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
    title = f"{len(rows)} replicas; averaging their gradients takes {replicas.all_reduce_s:.3f} s of a step"
    titles = ["replica", "hosts", "layers", "schedule", "in flight", "micro-batches"]
    return f"{title}\n" + plain_table(titles, rows, left=(1, 2, 3, 4))


def _shortened(names: Sequence[str]) -> Sequence[str]:
    return names if len(names) <= 6 else [*names[:5], "…", names[-1]]


def _why(explained: PlanExplanation) -> str:
    best = explained.planned.best
    limit = explained.bottleneck
    return f"Bottleneck: {resource_name(explained.planned, limit.resource)}, {_sentence(limit, best)}"


def _sentence(limit: Bottleneck, best: Prediction) -> str:
    if limit.resource[0] == "depth":
        return (
            f"whose {best.in_flight[limit.resource[1]]} micro-batches in flight do not cover the round trip of their "
            f"gradients: {limit.share:.0%} of the step at least"
        )
    if limit.resource[0] == "fill":
        return (
            f"with too few micro-batches to hide them; the busiest resource is needed for {limit.share:.0%} of the step"
        )
    return f"needed for {limit.share:.0%} of the step"


def resource_name(planned: Planned, resource: Resource) -> str:
    """A resource in words."""
    kind, index = resource
    names = named(planned.table.problem, planned.best.plan.hosts)
    if kind in ("activations", "gradients"):
        ends = (names[index], names[index + 1]) if kind == "activations" else (names[index + 1], names[index])
        return f"the path {ends[0]} → {ends[1]} (link {index}, {kind})"
    words = {
        "compute": "compute of",
        "uplink": "the uplink of",
        "downlink": "the downlink of",
        "encoder": "encoding on",
        "decoder": "decoding on",
        "depth": "waiting on",
    }
    return f"{words[kind]} stage {index} ({names[index]})" if kind in words else "the pipeline's filling and draining"


def _instead(explained: PlanExplanation) -> str:
    planned = explained.planned
    rows = [["the plan", _tokens(planned.best.tokens_per_s), ""]]
    if explained.given is not None:
        rows.append(
            [
                f"cluster.yaml as it is{_not_fitting(planned, explained.given)}",
                *_compared(explained.given.tokens_per_s, planned),
            ]
        )
    if explained.second is not None:
        second = explained.second
        rows.append([f"second best: {_in_short(planned, second.plan)}", *_compared(second.tokens_per_s, planned)])
    rows += [[each.change, *_compared(each.tokens_per_s, planned)] for each in explained.what_ifs]
    note = "the pipeline alone; in what-ifs hosts and layers stay, schedule and depths are chosen again"
    return f"Instead ({note})\n" + plain_table(["what", "would give", ""], rows, left=(0,))


def _not_fitting(planned: Planned, given: Prediction) -> str:
    """Words about the first host whose memory is not enough; empty: all have enough."""
    names = named(planned.table.problem, given.plan.hosts)
    for name, host, nbytes in zip(names, given.plan.hosts, given.memory_nbytes, strict=True):
        if nbytes > planned.table.memory[host]:
            return f", did it fit: {name} needs {format_size(nbytes)}"
    return ""


def _in_short(planned: Planned, plan: PipelinePlan) -> str:
    names = " ".join(_shortened(named(planned.table.problem, plan.hosts)))
    layers = "+".join(str(count) for count in plan.layers) if len(plan.layers) <= 8 else f"{len(plan.layers)} stages"
    return f"{names}, layers {layers}, {plan.num_micro_batches} × {plan.micro_batch}, {plan.schedule}"


def _compared(tokens_per_s: float, planned: Planned) -> tuple[str, str]:
    change = tokens_per_s / planned.best.tokens_per_s - 1
    return _tokens(tokens_per_s), f"{change:+.1%}"


def _tokens(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f} tokens/s"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "es" if word.endswith("ch") else "s")


def as_json(explained: PlanExplanation) -> dict[str, Any]:
    """The same as plain values; rates in tokens a second, times in seconds, sizes in bytes."""
    planned, second, limit = explained.planned, explained.second, explained.bottleneck
    replicas = planned.replicas
    return {
        "tokens_per_s": planned.tokens_per_s,
        "step_s": planned.step_s,
        "plan": _plan_json(planned, planned.best),
        "bottleneck": {"resource": limit.resource[0], "index": limit.resource[1], "share": limit.share},
        "given": None if explained.given is None else _plan_json(planned, explained.given),
        "second_best": None if second is None else _plan_json(planned, second),
        "what_if": [{"change": each.change, "tokens_per_s": each.tokens_per_s} for each in explained.what_ifs],
        "replicas": None
        if replicas is None
        else {
            "all_reduce_s": replicas.all_reduce_s,
            "hosts": [list(named(planned.table.problem, plan.hosts)) for plan in replicas.plans],
            "num_micro_batches": [plan.num_micro_batches for plan in replicas.plans],
            "plans": [_plan_json(planned, predict(planned.table, plan)) for plan in replicas.plans],
        },
        "simulated": planned.num_simulated,
        "origins": list(explained.origins),
    }


def _plan_json(planned: Planned, prediction: Prediction) -> dict[str, Any]:
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
