"""Candidates for a plan, by bound: an order of hosts, a micro-batch size and a division of the layers.

A candidate's bound is the shortest step that it could have, whatever the schedule and its depths. All orders of few
hosts are tried, and many hosts are searched: every order is scored by the best bound of its divisions. Equal hosts are
interchangeable, so they cost no time. The search is deterministic.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise, permutations
from typing import NamedTuple

import numpy as np

from tahq.comm.network_model import transmission_s
from tahq.plan.problem import PipelinePlan
from tahq.plan.search.needs import kept_by_block
from tahq.plan.search.stages import StageCosts, best_divisions
from tahq.plan.search.table import ClusterTable
from tahq.plan.simulate.bound import Array

Order = tuple[int, ...]
Score = Callable[[Order], float]
Progress = Callable[[float], None]
"""Called with the share that is done, from 0 to 1."""

MAX_ALL_HOSTS = 6
"""Up to this many hosts are tried in all orders."""

_MAX_EVERYTHING = 4_000
"""Up to this many pairs of order and micro-batch size, all are bounded; else only the orders best at two sizes."""

_KEPT_DIVISIONS = 6
_NUM_STARTS = 8
_NUM_SEEDS = 6
_NUM_LEVELS = 6
_SEARCHED = 4
_EVALUATIONS = 300
"""Of one local search."""


class Candidate(NamedTuple):
    """An order, a micro-batch size, a division, and its bound in seconds."""

    bound_s: float
    hosts: Order
    micro_batch: int
    layers: tuple[int, ...]


class CandidateSearch:
    """Finds the candidates among some hosts, with the codecs of fewest bits.

    `like`: a plan whose number of stages and micro-batch size are kept; None: both are open.
    """

    def __init__(
        self,
        table: ClusterTable,
        hosts: Sequence[int],
        like: PipelinePlan | None = None,
        progress: Progress = lambda share: None,
    ) -> None:
        self._progress = progress
        self._num_divided, self._num_expected = 0, 2 * _SEARCHED * _EVALUATIONS
        """Orders that were divided, for a micro-batch size, and about how many there will be."""
        self._table, self._hosts, self._model = table, tuple(hosts), table.problem.model
        self._micro_batches = (like.micro_batch,) if like else self._model.micro_batches
        self._num_stages = like.num_stages if like else table.problem.num_stages
        self._scores: dict[tuple[tuple[int, ...], int], float] = {}

    def run(self) -> list[Candidate]:
        """The best divisions of every promising order and micro-batch size, by their bound."""
        most = min(len(self._hosts), self._model.num_layers)
        sizes = [size for size in stage_counts(most, self._num_stages) if size <= most]
        if self._table.problem.in_order:
            orders = [self._hosts]
        else:
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
            self._num_expected = len(orders) * len(self._micro_batches)
            return orders
        self._num_expected = _MAX_EVERYTHING + 2 * len(orders)
        few = self._promising(dict.fromkeys(self._micro_batches, orders[:: max(1, len(orders) // 40)]))
        ranked = sorted(orders, key=lambda order: min(self._score(order, size) for size in few))
        return ranked[: _MAX_EVERYTHING // len(self._micro_batches)]

    def _searched(self, sizes: Sequence[int]) -> list[Order]:
        searches = {size: OrderSearch(self._table, self._hosts, size) for size in self._micro_batches}
        found: dict[Order, None] = {}
        for micro_batch in self._promising({size: each.fastest_alone(sizes) for size, each in searches.items()}):
            found |= dict.fromkeys(searches[micro_batch].best(sizes, partial(self._score, micro_batch=micro_batch)))
        return list(found)

    def _promising(self, orders: Mapping[int, Sequence[Order]]) -> tuple[int, ...]:
        """The two micro-batch sizes that some orders, given for each, do best with.

        If none of these orders fits memory, others may: then the two smallest sizes.
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
        self._num_divided += 1
        self._progress(min(1.0, self._num_divided / self._num_expected))
        stages = StageCosts(self._table, order, micro_batch)
        split = "zero-bubble" in self._table.problem.schedules
        return [
            Candidate(float(bound_s), order, micro_batch, tuple(map(int, layers)))
            for layers, bound_s in best_divisions(stages, self._model.num_layers, keep, split=split)
        ]


