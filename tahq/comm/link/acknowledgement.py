"""ACK's payload: which messages have come, and when, by the receiver's clock; and the numbers of heartbeats.

The sender learns from these times how long its bytes had the wire (`wire_time.py`), however slow the way back is. They
are whole microseconds since that clock began, so none is NaN, infinite or negative; they cannot be verified, and only
statistics depend on them.
"""

import math
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tahq.comm.link.wire_time import HeartbeatTimes
from tahq.errors import RemoteProtocolError

ACK_DELAY_S = 0.005
ACK_AT_ONCE_NBYTES = 64 * 1024
"""Small frames are acknowledged together, after the delay: a separate ACK would cost as much as the frame. Large ones
are acknowledged at once, since the window and goodput wait for it."""

MAX_TIMES = 128
"""Messages whose arrival one ACK reports: 1 KiB. Those before them came no later than the first of these."""

_HEARTBEAT_NBYTES = struct.calcsize("<IQ")
_A_SECOND = 1_000_000
_UNDER_WAY = 8
_REMEMBERED = 8


@dataclass(slots=True)
class Acknowledgement:
    """The payload of an ACK, beside the number up to which everything has come.

    Attributes:
        passed: for each of several connections, up to which number it has brought all that it will; empty with one.
        heartbeat: number of the last HEARTBEAT that came since the ACK before; 0: none did.
        heartbeat_s: when that came.
        arrivals_s: when the last messages came up to the acknowledged one, that one last.
    """

    passed: Sequence[int] = ()
    heartbeat: int = 0
    heartbeat_s: float = 0.0
    arrivals_s: Sequence[float] = ()

    def pack(self) -> bytes:
        """The payload."""
        heartbeat_ticks, *ticks = [round(_A_SECOND * time_s) for time_s in (self.heartbeat_s, *self.arrivals_s)]
        layout = f"<{len(self.passed)}QIQ{len(ticks)}Q"
        return struct.pack(layout, *self.passed, self.heartbeat, heartbeat_ticks, *ticks)

    def arrival_s(self, behind: int) -> float | None:
        """When the message came that is so many numbers before the acknowledged one; None: unknown."""
        if not self.arrivals_s:
            return None
        return self.arrivals_s[max(0, len(self.arrivals_s) - 1 - behind)]


def unpack_acknowledgement(payload: bytes | memoryview, connections: int, peer: object) -> Acknowledgement:
    """Parse the payload of an ACK, of a link with so many connections.

    Raises:
        RemoteProtocolError: its length is impossible.
    """
    num_passed = connections if connections > 1 else 0
    num_times, left = divmod(len(payload) - 8 * num_passed - _HEARTBEAT_NBYTES, 8)
    if left or not 0 <= num_times <= MAX_TIMES:
        raise RemoteProtocolError(f"{peer}: sent {len(payload)} bytes with an ACK for {connections} connections")
    values = struct.unpack(f"<{num_passed}QIQ{num_times}Q", payload)
    heartbeat, *ticks = values[num_passed:]
    heartbeat_s, *arrivals_s = [tick / _A_SECOND for tick in ticks]
    return Acknowledgement(values[:num_passed], heartbeat, heartbeat_s, arrivals_s)


class Arrivals:
    """Arrival times of messages and of the last HEARTBEAT, until the peer is told."""

    def __init__(self) -> None:
        self.due_s = math.inf
        """When to acknowledge the messages that have come; inf: none has."""
        self._nbytes = 0
        """Bytes since the last ACK."""
        self._arrived_s: dict[int, float] = {}
        self._told = 0
        self._heartbeat = (0, 0.0)

    def note(self, sequence: int, nbytes: int, now_s: float) -> bool:
        """A message is here; one that comes again keeps its first time. Returns whether to acknowledge at once."""
        if sequence > self._told:
            self._arrived_s.setdefault(sequence, now_s)
        self._nbytes += nbytes
        if self.due_s == math.inf:
            self.due_s = now_s + ACK_DELAY_S
        return self._nbytes >= ACK_AT_ONCE_NBYTES

    def note_heartbeat(self, number: int, now_s: float) -> None:
        """A HEARTBEAT of this number is here."""
        self._heartbeat = (number, now_s)

    def tell(self, received: int, passed: Sequence[int]) -> Acknowledgement:
        """The times that the peer was not told yet, when all up to `received` have come."""
        times_s = [self._arrived_s.pop(number) for number in range(self._told + 1, received + 1)]
        ack = Acknowledgement(passed, *self._heartbeat, times_s[-MAX_TIMES:])
        self._told, self._heartbeat = received, (0, 0.0)
        self.due_s, self._nbytes = math.inf, 0
        return ack


class Heartbeats:
    """This end's heartbeats of one session: their numbers, and the times of those that had the link to themselves.

    Such a heartbeat takes as long as the path is. An ACK names the heartbeat that it answers: others may be on their
    way by then. One thread moves it, any thread may ask for `recent`.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self.last = 0
        """Number of the last one."""
        self._alone_s: dict[int, float] = {}
        """When those left that were alone, and are not answered yet."""
        self._recent: deque[HeartbeatTimes] = deque(maxlen=_REMEMBERED)

    def leave(self, now_s: float, *, is_alone: bool) -> int:
        """One leaves; its number. `is_alone`: with nothing of the link on its way before it."""
        self.last += 1
        if is_alone:
            self._alone_s[self.last] = now_s
            if len(self._alone_s) > _UNDER_WAY:
                del self._alone_s[next(iter(self._alone_s))]
        return self.last

    def answered(self, number: int, arrived_s: float, now_s: float) -> None:
        """The one with this number came at `arrived_s`, by the peer's clock; 0 is none.

        One that is answered at the moment it left has met no network: the two ends are joined in one process.
        """
        left_s = self._alone_s.pop(number, None)
        if left_s is not None and now_s > left_s:
            self._recent.append(HeartbeatTimes(self._epoch, left_s, arrived_s, now_s))

    @property
    def recent(self) -> tuple[HeartbeatTimes, ...]:
        """The last few that were alone."""
        return tuple(self._recent)
