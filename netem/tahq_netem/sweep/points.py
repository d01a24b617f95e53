"""The points of a sweep: one per combination, with an id that depends on all that its measurement depends on, except
the machine and the versions, and not on the sweep's other points or their order.

Points that differ only in the network are measured one after another in one *session*: workers that keep training
while the network under them changes. Starting workers takes longer than most measurements.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from tahq.comm.network_config import NetworkConfig
from tahq.models.config import SleepConfig
from tahq.units import format_rate, write_duration
from tahq_netem.network.description import NetworkPlan, plan_network, profile, uniform
from tahq_netem.sweep.spec import AUTO, SweepConfig, split_wire


@dataclass(frozen=True, slots=True)
class NetworkChoice:
    """One network of a sweep: identical hosts with a rate and a round trip, or a profile of that name."""

    rate_bits_per_s: float | None = None
    round_trip_s: float = 0.0
    profile: str | None = None

    @property
    def label(self) -> str:
        """Such as `100 Mbit/s, 50ms`."""
        if self.profile is not None:
            return self.profile
        rate = "unshaped" if self.rate_bits_per_s is None else format_rate(self.rate_bits_per_s)
        return f"{rate}, {write_duration(self.round_trip_s)}" if self.round_trip_s else rate

    def config(
        self, num_hosts: int, congestion_control: str | None = None, after_idle: bool | None = None
    ) -> NetworkConfig:
        """The network for `num_hosts` hosts; `after_idle`: whether TCP restarts slowly after a pause."""
        if self.profile is None:
            network = uniform(num_hosts, rate=self.rate_bits_per_s, delay=self.round_trip_s / 2)
        else:
            network = profile(self.profile, num_hosts)
        tcp = {"congestion_control": congestion_control, "tcp_slow_start_after_idle": after_idle}
        return network.model_copy(update=tcp)

    def plan(self, num_hosts: int) -> NetworkPlan:
        """The network, resolved for every pair."""
        return plan_network(self.config(num_hosts))


@dataclass(frozen=True, slots=True)
class SessionKey:
    """The settings that workers are started with: everything but the network.

    `compute` is real, calibrated or sleep; `forward_s` and `backward_s` are the durations of sleep, for this number of
    stages and size of micro-batch.
    """

    runtime: str
    schedule: str
    activations: str
    gradients: str
    stages: int
    micro_batch: int
    compute: str
    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()
    in_flight: int | tuple[int, ...] | None = None
    """Micro-batches in flight, for all stages or by stage; None: the schedule's own number."""

    @property
    def wire(self) -> str:
        """`activations / gradients`, or one codec if they are equal."""
        return self.activations if self.activations == self.gradients else f"{self.activations} / {self.gradients}"

    @property
    def label(self) -> str:
        """Such as `tahq 1f1b, tah / fixed:bits=6, 4 stages of 4, sleep`."""
        depth = "" if self.in_flight is None else f" {self.in_flight}"
        stages = f"{self.stages} stages of {self.micro_batch}"
        return f"{self.runtime} {self.schedule}{depth}, {self.wire}, {stages}, {self.compute}"


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement."""

    id: str
    session: SessionKey
    network: NetworkChoice

    @property
    def label(self) -> str:
        """Session and network."""
        return f"{self.session.label}, {self.network.label}"

    def as_dict(self) -> dict[str, Any]:
        """Its coordinates, fit for JSON."""
        return asdict(self.session) | asdict(self.network)


def sweep_points(config: SweepConfig) -> list[Point]:
    """All points, those of a session together, in the order of the file."""
    workload = _workload(config)
    networks = [NetworkChoice(rate, trip_s) for trip_s, rate in product(config.round_trips, config.rates)]
    networks += [NetworkChoice(profile=name) for name in config.profiles]
    points: dict[str, Point] = {}
    for session, network in product(_sessions(config), networks):
        point = Point(_id(workload, session, network), session, network)
        points.setdefault(point.id, point)
    return list(points.values())


def by_session(points: Iterable[Point]) -> list[list[Point]]:
    """The points of each session, in order; what plans by itself has a session for each network."""
    sessions: dict[tuple[SessionKey, NetworkChoice | None], list[Point]] = {}
    for point in points:
        network = point.network if point.session.schedule == AUTO else None
        sessions.setdefault((point.session, network), []).append(point)
    return list(sessions.values())


def demands(choice: NetworkChoice, num_hosts: int) -> tuple[bool, bool, float]:
    """Whether a network loses packets, whether it delays them, and the longest delay: a measure of its difficulty."""
    paths = choice.plan(num_hosts).paths.values()
    has_losses = any(path.loss or path.reorder for path in paths)
    return has_losses, any(path.needs_netem for path in paths), max(path.delay_s for path in paths)


def by_network_kind(points: Sequence[Point]) -> list[list[Point]]:
    """Group points by number of hosts, losses and delays, so that a point pays only for what its network needs."""
    kinds: dict[tuple[int, bool, bool], list[Point]] = {}
    for point in points:
        has_losses, has_delays, _ = demands(point.network, point.session.stages)
        kinds.setdefault((point.session.stages, has_losses, has_delays), []).append(point)
    return list(kinds.values())


def _sessions(config: SweepConfig) -> Iterator[SessionKey]:
    axes = product(config.compute, config.stages, config.micro_batches, config.runtimes)
    for compute, stages, micro_batch, runtime in axes:
        kind, forward_s, backward_s = _compute(config, compute, stages, micro_batch)
        for schedule, wire, depth in product(runtime.schedules, runtime.wires, runtime.in_flight):
            codecs = split_wire(wire)
            yield SessionKey(runtime.name, schedule, *codecs, stages, micro_batch, kind, forward_s, backward_s, depth)


def _compute(
    config: SweepConfig, compute: str | SleepConfig, stages: int, micro_batch: int
) -> tuple[str, tuple[float, ...], tuple[float, ...]]:
    """The kind, and durations scaled to the micro-batch's samples and the stage's share of the model."""
    if isinstance(compute, str):
        return compute, (), ()
    scale = micro_batch / config.micro_batches[0] * config.stages[0] / stages
    of_stages = [compute.of(stage) for stage in range(stages)]
    return "sleep", tuple(scale * f for f, _ in of_stages), tuple(scale * b for _, b in of_stages)


_LATER_KEYS = (
    ("model", "frozen_layers", 0),
    ("data", "split", None),
    ("data", "subset", None),
    ("data", "packing", "auto"),
    ("data", "truncation", "end"),
)
"""Section, key, and the default with which earlier results were made."""


def _workload(config: SweepConfig) -> dict[str, Any]:
    """The settings that all points share and depend on."""
    kept = {"model", "data", "seq_len", "global_batch", "device", "threads", "congestion_control", "backend", "steps"}
    if config.faults:
        kept.add("faults")
    kept |= {key for key in ("tcp_slow_start_after_idle", "piece") if getattr(config, key) is not None}
    said = config.model_dump(mode="json", include=kept)
    # Keys as they were when the ids of earlier results were made, and later ones only where they are set.
    said["model"]["sleep"] = None
    if said["data"] is not None:
        said["data"]["jsonl"] = said["data"].pop("records")
    for section, key, default in _LATER_KEYS:
        if said[section] is not None and said[section][key] == default:
            del said[section][key]
    return said


def _id(workload: dict[str, Any], session: SessionKey, network: NetworkChoice) -> str:
    # A profile's file may change under its name.
    shapes = None if network.profile is None else repr(network.plan(session.stages))
    # Keys added later are left out at their default, so that the ids of earlier results stay valid.
    said = {key: value for key, value in asdict(session).items() if (key, value) != ("in_flight", None)}
    content = json.dumps([workload, said, asdict(network), shapes], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
