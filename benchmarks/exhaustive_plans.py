"""All plans of a small problem, one by one: the reference for the planner's choice.

Every order of every subset of the hosts, every division, every micro-batch size, every schedule and every profile of
in-flight depths that memory allows. One codec per direction; no interleaved schedules. Of what may be chosen under
`memory` each stage takes the fastest that fits, or every one that fits is tried.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from tahq.plan.prediction import step_time_s
from tahq.plan.problem import PipelinePlan, PlanProblem
from tahq.plan.search.candidates import all_orders
from tahq.plan.search.stages import StageCosts, all_divisions, plan_bound_s
from tahq.plan.search.table import ClusterTable
from tahq.plan.simulate.bound import Array, step_bound


class Choice(NamedTuple):
    """Everything but the depths, and the bound with as many micro-batches in flight as memory holds."""

    bound_s: float
    stages: StageCosts
    layers: Array
    schedule: str


def best_of_all(problem: PlanProblem, *, prune: bool = True, options: bool = False) -> tuple[PipelinePlan, float, int]:
    """The fastest plan of all, its seconds, and how many were simulated.

    Args:
        problem: a small one, for which a plan exists.
        prune: leave out plans whose bound is above the best so far, which cannot change the outcome.
        options: try all memory options of each stage, except those that take longer than another in every respect.
    """
    table = ClusterTable(problem)
    found: list[PipelinePlan] = []
    best_s, simulated = math.inf, 0
    for choice in sorted(_choices(table), key=lambda choice: choice.bound_s):
        if prune and choice.bound_s >= best_s:
            break
        for plan in _with_options(choice, _plans(table, choice)) if options else _plans(table, choice):
            if prune and plan_bound_s(table, plan) >= best_s:
                continue
            simulated += 1
            seconds = step_time_s(table, plan)
            if seconds < best_s:
                best_s = seconds
                found.append(plan)
    return found[-1], best_s, simulated


def _choices(table: ClusterTable) -> Iterator[Choice]:
    problem = table.problem
    num_layers = problem.model.num_layers
    sizes = [problem.num_stages] if problem.num_stages else range(1, min(table.num_hosts, num_layers) + 1)
    for order in all_orders(table.kinds, range(table.num_hosts), sizes):
        for micro_batch in problem.model.micro_batches:
            stages = StageCosts(table, order, micro_batch)
            every = all_divisions(num_layers, len(order))
            limits = stages.depth_limits(every)
            every, limits = every[limits[:, -1] >= 1], limits[limits[:, -1] >= 1]
            for schedule in problem.schedules if len(every) else ():
                bounds_s = step_bound(stages.step_seconds(every, limits, split=schedule == "zero-bubble"))
                for layers, bound_s in zip(every, bounds_s, strict=True):
                    yield Choice(float(bound_s), stages, layers, schedule)


def _with_options(choice: Choice, plans: Iterable[PipelinePlan]) -> Iterator[PipelinePlan]:
    for plan in plans:
        for options in itertools.product(*choice.stages.usable_options(plan)):
            yield replace(plan, options=options)


def _plans(table: ClusterTable, choice: Choice) -> Iterator[PipelinePlan]:
    """The choice with every depth profile that never rises, within memory."""
    stages, count = choice.stages, choice.stages.num_micro_batches
    limits = stages.depth_limits(choice.layers)
    if choice.schedule == "gpipe":
        profiles: Iterable[tuple[int, ...]] = [()] if limits[-1] >= count else []
    else:
        profiles = itertools.product(*(range(1, int(limit) + 1) for limit in limits))
    activations, gradients = ((codec,) * (len(stages.hosts) - 1) for codec in table.problem.fewest_bits)
    hosts, layers = tuple(map(int, stages.hosts)), tuple(map(int, choice.layers))
    for depths in profiles:
        if all(a >= b for a, b in itertools.pairwise(depths)):
            yield PipelinePlan(
                hosts, layers, stages.micro_batch, count, choice.schedule, depths, activations, gradients
            )
