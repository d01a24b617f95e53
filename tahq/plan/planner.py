"""The planner: hosts and their order, layers, micro-batch, schedule, depths and codecs for the most tokens per second.

Bound, then simulation: `search.candidates` finds candidates by a lower bound of the step's time, `search.search`
simulates the most promising and improves the best of them, `search.codecs` gives links back the quality that they can
afford, and replicas put pipelines side by side. Pure: equal problems give equal plans.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, permutations
from operator import attrgetter

import numpy as np

from tahq.comm.network_model import transmission_s
from tahq.errors import UserError
from tahq.pipeline.gradient_sum import BUCKET, sum_codec
from tahq.plan.prediction import Prediction, is_long, predict
from tahq.plan.problem import PipelinePlan, PlanProblem
from tahq.plan.search.candidates import MAX_ALL_HOSTS, CandidateSearch, Progress
from tahq.plan.search.codecs import TOLERANCE, with_best_codecs
from tahq.plan.search.search import BUDGET_ACTIONS, Search, Simulations, sturdiest
from tahq.plan.search.stages import StageCosts, depth_profiles
from tahq.plan.search.table import ClusterTable
from tahq.quant.config import WireConfig
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

    `plans` differ in their hosts only, and have an equal part of the batch. After the slowest, gradients are summed
    (`pipeline/gradient_sum.py`), of every stage s at once:

        T = max_r T_r + max_s (2·(R − 1)/R · bytes_s / rate_s) + 2·latency

    with the stage's gradients as `wire.all_reduce` encodes them, at the slowest rate of its hosts, and the longest
    latency between two of them. Coding is not counted, and neither is that later stages begin earlier.
    """

    plans: tuple[PipelinePlan, ...]
    slowest: Prediction
    all_reduce_s: float

    @property
    def step_s(self) -> float:
        """T."""
        return self.slowest.step_s + self.all_reduce_s


@dataclass(frozen=True, slots=True)
class Planned:
    """The planner's result: the best plan of one pipeline, and the others by speed.

    `replicas` is None where one pipeline is best, or no more are allowed.
    """

    table: ClusterTable
    best: Prediction
    others: tuple[PipelinePlan, ...]
    replicas: Replicas | None
    num_simulated: int

    @property
    def pipelines(self) -> tuple[PipelinePlan, ...]:
        """The replicas, or the best plan alone."""
        return (self.best.plan,) if self.replicas is None else self.replicas.plans

    @property
    def slowest(self) -> Prediction:
        """Of `pipelines`."""
        return self.best if self.replicas is None else self.replicas.slowest

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
    if replicas is not None and replicas.step_s >= best.step_s:
        replicas = None
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
        best = _sturdy(simulations, _fastest(predict(table, each) for each in finalists))
    fastest = _fastest([best, *(predict(table, replace(best.plan, first=first)) for first in problem.firsts[1:])])
    return fastest if fastest.step_s < best.step_s * (1 - _WORTH_ANOTHER_ORDER) else best


def _fastest(predictions: Iterable[Prediction]) -> Prediction:
    return min(predictions, key=attrgetter("step_s"))


def _with_quality(simulations: Simulations, fewest: PipelinePlan) -> Prediction:
    """A plan with the codecs that it can afford, chosen again for the depths that then suffice."""
    table, limit_s = simulations.table, simulations.time_s(fewest) * (1 + TOLERANCE)
    faithful = predict(table, with_best_codecs(simulations, fewest, limit_s))
    shallow = _sturdy(simulations, faithful)
    if shallow is faithful:
        return faithful
    again = with_best_codecs(simulations, shallow.plan, limit_s)
    return predict(table, again) if again != shallow.plan else shallow


def _sturdy(simulations: Simulations, best: Prediction) -> Prediction:
    """The same plan with few micro-batches in flight that is as fast and bears late frames: memory has a value."""
    if is_long(best.plan) or not best.plan.depths:
        return best
    table, limit_s = simulations.table, simulations.time_s(best.plan) * (1 + _ABOUT_AS_FAST)
    profiles = depth_profiles(StageCosts.of(table, best.plan), best.plan.layers, best.plan.schedule)
    plans = (replace(best.plan, depths=depths) for depths in profiles)
    near = [best.plan, *(plan for plan in plans if simulations.time_s(plan) <= limit_s)]
    found = predict(table, sturdiest(simulations, near))
    return found if found.step_s <= best.step_s * (1 + _ABOUT_AS_FAST) else best


# -- replicas ------------------------------------------------------------------------------------


