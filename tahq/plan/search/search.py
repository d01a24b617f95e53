"""From orders and divisions to plans: candidates by bound, the most promising simulated, the best improved.

A candidate is an order, a micro-batch size and a division; its bound is the shortest step that it could have, whatever
the schedule and its depths. Candidates are simulated in the order of their bounds, until the next bound is above the
best simulated step or the budget of simulated actions is spent.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tahq.plan.prediction import is_long, simulated_actions, step_time_s
from tahq.plan.problem import PipelinePlan
from tahq.plan.search.layers import best_divisions
from tahq.plan.search.orders import MAX_ALL_HOSTS, Order, OrderSearch, all_orders, stage_counts
from tahq.plan.search.stages import StageCosts, depth_profiles, plan_bound_s
from tahq.plan.search.table import ClusterTable

BUDGET_ACTIONS = 250_000
"""Actions that a search may simulate, 20 to 40 µs each."""

_MAX_EVERYTHING = 4_000
"""Up to so many pairs of order and micro-batch size, all are bounded; else only the orders best at two sizes."""

_KEPT_DIVISIONS = 6
_REFINED = 6
_GAIN = 1e-6
"""Least relative gain that counts."""


class Candidate(NamedTuple):
    """An order, a micro-batch size, a division, and its bound in seconds."""

    bound_s: float
    hosts: Order
    micro_batch: int
    layers: tuple[int, ...]


class Simulations:
    """The plans simulated so far, with their seconds, and the rest of the budget."""

    def __init__(self, table: ClusterTable, budget_actions: int = BUDGET_ACTIONS) -> None:
        self.table = table
        self.times_s: dict[PipelinePlan, float] = {}
        self._budget = self._left = budget_actions

    @property
    def is_exhausted(self) -> bool:
        """Whether the budget is used up."""
        return self._left <= 0

    @property
    def is_sparing(self) -> bool:
        """Whether half of the budget is used up, so that hopeless plans are no longer simulated."""
        return self._left <= self._budget / 2

    def time_s(self, plan: PipelinePlan) -> float:
        """Seconds of a plan's step."""
        if plan not in self.times_s:
            self._left -= simulated_actions(plan)
            self.times_s[plan] = float(step_time_s(self.table, plan))
        return self.times_s[plan]

    def ranked(self) -> list[PipelinePlan]:
        """All simulated plans, the fastest first; of equals the one with fewer micro-batches in flight."""

        def in_flight(plan: PipelinePlan) -> int:
            return plan.num_stages * plan.num_micro_batches if plan.schedule == "gpipe" else sum(plan.depths)

        return sorted(self.times_s, key=lambda plan: (self.times_s[plan], in_flight(plan)))


