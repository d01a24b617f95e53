"""The session's own messages (HELLO, ACK, HEARTBEAT, RESEND, RESUME, BYE): contents, order and times.

docs/dev/protocol.md says what they mean. An ACK tells when messages came, by the receiver's clock, from which the
sender learns how long its bytes had the wire (`wire_time.py`), however slow the path back is. These times are whole
microseconds since that clock began, so none is NaN, infinite or negative; they cannot be verified, and only statistics
depend on them.
"""

import math
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tahq.comm.link.frame import FrameHeader, FrameKind, LogicalId, Outgoing, pack_header, unpack_header
from tahq.comm.link.spec import ANY_STAGE, LinkHello, LinkSpec, PeerIdentity, SessionLimits, unpack_hello
from tahq.comm.link.wire_time import HeartbeatTimes
from tahq.errors import PeerLostError, RemoteProtocolError

ACK_DELAY_S = 0.005
ACK_AT_ONCE_NBYTES = 64 * 1024
"""Small frames are acknowledged together, after the delay: a separate ACK would cost as much as the frame. Large ones
are acknowledged at once, since the window and goodput wait for it."""
MAX_TIMES = 128
"""Messages whose arrival one ACK reports: 1 KiB. Those before them came no later than the first of these."""

_IN_ORDER = (FrameKind.ACK, FrameKind.HELLO, FrameKind.RESEND, FrameKind.RESUME, FrameKind.HEARTBEAT)
"""Messages that do not wait for frames, in the order in which they go."""
_PRIORITY = {kind: priority for priority, kind in enumerate(_IN_ORDER)}
_ROUND = struct.Struct("<I")
_ROUND_AND_NUMBER = struct.Struct("<II")
_FIELDS = {FrameKind.RESEND: _ROUND, FrameKind.RESUME: _ROUND, FrameKind.HEARTBEAT: _ROUND_AND_NUMBER}
MAX_REASON_NBYTES = 1024
_HEARTBEAT_NBYTES = struct.calcsize("<IQ")
_TICKS_PER_S = 1_000_000
_MAX_HEARTBEATS_KEPT = 8
_SILENT_HEARTBEATS = 2.5
"""A peer that has been silent for this many is in trouble."""


class Signals:
    """Packs and checks the messages of one end of a link, and remembers which are due on which connection.

    It does not decide when one is due.
    """

    def __init__(self, identity: PeerIdentity, spec: LinkSpec, limits: SessionLimits) -> None:
        self._identity = identity
        self._spec = spec
        self._limits = limits
        self._id = LogicalId.of_session(identity.run_id)
        self._place = (identity.run_id, identity.epoch, spec.link)
        self._due: set[tuple[int, int]] = set()

    def __bool__(self) -> bool:
        return bool(self._due)

    def plan(self, kind: FrameKind, connections: Iterable[int] = (0,)) -> None:
        """Have a message of this kind sent on each of these connections, once."""
        priority = _PRIORITY[kind]
        self._due.update((priority, connection) for connection in connections)

    def cancel(self, kind: FrameKind, connection: int) -> None:
        """It need not be sent there any more."""
        self._due.discard((_PRIORITY[kind], connection))

    def is_due(self, kind: FrameKind) -> bool:
        """Whether one is due on connection 0."""
        return (_PRIORITY[kind], 0) in self._due

    def next(self) -> tuple[FrameKind, int]:
        """Kind and connection of the message that goes first."""
        priority, connection = min(self._due)
        return _IN_ORDER[priority], connection

    def pack(self, kind: FrameKind, sequence: int, now_s: float, payload: bytes = b"", connection: int = 0) -> Outgoing:
        """A message for the wire."""
        _, epoch, link = self._place
        header = FrameHeader(kind, epoch, link, sequence, self._id, payload_nbytes=len(payload))
        return Outgoing(pack_header(header, payload), payload, now_s, connection)

    def pack_numbers(self, kind: FrameKind, sequence: int, now_s: float, connection: int, *numbers: int) -> Outgoing:
        """RESEND and RESUME with a round, or HEARTBEAT with a round and its own number."""
        return self.pack(kind, sequence, now_s, _FIELDS[kind].pack(*numbers), connection)

    def pack_hello(self, now_s: float, connection: int) -> Outgoing:
        """HELLO."""
        own = (self._identity.stage, self._spec.peer_stage, self._identity.config_hash)
        limits = (self._limits.connections, self._limits.receive_window_nbytes)
        return self.pack(FrameKind.HELLO, 0, now_s, LinkHello(*own, connection, *limits).pack(), connection)

    def unpack(self, data: bytes | memoryview, payload: bytes | memoryview) -> FrameHeader | None:
        """The header of a message from the peer; None if it is of an earlier epoch.

        RemoteProtocolError: it is damaged, or of another run, link or later epoch.
        """
        header = unpack_header(data, payload, self._spec)
        if header.epoch < self._place[1]:
            return None
        self._check_place(header)
        return header

    def _check_place(self, header: FrameHeader) -> None:
        got = (header.id.run, header.epoch, header.link)
        if got != self._place:
            raise RemoteProtocolError(f"{self._spec}: sent (run, epoch, link) {got}; expected {self._place}")

    def numbers(self, kind: FrameKind, payload: bytes | memoryview) -> tuple[int, ...]:
        """What `pack_numbers` has packed; RemoteProtocolError if the length is wrong."""
        fields = _FIELDS[kind]
        if len(payload) != fields.size:
            raise RemoteProtocolError(
                f"{self._spec}: sent {len(payload)} bytes with a {kind.name}; expected {fields.size}"
            )
        return fields.unpack(payload)

    def check_hello(self, header: FrameHeader, payload: bytes | memoryview) -> LinkHello:
        """Parse a HELLO and check that it is from our peer, about this link; RemoteProtocolError if it is not."""
        self._check_place(header)
        hello = unpack_hello(payload, str(self._spec))
        expected_stage = hello.stage if self._spec.peer_stage == ANY_STAGE else self._spec.peer_stage
        own_stage = hello.peer_stage if hello.peer_stage == ANY_STAGE else self._identity.stage
        got = (hello.stage, hello.peer_stage, hello.config_hash, hello.connections)
        expected = (expected_stage, own_stage, self._identity.config_hash, self._limits.connections)
        if got != expected:
            raise RemoteProtocolError(
                f"{self._spec}: sent (stage, peer's stage, configuration, connections) {got}; expected {expected}; "
                f"is it a worker of another run?"
            )
        return hello


