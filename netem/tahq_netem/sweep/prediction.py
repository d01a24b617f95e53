"""A step in the planner's simulator and its bound, at the same compute, bytes, rates, delays and codec times.

    step = max over stages of (end of its last action + delay of its PREPARE to the coordinator)

The coordinator is on the first stage's host, so the next step begins there as soon as all stages have prepared; without
a coordinator there is no such delay. torch is not predicted: it waits for sends, and the simulator does not. The bound
(`tahq.plan.simulate.bound`) is the shortest time that compute and bytes leave open, without codecs.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from tahq.comm.network_model import ACKNOWLEDGED_SHARE, GOODPUT_SHARE, SHORTEST_QUEUE_S, goodput_bits_per_s
from tahq.pipeline.schedule.generators import generate
from tahq.pipeline.schedule.schedule import Schedule
from tahq.plan.simulate.bound import step_bound, step_seconds
from tahq.plan.simulate.costs import Costs, CutCosts, HostCosts, StepWork
from tahq.plan.simulate.simulator import simulate
from tahq_netem.network.description import NetworkPlan
from tahq_netem.runtimes.bare_async import actions_of
from tahq_netem.runtimes.session import RuntimeStep
from tahq_netem.sweep.points import SessionKey

SHARED_NBYTES = 64 * 1024
"""Links that share an uplink take turns after this many bytes. TCP shares it packet by packet, which takes longer to
simulate and gives nearly the same times."""


@dataclass(frozen=True, slots=True)
class CodecSeconds:
    """Seconds to code a micro-batch at a cut, each way, at the sender and at the receiver."""

    forward_encode_s: float = 0.0
    forward_decode_s: float = 0.0
    backward_encode_s: float = 0.0
    backward_decode_s: float = 0.0

    @classmethod
    def measured(cls, steps: Sequence[RuntimeStep], num_micro_batches: int) -> "CodecSeconds | None":
        """Means over steps; None where the runtime does not report them.

        A stage between two others reports the sum of both directions. The first stage encodes activations and decodes
        gradients, the last one the other way round, so their times are used for every cut.
        """
        if not steps or not all(step.codec_s for step in steps):
            return None
        (first_encode, first_decode), (last_encode, last_decode) = (
            tuple(fmean(step.codec_s[stage][kind] for step in steps) / num_micro_batches for kind in (0, 1))
            for stage in (0, -1)
        )
        return cls(first_encode, last_decode, last_encode, first_decode)


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
    """tahq's schedule of that name, with this many micro-batches in flight; None: the schedule's own number."""
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
    """Seconds of a step in the simulator, of a schedule with one chunk per stage.

    `hosts` are the stages' in order (None: the network's first), `queue_s` as of `step_costs`; with a coordinator,
    stages report the end of a step to the first stage's host.
    """
    hosts = plan.hosts[: schedule.num_stages] if hosts is None else hosts
    timeline = simulate(schedule, step_costs(work, plan, codec, hosts, queue_s))
    ends_s = dict.fromkeys(range(len(hosts)), 0.0)
    for span in timeline.actions:
        ends_s[span.stage] = max(ends_s[span.stage], span.end_s)
    if has_coordinator:
        for stage, host in enumerate(hosts[1:], 1):
            ends_s[stage] += plan.paths[host, hosts[0]].delay_s
    return max(ends_s.values())


def step_bound_s(work: StepWork, plan: NetworkPlan) -> float:
    """The shortest time that a step can take on the network's first hosts, whatever the schedule; codecs apart."""
    hosts = plan.hosts[: len(work.forward_s)]
    costs = step_costs(work, plan, CodecSeconds(), hosts, latency=min)
    is_split = work.input_gradient_s is not None
    return float(step_bound(step_seconds(costs, work.num_micro_batches, split=is_split)))


def step_costs(
    work: StepWork,
    plan: NetworkPlan,
    codec: CodecSeconds,
    hosts: Sequence[str],
    queue_s: float | None = None,
    latency: Callable[[float, float], float] = max,
) -> Costs:
    """The costs of a step on the stages' hosts and the paths between them, at TCP's goodput.

    Uplinks of a plan have no caps, so TCP shares each between its links. `queue_s` is the length of the queues before
    slow lines (None: that of this network); `latency` chooses from the delays of both directions of a path.
    """
    if queue_s is None:
        queue_s = max([SHORTEST_QUEUE_S, *(plan.round_trip_s(*ends) for ends in itertools.pairwise(hosts))])
    shapes = [plan.host_shapes[host] for host in hosts]
    paths = []
    for ends in itertools.pairwise(hosts):
        there, back = plan.paths[ends], plan.paths[ends[::-1]]
        paths.append(
            CutCosts(
                **asdict(codec),
                latency_s=latency(there.delay_s, back.delay_s),
                forward_bits_per_s=goodput_bits_per_s(there.rate_bits_per_s),
                backward_bits_per_s=goodput_bits_per_s(back.rate_bits_per_s),
            )
        )
    return Costs(
        compute_s=work.compute_s(),
        cuts=work.cuts(paths),
        hosts=[HostCosts(*map(goodput_bits_per_s, (it.up_bits_per_s, it.down_bits_per_s))) for it in shapes],
        piece_nbytes=SHARED_NBYTES,
        first=None,
        queue_s=queue_s,
        acknowledged=GOODPUT_SHARE * ACKNOWLEDGED_SHARE,  # rates are of data alone
    )
