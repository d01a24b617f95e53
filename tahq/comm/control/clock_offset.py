"""How far another machine's clock is from this one, by the round trips of heartbeats (as NTP does it).

    here  t1 ─────▶ t2  there          offset = ((t2 - t1) + (t3 - t4)) / 2
    here  t4 ◀───── t3  there          round trip = (t4 - t1) - (t3 - t2)

Whatever the two ways took, the offset is wrong by at most half the round trip; so of the last few samples the one
with the shortest counts. Pure: times are arguments. There are no leaps: both are clocks that only run forward.
"""

import math
from collections import deque
from dataclasses import dataclass

SAMPLES = 8
"""As many are kept: two clocks drift apart by some 50 µs a second, so a good sample does not stay good."""
LONGEST_ROUND_TRIP_S = 60.0


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """`there - here` is `offset_s`, to within `error_s`."""

    offset_s: float
    error_s: float


class ClockComparison:
    """Samples of one other clock."""

    def __init__(self) -> None:
        self._samples: deque[ClockOffset] = deque(maxlen=SAMPLES)

    def note(self, sent_s: float, received_there_s: float, sent_there_s: float, received_s: float) -> None:
        """One round trip: t1, t2, t3 and t4 above. What cannot be is left out: the numbers come from a peer."""
        round_trip_s = (received_s - sent_s) - (sent_there_s - received_there_s)
        offset_s = ((received_there_s - sent_s) + (sent_there_s - received_s)) / 2
        if math.isfinite(offset_s) and 0 <= round_trip_s <= LONGEST_ROUND_TRIP_S:
            self._samples.append(ClockOffset(offset_s, round_trip_s / 2))

    @property
    def best(self) -> ClockOffset | None:
        """The sample with the shortest round trip; None: there is none yet."""
        return min(self._samples, key=lambda sample: sample.error_s, default=None)