def pack_reset(run_id: int, epoch: int, link: int) -> tuple[bytes, bytes]:
    """Header and payload of the answer to a message of a session that this process knows nothing of."""
    return pack_header(FrameHeader(FrameKind.RESET, epoch, link, 0, LogicalId.of_session(run_id)), b""), b""


def pack_refusal(hello: FrameHeader, reason: str) -> tuple[bytes, bytes]:
    """Header and payload of the BYE that answers a HELLO which is refused."""
    payload = f"refused: {reason}".encode()[:MAX_REASON_NBYTES]
    bye = FrameHeader(FrameKind.BYE, hello.epoch, hello.link, 0, hello.id, payload_nbytes=len(payload))
    return pack_header(bye, payload), payload


# ACK


@dataclass(slots=True)
class Acknowledgement:
    """The payload of an ACK, beside the number up to which everything has come."""

    passed: Sequence[int] = ()
    """For each of several connections, up to which number it has brought all that it will; empty with one."""
    heartbeat: int = 0
    """Number of the last HEARTBEAT that came since the ACK before; 0: none did."""
    heartbeat_s: float = 0.0
    """When that came."""
    arrivals_s: Sequence[float] = ()
    """When the last messages came up to the acknowledged one, that one last."""

    def pack(self) -> bytes:
        """The payload."""
        heartbeat_ticks, *ticks = [round(_TICKS_PER_S * time_s) for time_s in (self.heartbeat_s, *self.arrivals_s)]
        layout = f"<{len(self.passed)}QIQ{len(ticks)}Q"
        return struct.pack(layout, *self.passed, self.heartbeat, heartbeat_ticks, *ticks)

    def arrival_s(self, behind: int) -> float | None:
        """When the message came that is so many numbers before the acknowledged one; None: unknown."""
        if not self.arrivals_s:
            return None
        return self.arrivals_s[max(0, len(self.arrivals_s) - 1 - behind)]


def unpack_acknowledgement(payload: bytes | memoryview, connections: int, peer: object) -> Acknowledgement:
    """Parse an ACK of a link with so many connections; RemoteProtocolError if its length is impossible."""
    num_passed = connections if connections > 1 else 0
    num_times, left = divmod(len(payload) - 8 * num_passed - _HEARTBEAT_NBYTES, 8)
    if left or not 0 <= num_times <= MAX_TIMES:
        raise RemoteProtocolError(f"{peer}: sent {len(payload)} bytes with an ACK for {connections} connections")
    values = struct.unpack(f"<{num_passed}QIQ{num_times}Q", payload)
    heartbeat, *ticks = values[num_passed:]
    heartbeat_s, *arrivals_s = [tick / _TICKS_PER_S for tick in ticks]
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
        self.heartbeat = (0, 0.0)
        """Number of the last HEARTBEAT that came since the last ACK, and when."""

    def note(self, sequence: int, nbytes: int, now_s: float) -> bool:
        """A message is here; one that comes again keeps its first time. Returns whether to acknowledge at once."""
        if sequence > self._told:
            self._arrived_s.setdefault(sequence, now_s)
        self._nbytes += nbytes
        if self.due_s == math.inf:
            self.due_s = now_s + ACK_DELAY_S
        return self._nbytes >= ACK_AT_ONCE_NBYTES

    def tell(self, received: int, passed: Sequence[int]) -> Acknowledgement:
        """The ACK of all messages up to `received`, with the times that the peer was not told yet."""
        times_s = [self._arrived_s.pop(number) for number in range(self._told + 1, received + 1)]
        heartbeat, self.heartbeat = self.heartbeat, (0, 0.0)
        self._told, self.due_s, self._nbytes = received, math.inf, 0
        return Acknowledgement(passed, *heartbeat, times_s[-MAX_TIMES:])


