"""What a plan would give: its schedule, simulated with the costs of its hosts.

Each host encodes in one lane beside its compute and decodes in another. Not in it: the optimizer's update,
evaluations, snapshots, and the exchange of tied embeddings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tahq.comm.link.sending_order import First
from tahq.comm.network_model import SHORTEST_QUEUE_S
from tahq.pipeline.schedule.schedule import Schedule
from tahq.plan.problem import Plan
from tahq.plan.search.schedules import plan_schedule
from tahq.plan.search.stages import StageCosts, Wires
from tahq.plan.search.table import ClusterTable
from tahq.plan.simulate.bound import step_bound
from tahq.plan.simulate.costs import ComputeSeconds, Costs, CutCosts, HostCosts, compute_seconds
from tahq.plan.simulate.simulator import Timeline, simulate

MAX_ACTIONS = 20_000
"""Of a step that is simulated whole; of longer ones two shorter steps say how long each further micro-batch takes."""

MAX_ACTIONS_SEARCHED = 6_000
"""The same while plans are compared."""


_MANY_ACTIONS = 5_000


@dataclass(frozen=True, slots=True)
class Speed:
    """What is changed for a question of what would be if: rates, latencies and compute times, multiplied."""

    rates: float = 1.0
    latency: float = 1.0
    compute: float = 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan and what the simulator says of it.

    `step_s` includes the commit's round trip, and, with replicas, nothing of their exchange. `timeline` is of the
    whole step, or, where that is too long, of its first part. `memory_nbytes` and `in_flight` are by stage.
    """

    plan: Plan
    step_s: float
    tokens_per_s: float
    timeline: Timeline
    in_flight: tuple[int, ...]
    memory_nbytes: tuple[float, ...]


def step_time_s(table: ClusterTable, plan: Plan, *, whole_frames: bool = True, speed: Speed | None = None) -> float:
    """Seconds of a step.

    Args:
        table: the cluster.
        plan: what is simulated.
        whole_frames: frames share a downlink whole and queues have no end, which is faster to simulate; False: piece
            by piece, as sent.
        speed: what is changed.

    Raises:
        ScheduleError: depths with which the schedule deadlocks.
    """
    return _simulated(table, plan, whole_frames, speed or Speed())[0]


def predict(table: ClusterTable, plan: Plan, speed: Speed | None = None) -> Prediction:
    """The whole prediction, frames in pieces.

    Raises:
        ScheduleError: depths with which the schedule deadlocks.
    """
    step_s, timeline, schedule = _simulated(table, plan, False, speed or Speed())
    in_flight = tuple(schedule.max_in_flight(stage) for stage in range(schedule.num_stages))
    return Prediction(
        plan=plan,
        step_s=step_s,
        tokens_per_s=table.problem.tokens_a_step() / step_s,
        timeline=timeline,
        in_flight=in_flight,
        memory_nbytes=memory_nbytes(table, plan, in_flight),
    )


def memory_nbytes(table: ClusterTable, plan: Plan, in_flight: Sequence[int]) -> tuple[float, ...]:
    """What each stage would keep at its peak; chunks of one stage count as one."""
    stages = StageCosts(table, plan.hosts, plan.micro_batch, plan_wires(plan))
    layers, held = np.array(plan.layers, dtype=float), np.array(in_flight, dtype=float) / plan.chunks_per_stage
    total = stages.fixed_nbytes(layers) + held * stages.held_nbytes(layers)
    return tuple(float(nbytes) for nbytes in total)


def fits_memory(table: ClusterTable, plan: Plan) -> bool:
    """Whether each host has the memory for its stage."""
    has = table.memory[list(plan.hosts)]
    if np.isinf(has).all():
        return True
    schedule = plan_schedule(plan, min(plan.num_micro_batches, _longest(plan, MAX_ACTIONS_SEARCHED)))
    in_flight = [schedule.max_in_flight(stage) for stage in range(schedule.num_stages)]
    return bool((np.array(memory_nbytes(table, plan, in_flight)) <= has).all())


def plan_wires(plan: Plan) -> Wires:
    """The codecs of the cuts between neighbouring stages; a ring's last cut has those of the first."""
    cuts = plan.num_stages - 1
    return Wires(plan.activations[:cuts], plan.gradients[:cuts])


