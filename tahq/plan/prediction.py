"""The prediction of a plan: its schedule, simulated with the costs of its hosts.

Each host encodes in one lane beside its compute and decodes in another. Not included: the optimizer's update,
evaluations, checkpoints, and the exchange of tied embeddings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tahq.comm.network_model import SHORTEST_QUEUE_S
from tahq.pipeline.schedule.generators import generate
from tahq.pipeline.schedule.schedule import Schedule
from tahq.plan.problem import PipelinePlan
from tahq.plan.search.stages import StageCosts, plan_bound_s
from tahq.plan.search.table import ClusterTable
from tahq.plan.simulate.costs import ComputeSeconds, Costs, CutCosts, HostCosts, compute_seconds
from tahq.plan.simulate.simulator import StepTimeline, simulate

MAX_ACTIONS = 20_000
"""Longest step that is simulated whole; of longer ones two shorter steps tell the time per further micro-batch."""

MAX_ACTIONS_SEARCHED = 6_000
"""The same while plans are compared."""

_MANY_ACTIONS = 5_000


@dataclass(frozen=True, slots=True)
class Speed:
    """Factors of a what-if question, on rates, latencies and compute times."""

    rates: float = 1.0
    latency: float = 1.0
    compute: float = 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan and its simulation.

    `step_s` includes the commit's round trip, and, with replicas, nothing of their exchange. `timeline` is of the
    whole step, or, where that is too long, of its first part. `memory_nbytes` and `in_flight` are by stage.
    """

    plan: PipelinePlan
    step_s: float
    tokens_per_s: float
    timeline: StepTimeline
    in_flight: tuple[int, ...]
    memory_nbytes: tuple[float, ...]


def step_time_s(table: ClusterTable, plan: PipelinePlan, *, whole_frames: bool = True, speed: Speed = Speed()) -> float:
    """Seconds of a step.

    Args:
        table: the cluster.
        plan: what is simulated.
        whole_frames: frames share a downlink whole and queues have no end, which is faster to simulate; False: piece
            by piece, as sent.
        speed: factors of a what-if question.

    Raises:
        ScheduleError: depths with which the schedule deadlocks.
    """
    return _simulated(table, plan, whole_frames, speed)[0]


def predict(table: ClusterTable, plan: PipelinePlan, speed: Speed = Speed()) -> Prediction:
    """The whole prediction, frames in pieces.

    Raises:
        ScheduleError: depths with which the schedule deadlocks.
    """
    step_s, timeline, schedule = _simulated(table, plan, False, speed)
    in_flight = tuple(schedule.max_in_flight(stage) for stage in range(schedule.num_stages))
    return Prediction(
        plan=plan,
        step_s=step_s,
        tokens_per_s=table.problem.tokens_per_step() / step_s,
        timeline=timeline,
        in_flight=in_flight,
        memory_nbytes=_memory_nbytes(table, plan, in_flight),
    )


def _memory_nbytes(table: ClusterTable, plan: PipelinePlan, in_flight: Sequence[int]) -> tuple[float, ...]:
    """Each stage's peak; chunks of one stage count as one."""
    stages = StageCosts.of(table, plan)
    layers, held = np.array(plan.layers, dtype=float), np.array(in_flight, dtype=float) / plan.chunks_per_stage
    total = stages.fixed_nbytes(layers) + held * stages.held_nbytes(layers)
    return tuple(float(nbytes) for nbytes in total)


def fits_memory(table: ClusterTable, plan: PipelinePlan) -> bool:
    """Whether each host has the memory for its stage."""
    has = table.memory[list(plan.hosts)]
    if np.isinf(has).all():
        return True
    schedule = _schedule(plan, min(plan.num_micro_batches, _longest(plan, MAX_ACTIONS_SEARCHED)))
    in_flight = [schedule.max_in_flight(stage) for stage in range(schedule.num_stages)]
    return bool((np.array(_memory_nbytes(table, plan, in_flight)) <= has).all())


def _schedule(plan: PipelinePlan, num_micro_batches: int) -> Schedule:
    return generate(
        plan.schedule,
        plan.num_stages,
        num_micro_batches,
        depths=plan.depths or None,
        chunks_per_stage=plan.chunks_per_stage,
    )


def _simulated(
    table: ClusterTable, plan: PipelinePlan, whole_frames: bool, speed: Speed
) -> tuple[float, StepTimeline, Schedule]:
    count, longest = plan.num_micro_batches, _longest(plan, MAX_ACTIONS_SEARCHED if whole_frames else MAX_ACTIONS)
    costs = plan_costs(table, plan, None if whole_frames else table.problem.piece_nbytes, speed)
    schedule = _schedule(plan, min(count, longest))
    timeline = simulate(schedule, costs)
    if count <= longest:
        return timeline.step_time_s, timeline, schedule
    half = longest // 2 // plan.num_stages * plan.num_stages
    shorter = simulate(_schedule(plan, half), costs).step_time_s
    each_s = (timeline.step_time_s - shorter) / (longest - half)
    bound_s = plan_bound_s(table, plan) if speed == Speed() else 0.0
    return max(timeline.step_time_s + (count - longest) * each_s, bound_s), timeline, schedule


