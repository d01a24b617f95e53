"""A point's workload: its cluster.yaml, the same for every runtime, and how long a step should take.

`hosts` stays `local` in the configuration: the network decides hosts and links, and workers do no shaping.

The *bound* (`tahq.plan.simulate.bound`) is the shortest time that compute and bytes leave open for a step, without
codecs. Expected durations are bounds without real and calibrated compute, which is not known beforehand: good enough to
order points, to show progress, and to not start what cannot end in time. The *prediction* is a step in the planner's
simulator at the same compute, bytes, rates, delays and codec times:

    step = max over stages of (end of its last action + delay of its PREPARE to the coordinator)

The coordinator is on the first stage's host, so the next step begins there as soon as all stages have prepared; without
a coordinator there is no such delay. torch is not predicted: it waits for sends, and the simulator does not.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tahq.comm.config import LinksConfig
from tahq.comm.network_model import ACKNOWLEDGED_SHARE, GOODPUT_SHARE, SHORTEST_QUEUE_S, goodput_bits_per_s
from tahq.config.cluster import NUM_BYTE_TOKENS, ClusterConfig, EmulateConfig
from tahq.config.file import resolve
from tahq.config.run import RunConfig
from tahq.data.config import DataConfig
from tahq.data.tokenizer import load_tokenizer
from tahq.errors import ConfigError
from tahq.models.config import SleepConfig
from tahq.models.sleeping_slice import INPUT_GRADIENT_SHARE
from tahq.pipeline.config import PipelineConfig, TrainingConfig
from tahq.pipeline.schedule.generators import GENERATORS, generate
from tahq.pipeline.schedule.schedule import Schedule
from tahq.plan.simulate.bound import step_bound, step_seconds
from tahq.plan.simulate.costs import Costs, CutCosts, HostCosts, StepWork
from tahq.plan.simulate.simulator import simulate
from tahq.quant import get_codec
from tahq.quant.config import WireConfig
from tahq.quant.quality import FLOOR
from tahq_netem.network.description import NetworkPlan
from tahq_netem.runtimes.bare_async import actions_of
from tahq_netem.runtimes.session import RuntimeStep
from tahq_netem.sweep.points import Point, SessionKey, by_session
from tahq_netem.sweep.spec import AUTO, StepsConfig, SweepConfig
from tahq_netem.sweep.stage_times import StageTimes

MANY_STEPS = 1_000_000
"""A session trains until it is ended."""
START_S = 15.0
"""Expected time to start a session."""
SPLIT_SCHEDULES = (AUTO, "zero-bubble")
"""Schedules that compute the input gradient first and the weight gradient later."""
SHARED_NBYTES = 64 * 1024
"""Links that share an uplink take turns after this many bytes. TCP shares it packet by packet, which takes longer to
simulate and gives nearly the same times."""


def session_config(sweep: SweepConfig, key: SessionKey, folder: Path, times: StageTimes | None) -> ClusterConfig:
    """The configuration of a session's workers; `folder` is for generated data, `times` is None if stages compute."""
    data = _absolute(sweep.data) if sweep.data is not None else _random_data(sweep, folder)
    sleep = None if times is None else SleepConfig(forward=list(times.forward_s), backward=list(times.backward_s))
    model = sweep.model
    if model.path is None and model.vocab_size is None:
        model = model.model_copy(update={"vocab_size": load_tokenizer(data).vocab_size})
    # Schedules that only other runtimes have are passed to them by the session's name.
    schedule = key.schedule if key.schedule in GENERATORS else "1f1b"
    pipeline: dict[str, Any] = {"stages": key.stages, "schedule": schedule, "balance": "counted"}
    codecs = {"activations": key.activations, "gradients": key.gradients}
    if key.schedule == AUTO:
        pipeline = {"stages": key.stages}
        codecs = {direction: codec for direction, codec in codecs.items() if codec != AUTO}
    if key.in_flight is not None:
        pipeline["in_flight"] = key.in_flight if isinstance(key.in_flight, int) else list(key.in_flight)
    values = ClusterConfig(
        run=RunConfig(name="session", dir="runs", threads=sweep.threads, device=sweep.device, peer_timeout=60.0),
        model=model,
        data=data,
        training=TrainingConfig(steps=MANY_STEPS, global_batch=sweep.global_batch, micro_batch=key.micro_batch),
        pipeline=PipelineConfig.model_validate(pipeline),
        wire=WireConfig.model_validate(codecs),
        links=LinksConfig() if sweep.piece is None else LinksConfig(piece=sweep.piece),
        emulate=EmulateConfig(sleep=sleep),
    )
    values = ClusterConfig.model_validate(values.model_dump(exclude_unset=True))
    return values if key.schedule == AUTO else resolve(values)