def _replicas(table: ClusterTable, first: PipelinePlan, progress: Progress) -> Replicas | None:
    """The fastest replicas, from two to as many as are allowed; None: there is no room for any."""
    most = min(table.problem.max_replicas, table.num_hosts)
    shapes = [
        (count, stages)
        for count in range(2, most + 1)
        for stages in _stage_counts(table, first, count)
        if table.problem.model.global_batch % count == 0
    ]
    found = list[Replicas]()
    for number, (count, stages) in enumerate(shapes):
        part = _part(progress, 0.5 + 0.5 * number / len(shapes), 0.5 + 0.5 * (number + 1) / len(shapes))
        plans = _side_by_side(table, count, stages, part)
        if plans:
            slowest = max((predict(table, plan) for plan in plans), key=attrgetter("step_s"))
            found.append(Replicas(plans, slowest, _all_reduce_s(table, plans)))
    return min(found, key=attrgetter("step_s"), default=None)


def _stage_counts(table: ClusterTable, first: PipelinePlan, count: int) -> list[int]:
    """Numbers of stages to try with so many replicas; of many hosts only one."""
    problem = table.problem
    most = min(table.num_hosts // count, problem.model.num_layers)
    if problem.in_order:
        every = {table.num_hosts // count} if table.num_hosts % count == 0 else set()
    elif most > MAX_ALL_HOSTS:
        every = {min(first.num_stages, most)}
    else:
        every = set(range(1, most + 1))
    return sorted(number for number in every if number <= most and problem.num_stages in (None, number))


def _side_by_side(table: ClusterTable, count: int, num_stages: int, progress: Progress) -> tuple[PipelinePlan, ...]:
    """Plans of so many replicas that differ in their hosts only; empty: the hosts have no memory for them."""
    model = table.problem.model
    batch = model.global_batch // count
    sizes = [size for size in model.micro_batches if batch % size == 0]
    if not sizes:
        return ()
    part = replace(model.with_sizes(sizes), global_batch=batch)
    own = ClusterTable(replace(table.problem, model=part, num_stages=num_stages, max_replicas=1))
    free, plans = list(range(table.num_hosts)), list[PipelinePlan]()
    for number in range(count):
        hosts = free[:num_stages] if table.problem.in_order else free
        done = _part(progress, number / count, (number + 1) / count)
        simulations = Simulations(own, BUDGET_ACTIONS // 20)
        ranked = Search(simulations, hosts, like=plans[0] if plans else None, progress=done).run()
        if not ranked:
            return ()
        if not plans:
            ranked = [_best_in_pieces(simulations, ranked).plan]
        plans.append(replace(plans[0], hosts=ranked[0].hosts) if plans else ranked[0])
        free = [host for host in free if host not in ranked[0].hosts]
    layers = np.array(plans[0].layers, dtype=float)
    split = plans[0].schedule == "zero-bubble"
    limits = np.min([StageCosts.of(own, plan).depth_limits(layers, split=split) for plan in plans], axis=0)
    if limits.min() < (1 if plans[0].depths else plans[0].num_micro_batches):
        return ()
    limits = np.where(limits < plans[0].num_micro_batches, limits, np.inf)  # no more are ever in flight
    depths = tuple(int(min(pair)) for pair in zip(plans[0].depths, limits, strict=False))
    return tuple(replace(plan, depths=depths) for plan in plans)


def _all_reduce_s(table: ClusterTable, plans: Sequence[PipelinePlan]) -> float:
    count = len(plans)
    seconds = []
    for nbytes, hosts in zip(
        _sum_nbytes(table, plans[0]), zip(*(plan.hosts for plan in plans), strict=True), strict=True
    ):
        ends = tuple(np.array(list(permutations(hosts, 2))).T)
        own = np.array(hosts)
        rate = float(min(table.up[own].min(), table.down[own].min(), (count - 1) * table.pair_rate[ends].min()))
        seconds.append(transmission_s(2 * (count - 1) / count * nbytes, rate) + 2 * float(table.latency_s[ends].max()))
    return max(seconds)


def _sum_nbytes(table: ClusterTable, plan: PipelinePlan) -> list[float]:
    """Of each stage's gradients, encoded."""
    model = table.problem.model
    block, first, last = model.trained
    of_blocks = zip(plan.layers, accumulate(plan.layers), strict=True)
    numels = [block * max(0, min(layers, stop - model.first_trainable)) for layers, stop in of_blocks]
    numels[0] += first
    numels[-1] += last
    bucket_nbytes = sum_codec(table.problem.all_reduce, WireConfig()).encoded_nbytes((BUCKET,))
    return [numel / BUCKET * bucket_nbytes for numel in numels]


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
    need = float(stages.least_nbytes(ones, ones).min())
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
    total = min(each.block_nbytes * model.num_layers + each.first_nbytes + each.last_nbytes for each in model.options)
    return (
        f"no choice of hosts{_in_stages(problem)} has the memory for the model: weights, gradients and optimizer take "
        f"{format_size(total)}, a stage of one block {format_size(need)} or more; all {table.num_hosts} hosts together "
        f"have {format_size(float(table.memory.sum()))}"
    )


def _in_stages(problem: PlanProblem) -> str:
    return f" in {problem.num_stages} stages" if problem.num_stages else ""
