"""What both ends of a link say to each other: a pure state machine, bytes and time in, bytes and timers out.

Life of a link: the end that dials says HELLO until it hears one; the other answers; then DATA in both
directions, acknowledged cumulatively, and HEARTBEAT at its times; each end says BYE after its last
frame. The caller moves the bytes: `receive` takes what has come, `next_urgent` and `next_piece` give
what is to go, `handle_timer` and `next_timer_s` say when to come back. Nothing here sleeps, blocks
or looks at a clock.

Invariants: (epoch, sequence) names a delivery and is taken once, in order; the logical id names the
data and is delivered once; a gap in the sequence, or a HEARTBEAT or BYE that names a later last
message than has come, means that messages were lost: RESEND asks for all from the first of them on, and the peer
sends that again behind a RESUME. Silence longer than `give_up_s` ends the session with an error.
Every error names the link and the peer.

A link may have several connections, each of which keeps its own order. DATA is spread over them and put back
into order; HELLO, HEARTBEAT and BYE are said on each, and a link is open, or closed, when they have been
heard on all; ACK goes over the first.
"""

import math
import struct
from enum import Enum

from tahq.comm.link.acknowledgement import ACK_AT_ONCE_NBYTES, ACK_DELAY_S, Arrivals, Heartbeats, unpack_acknowledgement
from tahq.comm.link.connections import LinkConnections
from tahq.comm.link.frame import (
    MAX_PIECE_NBYTES,
    Direction,
    Frame,
    FrameHeader,
    FrameKind,
    LogicalId,
    Purpose,
    pack_header,
    unpack_header,
)
from tahq.comm.link.inbound import Allocate, Inbound, Resequencer, pageable
from tahq.comm.link.outbound import Outbound, Outgoing
from tahq.comm.link.sending_order import FAREWELL, Rank
from tahq.comm.link.spec import Hello, LinkSpec, PeerIdentity, SessionLimits, decode_text, unpack_hello
from tahq.comm.link.wire_time import HeartbeatTimes, PieceTimes
from tahq.errors import LocalProtocolError, PeerLostError, RemoteProtocolError


class End(Enum):
    """How far one end of a link is."""

    CONNECTING = "connecting"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


_BEFORE_HELLO = frozenset({FrameKind.HELLO, FrameKind.BYE})
"""What a peer may say on a connection before we have met there."""

_HEARD_WHEN_CLOSED = frozenset({FrameKind.ACK, FrameKind.BYE, FrameKind.RESEND})
"""What still matters after either has said BYE: whether everything has arrived. All else has come before."""

_SILENT_HEARTBEATS = 2.5
"""A peer that is silent for so many is in trouble."""

_ROUND = struct.Struct("<I")
_ROUND_AND_NUMBER = struct.Struct("<II")
_MAX_REASON_NBYTES = 1024


