"""Changes to a run, each simulated alone: the best schedule, division of layers, order of hosts, and codecs.

The run is a plan, and a change is a plan that differs in one of these. Except for schedules, candidates are simulated
in the order of their bounds, until the next bound is above the best simulated step or the budget is spent.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Literal

import numpy as np

from tahq.plan.prediction import Speed, fits_memory, is_long, predict, step_time_s
from tahq.plan.problem import PipelinePlan
from tahq.plan.search.candidates import MAX_ALL_HOSTS, all_orders, improved
from tahq.plan.search.codecs import LADDER
from tahq.plan.search.search import Simulations, deepened, sturdiest
from tahq.plan.search.stages import StageCosts, best_divisions, depth_profiles, plan_bound_s
from tahq.plan.search.table import ClusterTable
from tahq.quant.config import WireConfig

ChangeKind = Literal["schedule", "layers", "hosts", "codecs"]

_ABOUT_AS_FAST = 0.002
_NUM_DIVISIONS = 200
_BUDGET_ACTIONS = 15_000
"""Actions that are simulated for each kind, 20 to 40 µs each."""


def best_changes(
    table: ClusterTable, plan: PipelinePlan, kinds: Sequence[ChangeKind], *, adapts_depths: bool = False
) -> dict[ChangeKind, PipelinePlan]:
    """The best change of each kind; kinds that do not make steps shorter are left out.

    With `adapts_depths`, fewer micro-batches are in flight where other layers or hosts have no memory for as many.
    """
    found: dict[ChangeKind, PipelinePlan] = {}
    for kind in kinds:
        simulations = Simulations(table, _BUDGET_ACTIONS, in_pieces=kind == "schedule")
        if kind == "schedule":
            found[kind] = best_schedule(simulations, plan)
        else:
            options = _OPTIONS[kind](table, plan)
            found[kind] = _fastest(simulations, plan, map(partial(_cut, table), options) if adapts_depths else options)
    return {kind: best for kind, best in found.items() if best != plan}


def seconds(table: ClusterTable, plan: PipelinePlan, speed: Speed | None = None) -> float:
    """Seconds of a step, with frames in pieces where that does not take long to simulate."""
    speed = speed or Speed()
    return step_time_s(table, plan, speed) if is_long(plan) else predict(table, plan, speed).step_s


def with_schedules(table: ClusterTable, plan: PipelinePlan) -> Iterator[PipelinePlan]:
    """The plan with every schedule and depth profile."""
    yield plan
    stages = StageCosts.of(table, plan)
    for schedule in table.problem.schedules:
        if schedule != "interleaved":
            for depths in depth_profiles(stages, plan.layers, schedule):
                yield replace(plan, schedule=schedule, depths=depths, chunks_per_stage=1)


def best_schedule(simulations: Simulations, plan: PipelinePlan, *, fixed_depths: bool = False) -> PipelinePlan:
    """The plan under the best schedule with the best depths; of those about as fast the `sturdiest`.

    With `fixed_depths` only the schedule changes.
    """
    table, times_s = simulations.table, simulations.times_s
    names = (name for name in table.problem.schedules if name != "gpipe")  # which has no depths
    others = (replace(plan, schedule=name) for name in names) if fixed_depths else with_schedules(table, plan)
    for each in (plan, *others):
        if not simulations.is_exhausted and (each == plan or fits_memory(table, each)):
            simulations.time_s(each)
    best: PipelinePlan | None = None if fixed_depths else simulations.ranked()[0]
    while best is not None and not simulations.is_exhausted:
        best = next(_better(simulations, best), None)
    limit_s = (1 + _ABOUT_AS_FAST) * min(times_s.values())
    return sturdiest(simulations, [each for each in times_s if times_s[each] <= limit_s])


def _better(simulations: Simulations, plan: PipelinePlan) -> Iterator[PipelinePlan]:
    """Plans with a few micro-batches more or fewer in flight that are faster, and fit the memory."""
    limits = StageCosts.of(simulations.table, plan).depth_limits(np.array(plan.layers, dtype=float))
    for depths in deepened(plan.depths):
        if all(1 <= depth <= limit for depth, limit in zip(depths, limits, strict=True)):
            other = replace(plan, depths=depths)
            if simulations.time_s(other) < (1 - _ABOUT_AS_FAST) * simulations.time_s(plan):
                yield other


def _fastest(simulations: Simulations, plan: PipelinePlan, options: Iterable[PipelinePlan]) -> PipelinePlan:
    """The fastest option that fits the memory, of those about as fast the first; the plan itself if none is faster."""
    table, best_s = simulations.table, simulations.time_s(plan)
    bounds_s = {each: plan_bound_s(table, each) for each in options}
    for each in sorted(bounds_s, key=bounds_s.__getitem__):
        if bounds_s[each] > best_s or simulations.is_exhausted:
            break
        if fits_memory(table, each):
            best_s = min(best_s, simulations.time_s(each))
    limit_s = (1 + _ABOUT_AS_FAST) * best_s
    return next(each for each in (plan, *bounds_s) if simulations.times_s.get(each, math.inf) <= limit_s)


def _cut(table: ClusterTable, plan: PipelinePlan) -> PipelinePlan:
    """The plan with as many of its micro-batches in flight as its hosts have memory for."""
    limits = StageCosts.of(table, plan).depth_limits(np.array(plan.layers, dtype=float))
    pairs = zip(plan.depths, limits, strict=True) if plan.depths else ()
    return replace(plan, depths=tuple(max(1, int(min(pair))) for pair in pairs))


def _divisions(table: ClusterTable, plan: PipelinePlan) -> Iterator[PipelinePlan]:
    """Other divisions of the layers, with one layer or more for each stage."""
    stages, split = StageCosts.of(table, plan), plan.schedule == "zero-bubble"
    for layers, _ in best_divisions(stages, table.problem.model.num_layers, _NUM_DIVISIONS, split=split):
        yield replace(plan, layers=tuple(map(int, layers)))


def _orders(table: ClusterTable, plan: PipelinePlan) -> Iterator[PipelinePlan]:
    """Other orders of the hosts, over known paths only; of many hosts the order of least bound."""

    def bound_s(order: tuple[int, ...]) -> float:
        return plan_bound_s(table, replace(plan, hosts=order)) if _is_known(table, order) else math.inf

    is_few = plan.num_stages <= MAX_ALL_HOSTS
    every = all_orders(table.kinds, plan.hosts, [plan.num_stages]) if is_few else [improved(plan.hosts, (), bound_s)]
    yield from (replace(plan, hosts=order) for order in every if _is_known(table, order))


def _is_known(table: ClusterTable, order: Sequence[int]) -> bool:
    """Whether the numbers have a path between all neighbours, or a round trip and rates that hold between all hosts."""
    cluster = table.problem.cluster
    listed = {(path.source, path.target) for path in cluster.paths}
    pairs = [pair for one, other in pairwise(order) for pair in ((one, other), (other, one))]
    return all(
        (cluster.round_trip > 0 and table.pair_rate[pair] < math.inf)
        or (cluster.hosts[pair[0]].name, cluster.hosts[pair[1]].name) in listed
        for pair in pairs
    )


def _fewer_bits(table: ClusterTable, plan: PipelinePlan) -> Iterator[PipelinePlan]:
    """The plan with fewer bits in one direction or in both, the most faithful first."""
    cuts, usual = plan.num_stages - 1, WireConfig()
    forward = _rungs(table, plan.micro_batch, "activations", plan.activations[0], usual.activations)
    backward = _rungs(table, plan.micro_batch, "gradients", plan.gradients[0], usual.gradients)
    pairs = product(enumerate(forward), enumerate(backward))
    for (_, out), (_, back) in sorted(pairs, key=lambda pair: pair[0][0] + pair[1][0]):
        yield replace(plan, activations=(out,) * cuts, gradients=(back,) * cuts)


def _rungs(table: ClusterTable, micro_batch: int, direction: str, present: str, usual: str) -> list[str]:
    """A codec and those of the ladder with shorter frames, but for those shorter than the usual codec's.

    A codec that is itself below the usual one is followed by all that are shorter.
    """
    nbytes = partial(table.problem.frame_nbytes, micro_batch=micro_batch)
    least = nbytes(usual) if nbytes(present) >= nbytes(usual) else 0.0
    return [present, *(codec for codec in LADDER[direction] if least <= nbytes(codec) < nbytes(present))]


_OPTIONS = {"layers": _divisions, "hosts": _orders, "codecs": _fewer_bits}
