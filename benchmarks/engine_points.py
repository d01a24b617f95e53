"""What bench_engine measures: networks, sizes of a step, runtimes, and how deep tahq's pipeline is at each.

Four stages asleep for 73 and 152 ms, activations of 4 × 256 × 512 numbers, 2.1 MB in fp32.

**Congestion control.** Where both directions of an uplink are full, bbr stayed further below the rate than cubic. What
cubic loses on long links is its slow start after every pause, so there is none here; see docs/dev/experiment-log.md.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tahq.models.config import SleepConfig
from tahq_netem.sweep.points import NetworkChoice, sweep_points
from tahq_netem.sweep.prediction import CodecSeconds, predicted_step_s, schedule_with_depth
from tahq_netem.sweep.spec import SweepConfig
from tahq_netem.sweep.stage_times import StageTimes
from tahq_netem.sweep.workload import planned_work

FORWARD_S, BACKWARD_S = 0.073, 0.152
MICRO_BATCH, SEQ_LEN, HIDDEN_SIZE = 4, 256, 512
FP32 = "raw:dtype=fp32"
TAH = "tah / fixed:bits=6"
WIRES = {"tah": TAH, "fp32": FP32}
RUNTIMES: dict[str, tuple[str, ...]] = {
    "torch": ("gpipe", "1f1b", "1f1b-runtime"),
    "bare": ("1f1b", "1f1b-deep"),
}
"""What tahq is measured beside, in fp32 and with the schedules given."""

CONGESTION_CONTROL = "cubic"
SETTLING_FRAMES = 64
"""Of a link and direction, before anything counts: the first steps are slower (docs/dev/experiment-log.md)."""
DEEPER = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
"""Times 1F1B's own depth: candidates for tahq's."""
ASSUMED_CODEC = CodecSeconds(0.008, 0.008, 0.008, 0.008)
"""When a depth is chosen nobody has timed the codecs; without them the simulator would leave nothing to hide them."""
CAUTION = 1.25
"""Delays are taken so many times as long then: they vary, and what is too shallow by one waits in every turn."""
QUEUES_S = (0.1, 0.2, 0.4, math.inf)
"""How long queues before downlinks may be then. Some depths suit one length and lose a tenth with another, since whose
frame comes first there turns on it: what is slowest with any counts."""
AS_GOOD = 1.002
"""A shallower pipeline is taken if its step takes at most so many times the shortest one."""


@dataclass(frozen=True, slots=True)
class Place:
    """A network, and what is measured over it."""

    name: str
    rate_bits_per_s: float | None
    round_trip_s: float = 0.0
    stages: int = 4
    micro_batches: tuple[int, ...] = (8, 32)
    wires: tuple[str, ...] = ("tah", "fp32")
    has_others: bool = True
    """Whether torch and the bare loop are measured, too, with the fewest of the micro-batches."""

    @property
    def choice(self) -> NetworkChoice:
        """As sweeps have it."""
        return NetworkChoice(self.rate_bits_per_s, self.round_trip_s)

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.stages} stages, {self.choice.label}"


PLACES = (
    Place("unshaped", None),
    Place("300", 300e6),
    Place("100", 100e6),
    Place("100-50ms", 100e6, 0.05),
    Place("20", 20e6),
    Place("8-stages", 100e6, 0.15, stages=8, micro_batches=(32,), wires=("tah",), has_others=False),
)


@dataclass(frozen=True, slots=True)
class Choices:
    """What of it is to be measured, and how.

    Attributes:
        runtimes: of tahq, torch and bare.
        schedules: of tahq's.
        micro_batches: of a step; None: as the place says.
        wires: of WIRES.
        depth: micro-batches under way in tahq; None: chosen by the simulator.
        settle: steps that go by before; None: so many that `SETTLING_FRAMES` of a direction pass.
        steps: that count; some more where a step is short.
        backend: of the networks.
        calibrate: whether networks are measured first.
        max_busy_cores: above, a point is no measurement; None: as sweeps have it.
    """

    runtimes: tuple[str, ...] = ("tahq", "torch", "bare")
    schedules: tuple[str, ...] = ("1f1b", "zero-bubble")
    micro_batches: tuple[int, ...] | None = None
    wires: tuple[str, ...] = tuple(WIRES)
    depth: int | None = None
    settle: int | None = None
    steps: int = 5
    backend: str = "auto"
    calibrate: bool = True
    max_busy_cores: float | None = None


def sweeps(places: Sequence[Place], choices: Choices) -> Iterator[SweepConfig]:
    """One sweep a network and number of micro-batches."""
    for place in places:
        for count in place.micro_batches:
            if choices.micro_batches is None or count in choices.micro_batches:
                runtimes = list(_runtimes(place, count, choices))
                if runtimes:
                    yield _sweep(place, count, choices, runtimes)


def chosen_depth(place: Place, num_micro_batches: int, schedule: str, wire: str) -> tuple[int, ...]:
    """The shallowest pipeline that the simulator holds for as fast as any of the candidates, whatever the queues."""
    config = _sweep(place, num_micro_batches, Choices(), [{"name": "tahq", "schedules": [schedule], "wires": [wire]}])
    key = sweep_points(config)[0].session
    work = planned_work(config, key, StageTimes(key.forward_s, key.backward_s))
    plan = NetworkChoice(place.rate_bits_per_s, CAUTION * place.round_trip_s).plan(place.stages)
    seconds = {}
    for depth in depths(schedule, place.stages, num_micro_batches):
        found = schedule_with_depth(schedule, place.stages, num_micro_batches, depth)
        queues_s = QUEUES_S if place.rate_bits_per_s is not None else QUEUES_S[-1:]
        seconds[depth] = max(predicted_step_s(found, work, plan, ASSUMED_CODEC, queue_s=each) for each in queues_s)
    good = [depth for depth, step_s in seconds.items() if step_s <= AS_GOOD * min(seconds.values())]
    return min(good, key=sum)


def depths(schedule: str, num_stages: int, num_micro_batches: int) -> list[tuple[int, ...]]:
    """Candidates: 1F1B's P − r times something, and everything at once; each with other depths of the last stage.

    Under zero-bubble, weight gradients that lag count too, so there more than all micro-batches may be said to be under
    way, and no more than all ever are.
    """
    most = num_micro_batches + (num_stages - 1 if schedule == "zero-bubble" else 0)
    own = range(num_stages, 0, -1)
    scaled = [tuple(min(most, math.ceil(factor * depth)) for depth in own) for factor in DEEPER]
    found = [*scaled, (most,) * num_stages]
    last = [1, 2, *(math.ceil(share * most) for share in (0.25, 0.5, 0.625, 0.75, 0.875))]
    found += [(*depth[:-1], least) for depth in found for least in last if least < depth[-2]]
    return list(dict.fromkeys(found))


def _runtimes(place: Place, count: int, choices: Choices) -> Iterator[dict[str, Any]]:
    if "tahq" in choices.runtimes:
        for schedule in choices.schedules:
            for wire in (WIRES[name] for name in place.wires if name in choices.wires):
                yield {"name": "tahq", "schedules": [schedule], "wires": [wire]} | _depth(
                    place, count, schedule, wire, choices.depth
                )
    if place.has_others and count == min(place.micro_batches):
        for name, schedules in RUNTIMES.items():
            if name in choices.runtimes:
                yield {"name": name, "schedules": list(schedules), "wires": [FP32]}


def _depth(place: Place, count: int, schedule: str, wire: str, asked: int | None) -> dict[str, Any]:
    """What `in_flight` is; nothing for GPipe, which has all of them under way."""
    if schedule == "gpipe":
        return {}
    return {"in_flight": [asked if asked is not None else chosen_depth(place, count, schedule, wire)]}


def _sweep(place: Place, count: int, choices: Choices, runtimes: list[dict[str, Any]]) -> SweepConfig:
    return SweepConfig.model_validate(
        {
            "name": "engine",
            "model": {
                "family": "gpt2",
                "num_layers": place.stages,
                "hidden_size": HIDDEN_SIZE,
                "num_heads": 8,
                "vocab_size": 257,
            },
            "seq_len": SEQ_LEN,
            "global_batch": count * MICRO_BATCH,
            "micro_batches": [MICRO_BATCH],
            "stages": [place.stages],
            "compute": [SleepConfig(forward=[FORWARD_S], backward=[BACKWARD_S])],
            "rates": [place.rate_bits_per_s],
            "round_trips": [place.round_trip_s],
            "runtimes": runtimes,
            "steps": {
                "settle": choices.settle or max(2, SETTLING_FRAMES // count),
                "at_least": choices.steps,
                "at_most": choices.steps + choices.steps // 2,
                "about": 20.0,
            },
            "congestion_control": CONGESTION_CONTROL,
            "tcp_slow_start_after_idle": False,
            "backend": choices.backend,
            "calibrate": choices.calibrate,
            "max_busy_cores": choices.max_busy_cores,
        }
    )
