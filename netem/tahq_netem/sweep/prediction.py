"""What the simulator makes of a step that is measured, from the same costs: compute, bytes, rates, delays, codecs.

    step = max over stages of (end of its last action + way of its PREPARE to the coordinator)

The coordinator is on the first stage's host, so that the next step begins there as soon as all have prepared; the
COMMIT reaches the others before the first activation can. For a runtime without a coordinator the way is 0. What torch
does is not predicted: it waits for sends, and the simulator does not.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from tahq.comm.network_model import goodput_bits_per_s
from tahq.pipeline.schedule.generators import generate
from tahq.pipeline.schedule.schedule import ActionKind, Schedule
from tahq.plan.simulate.costs import Costs, CutCosts, HostCosts, StepWork
from tahq.plan.simulate.simulator import simulate
from tahq_netem.measure.figures import ACKNOWLEDGED, GOODPUT_SHARE
from tahq_netem.network.description import NetworkPlan
from tahq_netem.runtimes.bare_async import actions_of
from tahq_netem.runtimes.session import StepRecord
from tahq_netem.sweep.measurement import Measurement
from tahq_netem.sweep.points import SessionKey
from tahq_netem.wire.lines import SHORTEST_QUEUE_S

SHARED_NBYTES = 64 * 1024
"""Links that share an uplink are taken to take turns after so many bytes. TCP does it by packets; what is simulated
more finely takes longer and comes out much the same."""


@dataclass(frozen=True, slots=True)
class CodecSeconds:
    """What coding a micro-batch takes at a cut, each way, at the sender and at the receiver."""

    forward_encode_s: float = 0.0
    forward_decode_s: float = 0.0
    backward_encode_s: float = 0.0
    backward_decode_s: float = 0.0

    @classmethod
    def measured(cls, steps: Sequence[StepRecord], num_micro_batches: int) -> "CodecSeconds | None":
        """Means over steps; None where the runtime does not say.

        A stage between two others codes in both directions and tells only the sum. The first one encodes activations
        and decodes gradients, the last one the other way round, so what they say is taken for every cut.
        """
        if not steps or not all(step.codec_s for step in steps):
            return None
        (first_encode, first_decode), (last_encode, last_decode) = (
            tuple(fmean(step.codec_s[stage][way] for step in steps) / num_micro_batches for way in (0, 1))
            for stage in (0, -1)
        )
        return cls(first_encode, last_decode, last_encode, first_decode)


def prediction_of(key: SessionKey, planned: StepWork, plan: NetworkPlan, measured: Measurement) -> dict[str, Any]:
    """What the simulator says of a measured point, fit for JSON; None in place of what it cannot say.

    Bytes, and what compute and codecs took, are those of the steps that were measured.
    """
    schedule = session_schedule(key, planned.num_micro_batches)
    codec = CodecSeconds.measured(measured.steps, planned.num_micro_batches)
    if schedule is None or codec is None or measured.work is None:
        return {"codec_s": None, "predicted_step_s": None, "predicted_tokens_per_s": None}
    work = replace(measured.work, input_gradient_s=planned.input_gradient_s)
    step_s = predicted_step_s(schedule, work, plan, codec, has_coordinator=key.runtime == "tahq")
    predicted = {"predicted_step_s": step_s, "predicted_tokens_per_s": measured.tokens_a_step / step_s}
    return {"codec_s": asdict(codec), **predicted}


def session_schedule(key: SessionKey, num_micro_batches: int) -> Schedule | None:
    """The schedule that a session's stages follow; None where the simulator is no model of its runtime."""
    if key.runtime == "torch":
        return None
    if key.runtime == "bare":
        rows = tuple(actions_of(key.schedule, stage, key.stages, num_micro_batches) for stage in range(key.stages))
        return Schedule(key.schedule, num_micro_batches, rows, tuple(range(key.stages)))
    return schedule_with_depth(key.schedule, key.stages, num_micro_batches, key.in_flight)