def planned_work(sweep: SweepConfig, key: SessionKey, times: StageTimes | None) -> StepWork:
    """The expected work of a step: the codecs' largest streams, `auto`'s of fewest bits; no time for real compute."""
    hidden_size = sweep.model.hidden_size
    if hidden_size is None:
        raise ConfigError("a sweep needs model.hidden_size: the time of a step is estimated from it")
    shape = (key.micro_batch, sweep.sample_len, hidden_size)
    fewest = FLOOR.activations, FLOOR.gradients
    pairs = zip((key.activations, key.gradients), fewest, strict=True)
    specs = [least if spec == AUTO else spec for spec, least in pairs]
    activation_nbytes, gradient_nbytes = (
        (float(get_codec(spec).encoded_nbytes(shape)),) * (key.stages - 1) for spec in specs
    )
    of_stages = times or StageTimes((0.0,) * key.stages, (0.0,) * key.stages)
    return StepWork(
        forward_s=of_stages.forward_s,
        backward_s=of_stages.backward_s,
        activation_nbytes=activation_nbytes,
        gradient_nbytes=gradient_nbytes,
        num_micro_batches=sweep.global_batch // key.micro_batch,
        input_gradient_s=input_gradients(key, times),
    )


def input_gradients(key: SessionKey, times: StageTimes | None) -> tuple[float, ...] | None:
    """Seconds of the input gradient by stage; 0 if not known, None if the schedule does not split backwards."""
    if key.schedule not in SPLIT_SCHEDULES:
        return None
    if times is None:
        return (0.0,) * key.stages
    return tuple(INPUT_GRADIENT_SHARE * seconds for seconds in times.backward_s)


def _absolute(data: DataConfig) -> DataConfig:
    """The data with absolute paths; relative ones start in the sweep's working folder."""

    def absolute(path: str) -> str:
        return path if path == "stdlib" else str(Path(path).absolute())

    changed: dict[str, Any] = {}
    for key in ("text", "tokens", "records"):
        paths = getattr(data, key)
        if paths is not None:
            changed[key] = absolute(paths) if isinstance(paths, str) else [absolute(path) for path in paths]
    if data.tokenizer != "bytes":
        changed["tokenizer"] = absolute(data.tokenizer)
    return data.model_copy(update=changed)


def _random_data(sweep: SweepConfig, folder: Path) -> DataConfig:
    """One global batch of random bytes: a step is an epoch, so AQ-SGD has seen every sample after the first step."""
    path = folder / "tokens.bin"
    tokens = np.random.default_rng(0).integers(0, NUM_BYTE_TOKENS, sweep.global_batch * sweep.seq_len + 1)
    path.write_bytes(tokens.astype("<u2").tobytes())
    return DataConfig(tokens=str(path.absolute()), seq_len=sweep.seq_len, validation=0.0, shuffle=False)


def num_steps(steps: StepsConfig, expected_step_s: float) -> int:
    """As many steps as fit into `about`, within the limits."""
    fitting = int(steps.about / expected_step_s) if expected_step_s > 0 else steps.at_most
    return max(steps.at_least, min(steps.at_most, fitting))


def expected_step_s(config: SweepConfig, point: Point, times: StageTimes | None) -> float:
    """Seconds of a step; `times`: how long stages sleep, None if not known."""
    return step_bound_s(planned_work(config, point.session, times), point.network.plan(point.session.stages))


def expected_point_s(config: SweepConfig, point: Point, times: StageTimes | None) -> float:
    """Seconds of all steps of a point, including those that settle."""
    step_s = expected_step_s(config, point, times)
    return step_s * (config.steps.settle + num_steps(config.steps, step_s))


def expected_sweep_s(config: SweepConfig, points: Sequence[Point]) -> float:
    """Seconds of points and of their sessions' starts, as far as the configuration says."""
    seconds = START_S * len(by_session(points))
    for point in points:
        key = point.session
        times = StageTimes(key.forward_s, key.backward_s) if key.forward_s else None
        seconds += expected_point_s(config, point, times)
    return seconds


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
        means = (np.mean([step.codec_s for step in steps], axis=0) / num_micro_batches).tolist()
        (first_encode, first_decode), (last_encode, last_decode) = means[0], means[-1]
        return cls(first_encode, last_decode, last_encode, first_decode)


def session_schedule(key: SessionKey, num_micro_batches: int) -> Schedule | None:
    """The schedule that a session's stages follow; None where the simulator is no model of its runtime."""
    if key.runtime == "torch" or key.schedule == AUTO:
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
