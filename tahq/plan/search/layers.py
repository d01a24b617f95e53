"""Layers for the hosts of one order: the divisions of least bound.

Blocks are alike, so for a given limit of the busiest stage's compute time the best division gives each block to the
fastest host that has room: the rest, the time that a micro-batch needs to pass through, is a sum. So a few limits are
tried in place of all divisions, each division is bounded with everything else (links, memory, latency), and where
there are few divisions, all are tried.
"""

import math
from bisect import bisect_left
from functools import cache
from itertools import combinations

import numpy as np

from tahq.plan.search.stages import StageCosts, whole_quotient
from tahq.plan.simulate.bound import Array, step_bound

MAX_ALL = 2_000
"""Up to so many divisions, all are tried."""

_NUM_LIMITS = 48


def best_divisions(stages: StageCosts, num_layers: int, keep: int, *, split: bool) -> list[tuple[Array, float]]:
    """The divisions of least bound among those that fit the hosts' memory, with their bounds in seconds, best first.

    Args:
        stages: hosts, in order.
        num_layers: blocks to divide, each stage at least one.
        keep: at most this many.
        split: whether backwards may be split.
    """
    num_stages = len(stages.hosts)
    every = math.comb(num_layers - 1, num_stages - 1) <= MAX_ALL
    layers = all_divisions(num_layers, num_stages) if every else _filled(stages, num_layers)
    depths = stages.depth_limits(layers)
    fits = depths[:, -1] >= 1
    layers, depths = layers[fits], depths[fits]
    if not len(layers):
        return []
    bounds_s = step_bound(stages.step_seconds(layers, depths, split=split))
    return [(layers[index], float(bounds_s[index])) for index in np.argsort(bounds_s, kind="stable")[:keep]]


@cache
def all_divisions(num_layers: int, num_stages: int) -> Array:
    """All divisions, [N, P]."""
    cuts = combinations(range(1, num_layers), num_stages - 1)
    return np.diff(np.array([(0, *inner, num_layers) for inner in cuts], dtype=float))


def _filled(stages: StageCosts, num_layers: int) -> Array:
    """A division for each limit of compute time and each depth that memory may have to hold."""
    each = np.maximum(stages.block.forward + stages.block.backward, 1e-12)
    ends = stages.model_ends.forward + stages.model_ends.backward
    rooms = np.unique([_most_layers(stages, depths, num_layers) for depths in _wanted_depths(stages)], axis=0)
    found = [np.zeros((0, len(each)))]
    for room in rooms:
        if room.min() >= 1 and room.sum() >= num_layers:
            limits = _limits(each, ends, room, num_layers)
            found.append(_fill(_capacity(limits[:, None], each, ends, room), each, num_layers))
    layers: Array = np.unique(np.concatenate(found), axis=0)
    return layers


def _capacity(limit_s: Array, each: Array, ends: Array, room: Array) -> Array:
    """Blocks that each stage may have under a limit of its compute time, at least one."""
    capacity: Array = np.clip(np.floor((limit_s - ends) / each + 1e-9), 1, room)
    return capacity


def _wanted_depths(stages: StageCosts) -> list[Array]:
    """Depths to reserve memory for, from one micro-batch in flight to all; only one where memory is no limit."""
    num_stages = len(stages.hosts)
    if np.isinf(stages.memory).all():
        return [np.ones(num_stages)]
    natural = np.arange(num_stages, 0, -1).astype(float)
    same = [np.full(num_stages, float(2**power)) for power in range(stages.num_micro_batches.bit_length())]
    return [np.minimum(depths, stages.num_micro_batches) for depths in (natural, 2 * natural, *same)]


def _most_layers(stages: StageCosts, depths: Array, num_layers: int) -> Array:
    """Blocks that fit each stage's memory at these depths."""
    base, with_one = (
        stages.fixed_nbytes(layers) + depths * stages.held_nbytes(layers)
        for layers in (np.zeros(len(depths)), np.ones(len(depths)))
    )
    return np.clip(whole_quotient(stages.memory - base, with_one - base), 0, num_layers - len(depths) + 1)


def _limits(each: Array, ends: Array, room: Array, num_layers: int) -> Array:
    """Limits in seconds of the busiest stage's compute: the least that suffices, those just above, some far above."""
    values = np.unique(np.arange(1, int(room.max()) + 1)[:, None] * each + ends)
    least = (each + ends).max()
    values = values[values >= least - 1e-12] if values[-1] >= least - 1e-12 else np.array([least])
    low = bisect_left(
        range(len(values) - 1), True, key=lambda at: _capacity(values[at], each, ends, room).sum() >= num_layers
    )
    above = values[low:]
    half = _NUM_LIMITS // 2
    if len(above) <= _NUM_LIMITS:
        return above
    return np.concatenate([above[:half], above[np.linspace(half, len(above) - 1, half).astype(int)]])


def _fill(capacity: Array, each: Array, num_layers: int) -> Array:
    """Give every stage one block, then the rest to the fastest hosts first."""
    order = np.argsort(each, kind="stable")
    extra = (capacity - 1)[:, order]
    before = np.cumsum(extra, axis=1) - extra
    layers = np.ones_like(capacity)
    layers[:, order] += np.clip(num_layers - len(each) - before, 0, extra)
    whole: Array = layers[layers.sum(axis=1) == num_layers]
    return whole