def all_orders(kinds: Sequence[int], hosts: Sequence[int], sizes: Sequence[int]) -> Iterator[Order]:
    """Every order of every subset of these sizes, one of those that differ by equal hosts only."""
    for size in sizes:
        seen = set()
        for order in permutations(hosts, size):
            face = tuple(kinds[host] for host in order)
            if face not in seen:
                seen.add(face)
                yield order


def stage_counts(most: int, wanted: int | None) -> tuple[int, ...]:
    """Numbers of stages to try: all up to a few, then each about a seventh larger than the last."""
    if wanted is not None:
        return (wanted,)
    counts, count = [], 1
    while count < most:
        counts.append(count)
        count = max(count + 1, int(count * 1.15))
    return (*counts, most)


class OrderSearch:
    """Searches good orders of many hosts; the micro-batch size gives the seconds of hops and hosts."""

    def __init__(self, table: ClusterTable, hosts: Sequence[int], micro_batch: int) -> None:
        self._hosts, self._model, index = hosts, table.problem.model, np.array(hosts)
        codecs, nums = table.problem.fewest_bits, (self._model.num_forwards, 1)
        out, back = (table.problem.frame_nbytes(*each) for each in zip(codecs, (micro_batch,) * 2, nums, strict=True))
        times = table.times(micro_batch)
        self._layer_s = (times.block_forward + times.block_backward)[index]
        self._wire_s = transmission_s(out + back, np.minimum(table.up, table.down)[index])
        """Of a micro-batch, sent or received both ways."""
        pairs = np.ix_(index, index)
        rate, latency = table.pair_rate[pairs], table.latency_s[pairs]
        hop_s = transmission_s(out, rate) + transmission_s(back, rate.T) + latency + latency.T
        self._distances: Array = np.maximum(hop_s, hop_s.T)
        """Seconds of a micro-batch's round trip between each two hosts, in the slower order of the two."""
        np.fill_diagonal(self._distances, 0.0)
        self._fits = np.zeros(len(index), dtype=bool)
        """Whether each host has the memory for one block in the middle of a pipeline."""
        for number, option in enumerate(self._model.options):
            held = option.held[micro_batch]
            blocks = kept_by_block(self._model.options, number, micro_batch, times.held_block[index])
            nbytes = option.block_nbytes + 3 * held.tensor + held.again + blocks + 2 * (out + back)
            self._fits |= nbytes <= table.memory[index]
        self._tree = _tree_of(self._distances) if len(hosts) > 2 else None

    def fastest_alone(self, sizes: Sequence[int]) -> list[Order]:
        """For each number of stages the hosts that are fastest on their own; none where too few have the memory."""
        return [order for size in sizes for order in islice(self._starts(size), 1)]

    def best(self, sizes: Sequence[int], score: Score) -> list[Order]:
        """Good orders, the best first.

        Starts are the hosts that would be fastest on their own, and neighbours of good ones, chained by the time of a
        hop between two; the best of them are improved by reversing a part (2-opt), moving a few hosts elsewhere
        (or-opt) and exchanging a host for one outside, while the score falls: seconds, or inf if an order does not fit.
        """
        scores = {order: score(order) for size in sizes for order in self._starts(size)}
        best = [order for order in sorted(scores, key=scores.__getitem__) if scores[order] < math.inf]
        found = dict.fromkeys(best[:_NUM_STARTS])
        for order in _of_different_sizes(best)[:_SEARCHED]:
            nearest = np.argsort(self._alone_s(len(order)), kind="stable")[: 2 * len(order) + 8]
            found[improved(order, [self._hosts[index] for index in nearest], score)] = None
        return sorted(found, key=score)

    def _alone_s(self, size: int) -> Array:
        """Each host's seconds for its share of a micro-batch: computing, or sending or receiving both ways."""
        compute = self._model.num_layers / size * self._layer_s
        wire = self._wire_s if size > 1 else np.zeros_like(self._wire_s)
        alone: Array = np.where(self._fits, np.maximum(compute, wire) + 1e-3 * (compute + wire), math.inf)
        return alone

    def _starts(self, size: int) -> Iterator[Order]:
        """Chains of this many hosts."""
        for chosen in self._subsets(self._alone_s(size), size):
            yield tuple(self._hosts[index] for index in _chained(chosen, self._distances))

    def _subsets(self, alone: Array, size: int) -> Iterator[Sequence[int]]:
        """The fastest hosts, those near each of the fastest, and the fastest of each group of near ones."""
        ranked = np.argsort(alone, kind="stable")[: np.count_nonzero(np.isfinite(alone))]
        if len(ranked) < size:
            return
        yield ranked[:size].tolist()
        if size == len(ranked):
            return
        for seed in ranked[:_NUM_SEEDS]:
            near = alone + self._distances[seed]
            near[seed] = -1.0
            yield np.argsort(near, kind="stable")[:size].tolist()
        if self._tree is None or not self._distances.any():
            return
        from scipy.cluster import hierarchy

        heights = np.unique(self._tree[:, 2])
        for height in heights[np.unique(np.linspace(0, len(heights) - 1, _NUM_LEVELS).astype(int))]:
            groups = hierarchy.fcluster(self._tree, height, "distance")
            names, counts = np.unique(groups, return_counts=True)
            picked = []
            for name in names[counts >= size]:
                members = np.flatnonzero(groups == name)
                members = members[np.argsort(alone[members], kind="stable")][:size]
                if np.isfinite(alone[members]).all():
                    picked.append((float(alone[members].max()), members.tolist()))
            yield from (members for _, members in sorted(picked)[:3])


