"""From orders and divisions to plans: candidates by bound, the most promising simulated, the best improved.

Candidates (`candidates.py`) are simulated in the order of their bounds, until the next bound is above the best
simulated step or the budget of simulated actions is spent.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from tahq.plan.prediction import Speed, is_long, predict, simulated_actions, step_time_s
from tahq.plan.problem import PipelinePlan
from tahq.plan.search.candidates import Candidate, CandidateSearch, Order, Progress
from tahq.plan.search.stages import StageCosts, depth_profiles, plan_bound_s
from tahq.plan.search.table import ClusterTable

BUDGET_ACTIONS = 250_000
"""Actions that a search may simulate, 20 to 40 µs each."""

_REFINED = 6
_GAIN = 1e-6
"""Least relative gain that counts."""
_LATE, _NOT_SLOWER = 0.5, 0.01
"""Depths are as many as keep a step as short, but for this relative difference, if each frame comes this part of a
micro-batch's time later than simulated."""


class Simulations:
    """The plans simulated so far, with their seconds, and the rest of the budget, of which `progress` has the share.

    With `in_pieces` frames are in pieces, as they are sent, except in long steps; it takes twice the budget.
    """

    def __init__(
        self,
        table: ClusterTable,
        budget_actions: int = BUDGET_ACTIONS,
        progress: Progress = lambda share: None,
        *,
        in_pieces: bool = False,
    ) -> None:
        self.table = table
        self._progress, self._in_pieces = progress, in_pieces
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
            is_whole = not self._in_pieces or is_long(plan)
            self._left -= simulated_actions(plan) * (1 if is_whole else 2)
            seconds = step_time_s(self.table, plan) if is_whole else predict(self.table, plan).step_s
            self.times_s[plan] = float(seconds)
            self._progress(min(1.0, 1 - self._left / self._budget))
        return self.times_s[plan]

    def ranked(self) -> list[PipelinePlan]:
        """All simulated plans, the fastest first; of equally fast ones that with fewer micro-batches in flight."""
        return sorted(self.times_s, key=lambda plan: (self.times_s[plan], in_flight(plan)))


def in_flight(plan: PipelinePlan) -> int:
    """Most micro-batches in flight, of all stages together."""
    return plan.num_stages * plan.num_micro_batches if plan.schedule == "gpipe" else sum(plan.depths)


def sturdiest(simulations: Simulations, plans: Iterable[PipelinePlan]) -> PipelinePlan:
    """Of plans about as fast, that with the fewest micro-batches in flight which stays so if frames come late.

    No real frame is as punctual as a simulated one, and without slack each delay holds up the first stage.
    """

    def late_s(plan: PipelinePlan) -> float:
        each_s = simulations.time_s(plan) / plan.num_micro_batches
        return step_time_s(simulations.table, plan, Speed(late_s=_LATE * each_s))

    ranked = sorted(plans, key=in_flight)
    limit_s = (1 + _NOT_SLOWER) * late_s(ranked[-1])
    return next(plan for plan in ranked if late_s(plan) <= limit_s)


class Search:
    """One search for the best pipeline of some hosts; the arguments are those of `CandidateSearch`."""

    def __init__(
        self,
        simulations: Simulations,
        hosts: Sequence[int],
        like: PipelinePlan | None = None,
        progress: Progress = lambda share: None,
    ) -> None:
        self._simulations, self._table, self._hosts = simulations, simulations.table, frozenset(hosts)
        self._problem, self._model = self._table.problem, self._table.problem.model
        self._candidates = CandidateSearch(self._table, hosts, like, progress)

    def run(self) -> list[PipelinePlan]:
        """Plans, the fastest first; empty: no host has the memory for anything."""
        self._simulate(self._candidates.run())
        for plan in self._leaders():
            self._refine(plan)
        return self._simulations.ranked()

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
        stages = StageCosts(self._table, candidate.hosts, candidate.micro_batch)
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
        activations, gradients = ((codec,) * (len(candidate.hosts) - 1) for codec in self._problem.fewest_bits)
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
            if self._hosts.issuperset(plan.hosts):
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
        stages, split = StageCosts.of(self._table, plan), plan.schedule == "zero-bubble"
        for layers in _moved(plan.layers, least=plan.chunks_per_stage):
            limits = stages.depth_limits(np.array(layers, dtype=float), split=split)
            if limits[-1] >= 1 and (plan.depths or plan.schedule != "gpipe" or limits[-1] >= plan.num_micro_batches):
                depths = tuple(int(min(pair)) for pair in zip(plan.depths, limits, strict=True)) if plan.depths else ()
                yield _fitting(stages, replace(plan, layers=layers, depths=depths))
        limits = stages.depth_limits(np.array(plan.layers, dtype=float), split=split)
        for depths in deepened(plan.depths):
            if all(1 <= depth <= limit for depth, limit in zip(depths, limits, strict=True)):
                yield _fitting(stages, replace(plan, depths=depths))
        now = tuple(map(int, stages.options_of(plan)))
        for stage, usable in enumerate(stages.usable_options(plan) if len(stages.needs) > 1 else ()):
            for number in usable:
                if number != now[stage]:
                    yield replace(plan, options=(*now[:stage], number, *now[stage + 1 :]))


def _fitting(stages: StageCosts, plan: PipelinePlan) -> PipelinePlan:
    """The plan, with the fastest options instead of those that do not fit it."""
    return replace(plan, options=()) if plan.options and not stages.fits(plan) else plan


def _moved(layers: tuple[int, ...], least: int) -> Iterator[tuple[int, ...]]:
    """One block from any stage that has more than the least to any other."""
    for source, count in enumerate(layers):
        for target in range(len(layers)):
            if count > least and target != source:
                moved = list(layers)
                moved[source] -= 1
                moved[target] += 1
                yield tuple(moved)


def deepened(depths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """One more or less in flight on the first stages, or on one of them, never fewer than on the next."""
    for step in (1, -1, 2):
        for stage in range(len(depths)):
            for changed in ({stage}, set(range(stage + 1))):
                new = tuple(depth + step * (index in changed) for index, depth in enumerate(depths))
                if all(a >= b for a, b in pairwise(new)):
                    yield new
