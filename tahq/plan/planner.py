"""The planner: hosts and their order, layers, micro-batch, schedule, depths and codecs for the most tokens per second.

Bound, then simulation: `search.orders` and `search.layers` find candidates by a lower bound of the step's time,
`search.search` simulates the most promising and improves the best of them, `search.codecs` gives links back the
quality that they can afford, and `replicas` puts pipelines side by side. Pure: equal problems give equal plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tahq.errors import UserError
from tahq.plan.prediction import Prediction, is_long, predict
from tahq.plan.problem import PipelinePlan, PlanProblem
from tahq.plan.replicas import Replicas, combined
from tahq.plan.search.codecs import TOLERANCE, with_best_codecs
from tahq.plan.search.search import BUDGET_ACTIONS, Search, Simulations
from tahq.plan.search.stages import StageCosts, depth_profiles
from tahq.plan.search.table import ClusterTable
from tahq.units import format_size

_WORTH_ANOTHER_ORDER = 0.002
_ABOUT_AS_FAST = 0.001
_FINAL_ORDERS = 3
_FINALISTS = 8
"""Plans that are simulated again with frames in pieces, as they are sent."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The planner's result.

    Attributes:
        table: the cluster as it was seen, for further questions.
        best: the plan to take; with replicas, that of the fastest one, alone.
        others: the other simulated plans, the fastest first.
        replicas: None where one pipeline is best, or all that was asked for.
        num_simulated: plans that were simulated.
    """

    table: ClusterTable
    best: Prediction
    others: tuple[PipelinePlan, ...]
    replicas: Replicas | None
    num_simulated: int

    @property
    def step_s(self) -> float:
        """Seconds of a step of the whole run."""
        return self.best.step_s if self.replicas is None else self.replicas.step_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole run."""
        return self.table.problem.tokens_per_step() / self.step_s


def plan(problem: PlanProblem, budget_actions: int = BUDGET_ACTIONS) -> Planned:
    """Find the best plan.

    Args:
        problem: what is known, and what may be chosen.
        budget_actions: how many actions may be simulated; more take longer and miss less.

    Raises:
        UserError: no choice of hosts has the memory for the model, or working paths between them; there are
            fewer hosts or layers than stages.
    """
    _check_counts(problem)
    table = ClusterTable(problem)
    simulations = Simulations(table, budget_actions)
    ranked = Search(table, range(table.num_hosts), problem.fewest_bits, simulations).run()
    if not ranked:
        raise UserError(_why_nothing_fits(table))
    best = _best_in_pieces(table, simulations, ranked)
    _check_paths(table, best.plan)
    replicas = _replicas(table, best.plan) if problem.max_replicas > 1 else None
    others = tuple(each for each in simulations.ranked() if each != best.plan)
    return Planned(table, best, others, replicas, len(simulations.times_s))


def _best_in_pieces(table: ClusterTable, simulations: Simulations, ranked: Sequence[PipelinePlan]) -> Prediction:
    """The best of the finalists as they would run, with the codecs that they can afford."""
    problem = table.problem
    if len(problem.activations) + len(problem.gradients) > 2:
        finalists = [_with_quality(table, each, simulations) for each in _of_different_hosts(ranked)]
        return _with_best_first(table, min(finalists, key=lambda prediction: prediction.step_s))
    few = _of_different_hosts(ranked) if is_long(ranked[0]) else ranked[:_FINALISTS]
    best = min((predict(table, each) for each in few), key=lambda prediction: prediction.step_s)
    return _with_best_first(table, _shallowest(table, best, simulations))


def _with_quality(table: ClusterTable, fewest: PipelinePlan, simulations: Simulations) -> Prediction:
    """A plan with the codecs that it can afford, chosen again for the depths that then suffice."""
    limit_s = simulations.time_s(fewest) * (1 + TOLERANCE)
    faithful = predict(table, with_best_codecs(table.problem, fewest, simulations, limit_s))
    shallow = _shallowest(table, faithful, simulations)
    if shallow is faithful:
        return faithful
    again = with_best_codecs(table.problem, shallow.plan, simulations, limit_s)
    return predict(table, again) if again != shallow.plan else shallow


def _shallowest(table: ClusterTable, best: Prediction, simulations: Simulations) -> Prediction:
    """The same with the fewest micro-batches in flight that are about as fast: memory has a value, too."""
    if is_long(best.plan):
        return best
    limit_s = simulations.time_s(best.plan) * (1 + _ABOUT_AS_FAST)
    for depths in depth_profiles(StageCosts.of(table, best.plan), best.plan.layers, best.plan.schedule):
        if sum(depths) >= sum(best.plan.depths):
            break
        fewer = replace(best.plan, depths=depths)
        if simulations.time_s(fewer) <= limit_s:
            shallow = predict(table, fewer)
            if shallow.step_s <= best.step_s * (1 + _ABOUT_AS_FAST):
                return shallow
    return best


