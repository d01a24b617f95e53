"""What a step is made of, for the simulator: seconds of compute, bytes of traffic, rates and latency.

All times are seconds, all sizes bytes, all rates bytes a second. `inf` is a rate that never limits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tahq.errors import ScheduleError
from tahq.pipeline.schedule.schedule import ActionKind, Schedule


class FirstOut(StrEnum):
    """`links.first`: which of the frames that wait for a host's uplink goes first."""

    OLDEST = "oldest"
    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"


@dataclass(frozen=True, slots=True)
class CutCosts:
    """What crosses the cut between chunk c and chunk c + 1, each way, for one micro-batch, and the path it takes.

    `latency_s` is one-way, the same both ways; None: that of `Costs`. The rates are those of the path in each
    direction, which may be below what its two hosts could send and receive.
    """

    forward_nbytes: float = 0.0
    backward_nbytes: float = 0.0
    forward_encode_s: float = 0.0
    forward_decode_s: float = 0.0
    backward_encode_s: float = 0.0
    backward_decode_s: float = 0.0
    latency_s: float | None = None
    forward_bytes_per_s: float = math.inf
    backward_bytes_per_s: float = math.inf


@dataclass(frozen=True, slots=True)
class HostCosts:
    """What limits a stage's host; both directions of its traffic share each of the two."""

    uplink_bytes_per_s: float = math.inf
    downlink_bytes_per_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Costs:
    """Everything that the time of a step depends on, apart from the schedule.

    Attributes:
        compute_s: seconds by (chunk, kind) for one micro-batch.
        cuts: one entry a cut, between chunk c and c + 1.
        hosts: one entry a stage.
        latency_s: one-way, between any two hosts whose cut says nothing else.
        commit_s: from the end of the last stage's work to the commit's arrival everywhere: a round trip
            to the coordinator and what it does in between.
        codec_lane: False: encoding and decoding take the compute loop's time. True: each stage encodes in one
            thread beside its compute and decodes in another.
        piece_nbytes: a frame's largest piece. On a downlink that two neighbours send into, pieces of
            their frames take turns, and on an uplink what goes first goes between pieces; None: whole frames do.
        first: which of the frames that wait for an uplink goes first; None: nobody keeps an order, and links take
            turns piece by piece, about as TCP shares an uplink.
        queue_s: what waits at most before a downlink, or on a path, as time at its rate; more waits in its sender.
        acknowledged: bytes on the receiver's uplink for each that it gets; they go before the next piece there.
        activation_nbytes: what one micro-batch in flight keeps in memory, by chunk; None: not known.
    """

    compute_s: Mapping[tuple[int, ActionKind], float]
    cuts: Sequence[CutCosts]
    hosts: Sequence[HostCosts]
    latency_s: float = 0.0
    commit_s: float = 0.0
    codec_lane: bool = False
    piece_nbytes: int | None = None
    first: FirstOut | None = FirstOut.OLDEST
    queue_s: float = math.inf
    acknowledged: float = 0.0
    activation_nbytes: Sequence[float] | None = None

    def check(self, schedule: Schedule) -> None:
        """Raise ScheduleError unless there is a cost for everything in the schedule."""
        expected = {"cuts": schedule.num_chunks - 1, "hosts": schedule.num_stages}
        if self.activation_nbytes is not None:
            expected["activation_nbytes"] = schedule.num_chunks
        for name, length in expected.items():
            if len(getattr(self, name)) != length:
                got = len(getattr(self, name))
                raise ScheduleError(f"schedule {schedule.name} needs {length} {name}, the costs have {got}")
        kinds = {(action.chunk, action.kind) for row in schedule.actions for action in row}
        missing = sorted(f"{chunk}{kind}" for chunk, kind in kinds - set(self.compute_s))
        if missing:
            raise ScheduleError(f"no compute time for {', '.join(missing)} of schedule {schedule.name}")


def uniform_costs(
    num_chunks: int,
    num_stages: int,
    *,
    forward_s: float,
    backward_s: float,
    cut: CutCosts | None = None,
    host: HostCosts | None = None,
    latency_s: float = 0.0,
    commit_s: float = 0.0,
) -> Costs:
    """Costs that are the same for every chunk, cut and host; I and W take half a backward each."""
    seconds = {
        ActionKind.F: forward_s,
        ActionKind.B: backward_s,
        ActionKind.I: backward_s / 2,
        ActionKind.W: backward_s / 2,
    }
    return Costs(
        compute_s={(chunk, kind): seconds[kind] for chunk in range(num_chunks) for kind in ActionKind},
        cuts=[cut or CutCosts()] * (num_chunks - 1),
        hosts=[host or HostCosts()] * num_stages,
        latency_s=latency_s,
        commit_s=commit_s,
    )