class Heartbeats:
    """This end's heartbeats of one session: their numbers, and the times of those that had the link to themselves.

    Such a heartbeat measures the empty path. An ACK names the heartbeat that it answers, since others may be on their
    way by then. One thread changes it; any thread may read `recent`.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self.last = 0
        """Number of the last one."""
        self._alone_s: dict[int, float] = {}
        """When unanswered heartbeats left that were alone."""
        self._recent: deque[HeartbeatTimes] = deque(maxlen=_MAX_HEARTBEATS_KEPT)

    def leave(self, now_s: float, *, is_alone: bool) -> int:
        """One leaves; its number. `is_alone`: with nothing of the link on its way before it."""
        self.last += 1
        if is_alone:
            self._alone_s[self.last] = now_s
            if len(self._alone_s) > _MAX_HEARTBEATS_KEPT:
                del self._alone_s[next(iter(self._alone_s))]
        return self.last

    def answered(self, number: int, arrived_s: float, now_s: float) -> None:
        """The one with this number came at `arrived_s`, by the peer's clock; 0: no heartbeat."""
        left_s = self._alone_s.pop(number, None)
        if left_s is not None and now_s > left_s:  # else the two ends are joined in one process
            self._recent.append(HeartbeatTimes(self._epoch, left_s, arrived_s, now_s))

    @property
    def recent(self) -> tuple[HeartbeatTimes, ...]:
        """The last few that were alone."""
        return tuple(self._recent)


class Liveness:
    """When this end sends its next sign of life, and when the peer last sent one on each connection.

    The end that `dials` sends at once, the other when the two have met (`begin`).
    """

    def __init__(self, limits: SessionLimits, dials: bool) -> None:
        self.beat_at_s = 0.0 if dials else math.inf
        """When the next HEARTBEAT, or HELLO, is due."""
        self.is_held = False
        """Whether silence is no error any more: the peer is known to be lost."""
        self._heard_s: dict[int, float] = {}
        """When the peer was last heard, on the connections that must not fall silent."""
        self.left: set[int] = set()
        """The connections on which the peer has said BYE."""
        self.use_times(limits, 0.0)

    def begin(self, now_s: float) -> None:
        """The two ends have met: a HEARTBEAT leaves now, and the next one after the interval."""
        self.beat_at_s = now_s + self._heartbeat_s

    def beat(self, now_s: float) -> bool:
        """Whether the next sign of life is due."""
        is_due = now_s >= self.beat_at_s
        if is_due:
            self.beat_at_s = now_s + self._heartbeat_s
        return is_due

    def hear(self, connection: int, now_s: float) -> None:
        """The peer has given a sign of life."""
        if not self.is_held and connection not in self.left:
            self._heard_s[connection] = now_s

    def leave(self, connection: int) -> None:
        """The peer has said BYE there: after that, silence means nothing."""
        self.left.add(connection)
        self._heard_s.pop(connection, None)

    def hold(self) -> None:
        """Silence is no error from now on."""
        self.is_held = True
        self._heard_s.clear()

    @property
    def last_heard_s(self) -> float:
        """When the peer was last heard on the connection that is silent for longest; inf: none is listened to."""
        return min(self._heard_s.values(), default=math.inf)

    @property
    def silent_at_s(self) -> float:
        """When the peer will have been silent for too long."""
        return self.last_heard_s + self._silence_s

    def is_quiet(self, now_s: float) -> bool:
        """Whether the peer has missed heartbeats."""
        return now_s - self.last_heard_s > _SILENT_HEARTBEATS * self._heartbeat_s

    def check(self, now_s: float, peer: object) -> None:
        """Raise PeerLostError, once, if the peer has been silent for too long."""
        if now_s >= self.silent_at_s:
            self._heard_s.clear()
            raise PeerLostError(f"{peer}: no sign of life for {self._silence_s:.1f} s")

    def use_times(self, limits: SessionLimits, now_s: float) -> None:
        """Take the times of these limits from now on."""
        self._heartbeat_s, self._silence_s = limits.heartbeat_s, limits.silence_s
        if self.beat_at_s < math.inf:
            self.beat_at_s = min(self.beat_at_s, now_s + self._heartbeat_s)
