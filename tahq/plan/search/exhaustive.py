"""All plans of a small problem, one by one: the reference that the planner's choice is compared with.

Every order of every subset of the hosts, every division, every size of micro-batch, every schedule and every profile of
in-flight depths that memory allows. One codec a direction; no interleaved schedules.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tahq.plan.prediction import step_time_s
from tahq.plan.problem import Plan, PlanProblem
from tahq.plan.search.codecs import fewest_bits
from tahq.plan.search.orders import all_orders
from tahq.plan.search.stages import StageCosts, Wires
from tahq.plan.search.table import Array, ClusterTable
from tahq.plan.simulate.bound import step_bound


def best_of_all(problem: PlanProblem, *, prune: bool = True) -> tuple[Plan, float, int]:
    """The fastest plan of all, its seconds, and how many were simulated.

    Args:
        problem: a small one.
        prune: leave out plans whose bound is above the best so far, which cannot change the outcome.
    """
    table = ClusterTable(problem)
    best: Plan | None = None
    best_s, simulated = math.inf, 0
    for choice in sorted(_choices(table), key=lambda choice: choice.bound_s):
        if prune and choice.bound_s >= best_s:
            break
        for plan, bound_s in _timed_plans(choice):
            if prune and bound_s >= best_s:
                continue
            simulated += 1
            seconds = step_time_s(table, plan)
            if seconds < best_s:
                best, best_s = plan, seconds
    assert best is not None, "the problem has a plan"
    return best, best_s, simulated


@dataclass(frozen=True, slots=True)
class _Choice:
    """Everything but the depths, and the bound with as many micro-batches in flight as memory holds."""

    bound_s: float
    stages: StageCosts
    layers: Array
    schedule: str


def _choices(table: ClusterTable) -> Iterator[_Choice]:
    problem = table.problem
    wires, num_layers = fewest_bits(problem), problem.model.num_layers
    sizes = [problem.num_stages] if problem.num_stages else range(1, min(table.num_hosts, num_layers) + 1)
    for order in all_orders(table.kinds, range(table.num_hosts), sizes):
        for micro_batch in problem.model.micro_batches:
            stages = StageCosts(table, order, micro_batch, Wires.same(*wires, len(order)))
            yield from _divided(stages, num_layers, problem.schedules)


def _divided(stages: StageCosts, num_layers: int, schedules: tuple[str, ...]) -> Iterator[_Choice]:
    cuts = itertools.combinations(range(1, num_layers), len(stages.hosts) - 1)
    every = np.array([np.diff((0, *inner, num_layers)) for inner in cuts], dtype=float)
    limits = stages.depth_limits(every)
    every, limits = every[limits[:, -1] >= 1], limits[limits[:, -1] >= 1]
    for schedule in schedules if len(every) else ():
        bounds_s = step_bound(stages.bound_costs(every, limits, split=schedule == "zero-bubble"))
        for layers, bound_s in zip(every, bounds_s, strict=True):
            yield _Choice(float(bound_s), stages, layers, schedule)


def _timed_plans(choice: _Choice) -> Iterator[tuple[Plan, float]]:
    """The choice with every profile of depths, and their bounds."""
    stages, schedule = choice.stages, choice.schedule
    profiles = list(_depth_profiles(stages.depth_limits(choice.layers), stages.num_micro_batches, schedule))
    if not profiles:
        return
    depths = np.array(profiles, dtype=float) if profiles[0] else None
    costs = stages.bound_costs(choice.layers, depths, split=schedule == "zero-bubble")
    bounds_s = np.broadcast_to(step_bound(costs), (len(profiles),))
    for profile, bound_s in zip(profiles, bounds_s, strict=True):
        hosts, layers = tuple(map(int, stages.hosts)), tuple(map(int, choice.layers))
        wires = stages.wires.activations, stages.wires.gradients
        yield (
            Plan(hosts, layers, stages.micro_batch, stages.num_micro_batches, schedule, profile, *wires),
            float(bound_s),
        )


def _depth_profiles(limits: Array, count: int, schedule: str) -> Iterator[tuple[int, ...]]:
    """Every profile that never rises, within memory."""
    if schedule == "gpipe":
        yield from [()] if limits[-1] >= count else []
        return
    ranges = [range(1, int(limit) + 1) for limit in limits]
    for depths in itertools.product(*ranges):
        if all(a >= b for a, b in itertools.pairwise(depths)):
            yield depths
