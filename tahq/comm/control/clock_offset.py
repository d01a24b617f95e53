"""The difference between another machine's clock and this one's, by the round trips of heartbeats (as NTP does it).

    here  left ─────▶ arrived  there       offset = arrived - (left + answered) / 2
    here  answered ◀─                      round trip = answered - left

However long each of the two directions took, the offset is wrong by at most half the round trip; so of the last few
samples the one with the shortest round trip counts. Both clocks only run forward; there are no leaps.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tahq.comm.link.wire_time import HeartbeatTimes

LONGEST_ROUND_TRIP_S = 60.0


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """`there - here` is `offset_s`, to within `error_s`."""

    offset_s: float
    error_s: float


def clock_offset(heartbeats: Iterable[HeartbeatTimes]) -> ClockOffset | None:
    """The best estimate from these heartbeats; None if there is none."""
    samples = [
        ClockOffset(beat.arrived_s - (beat.left_s + beat.answered_s) / 2, (beat.answered_s - beat.left_s) / 2)
        for beat in heartbeats
        if 0 <= beat.answered_s - beat.left_s <= LONGEST_ROUND_TRIP_S
    ]
    return min(samples, key=lambda sample: sample.error_s, default=None)