def _tree_of(distances: Array) -> Array:
    """Hosts that are near each other, grouped by distance."""
    from scipy.cluster.hierarchy import linkage  # slow to import, and every launcher imports this module
    from scipy.spatial.distance import squareform

    tree: Array = linkage(squareform(distances, checks=False), "average")
    return tree


def _of_different_sizes(orders: Sequence[Order]) -> list[Order]:
    """The best order, then the best of other sizes, then the others."""
    firsts: dict[int, Order] = {}
    for order in orders:
        firsts.setdefault(len(order), order)
    ahead = list(firsts.values())[: _SEARCHED - 1]
    return [*ahead, *(order for order in orders if order not in ahead)]


def improved(order: Order, pool: Sequence[int], score: Score, evaluations: int = _EVALUATIONS) -> Order:
    """Local search from an order: take the first better neighbour until there is none, or no evaluation is left."""
    best_s, shuffle = score(order), random.Random(len(order))
    left = evaluations
    while left > 0:
        moves = list(_neighbours(order, pool))
        shuffle.shuffle(moves)
        for move in moves[:left]:
            left -= 1
            seconds = score(move)
            if seconds < best_s * (1 - 1e-9):
                order, best_s = move, seconds
                break
        else:
            return order
    return order


def _neighbours(order: Order, pool: Sequence[int]) -> Iterator[Order]:
    count = len(order)
    for start in range(count):
        for stop in range(start + 2, count + 1):
            yield (*order[:start], *reversed(order[start:stop]), *order[stop:])
    for length in (1, 2, 3):
        for start in range(count - length + 1):
            rest, moved = (*order[:start], *order[start + length :]), order[start : start + length]
            yield from ((*rest[:at], *moved, *rest[at:]) for at in range(len(rest) + 1) if at != start)
    used = set(order)
    for host in pool:
        if host not in used:
            yield from ((*order[:at], host, *order[at + 1 :]) for at in range(count))
    yield from (
        (*order[:a], order[b], *order[a + 1 : b], order[a], *order[b + 1 :])
        for a in range(count)
        for b in range(a + 2, count)
    )


def _chained(chosen: Sequence[int], distances: Array) -> list[int]:
    """The chosen hosts as a chain, each followed by the nearest that is left; the best of a few beginnings."""
    chains = []
    for first in list(chosen)[:8]:
        chain, left = [first], [host for host in chosen if host != first]
        while left:
            chain.append(min(left, key=lambda host: distances[chain[-1], host]))
            left.remove(chain[-1])
        chains.append(chain)
    return min(chains, key=lambda chain: sum(distances[a, b] for a, b in pairwise(chain)))
