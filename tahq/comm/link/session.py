"""One end of a reliable link: a pure state machine, bytes and time in, bytes and timers out.

A session carries three channels (data, control, files) over one or several connections. The end that dials says HELLO
until it hears one; then both send DATA, acknowledged cumulatively, and HEARTBEAT at its times; each end says BYE after
its last frame. The caller moves the bytes: `receive` takes those that have come, `next_urgent` and `next_piece` return
those to send, `handle_timer` and `next_timer_s` say when to come back. Nothing here sleeps, blocks or reads a clock.

Invariants: (epoch, sequence) names a delivery, which is taken once and in order; a logical id names data, which is
delivered once; a gap in the sequence, or a HEARTBEAT or BYE that names a later message than has come, means that
messages were lost: RESEND asks for all after the last that came, and the peer sends them again behind a RESUME. Silence
longer than `give_up_s` ends the session with an error. Every error names the link and the peer.

HELLO, HEARTBEAT and BYE are said on each connection; a link is open, or closed, when they have been heard on all.
"""

import math
import struct
from dataclasses import replace

from tahq.comm.link.acknowledgement import (
    ACK_AT_ONCE_NBYTES,
    ACK_DELAY_S,
    Arrivals,
    Heartbeats,
    unpack_acknowledgement,
)
from tahq.comm.link.connections import LinkConnections
from tahq.comm.link.frame import Channel, Frame, FrameHeader, FrameKind, LogicalId, pack_header, unpack_header
from tahq.comm.link.inbound import Allocate, Inbound, Resequencer, pageable
from tahq.comm.link.outbound import Outbound, Outgoing
from tahq.comm.link.sending_order import FAREWELL, Rank
from tahq.comm.link.spec import (
    ANY_STAGE,
    Hello,
    LinkSpec,
    PeerIdentity,
    SessionLimits,
    decode_text,
    unpack_hello,
)
from tahq.comm.link.transitions import TRANSITIONS, End, Event
from tahq.errors import LocalProtocolError, PeerLostError, RemoteProtocolError


class PeerForgotError(PeerLostError):
    """The peer was started again and knows nothing of this session."""


_BEFORE_HELLO = frozenset({FrameKind.HELLO, FrameKind.BYE, FrameKind.RESET})
"""What a peer may say on a connection before both ends have met there."""

_HEARD_WHEN_CLOSED = frozenset({FrameKind.ACK, FrameKind.BYE, FrameKind.RESEND})
"""What still matters after either end has said BYE: whether everything has arrived."""

_SILENT_HEARTBEATS = 2.5
"""A peer that is silent for this many is in trouble."""

_ROUND = struct.Struct("<I")
_ROUND_AND_NUMBER = struct.Struct("<II")
_MAX_REASON_NBYTES = 1024


