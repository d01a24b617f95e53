"""The schedule of a plan, and the in-flight depths that are worth trying.

A stage may never have fewer micro-batches in flight than the one after it, or both would wait for each other.
"""

from collections.abc import Iterator

import numpy as np

from tahq.pipeline.schedule.generators import generate
from tahq.pipeline.schedule.schedule import Schedule
from tahq.plan.problem import Plan
from tahq.plan.search.stages import StageCosts
from tahq.plan.search.table import Array

Depths = tuple[int, ...]


def plan_schedule(plan: Plan, num_micro_batches: int) -> Schedule:
    """The schedule of a plan, for a step of so many micro-batches."""
    return generate(
        plan.schedule,
        plan.num_stages,
        num_micro_batches,
        depths=plan.depths or None,
        chunks_per_stage=plan.chunks_per_stage,
    )


def depth_profiles(stages: StageCosts, layers: Array, schedule: str) -> tuple[Depths, ...]:
    """Depths to try under a schedule, the fewest first; none where memory has no room for the schedule at all.

    The schedule's own, P − r; what covers a round trip, that is, from a forward to its gradient's return at the pace of
    the slowest resource, and a little more; steeper ones, 1 + c·(P − 1 − r), which let the last stage begin its
    backwards while activations still come in slowly; and all that memory holds.
    """
    limits = stages.depth_limits(layers)
    if limits[-1] < 1:
        return ()
    if schedule == "gpipe":
        return ((),) if limits[-1] >= stages.num_micro_batches else ()
    if schedule == "interleaved":
        return _interleaved(stages, limits)
    if schedule == "zero-bubble":
        # weight gradients that lag behind count as in flight, and no more than all micro-batches ever are
        limits = np.where(limits >= stages.num_micro_batches, limits + len(layers), limits)
    later = np.arange(len(layers) - 1, -1, -1)
    most = (stages.num_micro_batches - 1) / max(1, len(layers) - 1)
    steep = [1 + np.ceil(slope * later) for slope in (1, 2, (1 + most) / 2, most)]
    wanted = [*steep, *_covering(stages, layers), np.full(len(layers), np.inf)]
    found = {tuple(int(depth) for depth in np.minimum(profile, limits)): None for profile in wanted}
    return tuple(sorted(found, key=sum))


def _interleaved(stages: StageCosts, limits: Array) -> tuple[Depths, ...]:
    """The schedule's own depths, and twice those, where memory allows: they count chunks, which keep less each."""
    chunks, count = stages.chunks_per_stage, len(limits)
    own = np.array([2 * (count - stage - 1) + (chunks - 1) * count + 1 for stage in range(count)])
    found = {tuple(int(depth) for depth in np.minimum(profile, limits * chunks)): None for profile in (own, 2 * own)}
    return tuple(depths for depths in sorted(found, key=sum) if min(depths) >= chunks)


def _covering(stages: StageCosts, layers: Array) -> Iterator[Array]:
    """Depths that let a stage go on while its oldest micro-batch travels."""
    times = stages.times(layers)
    out, back = stages.forward_way, stages.backward_way
    hops = out.encode + out.alone + out.decode + back.encode + back.alone + back.decode + 2 * stages.latency
    own = times.forward + times.backward
    later = np.concatenate([np.cumsum((own[1:] + hops)[::-1])[::-1], [0.0]])
    pace = max(float(own.max()), *(float(way.max(initial=0.0)) for way in (out.uplink, out.path, out.downlink)))
    pace = max(pace, *(float(way.max(initial=0.0)) for way in (back.uplink, back.path, back.downlink)), 1e-12)
    for share, extra in ((1.0, 0), (1.0, 1), (1.0, 2), (1.5, 2), (2.0, 4)):
        yield np.maximum(1.0, np.ceil(share * (own + later) / pace - 1e-9) + extra)
