"""Several pipelines side by side, each on hosts of its own, that train one model.

Every replica takes a share of the global batch and its own time for it; then the gradients are averaged:

    T = max_r T_r(share_r) + 2·(R − 1)/R · bytes / rate + 2·(R − 1) · latency

a ring's all-reduce of the fp32 gradients of the fullest stage, at the slowest rate and the longest latency between
any two of the hosts that would exchange them. Shares are whole micro-batches in proportion to the replicas' speeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, permutations

import numpy as np

from tahq.comm.network_model import transmission_s
from tahq.plan.prediction import step_time_s
from tahq.plan.problem import PipelinePlan
from tahq.plan.search.table import ClusterTable


@dataclass(frozen=True, slots=True)
class Replicas:
    """Pipelines of one run. `plans` have their shares of the batch as `num_micro_batches`."""

    plans: tuple[PipelinePlan, ...]
    step_s: float
    all_reduce_s: float


def combined(table: ClusterTable, plans: Sequence[PipelinePlan]) -> Replicas | None:
    """These pipelines together; None: there are fewer micro-batches than pipelines.

    Args:
        table: the cluster.
        plans: one per replica, of disjoint hosts and one micro-batch size, each as planned for the whole batch.
    """
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
