"""Points of bench_engine: networks, sizes of a step, runtimes, and the depth of tahq's pipeline at each.

Four stages asleep for 73 and 152 ms, activations of 4 × 256 × 512 elements, 2.1 MB in fp32.

**Congestion control.** Where both directions of an uplink are full, bbr stayed further below the rate than cubic. What
cubic loses on long links is its slow start after every pause, so there is none here; see docs/dev/experiment-log.md.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tahq.models.config import SleepConfig
from tahq_netem.sweep.points import NetworkChoice, sweep_points
from tahq_netem.sweep.spec import SweepConfig
from tahq_netem.sweep.stage_times import StageTimes
from tahq_netem.sweep.workload import CodecSeconds, planned_work, predicted_step_s, schedule_with_depth

FORWARD_S, BACKWARD_S = 0.073, 0.152
MICRO_BATCH, SEQ_LEN, HIDDEN_SIZE = 4, 256, 512
FP32 = "raw:dtype=fp32"
TAH = "tah / fixed:bits=6"
WIRES = {"tah": TAH, "fp32": FP32}
RUNTIMES: dict[str, tuple[str, ...]] = {
    "torch": ("gpipe", "1f1b", "1f1b-runtime"),
    "bare": ("1f1b", "1f1b-deep"),
}
"""The other runtimes, in fp32, with their schedules."""

CONGESTION_CONTROL = "cubic"
SETTLING_FRAMES = 64
"""Frames per link and direction before anything counts: the first steps are slower (docs/dev/experiment-log.md)."""
DEEPER = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
"""Times 1F1B's own depth: candidates for tahq's."""
ASSUMED_CODEC = CodecSeconds(0.008, 0.008, 0.008, 0.008)
"""Codec times assumed when a depth is chosen, before any were measured."""
CAUTION = 1.25
"""Factor on delays when a depth is chosen: they vary, and a pipeline that is too shallow waits in every turn."""
QUEUES_S = (0.1, 0.2, 0.4, math.inf)
"""Lengths of queues before downlinks when a depth is chosen. Some depths suit one length and lose a tenth with another,
since the order of frames depends on it; the slowest counts."""
AS_GOOD = 1.002
"""A shallower pipeline is taken if its step takes at most this many times the shortest."""


@dataclass(frozen=True, slots=True)
class Place:
    """A network, and the points measured over it."""

    name: str
    rate_bits_per_s: float | None
    round_trip_s: float = 0.0
    stages: int = 4
    micro_batches: tuple[int, ...] = (8, 32)
    wires: tuple[str, ...] = ("tah", "fp32")
    has_others: bool = True
    """Whether torch and the bare loop are measured, too, with the fewest micro-batches."""

    @property
    def key(self) -> tuple[int, float | None, float]:
        """Stages, rate and round trip."""
        return self.stages, self.rate_bits_per_s, self.round_trip_s

    @property
    def choice(self) -> NetworkChoice:
        return NetworkChoice(self.rate_bits_per_s, self.round_trip_s)

    @property
    def title(self) -> str:
        return f"{self.stages} stages, {self.choice.label}"


PLACES = (
    Place("unshaped", None),
    Place("300", 300e6),
    Place("100", 100e6),
    Place("100-50ms", 100e6, 0.05),
    Place("100-150ms", 100e6, 0.15, micro_batches=(8,), has_others=False),
    Place("20", 20e6),
    Place("8-stages", 100e6, 0.15, stages=8, micro_batches=(32,), wires=("tah",), has_others=False),
)


def sweeps(places: Sequence[Place], runtimes: Sequence[str], **changes: Any) -> Iterator[SweepConfig]:
    """One sweep per network and number of micro-batches; `changes` to its configuration."""
    for place in places:
        for count in place.micro_batches:
            chosen = [runtime for runtime in _runtimes(place, count) if runtime["name"] in runtimes]
            for runtime in chosen:
                if runtime["name"] == "tahq":
                    [schedule], [wire] = runtime["schedules"], runtime["wires"]
                    runtime["in_flight"] = [chosen_depth(place, count, schedule, wire)]
            if chosen:
                yield _sweep(place, count, chosen, **changes)


def chosen_depth(place: Place, num_micro_batches: int, schedule: str, wire: str) -> tuple[int, ...]:
    """The shallowest pipeline that the simulator predicts to be as fast as any candidate, whatever the queues."""
    config = _sweep(place, num_micro_batches, [{"name": "tahq", "schedules": [schedule], "wires": [wire]}])
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


def _runtimes(place: Place, count: int) -> Iterator[dict[str, Any]]:
    for schedule in ("1f1b", "zero-bubble"):
        for wire in place.wires:
            yield {"name": "tahq", "schedules": [schedule], "wires": [WIRES[wire]]}
    if place.has_others and count == min(place.micro_batches):
        for name, schedules in RUNTIMES.items():
            yield {"name": name, "schedules": list(schedules), "wires": [FP32]}


def _sweep(place: Place, count: int, runtimes: list[dict[str, Any]], **changes: Any) -> SweepConfig:
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
            "steps": {"settle": max(2, SETTLING_FRAMES // count), "at_least": 5, "at_most": 7, "about": 20.0},
            "congestion_control": CONGESTION_CONTROL,
            "tcp_slow_start_after_idle": False,
            **changes,
        }
    )
