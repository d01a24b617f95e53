"""The prediction of a plan: its schedule, simulated with the costs of its hosts.

Each host encodes in one lane beside its compute and decodes in another. Not included: the optimizer's update,
evaluations, checkpoints, and the exchange of tied embeddings; of the update its copies from and to host memory are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from tahq.comm.network_model import SHORTEST_QUEUE_S
from tahq.pipeline.schedule.generators import generate
from tahq.pipeline.schedule.schedule import Schedule
from tahq.plan.problem import MemoryOption, PipelinePlan
from tahq.plan.search.stages import StageCosts, plan_bound_s
from tahq.plan.search.table import ClusterTable
from tahq.plan.simulate.bound import Array
from tahq.plan.simulate.costs import Costs, CutCosts, HostCosts, compute_seconds
from tahq.plan.simulate.simulator import StepTimeline, simulate

MAX_ACTIONS = 20_000
"""Longest step that is simulated whole; of longer ones two shorter steps tell the time per further micro-batch."""

MAX_ACTIONS_SEARCHED = 6_000
"""The same while plans are compared."""

_MANY_ACTIONS = 5_000


@dataclass(frozen=True, slots=True)
class Speed:
    """Factors of a what-if question, on rates, latencies and compute times; all frames are `late_s` later besides."""

    rates: float = 1.0
    latency: float = 1.0
    compute: float = 1.0
    late_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan and its simulation.

    `step_s` includes the commit's round trip, but not the exchange between replicas. `timeline` is of the whole step,
    or, where that is too long, of its first part. `memory_nbytes`, `in_flight` and `options`, what is chosen under
    `memory`, are by stage.
    """

    plan: PipelinePlan
    step_s: float
    tokens_per_s: float
    timeline: StepTimeline
    in_flight: tuple[int, ...]
    memory_nbytes: tuple[float, ...]
    options: tuple[MemoryOption, ...]


def step_time_s(table: ClusterTable, plan: PipelinePlan, speed: Speed = Speed()) -> float:
    """Seconds of a step: frames share a downlink whole and queues have no end, which is faster to simulate.

    Raises:
        ScheduleError: with these depths the schedule deadlocks.
    """
    return _simulated(table, plan, None, MAX_ACTIONS_SEARCHED, speed)[0]


def predict(table: ClusterTable, plan: PipelinePlan, speed: Speed = Speed()) -> Prediction:
    """The whole prediction, frames in pieces, as they are sent; ScheduleError as in `step_time_s`."""
    step_s, timeline, schedule = _simulated(table, plan, table.problem.piece_nbytes, MAX_ACTIONS, speed)
    in_flight = _in_flight(schedule)
    tokens_per_s = table.problem.tokens_per_step() / step_s
    memory_nbytes = tuple(map(float, _memory_nbytes(table, plan, in_flight)))
    return Prediction(plan, step_s, tokens_per_s, timeline, in_flight, memory_nbytes, memory_options(table, plan))


def memory_options(table: ClusterTable, plan: PipelinePlan) -> tuple[MemoryOption, ...]:
    """What each stage of a plan has of what may be chosen under `memory`."""
    every = table.problem.model.options
    return tuple(every[number] for number in StageCosts.of(table, plan).options_of(plan))


def fits_memory(table: ClusterTable, plan: PipelinePlan) -> bool:
    """Whether each host has the memory for its stage."""
    has = table.memory[list(plan.hosts)]
    if np.isinf(has).all():
        return True
    schedule = _schedule(table, plan, min(plan.num_micro_batches, _longest(plan, MAX_ACTIONS_SEARCHED)))
    return bool((_memory_nbytes(table, plan, _in_flight(schedule)) <= has).all())


def _in_flight(schedule: Schedule) -> tuple[int, ...]:
    return tuple(map(schedule.max_in_flight, range(schedule.num_stages)))


def _memory_nbytes(table: ClusterTable, plan: PipelinePlan, in_flight: Sequence[int]) -> Array:
    """Each stage's peak; chunks of one stage count as one."""
    stages = StageCosts.of(table, plan)
    layers, held = np.array(plan.layers, dtype=float), np.array(in_flight, dtype=float) / plan.chunks_per_stage
    return stages.peak_nbytes(layers, held, stages.options_of(plan))