def _of_different_hosts(ranked: Sequence[PipelinePlan]) -> list[PipelinePlan]:
    """The best plans of a few orders."""
    firsts: dict[tuple[int, ...], PipelinePlan] = {}
    for each in ranked:
        firsts.setdefault(each.hosts, each)
    return list(firsts.values())[:_FINAL_ORDERS]


def _with_best_first(table: ClusterTable, best: Prediction) -> Prediction:
    """The same with another order on the uplinks, if that is faster."""
    tried = [best, *(predict(table, replace(best.plan, first=first)) for first in table.problem.firsts[1:])]
    fastest = min(tried, key=lambda prediction: prediction.step_s)
    return fastest if fastest.step_s < best.step_s * (1 - _WORTH_ANOTHER_ORDER) else best


def _replicas(table: ClusterTable, first: PipelinePlan) -> Replicas | None:
    """More pipelines from the remaining hosts, for as long as they make the whole faster."""
    plans, best = [first], combined(table, [first])
    wires = table.problem.fewest_bits if table.num_hosts > 1 else ("raw", "raw")
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


# -- refusals ------------------------------------------------------------------------------------


def _check_counts(problem: PlanProblem) -> None:
    stages, hosts, layers = problem.num_stages or 1, len(problem.cluster.hosts), problem.model.num_layers
    if stages > hosts:
        raise UserError(f"{stages} stages need {stages} hosts, the numbers have {hosts}")
    if stages > layers:
        raise UserError(f"{stages} stages need {stages} layers, the model has {layers}")
    if set(problem.schedules) == {"interleaved"} and not _interleaves(problem):
        among = f"{stages}" if problem.num_stages else f"2 to {min(hosts, layers)}"
        chunks, samples = problem.chunks_per_stage, problem.model.global_batch
        raise UserError(
            f"schedule interleaved with {chunks} chunks per stage does not work with {among} stages: it needs two "
            f"stages or more, {chunks} layers for each (the model has {layers}), and a number of micro-batches that "
            f"is a multiple of the stages (global_batch is {samples})"
        )


def _interleaves(problem: PlanProblem) -> bool:
    """Whether some number of stages has a layer for every chunk, and whole rounds of micro-batches."""
    most = min(len(problem.cluster.hosts), problem.model.num_layers // problem.chunks_per_stage)
    allowed = {problem.num_stages} if problem.num_stages else set(range(2, most + 1))
    return any(
        problem.model.global_batch // size % stages == 0
        for stages in allowed & set(range(2, most + 1))
        for size in problem.model.micro_batches
    )


def _check_paths(table: ClusterTable, best: PipelinePlan) -> None:
    """Refuse the best plan if one of its paths failed: then no plan is any good."""
    dead = table.dead_hop(best.hosts)
    if dead is None:
        return
    source, target = (table.problem.cluster.hosts[host] for host in dead)
    failures = [
        path.failure
        for path in table.problem.cluster.paths
        if path.source in (source.name, source.site) and path.target in (target.name, target.site)
    ]
    why = next((failure for failure in failures if failure), "no reason is given")
    raise UserError(
        f"no plan can run{_in_stages(table.problem)}: every choice of hosts that has the memory needs a path that "
        f"failed when it was measured, like that from {source.name} to {target.name} ({why})"
    )


def _why_nothing_fits(table: ClusterTable) -> str:
    """The need of the easiest stage of all, and the memory that there is."""
    problem = table.problem
    size = problem.model.micro_batches[0]
    count = min(table.num_hosts, problem.model.num_layers, 3)
    stages = StageCosts(table, range(count), size, *problem.fewest_bits)
    ones = np.ones(count)
    need = float((stages.fixed_nbytes(ones) + stages.held_nbytes(ones)).min())
    largest = int(np.argmax(table.memory))
    name, has = problem.cluster.hosts[largest].name, format_size(float(table.memory[largest]))
    if float(table.memory[largest]) < need:
        return (
            f"no host has the memory for a stage of one block with one micro-batch of {size} in flight: it needs "
            f"{format_size(need)} or more, and the largest, {name}, has {has}"
        )
    if Search(table, range(table.num_hosts), problem.fewest_bits, Simulations(table)).candidates():
        return (
            f"no choice of hosts{_in_stages(problem)} has the memory for what {' and '.join(problem.schedules)} keeps "
            f"in flight; with fewer micro-batches in flight the model fits: try --schedules 1f1b"
        )
    total = float(problem.model.block_nbytes * problem.model.num_layers)
    total += problem.model.first_nbytes + problem.model.last_nbytes
    return (
        f"no choice of hosts{_in_stages(problem)} has the memory for the model: weights, gradients and optimizer take "
        f"{format_size(total)}, all {table.num_hosts} hosts together have {format_size(float(table.memory.sum()))}"
    )


def _in_stages(problem: PlanProblem) -> str:
    return f" in {problem.num_stages} stages" if problem.num_stages else ""
