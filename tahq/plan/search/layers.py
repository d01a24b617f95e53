"""Layers for the hosts of one order: the divisions that the bound likes best.

Blocks are alike, so once it is said how long the busiest stage may compute, the best that can be done is to give each
block to the fastest host that has room: what is left, the time that a micro-batch needs to come through, is a sum. So
few limits are tried in place of all divisions, each division is bounded with everything else that there is (links,
memory, latency), and where all divisions are few, all are.
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np

from tahq.plan.search.stages import StageCosts
from tahq.plan.search.table import Array
from tahq.plan.simulate.bound import step_bound

MAX_ALL = 2_000
"""Divisions that are all tried."""

_NUM_LIMITS = 48


@dataclass(frozen=True, slots=True)
class Divisions:
    """Divisions with their bounds in seconds, the best first."""

    layers: Array
    bounds_s: Array


def best_divisions(stages: StageCosts, num_layers: int, keep: int, *, split: bool) -> Divisions:
    """The divisions of least bound among those that fit the hosts' memory; none may be left.

    Args:
        stages: hosts, in order.
        num_layers: blocks to divide, each stage one or more.
        keep: so many at most.
        split: whether backwards may be split.
    """
    num_stages = len(stages.hosts)
    every = math.comb(num_layers - 1, num_stages - 1) <= MAX_ALL
    layers = _all_divisions(num_layers, num_stages) if every else _filled(stages, num_layers)
    depths = stages.depth_limits(layers)
    fits = depths[:, -1] >= 1
    layers, depths = layers[fits], depths[fits]
    if not len(layers):
        return Divisions(layers, np.zeros(0))
    bounds_s = step_bound(stages.bound_costs(layers, depths, split=split))
    best = np.argsort(bounds_s, kind="stable")[:keep]
    return Divisions(layers[best], bounds_s[best])


@cache
def _all_divisions(num_layers: int, num_stages: int) -> Array:
    """All ways to divide, [N, P]."""
    cuts = np.array(list(combinations(range(1, num_layers), num_stages - 1)), dtype=float)
    ends = np.full((len(cuts), 1), float(num_layers))
    starts = np.zeros((len(cuts), 1))
    return np.diff(np.hstack([starts, cuts.reshape(len(cuts), num_stages - 1), ends]), axis=1)


def _filled(stages: StageCosts, num_layers: int) -> Array:
    """A division for each limit of compute time and each depth that memory may have to hold."""
    each = np.maximum(stages.block.forward + stages.block.backward, 1e-12)
    ends = stages.ends.forward + stages.ends.backward
    rooms = np.unique([_most_layers(stages, depths, num_layers) for depths in _wanted_depths(stages)], axis=0)
    found = [np.zeros((0, len(each)))]
    for room in rooms:
        if room.min() >= 1 and room.sum() >= num_layers:
            limits = _limits(each, ends, room, num_layers)
            capacity = np.clip(np.floor((limits[:, None] - ends) / each + 1e-9), 1, room)
            found.append(_fill(capacity, each, num_layers))
    layers: Array = np.unique(np.concatenate(found), axis=0)
    return layers


def _wanted_depths(stages: StageCosts) -> list[Array]:
    """Depths that memory may be kept free for, from one micro-batch in flight to all; one where memory is no limit."""
    num_stages = len(stages.hosts)
    if np.isinf(stages.memory()).all():
        return [np.ones(num_stages)]
    natural = np.arange(num_stages, 0, -1).astype(float)
    same = [np.full(num_stages, float(2**power)) for power in range(stages.num_micro_batches.bit_length())]
    return [np.minimum(depths, stages.num_micro_batches) for depths in (natural, 2 * natural, *same)]


def _most_layers(stages: StageCosts, depths: Array, num_layers: int) -> Array:
    """Blocks that each stage has memory for with so many micro-batches in flight."""
    none, one = np.zeros(len(depths)), np.ones(len(depths))
    base = stages.fixed_nbytes(none) + depths * stages.held_nbytes(none)
    block = stages.fixed_nbytes(one) + depths * stages.held_nbytes(one) - base
    room = stages.memory() - base
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.where(block > 0, np.floor(room / block), np.where(room >= 0, np.inf, 0.0))
    return np.clip(most, 0, num_layers - len(depths) + 1)


def _limits(each: Array, ends: Array, room: Array, num_layers: int) -> Array:
    """Seconds that the busiest stage may compute: the least that suffices, those just above, and some far above."""
    counts = np.arange(1, int(room.max()) + 1)
    values = np.unique(counts[:, None] * each + ends)
    values = values[values >= (each + ends).max() - 1e-12]
    if not len(values):
        values = np.array([(each + ends).max()])
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        capacity = np.clip(np.floor((values[middle] - ends) / each + 1e-9), 1, room)
        low, high = (low, middle) if capacity.sum() >= num_layers else (middle + 1, high)
    above = values[low:]
    half = _NUM_LIMITS // 2
    far = (
        np.linspace(half, len(above) - 1, half).astype(int) if len(above) > _NUM_LIMITS else np.arange(half, len(above))
    )
    return np.concatenate([above[:half], above[far]])


def _fill(capacity: Array, each: Array, num_layers: int) -> Array:
    """Blocks to the fastest hosts first, one to every stage before."""
    order = np.argsort(each, kind="stable")
    extra = (capacity - 1)[:, order]
    before = np.cumsum(extra, axis=1) - extra
    taken = np.clip(num_layers - len(each) - before, 0, extra)
    layers = np.ones_like(capacity)
    layers[:, order] += taken
    whole: Array = layers[layers.sum(axis=1) == num_layers]
    return whole