def _schedule(table: ClusterTable, plan: PipelinePlan, num_micro_batches: int) -> Schedule:
    depths, chunks = plan.depths or None, plan.chunks_per_stage
    frozen = sum(stop <= table.problem.model.first_trainable for stop in accumulate(chunk_layers(plan)[:-1]))
    return generate(
        plan.schedule, plan.num_stages, num_micro_batches, depths=depths, chunks_per_stage=chunks, num_frozen=frozen
    )


def _simulated(
    table: ClusterTable, plan: PipelinePlan, piece_nbytes: int | None, max_actions: int, speed: Speed
) -> tuple[float, StepTimeline, Schedule]:
    count, longest = plan.num_micro_batches, _longest(plan, max_actions)
    costs = plan_costs(table, plan, piece_nbytes, speed)
    schedule = _schedule(table, plan, min(count, longest))
    timeline = simulate(schedule, costs)
    if count <= longest:
        return timeline.step_time_s, timeline, schedule
    half = longest // 2 // plan.num_stages * plan.num_stages
    shorter = simulate(_schedule(table, plan, half), costs).step_time_s
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


def chunk_layers(plan: PipelinePlan) -> tuple[int, ...]:
    """Blocks of each chunk: a stage's, divided evenly over its chunks, the first of which take what is left over."""
    return tuple(
        layers // plan.chunks_per_stage + (turn < layers % plan.chunks_per_stage)
        for turn in range(plan.chunks_per_stage)
        for layers in plan.layers
    )


def plan_costs(table: ClusterTable, plan: PipelinePlan, piece_nbytes: int | None, speed: Speed) -> Costs:
    """The simulator's costs of a plan: chunk c is on stage c mod P."""
    hosts = plan.hosts * plan.chunks_per_stage
    # a ring's last cut has the codecs of the first
    links = [cut % plan.num_stages % max(1, plan.num_stages - 1) for cut in range(len(hosts) - 1)]
    activations, gradients = ([codecs[link] for link in links] for codecs in (plan.activations, plan.gradients))
    chunks = StageCosts(table, hosts, plan.micro_batch, activations, gradients)
    stages = StageCosts.of(table, plan)
    options = stages.options_of(plan)
    times = chunks.times(np.array(chunk_layers(plan), dtype=float), np.tile(options, plan.chunks_per_stage))
    out, back = chunks.outward, chunks.inward
    by_cut = (
        *(chunks.nbytes, out.encode, out.decode, back.encode, back.decode),
        speed.latency * chunks.latency + speed.late_s,
        *(speed.rates * table.path_rate[ends] for ends in (chunks.ends, chunks.ends[::-1])),
        chunks.relayed,
    )
    cuts = [
        CutCosts(*map(float, (*nbytes, *others)), is_relayed=bool(is_relayed))
        for nbytes, *others, is_relayed in zip(*by_cut, strict=True)
    ]
    seconds = (times.forward, times.backward, times.input_gradient)
    update_s = stages.update_s(np.array(plan.layers, dtype=float), options)
    # frames wait where tahq chooses the next one only if uplinks are shaped; else links share an uplink as TCP does
    is_ordered = piece_nbytes is None or len(table.problem.firsts) > 1 or plan.first != "oldest"
    relay: int | HostCosts = HostCosts(*(float(speed.rates * rate) for rate in table.relay_rates))
    if table.relay in plan.hosts:
        relay = plan.hosts.index(table.relay)
    return Costs(
        compute_s=compute_seconds(*((speed.compute * each).tolist() for each in seconds)),
        cuts=cuts,
        hosts=[
            HostCosts(*(float(speed.rates * rates[host]) for rates in (table.up, table.down))) for host in plan.hosts
        ],
        commit_s=max((2 * cut.latency_s for cut in cuts), default=0.0) + update_s,
        piece_nbytes=piece_nbytes,
        first=plan.first if is_ordered else None,
        queue_s=math.inf if piece_nbytes is None else SHORTEST_QUEUE_S,
        relay=relay if chunks.relayed.any() else None,
        devices=[table.devices[host] for host in plan.hosts],
    )
