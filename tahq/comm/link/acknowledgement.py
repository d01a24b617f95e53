"""ACK's payload: what has come, and when by the clock of who says it.

The sender learns from these times how long its bytes had the wire (`wire_time.py`), whatever the way back is like. They
are whole microseconds since that clock began, so no number in them is NaN, infinite or negative; that they are true
nobody can check, and nothing but figures depends on it.
"""

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tahq.comm.link.wire_time import HeartbeatTimes
from tahq.errors import RemoteProtocolError

ACK_DELAY_S = 0.005
ACK_AT_ONCE_NBYTES = 64 * 1024
"""Small frames are acknowledged together, after the delay: an ACK of its own would cost as much as the
frame does. Large ones are acknowledged at once, since the window and goodput wait for it."""

MAX_TIMES = 128
"""Messages whose arrival one ACK tells: 1 KiB. Those before them came no later than the first of these."""

_PASSED = struct.Struct("<Q")
_HEARTBEAT = struct.Struct("<IQ")
_TIME = struct.Struct("<Q")
_A_SECOND = 1_000_000


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """What an ACK says beside the number up to which everything has come.

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
        passed = b"".join(map(_PASSED.pack, self.passed))
        arrivals = b"".join(_TIME.pack(_ticks(time_s)) for time_s in self.arrivals_s)
        return passed + _HEARTBEAT.pack(self.heartbeat, _ticks(self.heartbeat_s)) + arrivals

    def arrival_s(self, behind: int) -> float | None:
        """When the message came that is so many numbers before the acknowledged one; None: nobody knows."""
        if not self.arrivals_s:
            return None
        return self.arrivals_s[max(0, len(self.arrivals_s) - 1 - behind)]


def unpack_acknowledgement(payload: bytes | memoryview, connections: int, peer: str) -> Acknowledgement:
    """What an ACK says, of a link with so many connections.

    Raises:
        RemoteProtocolError: it is not of a length that it can have.
    """
    head = connections * _PASSED.size if connections > 1 else 0
    num_times, left = divmod(len(payload) - head - _HEARTBEAT.size, _TIME.size)
    if left or not 0 <= num_times <= MAX_TIMES:
        raise RemoteProtocolError(f"{peer}: sent {len(payload)} bytes with an ACK for {connections} connections")
    heartbeat, ticks = _HEARTBEAT.unpack_from(payload, head)
    times = _TIME.iter_unpack(payload[head + _HEARTBEAT.size :])
    return Acknowledgement(
        passed=[number for (number,) in _PASSED.iter_unpack(payload[:head])],
        heartbeat=heartbeat,
        heartbeat_s=ticks / _A_SECOND,
        arrivals_s=[ticks / _A_SECOND for (ticks,) in times],
    )


def _ticks(time_s: float) -> int:
    return round(_A_SECOND * time_s)


class Arrivals:
    """When messages have come, until the peer is told."""

    def __init__(self) -> None:
        self._arrived_s: dict[int, float] = {}
        self._told = 0
        self._heartbeat, self._heartbeat_s = 0, 0.0

    def note(self, sequence: int, now_s: float) -> None:
        """A message of this number is here; if it has come before, that is when it came."""
        if sequence > self._told:
            self._arrived_s.setdefault(sequence, now_s)

    def note_heartbeat(self, number: int, now_s: float) -> None:
        """A HEARTBEAT of this number is here."""
        self._heartbeat, self._heartbeat_s = number, now_s

    def tell(self, received: int, passed: Sequence[int]) -> Acknowledgement:
        """What the peer has not been told, all up to `received` being here."""
        times_s = [self._arrived_s.pop(number) for number in range(self._told + 1, received + 1)]
        ack = Acknowledgement(passed, self._heartbeat, self._heartbeat_s, times_s[-MAX_TIMES:])
        self._told = received
        self._heartbeat, self._heartbeat_s = 0, 0.0
        return ack


_UNDER_WAY = 8
_REMEMBERED = 8


class Heartbeats:
    """Of one session; its epoch says with which process the peer's times are.

    One thread moves it, any thread may ask for `recent`.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self.last = 0
        """Number of the last one."""
        self._alone_s: dict[int, float] = {}
        """When those left that had the link for themselves, and are not answered yet."""
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

        One that is answered at the moment it left has met no network, as when the ends of an `InprocPair` are joined.
        """
        left_s = self._alone_s.pop(number, None)
        if left_s is not None and now_s > left_s:
            self._recent.append(HeartbeatTimes(self._epoch, left_s, arrived_s, now_s))

    @property
    def recent(self) -> tuple[HeartbeatTimes, ...]:
        """The last few that were alone."""
        return tuple(self._recent)
