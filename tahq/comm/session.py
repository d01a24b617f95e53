"""What both ends of a link say to each other: a pure state machine, bytes and time in, bytes and timers out.

Life of a link: the end that dials says HELLO until it hears one; the other answers; then DATA in both
directions, acknowledged cumulatively, and HEARTBEAT at its times; each end says BYE after its last
frame. The caller moves the bytes: `receive` takes what has come, `next_urgent` and `next_piece` give
what is to go, `handle_timer` and `next_timer_s` say when to come back. Nothing here sleeps, blocks
or looks at a clock.

Invariants: (epoch, sequence) names a delivery and is taken once, in order; the logical id names the
data and is delivered once; a gap in the sequence, or a HEARTBEAT or BYE that names a later last
message than has come, means that messages were lost, and the session ends with an error; so does
silence longer than `peer_timeout_s`. Every error names the link and the peer.
"""

import struct
from dataclasses import dataclass, field
from enum import Enum

from tahq.comm.frame import Direction, Frame, FrameHeader, FrameKind, LogicalId, Purpose, pack_header, unpack_header
from tahq.comm.inbound import Inbound, UnexpectedBound
from tahq.comm.outbound import Outbound, Outgoing
from tahq.errors import LocalProtocolError, PeerLostError, RemoteProtocolError


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who speaks: both ends of a link must agree on run, epoch and configuration."""

    run_id: int
    epoch: int
    stage: int
    config_hash: str


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One link as this end sees it; `dials` says whose part it is to say HELLO first."""

    link: int
    peer_stage: int
    peer_name: str
    dials: bool

    def __str__(self) -> str:
        return f"link {self.link} to stage {self.peer_stage} ({self.peer_name})"


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Times and bounds of a session."""

    peer_timeout_s: float = 10.0
    heartbeat_s: float = 2.0
    piece_nbytes: int = 256 * 1024
    window_nbytes: int = 64 * 1024 * 1024
    """Most that is on its way and not acknowledged."""
    unexpected: UnexpectedBound = field(default_factory=UnexpectedBound)


class End(Enum):
    """How far one end of a link is."""

    CONNECTING = "connecting"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


_WELCOME: dict[End, frozenset[FrameKind]] = {
    End.CONNECTING: frozenset({FrameKind.HELLO, FrameKind.BYE}),
    End.OPEN: frozenset(FrameKind),
    End.CLOSED: frozenset({FrameKind.ACK, FrameKind.HELLO}),
}
"""What a peer may say, by how far it is."""

_HEARD_WHEN_CLOSED = frozenset({FrameKind.ACK, FrameKind.BYE})
"""What still matters after we have said BYE: whether everything has arrived."""

_ACK_DELAY_S = 0.005
_ACK_AT_ONCE_NBYTES = 64 * 1024
"""Small frames are acknowledged together, after the delay: an ACK of its own would cost as much as the
frame does. Large ones are acknowledged at once, since goodput is measured by it."""

_HELLO = struct.Struct("<II")
_MAX_REASON_NBYTES = 1024


def pack_hello(identity: PeerIdentity, peer_stage: int) -> bytes:
    """The payload of HELLO: own stage, the stage that is meant to hear it, the configuration's hash."""
    return _HELLO.pack(identity.stage, peer_stage) + identity.config_hash.encode()


def _decode_text(data: bytes | memoryview) -> str:
    return ascii(bytes(data[:_MAX_REASON_NBYTES]).decode("utf-8", "replace"))[1:-1]


