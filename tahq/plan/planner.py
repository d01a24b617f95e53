"""The planner: hosts and their order, layers, micro-batch, schedule, depths and codecs for the most tokens per second.

Bound, then simulation: `search.candidates` finds candidates by a lower bound of the step's time, `search.search`
simulates the most promising and improves the best of them, `search.codecs` gives links back the quality that they can
afford, and replicas put pipelines side by side. Pure: equal problems give equal plans.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, permutations
from operator import attrgetter

import numpy as np

from tahq.comm.network_model import transmission_s
from tahq.errors import UserError
from tahq.plan.prediction import Prediction, is_long, predict, step_time_s
from tahq.plan.problem import PipelinePlan, PlanProblem
from tahq.plan.search.candidates import CandidateSearch, Progress
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


class NothingFitsError(UserError):
    """No plan fits the hosts' memory, by the estimates."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """Pipelines side by side, each on hosts of its own, that train one model.

    `plans` have their shares of the batch as `num_micro_batches`: whole micro-batches in proportion to their speeds.
    After the slowest, the gradients are averaged,

        T = max_r T_r(share_r) + 2·(R − 1)/R · bytes / rate + 2·(R − 1) · latency

    a ring's all-reduce of the fp32 gradients of the fullest stage, at the slowest rate and the longest latency between
    any two of the hosts that would exchange them.
    """

    plans: tuple[PipelinePlan, ...]
    step_s: float
    all_reduce_s: float


@dataclass(frozen=True, slots=True)
class Planned:
    """The planner's result: the best plan (with replicas, that of the fastest one, alone) and the others by speed.

    `replicas` is None where one pipeline is best, or no more are allowed.
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


def plan(
    problem: PlanProblem, budget_actions: int = BUDGET_ACTIONS, progress: Progress = lambda share: None
) -> Planned:
    """Find the best plan; more `budget_actions`, the actions that may be simulated, take longer and miss less.

    `progress` is called with about the share that is done: half is for orders of hosts and half for simulations, or
    with replicas a quarter each.

    Raises:
        NothingFitsError: no choice of hosts has the memory for the model.
        UserError: all choices need a path that failed; there are fewer hosts or layers than stages.
    """
    _check_counts(problem)
    table = ClusterTable(problem)
    alone = 1.0 if problem.max_replicas == 1 else 0.5
    simulations = Simulations(table, budget_actions, _part(progress, alone / 2, alone))
    ranked = Search(simulations, range(table.num_hosts), progress=_part(progress, 0.0, alone / 2)).run()
    if not ranked:
        raise NothingFitsError(_why_nothing_fits(table))
    best = _best_in_pieces(simulations, ranked)
    _check_paths(table, best.plan)
    replicas = _replicas(table, best.plan, progress) if problem.max_replicas > 1 else None
    others = tuple(each for each in simulations.ranked() if each != best.plan)
    return Planned(table, best, others, replicas, len(simulations.times_s))


def _part(progress: Progress, begin: float, end: float) -> Progress:
    """Progress of one part of the work, from `begin` to `end` of the whole."""
    return lambda share: progress(begin + (end - begin) * share)


def _best_in_pieces(simulations: Simulations, ranked: Sequence[PipelinePlan]) -> Prediction:
    """The best of the finalists as they would run, with the codecs that they can afford."""
    table, problem = simulations.table, simulations.table.problem
    by_order: dict[tuple[int, ...], PipelinePlan] = {}
    for each in ranked:
        by_order.setdefault(each.hosts, each)
    of_different_orders = list(by_order.values())[:_FINAL_ORDERS]
    if problem.has_choice_of_codecs:
        best = _fastest(_with_quality(simulations, each) for each in of_different_orders)
    else:
        finalists = of_different_orders if is_long(ranked[0]) else ranked[:_FINALISTS]
        best = _shallowest(simulations, _fastest(predict(table, each) for each in finalists))
    fastest = _fastest([best, *(predict(table, replace(best.plan, first=first)) for first in problem.firsts[1:])])
    return fastest if fastest.step_s < best.step_s * (1 - _WORTH_ANOTHER_ORDER) else best


def _fastest(predictions: Iterable[Prediction]) -> Prediction:
    return min(predictions, key=attrgetter("step_s"))


def _with_quality(simulations: Simulations, fewest: PipelinePlan) -> Prediction:
    """A plan with the codecs that it can afford, chosen again for the depths that then suffice."""
    table, limit_s = simulations.table, simulations.time_s(fewest) * (1 + TOLERANCE)
    faithful = predict(table, with_best_codecs(simulations, fewest, limit_s))
    shallow = _shallowest(simulations, faithful)
    if shallow is faithful:
        return faithful
    again = with_best_codecs(simulations, shallow.plan, limit_s)
    return predict(table, again) if again != shallow.plan else shallow


def _shallowest(simulations: Simulations, best: Prediction) -> Prediction:
    """The same plan with the fewest micro-batches in flight that is about as fast: memory has a value, too."""
    if is_long(best.plan):
        return best
    table, limit_s = simulations.table, simulations.time_s(best.plan) * (1 + _ABOUT_AS_FAST)
    for depths in depth_profiles(StageCosts.of(table, best.plan), best.plan.layers, best.plan.schedule):
        if sum(depths) >= sum(best.plan.depths):
            break
        fewer = replace(best.plan, depths=depths)
        if simulations.time_s(fewer) <= limit_s:
            shallow = predict(table, fewer)
            if shallow.step_s <= best.step_s * (1 + _ABOUT_AS_FAST):
                return shallow
    return best


# -- replicas ------------------------------------------------------------------------------------


