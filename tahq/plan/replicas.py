"""Several pipelines side by side, each on hosts of its own, that train one model.

Every replica takes a share of the global batch and its own time for it; then the gradients are averaged:

    T = max_r T_r(share_r) + 2·(R − 1)/R · bytes / rate + 2·(R − 1) · latency

a ring's all-reduce of the fp32 gradients of the fullest stage, at the slowest rate and the longest latency between
any two of the hosts that would exchange them. Shares are whole micro-batches in proportion to the replicas' speeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
        first = min(range(len(speeds)), key=lambda index: (shares[index] + 1) / speeds[index])
        shares[first] += 1
    return shares


def _all_reduce_s(table: ClusterTable, plans: Sequence[PipelinePlan]) -> float:
    count = len(plans)
    if count == 1:
        return 0.0
    nbytes = max(_gradient_nbytes(table, plan) for plan in plans)
    pairs = [pair for one in plans for other in plans if one is not other for pair in _facing(one, other)]
    ends = tuple(np.array(pairs).T)
    slowest, longest_s = float(table.pair_rate[ends].min()), float(table.latency_s[ends].max())
    return transmission_s(2 * (count - 1) / count * nbytes, slowest) + 2 * (count - 1) * longest_s


def _facing(one: PipelinePlan, other: PipelinePlan) -> list[tuple[int, int]]:
    """Hosts of two replicas that hold the same layers, or some of them."""
    ends = [np.cumsum((0, *plan.layers)) for plan in (one, other)]
    return [
        (host, peer)
        for stage, host in enumerate(one.hosts)
        for place, peer in enumerate(other.hosts)
        if ends[0][stage] < ends[1][place + 1] and ends[1][place] < ends[0][stage + 1]
    ]


def _gradient_nbytes(table: ClusterTable, plan: PipelinePlan) -> float:
    """Of the stage that has most to exchange, in fp32."""
    model = table.problem.model
    stages = [layers * model.block_nbytes / model.num_states for layers in plan.layers]
    stages[0] += model.first_nbytes / model.num_states
    stages[-1] += model.last_nbytes / model.num_states
    return max(stages)