class Session:
    """One end of one link."""

    def __init__(self, identity: PeerIdentity, spec: LinkSpec, limits: SessionLimits) -> None:
        self._identity = identity
        self._spec = spec
        self._limits = limits
        self._outbound = Outbound(spec.link, identity.epoch, limits.piece_nbytes, limits.window_nbytes)
        self._inbound = Inbound(limits.unexpected, str(spec))
        self.local = End.OPEN
        self.remote = End.CONNECTING
        self._control_id = LogicalId(identity.run_id, 0, 0, Purpose.TRAIN, 0, 0, Direction.FORWARD)
        self._received = 0
        self._delivered: list[Frame] = []
        self._hello_due = spec.dials
        self._unacked_nbytes = 0
        self._ack_at_s: float | None = None
        self._ack_due = False
        self._heartbeat_due = False
        self._heartbeat_at_s: float | None = 0.0 if spec.dials else None
        self._silent_at_s: float | None = None
        self._bye_reason = ""

    # What the compute side asks for

    def send(self, frame: Frame, now_s: float) -> None:
        """Queue a frame.

        Raises:
            LocalProtocolError: it belongs to another run, or this end is closed.
        """
        if frame.id.run != self._identity.run_id:
            raise LocalProtocolError(f"{self._spec}: {frame.id} is not of run {self._identity.run_id}")
        if self.local is not End.OPEN:
            raise LocalProtocolError(f"{self._spec}: cannot send {frame.id}, this end is {self.local.value}")
        if self.remote is not End.CLOSED:
            self._outbound.queue(frame, now_s)

    def expect(self, id: LogicalId, max_nbytes: int) -> None:
        """Post a receive; see Transport.expect."""
        self._deliver(self._inbound.expect(id, max_nbytes))

    def take_delivered(self) -> list[Frame]:
        """Frames that have become whole, and were expected, since the last call."""
        delivered, self._delivered = self._delivered, []
        return delivered

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is to go out, and all that went has been acknowledged (or nobody is there to)."""
        return self.local is End.CLOSED and self._outbound.is_settled

    @property
    def queued_nbytes(self) -> int:
        """Payload bytes that were given to `send` and are not acknowledged; any thread may ask."""
        return self._outbound.nbytes

    @property
    def has_early(self) -> bool:
        """Whether a frame is kept that nobody has posted yet; any thread may ask."""
        return self._inbound.has_early

    def busy_s(self, direction: Direction, now_s: float) -> float:
        """Seconds in which anything sent that way was queued or unacknowledged."""
        return self._outbound.busy[direction].total_s(now_s)

    def close(self, now_s: float, reason: str = "") -> None:
        """Say BYE after what is queued, or at once when there is a `reason` why this end cannot go on."""
        if self.local is End.CLOSED or (self.local is End.CLOSING and not reason):
            return
        if reason or self.remote is End.CLOSED:
            self._outbound.discard(now_s)
        self._bye_reason = reason
        nobody_is_there = self.remote is not End.OPEN and self._outbound.is_drained
        self.local = End.CLOSED if nobody_is_there else End.CLOSING

    # What has come from the wire

    def heard(self, now_s: float) -> None:
        """The peer has given a sign of life (its bytes may still be held back by shaping)."""
        if self.remote is End.OPEN:
            self._silent_at_s = now_s + self._limits.peer_timeout_s

    def receive(self, data: bytes | memoryview, payload: bytes | memoryview, now_s: float) -> None:
        """Take one message.

        Raises:
            RemoteProtocolError: the peer must not say that, or not now.
            PeerLostError: messages were lost, or the peer has given up.
        """
        header = unpack_header(data, payload, str(self._spec))
        if header.epoch < self._identity.epoch or (self.local is End.CLOSED and header.kind not in _HEARD_WHEN_CLOSED):
            return
        self._check_place(header)
        if header.kind not in _WELCOME[self.remote]:
            raise RemoteProtocolError(f"{self._spec}: sent {header.kind.name} while {self.remote.value}")
        self._handle(header, payload, now_s)
        self.heard(now_s)

    def _check_place(self, header: FrameHeader) -> None:
        got = (header.id.run, header.epoch, header.link)
        expected = (self._identity.run_id, self._identity.epoch, self._spec.link)
        if got != expected:
            raise RemoteProtocolError(f"{self._spec}: speaks of (run, epoch, link) {got}; expected {expected}")

    def _handle(self, header: FrameHeader, payload: bytes | memoryview, now_s: float) -> None:
        match header.kind:
            case FrameKind.DATA:
                self._handle_data(header, payload, now_s)
            case FrameKind.HELLO:
                self.check_hello(header, payload)
                self._handle_hello(now_s)
            case FrameKind.ACK:
                self._handle_ack(header.sequence, now_s)
            case FrameKind.HEARTBEAT:
                self._check_complete(header.sequence)
            case FrameKind.BYE:
                self._handle_bye(header.sequence, payload, now_s)

    def _handle_data(self, header: FrameHeader, payload: bytes | memoryview, now_s: float) -> None:
        self._plan_ack(len(payload), now_s)
        if header.sequence <= self._received:
            return
        self._check_complete(header.sequence - 1)
        self._received = header.sequence
        self._deliver(self._inbound.accept(header, payload))

    def _plan_ack(self, nbytes: int, now_s: float) -> None:
        self._unacked_nbytes += nbytes
        if self._ack_at_s is None:
            self._ack_at_s = now_s + _ACK_DELAY_S
        self._ack_due |= self._unacked_nbytes >= _ACK_AT_ONCE_NBYTES

    def _handle_hello(self, now_s: float) -> None:
        if self.remote is End.CONNECTING:
            self.remote = End.OPEN
            self._heartbeat_at_s = now_s + self._limits.heartbeat_s
        self._hello_due = not self._spec.dials

    def check_hello(self, header: FrameHeader, payload: bytes | memoryview) -> None:
        """Whether a HELLO is from our peer, about this link; RemoteProtocolError if not. Changes nothing."""
        self._check_place(header)
        if len(payload) < _HELLO.size:
            raise RemoteProtocolError(f"{self._spec}: sent a HELLO of {len(payload)} bytes")
        stage, peer_stage = _HELLO.unpack_from(payload)
        config_hash = _decode_text(payload[_HELLO.size :])
        got = (stage, peer_stage, config_hash)
        expected = (self._spec.peer_stage, self._identity.stage, self._identity.config_hash)
        if got != expected:
            raise RemoteProtocolError(
                f"{self._spec}: says (stage, peer's stage, configuration) {got}; expected {expected}; "
                f"is it a worker of another run?"
            )

    def _handle_ack(self, sequence: int, now_s: float) -> None:
        last = self._outbound.last_sequence
        if sequence > last:
            raise RemoteProtocolError(f"{self._spec}: acknowledged message {sequence}; the last one sent was {last}")
        self._outbound.acknowledge(sequence, now_s)

    def _handle_bye(self, sequence: int, payload: bytes | memoryview, now_s: float) -> None:
        reason = _decode_text(payload)
        self.remote = End.CLOSED
        self._outbound.discard(now_s)
        if self.local is End.CLOSED:
            return
        if self.local is End.CLOSING:
            self.local = End.CLOSED
        if reason:
            raise PeerLostError(f"{self._spec}: the peer ended it: {reason}")
        self._check_complete(sequence)
        self._ack_due = True

    def _check_complete(self, sequence: int) -> None:
        if sequence > self._received:
            raise PeerLostError(
                f"{self._spec}: messages {self._received + 1} to {sequence} were lost on the way (a connection "
                f"that was reset?); resume the run from its last snapshot"
            )

    def _deliver(self, frame: Frame | None) -> None:
        if frame is not None:
            self._delivered.append(frame)

    # What is to go on the wire

    def next_urgent(self, now_s: float) -> Outgoing | None:
        """The session's own next message, small, to go before any piece; None if there is none."""
        # An ACK is owed whoever has closed: the peer waits for it before it leaves.
        if self._ack_due or (self._ack_at_s is not None and self.local is not End.OPEN):
            self._ack_due, self._ack_at_s, self._unacked_nbytes = False, None, 0
            return self._message(FrameKind.ACK, self._received, now_s)
        if self.local is End.CLOSED:
            return None
        if self._hello_due:
            self._hello_due = False
            return self._message(FrameKind.HELLO, 0, now_s, pack_hello(self._identity, self._spec.peer_stage))
        if self._heartbeat_due:
            self._heartbeat_due = False
            return self._message(FrameKind.HEARTBEAT, self._outbound.last_sequence, now_s)
        return None

    def next_piece(self, now_s: float) -> Outgoing | None:
        """The next piece of a frame, or BYE after the last; None if there is nothing, or no room in the window."""
        if self.remote is not End.OPEN or self.local is End.CLOSED:
            return None
        if self._outbound.can_send:
            return self._outbound.take_piece()
        if self.local is End.CLOSING and self._outbound.is_drained:
            self.local = End.CLOSED
            return self._message(FrameKind.BYE, self._outbound.last_sequence, now_s, self._reason())
        return None

    def _reason(self) -> bytes:
        return self._bye_reason.encode("utf-8", "replace")[:_MAX_REASON_NBYTES]

    def _message(self, kind: FrameKind, sequence: int, now_s: float, payload: bytes = b"") -> Outgoing:
        header = FrameHeader(
            kind=kind,
            epoch=self._identity.epoch,
            link=self._spec.link,
            sequence=sequence,
            id=self._control_id,
            payload_nbytes=len(payload),
        )
        return Outgoing(pack_header(header, payload), payload, now_s)

    # Time

    def next_timer_s(self) -> float | None:
        """When `handle_timer` is to be called; None: not before something has come."""
        if self.local is End.CLOSED or self.remote is End.CLOSED:
            return None
        next_s = self._heartbeat_at_s
        for time_s in (self._silent_at_s, self._ack_at_s):
            if next_s is None or (time_s is not None and time_s < next_s):
                next_s = time_s
        return next_s

    def handle_timer(self, now_s: float) -> None:
        """Do what is due by now; what has come by now must have been given to `receive` or `heard` before.

        Raises:
            PeerLostError: the peer has been silent for too long.
        """
        if self.local is End.CLOSED or self.remote is End.CLOSED:
            return
        if self._ack_at_s is not None and now_s >= self._ack_at_s:
            self._ack_due, self._ack_at_s = True, None
        if self._silent_at_s is not None and now_s >= self._silent_at_s:
            self._silent_at_s = None
            raise PeerLostError(f"{self._spec}: no sign of life for {self._limits.peer_timeout_s:.1f} s")
        if self._heartbeat_at_s is not None and now_s >= self._heartbeat_at_s:
            self._heartbeat_at_s = now_s + self._limits.heartbeat_s
            self._hello_due |= self.remote is End.CONNECTING
            self._heartbeat_due = self.remote is End.OPEN