def schedule_with_depth(
    name: str, num_stages: int, num_micro_batches: int, in_flight: int | tuple[int, ...] | None
) -> Schedule:
    """tahq's schedule of that name, with so many micro-batches under way; None: as the schedule has it."""
    depths = (in_flight,) * num_stages if isinstance(in_flight, int) else in_flight
    return generate(name, num_stages, num_micro_batches, depths=depths)


def predicted_step_s(
    schedule: Schedule,
    work: StepWork,
    plan: NetworkPlan,
    codec: CodecSeconds,
    *,
    hosts: Sequence[str] | None = None,
    has_coordinator: bool = True,
    queue_s: float | None = None,
) -> float:
    """Seconds of a step in the simulator.

    Args:
        schedule: with one chunk a stage.
        work: seconds and bytes.
        plan: the network.
        codec: of every cut.
        hosts: who runs the stages, in order; None: the network's first.
        has_coordinator: whether stages tell the first stage's host when they are done.
        queue_s: as of `step_costs`.
    """
    hosts = plan.hosts[: schedule.num_stages] if hosts is None else hosts
    timeline = simulate(schedule, step_costs(work, plan, codec, hosts, queue_s))
    ends_s = [0.0] * schedule.num_stages
    for span in timeline.actions:
        ends_s[span.stage] = max(ends_s[span.stage], span.end_s)
    ways_s = [plan.paths[host, hosts[0]].delay_s if has_coordinator and host != hosts[0] else 0.0 for host in hosts]
    return max(end_s + way_s for end_s, way_s in zip(ends_s, ways_s, strict=True))


def step_costs(
    work: StepWork, plan: NetworkPlan, codec: CodecSeconds, hosts: Sequence[str], queue_s: float | None = None
) -> Costs:
    """The same step for the simulator, on these hosts and the paths between them; rates at TCP's goodput.

    Args:
        work: seconds and bytes.
        plan: the network; no uplink of it is capped, so that TCP shares each between its links.
        codec: of every cut.
        hosts: who runs the stages, in order.
        queue_s: how long queues get; None: as the networks here have them.
    """
    if queue_s is None:
        queue_s = max([SHORTEST_QUEUE_S, *(plan.round_trip_s(*ends) for ends in itertools.pairwise(hosts))])
    stages = range(len(work.forward_s))
    weights_s = [whole_s - part_s for whole_s, part_s in zip(work.backward_s, work.returns_s, strict=True)]
    seconds = {
        ActionKind.F: work.forward_s,
        ActionKind.B: work.backward_s,
        ActionKind.I: work.returns_s,
        ActionKind.W: weights_s,
    }
    return Costs(
        compute_s={(stage, kind): row[stage] for kind, row in seconds.items() for stage in stages},
        cuts=[
            _cut(plan, ends, out, back, codec)
            for ends, out, back in zip(
                itertools.pairwise(hosts), work.activation_nbytes, work.gradient_nbytes, strict=True
            )
        ],
        hosts=[_host(plan, host) for host in hosts],
        piece_nbytes=SHARED_NBYTES,
        first=None,
        queue_s=queue_s,
        acknowledged=GOODPUT_SHARE * ACKNOWLEDGED,  # rates are of data alone
    )


def _cut(
    plan: NetworkPlan, ends: tuple[str, str], activation_nbytes: float, gradient_nbytes: float, codec: CodecSeconds
) -> CutCosts:
    """Of delays that differ by direction the longer."""
    there, back = plan.paths[ends], plan.paths[ends[::-1]]
    return CutCosts(
        activation_nbytes,
        gradient_nbytes,
        codec.forward_encode_s,
        codec.forward_decode_s,
        codec.backward_encode_s,
        codec.backward_decode_s,
        latency_s=max(there.delay_s, back.delay_s),
        forward_bits_per_s=goodput_bits_per_s(there.rate_bits_per_s),
        backward_bits_per_s=goodput_bits_per_s(back.rate_bits_per_s),
    )


def _host(plan: NetworkPlan, host: str) -> HostCosts:
    shape = plan.host_shapes[host]
    return HostCosts(goodput_bits_per_s(shape.up_bits_per_s), goodput_bits_per_s(shape.down_bits_per_s))