class Session:
    """One end of one link."""

    def __init__(
        self, identity: PeerIdentity, spec: LinkSpec, limits: SessionLimits, allocate: Allocate = pageable
    ) -> None:
        self._identity = identity
        self._spec = spec
        self._limits = limits
        self._outbound = Outbound(
            *(spec.link, identity.epoch, limits.piece_nbytes, limits.window_nbytes, limits.first, limits.connections)
        )
        bound_nbytes = limits.receive_window_nbytes + MAX_PIECE_NBYTES
        self._resequencer = Resequencer(limits.connections, bound_nbytes, str(spec))
        self._inbound = Inbound(limits.unexpected, str(spec), allocate)
        self.local = End.OPEN
        self.remote = End.CONNECTING
        self._control_id = LogicalId(identity.run_id, 0, 0, Purpose.TRAIN, 0, 0, Direction.FORWARD)
        self._delivered: list[Frame] = []
        self._connections = LinkConnections(limits.connections, spec.dials)
        self._unacked_nbytes = 0
        self._ack_at_s: float | None = None
        self._ack_due = False
        self._round = 0
        """In which we send; the peer counts them."""
        self._resend_due = False
        self._heard_on = 0
        """The connection that the peer was last heard on."""
        self._heartbeats = Heartbeats(identity.epoch)
        self._arrivals = Arrivals()
        self._heartbeat_at_s: float | None = 0.0 if spec.dials else None
        self._bye_reason = ""
        self._is_held = False
        self._give_up_s = limits.give_up_s if limits.give_up_s is not None else limits.peer_timeout_s

    def succeed(self, before: "Session", now_s: float) -> None:
        """Go on where a session with an earlier process at the other end stood, before anything is sent or heard.

        What was posted, has come and was delivered stays so; what was queued or unacknowledged is forgotten.
        """
        self._inbound = before._inbound
        self._inbound.begin_anew()
        self._outbound.count_on_from(before._outbound, now_s)
        self._delivered.extend(before.take_delivered())

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
    def num_connections(self) -> int:
        """Over how many connections it speaks."""
        return len(self._connections)

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
        return self._outbound.busy.total_s(direction, now_s)

    def sending_s(self, direction: Direction, now_s: float) -> float:
        """Of these, the seconds in which bytes of it were on their way, and did not wait for others to go."""
        return self._outbound.sending.total_s(direction, now_s)

    @property
    def heartbeats(self) -> tuple[HeartbeatTimes, ...]:
        """The last few that had the link for themselves; any thread may ask."""
        return self._heartbeats.recent

    def trouble(self, now_s: float) -> str:
        """Why the link is degraded; empty if it is not. The caller remembers since when."""
        if self.remote is not End.OPEN:
            return ""
        if self._is_held:
            return "the peer is lost, and will be replaced"
        silent_s = now_s + self._give_up_s - (self._connections.silent_at_s or math.inf)
        if silent_s > _SILENT_HEARTBEATS * self._limits.heartbeat_s:
            return "nothing is heard of the peer"
        if self._resequencer.is_waiting:
            return "messages were lost, and have been asked for"
        return "messages were lost, and are sent again" if self._outbound.is_resending else ""

    def was_heard_after(self, time_s: float) -> bool:
        """Whether the peer has given a sign of life since then."""
        silent_at_s = self._connections.silent_at_s
        return silent_at_s is not None and silent_at_s - self._give_up_s > time_s

    @property
    def num_sent_again(self) -> int:
        """Pieces that were sent again because the peer did not get them."""
        return self._outbound.num_again

    def take_pieces(self) -> list[PieceTimes]:
        """When pieces left and came back acknowledged, for those since the last call; any one thread may ask."""
        pieces = self._outbound.pieces
        return [pieces.popleft() for _ in range(len(pieces))]

    def close(self, now_s: float, reason: str = "") -> None:
        """Say BYE after what is queued, or at once when there is a `reason` why this end cannot go on."""
        if self.local is End.CLOSED or (self.local is End.CLOSING and not reason):
            return
        if reason or self.remote is End.CLOSED:
            self._outbound.discard(now_s)
        self._bye_reason = reason
        nobody_is_there = self.remote is not End.OPEN and self._outbound.is_drained
        self.local = End.CLOSED if nobody_is_there else End.CLOSING

    def hold(self) -> None:
        """The peer is known to be lost: its silence is no error, and another session will take this one's place."""
        self._is_held = True
        self._connections.forget_silence()

    # What has come from the wire

    def heard(self, now_s: float, connection: int = 0) -> None:
        """The peer has given a sign of life on a connection (its bytes may still be held back by shaping)."""
        if self.remote is End.OPEN and not self._is_held:
            self._connections.expect_by(connection, now_s + self._give_up_s)

    def reconnected(self, connection: int) -> None:
        """Another connection has taken the place of one that was lost, perhaps with some of what it carried.

        Ask for all that has not come, and say how far we are, rather than see with the next HEARTBEAT what is missing.
        """
        if not self._connections.has_met(connection):
            self._connections.plan_hellos()
        elif self.remote is End.OPEN:
            self._connections.plan_heartbeat(connection)
            self._resequencer.begin_round(is_precaution=True)
            self._resend_due = True

    def receive(self, data: bytes | memoryview, payload: bytes | memoryview, now_s: float, connection: int = 0) -> None:
        """Take one message that has come over a connection.

        Raises:
            RemoteProtocolError: the peer must not say that, or not now.
            PeerLostError: the peer has given up.
        """
        header = unpack_header(data, payload, str(self._spec))
        is_over = self.local is End.CLOSED or self.remote is End.CLOSED
        if header.epoch < self._identity.epoch or (is_over and header.kind not in _HEARD_WHEN_CLOSED):
            return
        self._check_place(header)
        if header.kind not in _BEFORE_HELLO and not self._connections.has_met(connection):
            raise RemoteProtocolError(f"{self._spec}: sent {header.kind.name} while {End.CONNECTING.value}")
        self._heard_on = connection
        self._handle(header, payload, now_s, connection)
        if self._resequencer.has_lost and self.remote is End.OPEN:
            self._resequencer.begin_round()
            self._resend_due = True
        self.heard(now_s, connection)

    def _check_place(self, header: FrameHeader) -> None:
        got = (header.id.run, header.epoch, header.link)
        expected = (self._identity.run_id, self._identity.epoch, self._spec.link)
        if got != expected:
            raise RemoteProtocolError(f"{self._spec}: speaks of (run, epoch, link) {got}; expected {expected}")

    def _handle(self, header: FrameHeader, payload: bytes | memoryview, now_s: float, connection: int) -> None:
        match header.kind:
            case FrameKind.DATA:
                self._handle_data(header, payload, now_s, connection)
            case FrameKind.HELLO:
                self._handle_hello(self.check_hello(header, payload), now_s, connection)
            case FrameKind.ACK:
                self._handle_ack(header.sequence, payload, now_s)
            case FrameKind.HEARTBEAT:
                self._handle_heartbeat(header.sequence, payload, now_s, connection)
            case FrameKind.BYE:
                self._handle_bye(header.sequence, payload, now_s, connection)
            case FrameKind.RESEND:
                self._handle_resend(header.sequence, self._round_in(payload), now_s)
            case FrameKind.RESUME:
                self._join_round(header.sequence, self._round_in(payload), connection)

    def _handle_data(self, header: FrameHeader, payload: bytes | memoryview, now_s: float, connection: int) -> None:
        self._plan_ack(len(payload), now_s)
        self._arrivals.note(header.sequence, now_s)
        for piece_header, piece in self._resequencer.take(header, payload, connection):
            self._deliver(self._inbound.accept(piece_header, piece))

    def _round_in(self, payload: bytes | memoryview) -> int:
        if len(payload) != _ROUND.size:
            raise RemoteProtocolError(f"{self._spec}: named a round in {len(payload)} bytes; expected {_ROUND.size}")
        (number,) = _ROUND.unpack(payload)
        return int(number)

    def _handle_heartbeat(self, sequence: int, payload: bytes | memoryview, now_s: float, connection: int) -> None:
        if len(payload) != _ROUND_AND_NUMBER.size:
            raise RemoteProtocolError(
                f"{self._spec}: sent {len(payload)} bytes with a HEARTBEAT; expected {_ROUND_AND_NUMBER.size}"
            )
        round_, number = _ROUND_AND_NUMBER.unpack(payload)
        self._join_round(sequence, round_, connection)
        self._arrivals.note_heartbeat(number, now_s)
        self._ack_due = True

    def _join_round(self, sequence: int, number: int, connection: int) -> None:
        if not self._resequencer.join_round(number, sequence, connection):
            self._resend_due = True  # it has not come, perhaps

    def _handle_resend(self, sequence: int, number: int, now_s: float) -> None:
        if number <= self._round or self.remote is End.CLOSED:  # it has left since, and wants nothing any more
            return
        self._check_sent(sequence)
        self._round = number
        self._outbound.rewind(sequence, now_s)
        self._connections.plan_resumes()
        self._leave_again()

    def _leave_again(self) -> None:
        """Have BYE said again when all has gone: what went before it has not all come."""
        if self.local is End.CLOSED and not self._bye_reason:
            self.local = End.CLOSING
            self._connections.unsay_byes()

    def _check_sent(self, sequence: int) -> None:
        last = self._outbound.last_sequence
        if sequence > last:
            raise RemoteProtocolError(f"{self._spec}: has message {sequence}, it says; the last one sent was {last}")

    def _plan_ack(self, nbytes: int, now_s: float) -> None:
        self._unacked_nbytes += nbytes
        if self._ack_at_s is None:
            self._ack_at_s = now_s + ACK_DELAY_S
        self._ack_due |= self._unacked_nbytes >= ACK_AT_ONCE_NBYTES

    def _handle_hello(self, hello: Hello, now_s: float, connection: int) -> None:
        if hello.connection != connection:
            raise RemoteProtocolError(
                f"{self._spec}: says on connection {connection} that it is connection {hello.connection}"
            )
        self._connections.take_hello(connection)
        self._outbound.limit_window(hello.window_nbytes)
        if self.remote is End.CONNECTING and self._connections.have_met:
            self.remote = End.OPEN
            self._heartbeat_at_s = now_s + self._limits.heartbeat_s
            self._connections.plan_heartbeats()
            for each in self._connections:
                self.heard(now_s, each)

    def check_hello(self, header: FrameHeader, payload: bytes | memoryview) -> Hello:
        """What a HELLO says if it is from our peer, about this link; RemoteProtocolError if not. Changes nothing."""
        self._check_place(header)
        hello = unpack_hello(payload, str(self._spec))
        got = (hello.stage, hello.peer_stage, hello.config_hash, hello.connections)
        expected = (self._spec.peer_stage, self._identity.stage, self._identity.config_hash, self._limits.connections)
        if got != expected:
            raise RemoteProtocolError(
                f"{self._spec}: says (stage, peer's stage, configuration, connections) {got}; expected {expected}; "
                f"is it a worker of another run?"
            )
        return hello

    def _handle_ack(self, sequence: int, payload: bytes | memoryview, now_s: float) -> None:
        self._check_sent(sequence)
        ack = unpack_acknowledgement(payload, len(self._connections), str(self._spec))
        if ack.heartbeat > self._heartbeats.last:
            raise RemoteProtocolError(
                f"{self._spec}: has heartbeat {ack.heartbeat}, it says; the last one sent was {self._heartbeats.last}"
            )
        self._outbound.acknowledge(sequence, now_s, ack)
        self._heartbeats.answered(ack.heartbeat, ack.heartbeat_s, now_s)

    def _handle_bye(self, sequence: int, payload: bytes | memoryview, now_s: float, connection: int) -> None:
        reason = decode_text(payload)
        self._connections.take_bye(connection)
        self._resequencer.pass_on(sequence, connection)
        is_whole = self._resequencer.received >= sequence or self.local is End.CLOSED
        if reason or (self._connections.have_left and is_whole):
            self._end(reason, now_s)
        elif self._connections.have_left:
            self._connections.forget_byes()

    def _end(self, reason: str, now_s: float) -> None:
        if self.remote is End.CLOSED:
            self._ack_due = True  # said again: ours was lost
            return
        self.remote = End.CLOSED
        self._outbound.discard(now_s)
        if self.local is End.CLOSED:
            return
        if self.local is End.CLOSING:
            self.local = End.CLOSED
        if reason:
            raise PeerLostError(f"{self._spec}: the peer ended it: {reason}")
        self._ack_due = True

    def _deliver(self, frame: Frame | None) -> None:
        if frame is not None:
            self._delivered.append(frame)

    # What is to go on the wire

    def next_urgent(self, now_s: float) -> Outgoing | None:
        """The session's own next message, small, to go before any piece; None if there is none."""
        # An ACK is owed whoever has closed: the peer waits for it before it leaves.
        if self._ack_due or (self._ack_at_s is not None and self.local is not End.OPEN):
            self._ack_due, self._ack_at_s, self._unacked_nbytes = False, None, 0
            return self._message(FrameKind.ACK, self._resequencer.received, now_s, self._acknowledgement())
        if self.local is End.CLOSED:
            return None
        if (connection := self._connections.next_hello()) is not None:
            return self._message(FrameKind.HELLO, 0, now_s, self._hello(connection).pack(), connection)
        if self._resend_due and self.remote is End.OPEN:
            self._resend_due = False
            asked = _ROUND.pack(self._resequencer.round)
            return self._message(FrameKind.RESEND, self._resequencer.received, now_s, asked, self._heard_on)
        return self._next_mark(now_s)

    def _next_mark(self, now_s: float) -> Outgoing | None:
        """What says how far we are on a connection: RESUME, before anything that is sent again, and HEARTBEAT."""
        sent_through = self._outbound.sent_through
        if (connection := self._connections.next_resume()) is not None:
            return self._message(FrameKind.RESUME, sent_through, now_s, _ROUND.pack(self._round), connection)
        if (connection := self._connections.next_heartbeat()) is not None:
            number = self._heartbeats.leave(now_s, is_alone=self._outbound.is_settled)
            mine = _ROUND_AND_NUMBER.pack(self._round, number)
            return self._message(FrameKind.HEARTBEAT, sent_through, now_s, mine, connection)
        return None

    def _acknowledgement(self) -> bytes:
        """When what has come came, and, for the peer to see, how much each of several connections still carries."""
        passed = self._resequencer.passed if len(self._connections) > 1 else ()
        return self._arrivals.tell(self._resequencer.received, passed).pack()

    def _hello(self, connection: int) -> Hello:
        limits = self._limits
        return Hello(
            *(self._identity.stage, self._spec.peer_stage, self._identity.config_hash),
            *(connection, limits.connections, limits.receive_window_nbytes),
        )

    @property
    def next_rank(self) -> Rank | None:
        """How urgent `next_piece` is; None if there is none."""
        if self.remote is not End.OPEN or self.local is End.CLOSED:
            return None
        rank = self._outbound.next_rank
        if rank is None and self.local is End.CLOSING and self._outbound.is_drained:
            return FAREWELL
        return rank

    def next_piece(self, now_s: float) -> Outgoing | None:
        """The next piece of a frame, or BYE after the last; None if there is nothing, or no room in the window."""
        rank = self.next_rank
        if rank is None:
            return None
        if rank == FAREWELL:
            return self._next_bye(now_s)
        return self._outbound.take_piece(now_s)

    def _next_bye(self, now_s: float) -> Outgoing:
        connection = self._connections.next_bye()
        if self._connections.are_left:
            self.local = End.CLOSED
        return self._message(FrameKind.BYE, self._outbound.last_sequence, now_s, self._reason(), connection)

    def _reason(self) -> bytes:
        return self._bye_reason.encode("utf-8", "replace")[:_MAX_REASON_NBYTES]

    def _message(
        self, kind: FrameKind, sequence: int, now_s: float, payload: bytes = b"", connection: int = 0
    ) -> Outgoing:
        header = FrameHeader(
            kind=kind,
            epoch=self._identity.epoch,
            link=self._spec.link,
            sequence=sequence,
            id=self._control_id,
            payload_nbytes=len(payload),
        )
        return Outgoing(pack_header(header, payload), payload, now_s, connection)

    # Time

    def next_timer_s(self) -> float | None:
        """When `handle_timer` is to be called; None: not before something has come."""
        if self.remote is End.CLOSED or self.is_settled:
            return None
        next_s = self._heartbeat_at_s
        if self.local is End.CLOSED:
            return next_s
        for time_s in (self._connections.silent_at_s, self._ack_at_s):
            if next_s is None or (time_s is not None and time_s < next_s):
                next_s = time_s
        return next_s

    def handle_timer(self, now_s: float) -> None:
        """Do what is due by now; what has come by now must have been given to `receive` or `heard` before.

        Raises:
            PeerLostError: the peer has been silent for too long.
        """
        if self.remote is End.CLOSED or self.is_settled:
            return
        if self.local is End.CLOSED:
            if self._heartbeat_at_s is not None and now_s >= self._heartbeat_at_s:
                self._heartbeat_at_s = now_s + self._limits.heartbeat_s
                self._leave_again()
            return
        if self._ack_at_s is not None and now_s >= self._ack_at_s:
            self._ack_due, self._ack_at_s = True, None
        silent_at_s = self._connections.silent_at_s
        if silent_at_s is not None and now_s >= silent_at_s:
            self._connections.forget_silence()
            raise PeerLostError(f"{self._spec}: no sign of life for {self._give_up_s:.1f} s")
        if self._heartbeat_at_s is not None and now_s >= self._heartbeat_at_s:
            self._heartbeat_at_s = now_s + self._limits.heartbeat_s
            if self.remote is End.OPEN:
                self._connections.plan_heartbeats()
            else:
                self._connections.plan_hellos()