class Search:
    """One search for the best pipeline of some hosts.

    Args:
        table: the cluster.
        hosts: the hosts that may be used.
        wires: the codecs of the two directions.
        simulations: shared by several searches.
        like: a plan whose number of stages and micro-batch size are kept; None: both are open.
    """

    def __init__(
        self,
        table: ClusterTable,
        hosts: Sequence[int],
        wires: tuple[str, str],
        simulations: Simulations,
        like: PipelinePlan | None = None,
    ) -> None:
        self._table, self._hosts, self._wires = table, tuple(hosts), wires
        self._problem, self._model = table.problem, table.problem.model
        self._simulations = simulations
        self._micro_batches = (like.micro_batch,) if like else self._model.micro_batches
        self._num_stages = like.num_stages if like else self._problem.num_stages
        self._scores: dict[tuple[tuple[int, ...], int], float] = {}

    def run(self) -> list[PipelinePlan]:
        """Plans, the fastest first; empty: no host has the memory for anything."""
        self._simulate(self.candidates())
        for plan in self._leaders():
            self._refine(plan)
        return self._simulations.ranked()

    # -- candidates by bound ---------------------------------------------------------------------

    def candidates(self) -> list[Candidate]:
        """The best divisions of every promising order and micro-batch size, by their bound."""
        most = min(len(self._hosts), self._model.num_layers)
        sizes = [size for size in stage_counts(most, self._num_stages) if size <= most]
        orders = self._exhaustive(sizes) if len(self._hosts) <= MAX_ALL_HOSTS else self._searched(sizes)
        found = [
            candidate
            for order in orders
            for micro_batch in self._micro_batches
            for candidate in self._divided(order, micro_batch)
        ]
        return sorted(found, key=lambda candidate: candidate.bound_s)

    def _exhaustive(self, sizes: Sequence[int]) -> list[Order]:
        orders = list(all_orders(self._table.kinds, self._hosts, sizes))
        if len(orders) * len(self._micro_batches) <= _MAX_EVERYTHING:
            return orders
        few = self._promising(dict.fromkeys(self._micro_batches, orders[:: max(1, len(orders) // 40)]))
        ranked = sorted(orders, key=lambda order: min(self._score(order, size) for size in few))
        return ranked[: _MAX_EVERYTHING // len(self._micro_batches)]

    def _searched(self, sizes: Sequence[int]) -> list[Order]:
        searches = {size: OrderSearch(self._table, self._hosts, size, self._wires) for size in self._micro_batches}
        found: dict[Order, None] = {}
        for micro_batch in self._promising({size: each.fastest_alone(sizes) for size, each in searches.items()}):
            found |= dict.fromkeys(searches[micro_batch].best(sizes, partial(self._score, micro_batch=micro_batch)))
        return list(found)

    def _promising(self, orders: Mapping[int, Sequence[Order]]) -> tuple[int, ...]:
        """The two micro-batch sizes that some orders, given for each, do best with.

        Where none of the orders fits, others may: then the sizes that take least memory.
        """
        best = {
            size: min((self._score(order, size) for order in those), default=math.inf) for size, those in orders.items()
        }
        fitting = tuple(size for size in sorted(best, key=best.__getitem__)[:2] if best[size] < math.inf)
        return fitting or self._micro_batches[:2]

    def _score(self, order: Order, micro_batch: int) -> float:
        """The least bound of an order; equal hosts are interchangeable."""
        key = tuple(self._table.kinds[host] for host in order), micro_batch
        if key not in self._scores:
            divided = self._divided(order, micro_batch, keep=1)
            self._scores[key] = divided[0].bound_s if divided else math.inf
        return self._scores[key]

    def _divided(self, order: Order, micro_batch: int, keep: int = _KEPT_DIVISIONS) -> list[Candidate]:
        stages = StageCosts(self._table, order, micro_batch, *self._wires)
        split = "zero-bubble" in self._problem.schedules
        return [
            Candidate(float(bound_s), order, micro_batch, tuple(map(int, layers)))
            for layers, bound_s in best_divisions(stages, self._model.num_layers, keep, split=split)
        ]

    # -- simulation ------------------------------------------------------------------------------

    def _simulate(self, candidates: Sequence[Candidate]) -> None:
        """Each order and micro-batch size once with its best division, then the other divisions."""
        firsts: dict[tuple[Order, int], Candidate] = {}
        for candidate in candidates:
            firsts.setdefault((candidate.hosts, candidate.micro_batch), candidate)
        seen = set(firsts.values())
        best_s = math.inf
        for group in (firsts.values(), [candidate for candidate in candidates if candidate not in seen]):
            for candidate in group:
                if candidate.bound_s >= best_s or self._simulations.is_exhausted:
                    break
                best_s = min([best_s, *map(self._simulations.time_s, self._plans(candidate, best_s))])

    def _plans(self, candidate: Candidate, best_s: float) -> Iterator[PipelinePlan]:
        """A candidate under every schedule with every depth profile; when sparing, while they come near the best.

        The deepest profile alone tells little: it is often not the fastest, least of all with 1F1B.
        """
        stages = StageCosts(self._table, candidate.hosts, candidate.micro_batch, *self._wires)
        for schedule in self._problem.schedules:
            if schedule == "interleaved" and not self._interleaves(candidate):
                continue
            profiles = depth_profiles(stages, candidate.layers, schedule)
            if profiles and is_long(self._plan(candidate, schedule, profiles[-1])):
                # a second each: the deepest, and one between
                profiles = tuple(dict.fromkeys(profiles[len(profiles) * third // 3 - 1] for third in (2, 3)))
            for depths in reversed(profiles):
                plan = self._plan(candidate, schedule, depths)
                yield plan
                if self._simulations.is_sparing and self._simulations.time_s(plan) > 1.1 * best_s:
                    break

    def _interleaves(self, candidate: Candidate) -> bool:
        """Whether each stage has a block for every chunk, and micro-batches come in whole rounds."""
        num_micro_batches, num_stages = self._model.global_batch // candidate.micro_batch, len(candidate.hosts)
        enough = min(candidate.layers) >= self._problem.chunks_per_stage
        return enough and num_micro_batches % num_stages == 0 and num_stages > 1

    def _plan(self, candidate: Candidate, schedule: str, depths: tuple[int, ...]) -> PipelinePlan:
        activations, gradients = ((codec,) * (len(candidate.hosts) - 1) for codec in self._wires)
        return PipelinePlan(
            hosts=candidate.hosts,
            layers=candidate.layers,
            micro_batch=candidate.micro_batch,
            num_micro_batches=self._model.global_batch // candidate.micro_batch,
            schedule=schedule,
            depths=depths,
            activations=activations,
            gradients=gradients,
            chunks_per_stage=self._problem.chunks_per_stage if schedule == "interleaved" else 1,
            first=self._problem.firsts[0],
        )

    # -- improvement -----------------------------------------------------------------------------

    def _leaders(self) -> list[PipelinePlan]:
        """The best plans of different orders or micro-batch sizes."""
        leaders: dict[object, PipelinePlan] = {}
        for plan in self._simulations.ranked():
            if set(self._hosts).issuperset(plan.hosts):
                leaders.setdefault((plan.hosts, plan.micro_batch), plan)
            if len(leaders) == _REFINED:
                break
        return list(leaders.values())

    def _refine(self, plan: PipelinePlan) -> None:
        """Move a block, or change a stage's depth, for as long as it helps."""
        better: PipelinePlan | None = plan
        while better is not None:
            plan, better = better, None
            limit_s = self._simulations.time_s(plan) * (1 - _GAIN)
            for neighbour in self._neighbours(plan):
                if self._simulations.is_exhausted:
                    return
                if plan_bound_s(self._table, neighbour) < limit_s and self._simulations.time_s(neighbour) < limit_s:
                    better = neighbour
                    break

    def _neighbours(self, plan: PipelinePlan) -> Iterator[PipelinePlan]:
        stages = StageCosts(self._table, plan.hosts, plan.micro_batch, *self._wires)
        for layers in _moved(plan.layers, least=plan.chunks_per_stage):
            limits = stages.depth_limits(np.array(layers, dtype=float))
            if limits[-1] >= 1 and (plan.depths or plan.schedule != "gpipe" or limits[-1] >= plan.num_micro_batches):
                depths = tuple(int(min(pair)) for pair in zip(plan.depths, limits, strict=True)) if plan.depths else ()
                yield replace(plan, layers=layers, depths=depths)
        limits = stages.depth_limits(np.array(plan.layers, dtype=float))
        for depths in _deepened(plan.depths):
            if all(1 <= depth <= limit for depth, limit in zip(depths, limits, strict=True)):
                yield replace(plan, depths=depths)


def _moved(layers: tuple[int, ...], least: int) -> Iterator[tuple[int, ...]]:
    """One block from any stage that has more than the least to any other."""
    for source, count in enumerate(layers):
        for target in range(len(layers)):
            if count > least and target != source:
                moved = list(layers)
                moved[source] -= 1
                moved[target] += 1
                yield tuple(moved)


def _deepened(depths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """One more or less in flight on the first stages, or on one of them, never fewer than on the next."""
    for step in (1, -1, 2):
        for stage in range(len(depths)):
            for changed in ({stage}, set(range(stage + 1))):
                new = tuple(depth + step * (index in changed) for index, depth in enumerate(depths))
                if all(a >= b for a, b in pairwise(new)):
                    yield new
