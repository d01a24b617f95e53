"""Explains a plan: its bottleneck, the next best plan, and the gain if something were better.

Shares are of the step's time: how long a resource is needed in all, whatever the schedule. A resource at 100 % is
never idle. Where none is near that, micro-batches wait for each other: for the pipeline to fill, or for a round trip
that the micro-batches in flight do not cover.
"""

from dataclasses import dataclass

import numpy as np

from tahq.plan.changes import best_changes, with_schedules
from tahq.plan.planner import Planned
from tahq.plan.prediction import Prediction, Speed, is_long, predict, step_time_s
from tahq.plan.problem import PipelinePlan
from tahq.plan.search.codecs import with_best_codecs
from tahq.plan.search.search import Simulations
from tahq.plan.search.stages import StageCosts
from tahq.plan.search.table import ClusterTable
from tahq.plan.simulate.bound import Resource, shared_devices, step_bounds
from tahq.quant import CodecSpec

_BUSY = 0.8
"""From this share on a resource, and not waiting, is called the bottleneck."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The limit of a step: a resource, the share of the step that it is needed for, and the bound that it sets.

    `resource` is as in `tahq.plan.simulate.bound`; ``("depth", s)`` says that stage s waits for gradients to come
    back, and ``("fill", 0)`` that micro-batches are too few for the pipeline to be full.
    """

    resource: Resource
    share: float
    bound_s: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Tokens per second of the same hosts and layers under a change."""

    change: str
    tokens_per_s: float


def shares(table: ClusterTable, prediction: Prediction) -> dict[Resource, float]:
    """Share of the step that each resource is needed for, the largest first."""
    plan = prediction.plan
    stages = StageCosts.of(table, plan)
    times = stages.times_of(plan)
    layers = np.array(plan.layers, dtype=float)
    out, back = stages.outward, stages.gradients_of(layers)
    chunks = plan.chunks_per_stage
    seconds: dict[Resource, float] = {}
    for stage in range(plan.num_stages):
        seconds["compute", stage] = float(times.forward[stage] + times.backward[stage])
        before, after = slice(max(stage - 1, 0), stage), slice(stage, stage + 1)
        for kind, forth, again in (
            ("uplink", out.uplink[after], back.uplink[before]),
            ("downlink", out.downlink[before], back.downlink[after]),
            ("encoder", out.encode[after], back.encode[before]),
            ("decoder", out.decode[before], back.decode[after]),
        ):
            seconds[kind, stage] = chunks * float(forth.sum() + again.sum())
    for cut in range(plan.num_stages - 1):
        seconds["activations", cut] = chunks * float(out.path[cut])
        seconds["gradients", cut] = chunks * float(back.path[cut])
    for on_one in shared_devices([table.devices[host] for host in plan.hosts]):
        seconds["gpu", on_one[0]] = sum(seconds["compute", stage] for stage in on_one)
    if relay_s := float(stages.relay_s(layers)):
        seconds["relay", 0] = chunks * relay_s
    ranked = sorted(seconds, key=seconds.__getitem__, reverse=True)
    return {resource: plan.num_micro_batches * seconds[resource] / prediction.step_s for resource in ranked}


def bottleneck(table: ClusterTable, prediction: Prediction) -> Bottleneck:
    """The limit of a plan."""
    plan = prediction.plan
    stages = StageCosts.of(table, plan)
    depths = np.array(prediction.in_flight, dtype=float) if plan.chunks_per_stage == 1 else None
    layers = np.array(plan.layers, dtype=float)
    bounds = step_bounds(stages.step_seconds(layers, depths, split=plan.schedule == "zero-bubble"))
    needed = shares(table, prediction)
    busiest = next(iter(needed))
    if needed[busiest] >= _BUSY:
        return Bottleneck(busiest, needed[busiest], float(bounds[busiest]))
    tightest = max(bounds, key=lambda resource: float(bounds[resource]))
    if tightest[0] == "depth" and prediction.in_flight[tightest[1]] < plan.num_micro_batches:
        return Bottleneck(tightest, float(bounds[tightest]) / prediction.step_s, float(bounds[tightest]))
    return Bottleneck(("fill", 0), needed[busiest], float(bounds[busiest]))


def second_best(planned: Planned) -> Prediction | None:
    """The best plan with other hosts, order or micro-batch size, or more than one block elsewhere; None: there is none.

    Equal hosts make no difference.
    """
    table, best = planned.table, planned.best.plan

    def differs(plan: PipelinePlan) -> bool:
        kinds = [[table.kinds[host] for host in hosts] for hosts in (plan.hosts, best.hosts)]
        if plan.micro_batch != best.micro_batch or kinds[0] != kinds[1]:
            return True
        return sum(abs(a - b) for a, b in zip(plan.layers, best.layers, strict=True)) > 2

    plan = next((each for each in planned.others if differs(each) and table.dead_hop(each.hosts) is None), None)
    if plan is not None and table.problem.has_choice_of_codecs and not is_long(plan):
        plan = with_best_codecs(Simulations(table), plan)
    return None if plan is None else predict(table, plan)


def what_ifs(planned: Planned) -> tuple[WhatIf, ...]:
    """The gain from twice the rates, half the latency, twice the compute, and fewer bits, not below the default.

    Hosts, layers and micro-batches stay; schedule and depths are chosen again where a step is short enough for that.
    """
    best = planned.best.plan
    questions = [(change, best, speed) for change, speed in faster(best).items()]
    if best.activations and (fewer := best_changes(planned.table, best, ["codecs"]).get("codecs")):
        pair = dict.fromkeys(CodecSpec.parse(codec).brief() for codec in (*fewer.activations, *fewer.gradients))
        questions.append((f"{' and '.join(pair)} on the links", fewer, Speed()))
    # of long steps, which take seconds to simulate, the ratio of two quick simulations
    usual_s = step_time_s(planned.table, best) if is_long(best) else None
    return tuple(WhatIf(change, _tokens_per_s(planned, usual_s, plan, speed)) for change, plan, speed in questions)


def faster(plan: PipelinePlan) -> dict[str, Speed]:
    """Faster links and hosts, in words."""
    links = {"rates twice as high": Speed(rates=2.0), "latency half as long": Speed(latency=0.5)}
    return (links if plan.num_stages > 1 else {}) | {"hosts twice as fast": Speed(compute=0.5)}


def _tokens_per_s(planned: Planned, usual_s: float | None, plan: PipelinePlan, speed: Speed) -> float:
    table = planned.table
    if usual_s is not None:
        return planned.best.tokens_per_s * usual_s / step_time_s(table, plan, speed=speed)
    again = min(with_schedules(table, plan), key=lambda each: step_time_s(table, each, speed=speed))
    return predict(table, again, speed).tokens_per_s