def _simulated(table: ClusterTable, plan: Plan, whole: bool, speed: Speed) -> tuple[float, Timeline, Schedule]:
    count, longest = plan.num_micro_batches, _longest(plan, MAX_ACTIONS_SEARCHED if whole else MAX_ACTIONS)
    piece_nbytes = None if whole else table.problem.piece_nbytes
    costs = plan_costs(table, plan, piece_nbytes, speed)
    if count <= longest:
        schedule = plan_schedule(plan, count)
        timeline = simulate(schedule, costs)
        return timeline.step_time_s, timeline, schedule
    half = longest // 2 // plan.num_stages * plan.num_stages
    shorter = simulate(plan_schedule(plan, half), costs).step_time_s
    schedule = plan_schedule(plan, longest)
    timeline = simulate(schedule, costs)
    each_s = (timeline.step_time_s - shorter) / (longest - half)
    step_s = max(timeline.step_time_s + (count - longest) * each_s, _bound_s(table, plan, speed))
    return step_s, timeline, schedule


def _bound_s(table: ClusterTable, plan: Plan, speed: Speed) -> float:
    if plan.chunks_per_stage > 1 or speed != Speed():
        return 0.0
    stages = StageCosts(table, plan.hosts, plan.micro_batch, plan_wires(plan))
    depths = np.array(plan.depths, dtype=float) if plan.depths else None
    costs = stages.bound_costs(np.array(plan.layers, dtype=float), depths, split=plan.schedule == "zero-bubble")
    return float(step_bound(costs))


def simulated_actions(plan: Plan) -> int:
    """Actions that `step_time_s` simulates, about."""
    count, longest = plan.num_micro_batches, _longest(plan, MAX_ACTIONS_SEARCHED)
    return 2 * plan.num_stages * plan.chunks_per_stage * (count if count <= longest else longest * 3 // 2)


def is_long(plan: Plan) -> bool:
    """Whether a step takes the simulator a good part of a second, so that few variants of it are tried."""
    return simulated_actions(plan) > _MANY_ACTIONS


def _longest(plan: Plan, actions: int) -> int:
    """Most micro-batches of a step that is simulated whole: whole rounds, and enough for its depths to matter."""
    stages = plan.num_stages
    longest = max(2 * stages, actions // (2 * stages * plan.chunks_per_stage), 2 * max(plan.depths, default=0))
    return longest - longest % stages


def plan_costs(table: ClusterTable, plan: Plan, piece_nbytes: int | None, speed: Speed) -> Costs:
    """The simulator's costs of a plan: chunk c is on stage c mod P."""
    num_chunks = plan.num_stages * plan.chunks_per_stage
    hosts = [plan.hosts[chunk % plan.num_stages] for chunk in range(num_chunks)]
    cuts = [_cut(table, plan, cut, hosts[cut], hosts[cut + 1], speed) for cut in range(num_chunks - 1)]
    round_trip = max((2 * speed.latency * float(_latency(table, hosts, cut)) for cut in range(len(cuts))), default=0.0)
    return Costs(
        compute_s=_compute_s(table, plan, hosts, speed.compute),
        cuts=cuts,
        hosts=[HostCosts(speed.rates * table.up[host], speed.rates * table.down[host]) for host in plan.hosts],
        commit_s=round_trip,
        piece_nbytes=piece_nbytes,
        first=_order(table, plan, piece_nbytes),
        queue_s=math.inf if piece_nbytes is None else SHORTEST_QUEUE_S,
    )


def _order(table: ClusterTable, plan: Plan, piece_nbytes: int | None) -> First | None:
    """What goes first on an uplink; None: links share it, since frames do not wait where tahq could choose."""
    is_kept = len(table.problem.firsts) > 1 or plan.first != "oldest"
    return plan.first if piece_nbytes is None or is_kept else None


def chunk_layers(plan: Plan) -> tuple[int, ...]:
    """Blocks of each chunk: a stage's, divided evenly over its chunks, the first ones taking what is left over."""
    return tuple(
        layers // plan.chunks_per_stage + (turn < layers % plan.chunks_per_stage)
        for turn in range(plan.chunks_per_stage)
        for layers in plan.layers
    )


def _latency(table: ClusterTable, hosts: Sequence[int], cut: int) -> float:
    return float(table.latency_s[hosts[cut], hosts[cut + 1]])


def _cut(table: ClusterTable, plan: Plan, cut: int, source: int, target: int, speed: Speed) -> CutCosts:
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


def _compute_s(table: ClusterTable, plan: Plan, hosts: Sequence[int], factor: float) -> ComputeSeconds:
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