class Session:
    """One end of one link; `outbound`, `inbound` and `heartbeats` are public for what other threads may read there."""

    def __init__(
        self, identity: PeerIdentity, spec: LinkSpec, limits: SessionLimits, allocate: Allocate = pageable
    ) -> None:
        self._identity = identity
        self._spec = spec
        self._limits = limits
        self.outbound = Outbound(identity, spec, limits)
        self.inbound = Inbound(limits, str(spec), allocate)
        self.heartbeats = Heartbeats(identity.epoch)
        self.local = End.OPEN
        self.remote = End.CONNECTING
        self._resequencer = Resequencer(limits, str(spec))
        self._connections = LinkConnections(limits.connections, spec.dials)
        self._arrivals = Arrivals()
        self._message_id = LogicalId.of_session(identity.run_id)
        self._delivered: list[Frame] = []
        self._messages: list[tuple[Channel, bytes]] = []
        self._unacked_nbytes = 0
        self._ack_at_s: float | None = None
        self._ack_due = False
        self._round = 0
        """The round that we send in; the peer counts them."""
        self._resend_due = False
        self._heard_on = 0
        """The connection that the peer was last heard on."""
        self._heartbeat_at_s: float | None = 0.0 if spec.dials else None
        self._bye_reason = ""
        self._is_held = False

    def take_over(self, before: "Session", now_s: float) -> None:
        """Continue where a session with an earlier process at the other end stood; call it first.

        Frames that were posted, have come or were delivered stay so; queued and unacknowledged ones are forgotten.
        """
        self.inbound = before.inbound
        self.inbound.begin_anew()
        self.outbound.count_on_from(before.outbound, now_s)
        self._delivered.extend(before.take_delivered())

    # What the owner of this end asks for

    def send(self, frame: Frame, now_s: float) -> None:
        """Queue a frame of data.

        Raises:
            LocalProtocolError: it belongs to another run, or this end is closed.
        """
        if frame.id.run != self._identity.run_id:
            raise LocalProtocolError(f"{self._spec}: {frame.id} is not of run {self._identity.run_id}")
        self._check_open(frame.id)
        if self.remote is not End.CLOSED:
            self.outbound.queue(frame, now_s)

    def send_message(self, channel: Channel, data: bytes, now_s: float) -> None:
        """Queue a message on the control or the files channel; LocalProtocolError if this end is closed."""
        self._check_open(f"a message on the channel for {channel.name.lower()}")
        if self.remote is not End.CLOSED:
            self.outbound.queue_message(channel, data, now_s)

    def _check_open(self, what: object) -> None:
        if self.local is not End.OPEN:
            raise LocalProtocolError(f"{self._spec}: cannot send {what}, this end is {self.local.value}")

    def expect(self, id: LogicalId, max_nbytes: int) -> None:
        """Post a receive; see Transport.expect."""
        self._deliver(self.inbound.expect(id, max_nbytes))

    def take_delivered(self) -> list[Frame]:
        """Frames that have become whole, and were expected, since the last call."""
        delivered, self._delivered = self._delivered, []
        return delivered

    def take_messages(self) -> list[tuple[Channel, bytes]]:
        """Messages on the control and files channels that have become whole since the last call."""
        messages, self._messages = self._messages, []
        return messages

    @property
    def num_connections(self) -> int:
        """How many connections the link has."""
        return len(self._connections)

    @property
    def is_settled(self) -> bool:
        """Whether this end is closed, and everything sent was acknowledged (or the peer has left)."""
        return self.local is End.CLOSED and self.outbound.is_settled

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be said at either end."""
        return not self._ack_due and (self.remote is End.CLOSED or self.is_settled)

    def trouble(self, now_s: float) -> str:
        """Why the link is degraded; empty if it is not."""
        if self.remote is not End.OPEN:
            return ""
        if self._is_held:
            return "the peer is lost, and will be replaced"
        heard_s = self._connections.heard_s
        if heard_s is not None and now_s - heard_s > _SILENT_HEARTBEATS * self._limits.heartbeat_s:
            return "nothing is heard of the peer"
        if self._resequencer.is_waiting:
            return "messages were lost, and have been asked for"
        return "messages were lost, and are sent again" if self.outbound.is_resending else ""

    def was_heard_after(self, time_s: float) -> bool:
        """Whether the peer has given a sign of life since then."""
        heard_s = self._connections.heard_s
        return heard_s is not None and heard_s > time_s

    def use_times(self, limits: SessionLimits, now_s: float) -> SessionLimits:
        """Take the times of these limits from now on; the bounds stay. Returns both."""
        times = {name: getattr(limits, name) for name in ("peer_timeout_s", "heartbeat_s", "give_up_s")}
        self._limits = replace(self._limits, **times)
        if self._heartbeat_at_s is not None:
            self._heartbeat_at_s = min(self._heartbeat_at_s, now_s + self._limits.heartbeat_s)
        return self._limits

    def close(self, now_s: float, reason: str = "") -> None:
        """Say BYE after everything queued, or at once when there is a `reason` why this end cannot go on."""
        if self.local is End.CLOSED or (self.local is End.CLOSING and not reason):
            return
        if reason or self.remote is End.CLOSED:
            self.outbound.discard(now_s)
        self._bye_reason = reason
        is_idle = self.remote is not End.OPEN and self.outbound.is_drained
        self._change(Event.CLOSE_IDLE if is_idle else Event.CLOSE, now_s)

    def hold(self) -> None:
        """The peer is known to be lost: its silence is no error, and another session will take this one's place."""
        self._is_held = True
        self._connections.forget_silence()

    def _change(self, event: Event, now_s: float, reason: str = "") -> None:
        """Take a transition of the table."""
        transition = TRANSITIONS.get((self.local, self.remote), {}).get(event)
        if transition is None:
            return
        was_closed = self.remote is End.CLOSED
        self.local, self.remote, action = transition
        if self.remote is End.CLOSED and not was_closed:
            self.outbound.discard(now_s)
        if action == "greet":
            self._heartbeat_at_s = now_s + self._limits.heartbeat_s
            self._connections.plan_heartbeats()
            for each in self._connections:
                self.heard(now_s, each)
        elif action == "acknowledge":
            self._ack_due = True
        elif action == "retract":
            self._connections.retract_byes()
        elif action == "fail":
            raise PeerLostError(f"{self._spec}: the peer ended it: {reason}")
        elif action == "forget":
            raise PeerForgotError(f"{self._spec}: was started again, and knows nothing of this end")

    # What has come from the wire

    def heard(self, now_s: float, connection: int = 0) -> None:
        """The peer has given a sign of life on a connection (its bytes may still be held back by shaping)."""
        if self.remote is End.OPEN and not self._is_held:
            self._connections.note_heard(connection, now_s)

    def reconnected(self, connection: int) -> None:
        """A new connection has replaced one that was lost, perhaps with some of what it carried.

        Ask for everything that has not come, rather than notice with the next HEARTBEAT what is missing.
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
            PeerLostError: the peer has given up; PeerForgotError: it was started again.
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
            raise RemoteProtocolError(f"{self._spec}: sent (run, epoch, link) {got}; expected {expected}")

    def _handle(self, header: FrameHeader, payload: bytes | memoryview, now_s: float, connection: int) -> None:
        match header.kind:
            case FrameKind.DATA:
                self._plan_ack(len(payload), now_s)
                self._arrivals.note(header.sequence, now_s)
                for piece_header, piece in self._resequencer.take(header, payload, connection):
                    self._deliver(self.inbound.accept(piece_header, piece))
            case FrameKind.HELLO:
                self._handle_hello(self.check_hello(header, payload), now_s, connection)
            case FrameKind.ACK:
                self._handle_ack(header.sequence, payload, now_s)
            case FrameKind.HEARTBEAT:
                round_, number = self._unpack(_ROUND_AND_NUMBER, header.kind, payload)
                self._join_round(header.sequence, round_, connection)
                self._arrivals.note_heartbeat(number, now_s)
                self._ack_due = True
            case FrameKind.BYE:
                self._handle_bye(header.sequence, decode_text(payload), now_s, connection)
            case FrameKind.RESEND:
                (number,) = self._unpack(_ROUND, header.kind, payload)
                self._handle_resend(header.sequence, number, now_s)
            case FrameKind.RESUME:
                (number,) = self._unpack(_ROUND, header.kind, payload)
                self._join_round(header.sequence, number, connection)
            case FrameKind.RESET:
                self._change(Event.RESET, now_s)

    def _unpack(self, fields: struct.Struct, kind: FrameKind, payload: bytes | memoryview) -> tuple[int, ...]:
        if len(payload) != fields.size:
            raise RemoteProtocolError(
                f"{self._spec}: sent {len(payload)} bytes with a {kind.name}; expected {fields.size}"
            )
        return fields.unpack(payload)

    def _join_round(self, sequence: int, number: int, connection: int) -> None:
        if not self._resequencer.join_round(number, sequence, connection):
            self._resend_due = True  # our RESEND may have been lost

    def _handle_resend(self, sequence: int, number: int, now_s: float) -> None:
        if number <= self._round or self.remote is End.CLOSED:  # done already, or the peer has left since
            return
        self._check_sent(sequence)
        self._round = number
        self.outbound.rewind(sequence, now_s)
        self._connections.plan_resumes()
        self._leave_again(now_s)

    def _leave_again(self, now_s: float) -> None:
        if not self._bye_reason:
            self._change(Event.LOST, now_s)

    def _check_sent(self, sequence: int) -> None:
        last = self.outbound.last_sequence
        if sequence > last:
            raise RemoteProtocolError(f"{self._spec}: acknowledged message {sequence}; the last one sent was {last}")

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
        self.outbound.limit_window(hello.window_nbytes)
        if self._connections.have_met:
            self._change(Event.MET, now_s)

    def check_hello(self, header: FrameHeader, payload: bytes | memoryview) -> Hello:
        """Parse a HELLO and check that it is from our peer, about this link; changes nothing.

        Raises:
            RemoteProtocolError: it is not.
        """
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

    def _handle_ack(self, sequence: int, payload: bytes | memoryview, now_s: float) -> None:
        self._check_sent(sequence)
        ack = unpack_acknowledgement(payload, len(self._connections), str(self._spec))
        if ack.heartbeat > self.heartbeats.last:
            raise RemoteProtocolError(
                f"{self._spec}: acknowledged heartbeat {ack.heartbeat}; the last one sent was {self.heartbeats.last}"
            )
        self.outbound.acknowledge(sequence, now_s, ack)
        self.heartbeats.answered(ack.heartbeat, ack.heartbeat_s, now_s)

    def _handle_bye(self, sequence: int, reason: str, now_s: float, connection: int) -> None:
        self._connections.take_bye(connection)
        self._resequencer.pass_on(sequence, connection)
        is_whole = self._resequencer.received >= sequence or self.local is End.CLOSED
        if reason:
            self._change(Event.FAULT, now_s, reason)
        elif self._connections.have_left and is_whole:
            self._change(Event.BYE, now_s)
        elif self._connections.have_left:
            self._connections.forget_byes()

    def _deliver(self, whole: Frame | tuple[Channel, bytes] | None) -> None:
        if isinstance(whole, Frame):
            self._delivered.append(whole)
        elif whole is not None:
            self._messages.append(whole)

    # What is to go on the wire

    def next_urgent(self, now_s: float) -> Outgoing | None:
        """The session's own next message, small, to go before any piece; None if there is none."""
        # An ACK is owed even after BYE: the peer waits for it before it leaves.
        if self._ack_due or (self._ack_at_s is not None and self.local is not End.OPEN):
            self._ack_due, self._ack_at_s, self._unacked_nbytes = False, None, 0
            received = self._resequencer.received
            passed = self._resequencer.passed if len(self._connections) > 1 else ()
            return self._message(FrameKind.ACK, received, now_s, self._arrivals.tell(received, passed).pack())
        if self.local is End.CLOSED:
            return None
        if (connection := self._connections.next_hello()) is not None:
            return self._message(FrameKind.HELLO, 0, now_s, self._hello(connection), connection)
        if self._resend_due and self.remote is End.OPEN:
            self._resend_due = False
            asked = _ROUND.pack(self._resequencer.round)
            return self._message(FrameKind.RESEND, self._resequencer.received, now_s, asked, self._heard_on)
        sent_through = self.outbound.sent_through
        if (connection := self._connections.next_resume()) is not None:
            return self._message(FrameKind.RESUME, sent_through, now_s, _ROUND.pack(self._round), connection)
        if (connection := self._connections.next_heartbeat()) is not None:
            number = self.heartbeats.leave(now_s, is_alone=self.outbound.is_settled)
            mine = _ROUND_AND_NUMBER.pack(self._round, number)
            return self._message(FrameKind.HEARTBEAT, sent_through, now_s, mine, connection)
        return None

    def _hello(self, connection: int) -> bytes:
        return Hello(
            *(self._identity.stage, self._spec.peer_stage, self._identity.config_hash),
            *(connection, self._limits.connections, self._limits.receive_window_nbytes),
        ).pack()

    @property
    def next_rank(self) -> Rank | None:
        """How urgent `next_piece` is; None if there is none."""
        if self.remote is not End.OPEN or self.local is End.CLOSED:
            return None
        rank = self.outbound.next_rank
        if rank is None and self.local is End.CLOSING and self.outbound.is_drained:
            return FAREWELL
        return rank

    def next_piece(self, now_s: float) -> Outgoing | None:
        """The next piece of a frame, or BYE after the last; None if there is nothing, or no room in the window."""
        rank = self.next_rank
        if rank is None:
            return None
        if rank != FAREWELL:
            return self.outbound.take_piece(now_s)
        connection = self._connections.next_bye()
        if self._connections.are_left:
            self._change(Event.SAID_BYE, now_s)
        reason = self._bye_reason.encode("utf-8", "replace")[:_MAX_REASON_NBYTES]
        return self._message(FrameKind.BYE, self.outbound.last_sequence, now_s, reason, connection)

    def _message(
        self, kind: FrameKind, sequence: int, now_s: float, payload: bytes = b"", connection: int = 0
    ) -> Outgoing:
        place = (kind, self._identity.epoch, self._spec.link, sequence, self._message_id)
        header = FrameHeader(*place, payload_nbytes=len(payload))
        return Outgoing(pack_header(header, payload), payload, now_s, connection)

    # Time

    @property
    def _silent_at_s(self) -> float:
        """When the peer will have been silent for too long."""
        heard_s = self._connections.heard_s
        return math.inf if heard_s is None else heard_s + self._limits.silence_s

    def next_timer_s(self) -> float | None:
        """When `handle_timer` is to be called; None: not before something has come."""
        if self.remote is End.CLOSED or self.is_settled:
            return None
        if self.local is End.CLOSED:
            return self._heartbeat_at_s
        times = (self._heartbeat_at_s, self._silent_at_s, self._ack_at_s)
        next_s = min(time_s for time_s in times if time_s is not None)
        return next_s if next_s < math.inf else None

    def handle_timer(self, now_s: float) -> None:
        """Do what is due by now; pass everything that has come to `receive` or `heard` first.

        Raises:
            PeerLostError: the peer has been silent for too long.
        """
        if self.remote is End.CLOSED or self.is_settled:
            return
        is_heartbeat_due = self._heartbeat_at_s is not None and now_s >= self._heartbeat_at_s
        if is_heartbeat_due:
            self._heartbeat_at_s = now_s + self._limits.heartbeat_s
        if self.local is End.CLOSED:
            if is_heartbeat_due:
                self._leave_again(now_s)
            return
        if self._ack_at_s is not None and now_s >= self._ack_at_s:
            self._ack_due, self._ack_at_s = True, None
        if now_s >= self._silent_at_s:
            self._connections.forget_silence()
            raise PeerLostError(f"{self._spec}: no sign of life for {self._limits.silence_s:.1f} s")
        if is_heartbeat_due and self.remote is End.OPEN:
            self._connections.plan_heartbeats()
        elif is_heartbeat_due:
            self._connections.plan_hellos()


def pack_reset(run_id: int, epoch: int, link: int) -> tuple[bytes, bytes]:
    """Header and payload of the answer to a message of a session that this process knows nothing of."""
    return pack_header(FrameHeader(FrameKind.RESET, epoch, link, 0, LogicalId.of_session(run_id)), b""), b""