def _replicas(table: ClusterTable, first: PipelinePlan, progress: Progress) -> Replicas | None:
    """More pipelines from the remaining hosts, for as long as they make the whole faster."""
    plans, best = [first], _combined(table, [first])
    while best is not None and len(plans) < table.problem.max_replicas:
        used = {host for each in plans for host in each.hosts}
        free = [host for host in range(table.num_hosts) if host not in used]
        if len(free) < first.num_stages:
            break
        each = 0.5 / (table.problem.max_replicas - 1)
        part = _part(progress, 0.5 + each * (len(plans) - 1), 0.5 + each * len(plans))
        found = Search(Simulations(table, BUDGET_ACTIONS // 20), free, like=first, progress=part).run()
        together = _combined(table, [*plans, found[0]]) if found else None
        if together is None or together.step_s >= best.step_s:
            break
        plans.append(found[0])
        best = together
    return best if len(plans) > 1 else None


def _combined(table: ClusterTable, plans: Sequence[PipelinePlan]) -> Replicas | None:
    """Pipelines on disjoint hosts, each planned for the whole batch, together; None: too few micro-batches."""
    count = plans[0].num_micro_batches
    if count < len(plans):
        return None
    speeds = [1 / step_time_s(table, plan) for plan in plans]
    shared = tuple(
        replace(plan, num_micro_batches=share, depths=tuple(min(depth, share) for depth in plan.depths))
        for plan, share in zip(plans, _shares(count, speeds), strict=True)
    )
    all_reduce_s = _all_reduce_s(table, plans)
    slowest_s = max(step_time_s(table, plan) for plan in shared)
    return Replicas(shared, slowest_s + all_reduce_s, all_reduce_s)


def _shares(count: int, speeds: Sequence[float]) -> list[int]:
    """Whole shares of `count` in proportion, at least one each, so that the slowest is done as early as possible."""
    shares = [1] * len(speeds)
    for _ in range(count - len(speeds)):
        shares[min(range(len(speeds)), key=lambda index: (shares[index] + 1) / speeds[index])] += 1
    return shares


def _all_reduce_s(table: ClusterTable, plans: Sequence[PipelinePlan]) -> float:
    count = len(plans)
    if count == 1:
        return 0.0
    pairs = [pair for one, other in permutations(plans, 2) for pair in _facing(one, other)]
    ends = tuple(np.array(pairs).T)
    nbytes = 2 * (count - 1) / count * max(_gradient_nbytes(table, plan) for plan in plans)
    return transmission_s(nbytes, float(table.pair_rate[ends].min())) + 2 * (count - 1) * float(
        table.latency_s[ends].max()
    )


def _facing(one: PipelinePlan, other: PipelinePlan) -> list[tuple[int, int]]:
    """Hosts of two replicas that hold the same layers, or some of them."""
    held, peers = ([*zip(plan.hosts, pairwise((0, *accumulate(plan.layers))), strict=True)] for plan in (one, other))
    return [
        (host, peer)
        for host, (first, end) in held
        for peer, (peer_first, peer_end) in peers
        if first < peer_end and peer_first < end
    ]


def _gradient_nbytes(table: ClusterTable, plan: PipelinePlan) -> float:
    """Of the stage that has most to exchange, in fp32."""
    model = table.problem.model
    stages = [layers * model.block_nbytes / model.num_states for layers in plan.layers]
    stages[0] += model.first_nbytes / model.num_states
    stages[-1] += model.last_nbytes / model.num_states
    return max(stages)


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
    return any(
        problem.model.global_batch // size % stages == 0
        for stages in range(2, most + 1)
        for size in problem.model.micro_batches
        if problem.num_stages in (None, stages)
    )


def _check_paths(table: ClusterTable, best: PipelinePlan) -> None:
    """Refuse the best plan if one of its paths failed: then no plan is any good."""
    dead = table.dead_hop(best.hosts)
    if dead is None:
        return
    source, target = (table.problem.cluster.hosts[host] for host in dead)
    why = next(
        path.failure
        for path in table.problem.cluster.paths
        if path.source in (source.name, source.site) and path.target in (target.name, target.site) and path.failure
    )
    raise UserError(
        f"no plan can run{_in_stages(table.problem)}: every choice of hosts that has the memory needs a path that "
        f"failed when it was measured, like that from {source.name} to {target.name} ({why})"
    )


def _why_nothing_fits(table: ClusterTable) -> str:
    """Why no plan fits: the memory that the smallest stage needs, and the memory that there is."""
    problem, model = table.problem, table.problem.model
    count = min(table.num_hosts, model.num_layers, 3)
    stages = StageCosts(table, range(count), model.micro_batches[0])
    ones = np.ones(count)
    need = float((stages.fixed_nbytes(ones) + stages.nbytes_in_flight(ones, ones)).min())
    largest = int(np.argmax(table.memory))
    if table.memory[largest] < need:
        return (
            f"no host has the memory for a stage of one block with one micro-batch of {model.micro_batches[0]} in "
            f"flight: it needs {format_size(need)} or more, and the largest, {problem.cluster.hosts[largest].name}, "
            f"has {format_size(float(table.memory[largest]))}"
        )
    if CandidateSearch(table, range(table.num_hosts)).run():
        return (
            f"no choice of hosts{_in_stages(problem)} has the memory for what {' and '.join(problem.schedules)} keeps "
            f"in flight; with fewer micro-batches in flight the model fits: try --schedules 1f1b"
        )
    total = model.block_nbytes * model.num_layers + model.first_nbytes + model.last_nbytes
    return (
        f"no choice of hosts{_in_stages(problem)} has the memory for the model: weights, gradients and optimizer take "
        f"{format_size(total)}, all {table.num_hosts} hosts together have {format_size(float(table.memory.sum()))}"
    )


def _in_stages(problem: PlanProblem) -> str:
    return f" in {problem.num_stages} stages" if problem.num_stages else ""
