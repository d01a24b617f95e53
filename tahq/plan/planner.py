"""The planner: hosts and their order, layers, micro-batch, schedule, depths and codecs for the most tokens a second.

Bound, then simulation: `planner_orders` and `planner_layers` find candidates by a lower bound of the step's time,
`planner_search` simulates the most promising and improves the best of them, `planner_codecs` gives links back the
quality that they can afford, `planner_replicas` puts pipelines side by side. Pure: equal problems give equal plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tahq.errors import UserError
from tahq.plan.prediction import Prediction, is_long, plan_wires, predict
from tahq.plan.problem import Plan, PlanProblem
from tahq.plan.refusals import check_counts, check_ways, why_nothing_fits
from tahq.plan.search.codecs import TOLERANCE, fewest_bits, with_best_codecs
from tahq.plan.search.replicas import Replicas, combined
from tahq.plan.search.schedules import depth_profiles
from tahq.plan.search.search import BUDGET_ACTIONS, Search, Simulations
from tahq.plan.search.stages import StageCosts
from tahq.plan.search.table import ClusterTable

_WORTH_ANOTHER_ORDER = 0.002
_ABOUT_AS_FAST = 0.001
_FINAL_ORDERS = 3
_FINALISTS = 8
"""Plans that are simulated again with frames in pieces, as they are sent."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What the planner found.

    Attributes:
        table: the cluster as it was seen, for further questions.
        best: the plan to take; with replicas, that of the fastest one, alone.
        others: plans that were simulated too, from the fastest on, the best one not among them.
        replicas: None where one pipeline is best, or all that was asked for.
        num_simulated: plans that were simulated.
    """

    table: ClusterTable
    best: Prediction
    others: tuple[Plan, ...]
    replicas: Replicas | None
    num_simulated: int

    @property
    def step_s(self) -> float:
        """Seconds of a step of the whole run."""
        return self.best.step_s if self.replicas is None else self.replicas.step_s

    @property
    def tokens_per_s(self) -> float:
        """Of the whole run."""
        return self.table.problem.tokens_a_step() / self.step_s


def plan(problem: PlanProblem, budget_actions: int = BUDGET_ACTIONS) -> Planned:
    """Find the best plan.

    Args:
        problem: what is known, and what may be chosen.
        budget_actions: how many actions may be simulated; more take longer and miss less.

    Raises:
        UserError: no choice of hosts has the memory for the model, or ways between them that carry anything; there are
            fewer hosts or layers than stages.
    """
    check_counts(problem)
    table = ClusterTable(problem)
    simulations = Simulations(table, budget_actions)
    every = tuple(range(table.num_hosts))
    ranked = Search(table, every, fewest_bits(problem), simulations).run()
    if not ranked:
        raise UserError(why_nothing_fits(table))
    best = _best_in_pieces(table, simulations, ranked)
    check_ways(table, best.plan)
    replicas = _replicas(table, best.plan) if problem.max_replicas > 1 else None
    others = tuple(each for each in simulations.ranked() if each != best.plan)
    return Planned(table, best, others, replicas, len(simulations.times_s))


def _best_in_pieces(table: ClusterTable, simulations: Simulations, ranked: Sequence[Plan]) -> Prediction:
    """The best of the finalists as they would run, with the codecs that they can afford."""
    problem = table.problem
    if len(problem.activations) + len(problem.gradients) > 2:
        finalists = [_with_quality(table, each, simulations) for each in _of_different_hosts(ranked)]
        return _with_best_first(table, min(finalists, key=lambda prediction: prediction.step_s))
    few = _of_different_hosts(ranked) if is_long(ranked[0]) else ranked[:_FINALISTS]
    best = min((predict(table, each) for each in few), key=lambda prediction: prediction.step_s)
    return _with_best_first(table, _shallowest(table, best, simulations))


def _with_quality(table: ClusterTable, fewest: Plan, simulations: Simulations) -> Prediction:
    """A plan with the codecs that it can afford, chosen again for the fewer micro-batches in flight that then do."""
    limit_s = simulations.time_s(fewest) * (1 + TOLERANCE)
    faithful = predict(table, with_best_codecs(table.problem, fewest, simulations, limit_s))
    shallow = _shallowest(table, faithful, simulations)
    if shallow is faithful:
        return faithful
    again = with_best_codecs(table.problem, shallow.plan, simulations, limit_s)
    return predict(table, again) if again != shallow.plan else shallow


def _shallowest(table: ClusterTable, best: Prediction, simulations: Simulations) -> Prediction:
    """The same with the fewest micro-batches in flight that are about as fast: memory is worth something, too."""
    limit_s = simulations.time_s(best.plan) * (1 + _ABOUT_AS_FAST)
    for depths in _profiles(table, best.plan) if not is_long(best.plan) else ():
        if sum(depths) >= sum(best.plan.depths):
            break
        plan = replace(best.plan, depths=depths)
        if simulations.time_s(plan) <= limit_s:
            shallow = predict(table, plan)
            if shallow.step_s <= best.step_s * (1 + _ABOUT_AS_FAST):
                return shallow
    return best


def _profiles(table: ClusterTable, plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Depths that are worth trying for a plan, the fewest first."""
    stages = StageCosts(table, plan.hosts, plan.micro_batch, plan_wires(plan))
    return depth_profiles(stages, np.array(plan.layers, dtype=float), plan.schedule)


def _of_different_hosts(ranked: Sequence[Plan]) -> list[Plan]:
    """The best plans of a few orders."""
    firsts: dict[tuple[int, ...], Plan] = {}
    for each in ranked:
        firsts.setdefault(each.hosts, each)
    return list(firsts.values())[:_FINAL_ORDERS]


def _with_best_first(table: ClusterTable, best: Prediction) -> Prediction:
    """The same with another order on the uplinks, if that is faster."""
    tried = [best, *(predict(table, replace(best.plan, first=first)) for first in table.problem.firsts[1:])]
    fastest = min(tried, key=lambda prediction: prediction.step_s)
    return fastest if fastest.step_s < best.step_s * (1 - _WORTH_ANOTHER_ORDER) else best


def _replicas(table: ClusterTable, first: Plan) -> Replicas | None:
    """More pipelines from the hosts that are left, for as long as they make the whole faster."""
    plans, best = [first], combined(table, [first])
    wires = fewest_bits(table.problem) if table.num_hosts > 1 else ("raw", "raw")
    while len(plans) < table.problem.max_replicas:
        used = {host for each in plans for host in each.hosts}
        free = [host for host in range(table.num_hosts) if host not in used]
        if len(free) < first.num_stages:
            break
        found = Search(table, free, wires, Simulations(table, BUDGET_ACTIONS // 20), like=first).run()
        if not found:
            break
        plans.append(found[0])
        together = combined(table, plans)
        if together is None or (best is not None and together.step_s >= best.step_s):
            break
        best = together
    return best if best is not None and len(best.plans) > 1 else None