def simulated_actions(plan: PipelinePlan) -> int:
    """Approximate number of actions that `step_time_s` simulates."""
    count, longest = plan.num_micro_batches, _longest(plan, MAX_ACTIONS_SEARCHED)
    return 2 * plan.num_stages * plan.chunks_per_stage * (count if count <= longest else longest * 3 // 2)


def is_long(plan: PipelinePlan) -> bool:
    """Whether simulating a step takes a good part of a second, so that few variants of it are tried."""
    return simulated_actions(plan) > _MANY_ACTIONS


def _longest(plan: PipelinePlan, actions: int) -> int:
    """Most micro-batches of a step that is simulated whole: whole rounds, and enough for its depths to matter."""
    stages = plan.num_stages
    longest = max(2 * stages, actions // (2 * stages * plan.chunks_per_stage), 2 * max(plan.depths, default=0))
    return longest - longest % stages


def plan_costs(table: ClusterTable, plan: PipelinePlan, piece_nbytes: int | None, speed: Speed) -> Costs:
    """The simulator's costs of a plan: chunk c is on stage c mod P."""
    num_chunks = plan.num_stages * plan.chunks_per_stage
    hosts = [plan.hosts[chunk % plan.num_stages] for chunk in range(num_chunks)]
    cuts = [_cut(table, plan, cut, hosts[cut], hosts[cut + 1], speed) for cut in range(num_chunks - 1)]
    # frames wait where tahq chooses the next one only if uplinks are shaped; else links share an uplink as TCP does
    is_ordered = piece_nbytes is None or len(table.problem.firsts) > 1 or plan.first != "oldest"
    return Costs(
        compute_s=_compute_s(table, plan, hosts, speed.compute),
        cuts=cuts,
        hosts=[HostCosts(speed.rates * table.up[host], speed.rates * table.down[host]) for host in plan.hosts],
        commit_s=max((2 * cut.latency_s for cut in cuts), default=0.0),
        piece_nbytes=piece_nbytes,
        first=plan.first if is_ordered else None,
        queue_s=math.inf if piece_nbytes is None else SHORTEST_QUEUE_S,
    )


def chunk_layers(plan: PipelinePlan) -> tuple[int, ...]:
    """Blocks of each chunk: a stage's, divided evenly over its chunks, the first ones taking what is left over."""
    return tuple(
        layers // plan.chunks_per_stage + (turn < layers % plan.chunks_per_stage)
        for turn in range(plan.chunks_per_stage)
        for layers in plan.layers
    )


def _cut(table: ClusterTable, plan: PipelinePlan, cut: int, source: int, target: int, speed: Speed) -> CutCosts:
    """A ring's last cut has the codecs of the first."""
    link = cut % plan.num_stages % max(1, plan.num_stages - 1)
    out, back = plan.activations[link], plan.gradients[link]
    size, frame_nbytes = plan.micro_batch, table.problem.frame_nbytes
    return CutCosts(
        forward_nbytes=frame_nbytes(out, size),
        backward_nbytes=frame_nbytes(back, size),
        forward_encode_s=table.codec_s(source, out, size)[0],
        forward_decode_s=table.codec_s(target, out, size)[1],
        backward_encode_s=table.codec_s(target, back, size)[0],
        backward_decode_s=table.codec_s(source, back, size)[1],
        latency_s=speed.latency * float(table.latency_s[source, target]),
        forward_bits_per_s=speed.rates * float(table.path_rate[source, target]),
        backward_bits_per_s=speed.rates * float(table.path_rate[target, source]),
    )


def _compute_s(table: ClusterTable, plan: PipelinePlan, hosts: Sequence[int], factor: float) -> ComputeSeconds:
    times = table.times(plan.micro_batch)
    forward, backward, own = [], [], []
    for chunk, (host, layers) in enumerate(zip(hosts, chunk_layers(plan), strict=True)):
        first, last = float(chunk == 0), float(chunk == len(hosts) - 1)
        ends_forward = first * times.first_forward[host] + last * times.last_forward[host]
        forward.append(factor * float(layers * times.block_forward[host] + ends_forward))
        ends_backward = first * times.first_backward[host] + last * times.last_backward[host]
        backward.append(factor * float(layers * times.block_backward[host] + ends_backward))
        own.append(factor * float(layers * times.block_input_gradient[host] + last * times.last_backward[host] / 2))
    return compute_seconds(forward, backward, own)
