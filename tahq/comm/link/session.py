"""One end of a reliable link: a pure state machine, bytes and time in, bytes and timers out.

A session carries three channels (data, control, files) over one or several connections. The end that dials sends HELLO
until it receives one; then both send DATA, acknowledged cumulatively, and HEARTBEAT at intervals; each end sends BYE
after its last frame. The caller moves the bytes: `receive` takes those that have come, `next_urgent` and `next_piece`
return those to send, `handle_timer` is called when `timer_s` has come. Nothing here sleeps, blocks or reads a clock.

Invariants: (epoch, sequence) names a delivery, which is taken once and in order; a logical id names data, which is
delivered once; a gap in the sequence, or a HEARTBEAT or BYE that names a later message than has come, means that
messages were lost: RESEND asks for all after the last that came, and the peer sends them again behind a RESUME. Silence
longer than `give_up_s` ends the session with an error. Every error names the link and the peer.

HELLO, HEARTBEAT and BYE are sent on each connection, since connections know nothing of each other; a link is open, or
closed, when they have arrived on all.
"""

import math

from tahq.comm.link.frame import Channel, Frame, FrameHeader, FrameKind, LogicalId, Outgoing
from tahq.comm.link.inbound import Allocate, Inbound, Resequencer, pageable
from tahq.comm.link.outbound import FAREWELL, Outbound, Rank
from tahq.comm.link.signals import MAX_REASON_NBYTES, Arrivals, Heartbeats, Liveness, Signals, unpack_acknowledgement
from tahq.comm.link.spec import LinkHello, LinkSpec, PeerIdentity, SessionLimits, decode_text
from tahq.comm.link.transitions import TRANSITIONS, End, Event
from tahq.errors import LocalProtocolError, PeerLostError, RemoteProtocolError


class PeerForgotError(PeerLostError):
    """The peer was started again and knows nothing of this session."""


_BEFORE_HELLO = (FrameKind.HELLO, FrameKind.BYE, FrameKind.RESET)
"""Messages that a peer may send on a connection before its HELLO."""

_HEARD_WHEN_CLOSED = (FrameKind.ACK, FrameKind.BYE, FrameKind.RESEND)
"""Messages that count after either end's BYE: they tell whether everything has arrived."""


class Session:
    """One end of one link; other threads may read the fields of `outbound`, `inbound` and `heartbeats` that say so."""

    def __init__(
        self, identity: PeerIdentity, spec: LinkSpec, limits: SessionLimits, allocate: Allocate = pageable
    ) -> None:
        self._identity = identity
        self._spec = spec
        self.outbound = Outbound(identity, spec, limits)
        self.inbound = Inbound(limits, str(spec), allocate)
        self.heartbeats = Heartbeats(identity.epoch)
        self.signals = Signals(identity, spec, limits)
        self._liveness = Liveness(limits, spec.dials)
        self.local = End.OPEN
        self.remote = End.CONNECTING
        self.connections = range(limits.connections)
        self.timer_s = self._liveness.beat_at_s
        """When to call `handle_timer`, possibly too early; inf: not before something has arrived."""
        self.is_disturbed = False
        """Whether `trouble` may say more than that the peer is silent; the caller clears it."""
        self._resequencer = Resequencer(limits, str(spec))
        self._arrivals = Arrivals()
        self._delivered: list[Frame] = []
        self._messages: list[tuple[Channel, bytes]] = []
        self._greeted: set[int] = set()
        """The connections on which the peer has said HELLO."""
        self._byes_said = 0
        self._heard_on = 0
        self._round = 0
        """The round that we send in; the peer counts them."""
        self._bye_reason = ""
        self._plan_hellos()

    def take_over(self, before: "Session", now_s: float) -> None:
        """Continue where a session with an earlier process at the other end stood; call it first.

        Posted, received and delivered frames stay so; queued and unacknowledged ones are forgotten.
        """
        self.inbound = before.inbound
        self.inbound.begin_anew()
        self.outbound.count_on_from(before.outbound, now_s)
        self._delivered.extend(before.take_delivered())

    # What the owner of this end asks for

    def send(self, frame: Frame, now_s: float) -> None:
        """Queue a frame of data; LocalProtocolError if it belongs to another run, or this end is closed."""
        if frame.id.run != self._identity.run_id:
            raise LocalProtocolError(f"{self._spec}: {frame.id} is not of run {self._identity.run_id}")
        if self.local is not End.OPEN:
            raise LocalProtocolError(f"{self._spec}: cannot send {frame.id}, this end is {self.local.value}")
        if self.remote is not End.CLOSED:
            self.outbound.queue(frame, now_s)

    def send_message(self, channel: Channel, data: bytes, now_s: float) -> None:
        """Queue a message on the control or the files channel; LocalProtocolError if this end is closed."""
        if self.local is not End.OPEN:
            raise LocalProtocolError(f"{self._spec}: cannot send on {channel.name}, this end is {self.local.value}")
        if self.remote is not End.CLOSED:
            self.outbound.queue_message(channel, data, now_s)

    def expect(self, id: LogicalId, max_nbytes: int) -> None:
        """Post a receive; see Transport.expect."""
        self._deliver(self.inbound.expect(id, max_nbytes))

    def abandon(self, step: int) -> None:
        """Deliver void frames for those of a step's training that have not come, and will not."""
        self._delivered += self.inbound.abandon(step)

    def take_delivered(self) -> list[Frame]:
        """Frames that have become whole, and were expected, since the last call."""
        delivered, self._delivered = self._delivered, []
        return delivered

    def take_messages(self) -> list[tuple[Channel, bytes]]:
        """Messages on the control and files channels that have become whole since the last call."""
        messages, self._messages = self._messages, []
        return messages

    @property
    def is_settled(self) -> bool:
        """Whether this end is closed, and everything sent was acknowledged (or the peer has left)."""
        return self.local is End.CLOSED and self.outbound.is_settled

    @property
    def is_over(self) -> bool:
        """Whether neither end will send anything more."""
        return not self.signals.is_due(FrameKind.ACK) and (self.remote is End.CLOSED or self.is_settled)

    def trouble(self, now_s: float) -> str:
        """Why the link is degraded; empty if it is not."""
        if self.remote is not End.OPEN:
            return ""
        if self._liveness.is_held:
            return "the peer is lost, and will be replaced"
        if self._liveness.is_quiet(now_s):
            return "no sign of life from the peer"
        if self._resequencer.is_waiting:
            return "messages were lost, and were requested again"
        return "lost messages are being sent again" if self.outbound.is_resending else ""

    def was_heard_after(self, time_s: float) -> bool:
        """Whether the peer has given a sign of life since then."""
        return time_s < self._liveness.last_heard_s < math.inf

    def use_times(self, limits: SessionLimits, now_s: float) -> None:
        """Take the times of these limits from now on; the bounds stay."""
        self._liveness.use_times(limits, now_s)
        self.timer_s = min(self.timer_s, self._liveness.beat_at_s)

    def close(self, now_s: float, reason: str = "") -> None:
        """Say BYE after everything queued, or at once when there is a `reason` why this end cannot go on."""
        if self.local is End.CLOSED or (self.local is End.CLOSING and not reason):
            return
        if reason or self.remote is End.CLOSED:
            self.outbound.discard(now_s)
        self._bye_reason = reason
        if self._arrivals.due_s < math.inf:
            self.signals.plan(FrameKind.ACK)
        is_idle = self.remote is not End.OPEN and self.outbound.is_drained
        self._change(Event.CLOSE_IDLE if is_idle else Event.CLOSE, now_s)

    def hold(self) -> None:
        """The peer is known to be lost: its silence is no error, and another session will replace this one."""
        self.is_disturbed = True
        self._liveness.hold()

    def _change(self, event: Event, now_s: float, reason: str = "") -> None:
        transition = TRANSITIONS.get((self.local, self.remote), {}).get(event)
        if transition is None:
            return
        was_closed = self.remote is End.CLOSED
        self.local, self.remote, action = transition
        if self.remote is End.CLOSED and not was_closed:
            self.outbound.discard(now_s)
        if action == "greet":
            self._liveness.begin(now_s)
            self.timer_s = min(self.timer_s, self._liveness.beat_at_s)
            self.signals.plan(FrameKind.HEARTBEAT, self.connections[self._byes_said :])
            for each in self.connections:
                self.heard(now_s, each)
        elif action == "acknowledge":
            self.signals.plan(FrameKind.ACK)
        elif action == "retract":
            self._byes_said = 0
            self.signals.plan(FrameKind.HEARTBEAT, self.connections)  # names our round, which BYE does not
        elif action == "fail":
            raise PeerLostError(f"{self._spec}: the peer ended it: {reason}")
        elif action == "forget":
            raise PeerForgotError(f"{self._spec}: was started again, and knows nothing of this end")

    # What has come from the wire

    def heard(self, now_s: float, connection: int = 0) -> None:
        """The peer has given a sign of life on a connection (its bytes may still be held back by shaping)."""
        if self.remote is End.OPEN:
            self._liveness.hear(connection, now_s)

    def reconnected(self, connection: int) -> None:
        """A new connection has replaced one that was lost: ask at once for all that has not come."""
        if connection not in self._greeted:
            self._plan_hellos()
        elif self.remote is End.OPEN:
            self.signals.plan(FrameKind.HEARTBEAT, [connection])
            self.signals.plan(FrameKind.RESEND)
            self._resequencer.begin_round(is_precaution=True)

    def receive(self, data: bytes | memoryview, payload: bytes | memoryview, now_s: float, connection: int = 0) -> None:
        """Take one message that has come over a connection.

        Raises:
            RemoteProtocolError: the peer must not send that, or not now.
            PeerLostError: the peer has given up; PeerForgotError: it was started again.
        """
        header = self.signals.unpack(data, payload)
        is_over = self.local is End.CLOSED or self.remote is End.CLOSED
        if header is None or (is_over and header.kind not in _HEARD_WHEN_CLOSED):
            return
        if connection not in self._greeted and header.kind not in _BEFORE_HELLO:
            raise RemoteProtocolError(f"{self._spec}: sent {header.kind.name} while {End.CONNECTING.value}")
        self._heard_on = connection
        self._handle(header, payload, now_s, connection)
        if self._resequencer.has_lost and self.remote is End.OPEN:
            self._resequencer.begin_round()
            self.signals.plan(FrameKind.RESEND)
            self.is_disturbed = True
        self.heard(now_s, connection)

    def _handle(self, header: FrameHeader, payload: bytes | memoryview, now_s: float, connection: int) -> None:
        match header.kind:
            case FrameKind.DATA:
                if self._arrivals.note(header.sequence, len(payload), now_s) or self.local is not End.OPEN:
                    self.signals.plan(FrameKind.ACK)
                self.timer_s = min(self.timer_s, self._arrivals.due_s)
                for piece_header, piece in self._resequencer.take(header, payload, connection):
                    self._deliver(self.inbound.accept(piece_header, piece))
            case FrameKind.HELLO:
                self._handle_hello(self.signals.check_hello(header, payload), now_s, connection)
            case FrameKind.ACK:
                self._handle_ack(header.sequence, payload, now_s)
            case FrameKind.HEARTBEAT:
                round_, number = self.signals.numbers(header.kind, payload)
                self._join_round(header.sequence, round_, connection)
                self._arrivals.heartbeat = (number, now_s)
                self.signals.plan(FrameKind.ACK)
            case FrameKind.BYE:
                self._handle_bye(header.sequence, decode_text(payload), now_s, connection)
            case FrameKind.RESEND:
                self._handle_resend(header.sequence, self.signals.numbers(header.kind, payload)[0], now_s)
            case FrameKind.RESUME:
                self._join_round(header.sequence, self.signals.numbers(header.kind, payload)[0], connection)
            case FrameKind.RESET:
                self._change(Event.RESET, now_s)

    def _join_round(self, sequence: int, number: int, connection: int) -> None:
        if not self._resequencer.join_round(number, sequence, connection):
            self.signals.plan(FrameKind.RESEND)  # our RESEND may have been lost

    def _handle_resend(self, sequence: int, number: int, now_s: float) -> None:
        if number <= self._round or self.remote is End.CLOSED:  # done already, or the peer has left since
            return
        self._check_sent(sequence)
        self._round = number
        self.outbound.rewind(sequence, now_s)
        self.signals.plan(FrameKind.RESUME, self.connections)
        self.is_disturbed = True
        if not self._bye_reason:
            self._change(Event.LOST, now_s)

    def _check_sent(self, sequence: int) -> None:
        last = self.outbound.last_sequence
        if sequence > last:
            raise RemoteProtocolError(f"{self._spec}: acknowledged message {sequence}; the last one sent was {last}")

    def _handle_hello(self, hello: LinkHello, now_s: float, connection: int) -> None:
        if hello.connection != connection:
            raise RemoteProtocolError(
                f"{self._spec}: sent a HELLO for connection {hello.connection} on connection {connection}"
            )
        self._greeted.add(connection)
        if self._spec.dials:
            self.signals.cancel(FrameKind.HELLO, connection)
        else:
            self.signals.plan(FrameKind.HELLO, [connection])  # our answer
        self.outbound.limit_window(hello.window_nbytes)
        if len(self._greeted) == len(self.connections):
            self._change(Event.MET, now_s)

    def _handle_ack(self, sequence: int, payload: bytes | memoryview, now_s: float) -> None:
        self._check_sent(sequence)
        ack = unpack_acknowledgement(payload, len(self.connections), self._spec)
        if ack.heartbeat > self.heartbeats.last:
            raise RemoteProtocolError(
                f"{self._spec}: acknowledged heartbeat {ack.heartbeat}; the last one sent was {self.heartbeats.last}"
            )
        self.outbound.acknowledge(sequence, now_s, ack)
        self.heartbeats.answered(ack.heartbeat, ack.heartbeat_s, now_s)

    def _handle_bye(self, sequence: int, reason: str, now_s: float, connection: int) -> None:
        self._liveness.leave(connection)
        self._resequencer.pass_on(sequence, connection)
        is_whole = self._resequencer.received >= sequence or self.local is End.CLOSED
        if reason:
            self._change(Event.FAULT, now_s, reason)
        elif len(self._liveness.left) == len(self.connections):
            if is_whole:
                self._change(Event.BYE, now_s)
            else:
                self._liveness.left.clear()  # all will say it again

    def _deliver(self, whole: Frame | tuple[Channel, bytes] | None) -> None:
        if isinstance(whole, Frame):
            self._delivered.append(whole)
        elif whole is not None:
            self._messages.append(whole)

    # What is to go on the wire

    def next_urgent(self, now_s: float) -> Outgoing | None:
        """The session's own next message, small, to go before any piece; None if there is none."""
        while self.signals:
            kind, connection = self.signals.next()
            # An ACK is owed even after BYE: the peer waits for it before it leaves.
            if self.local is End.CLOSED and kind is not FrameKind.ACK:
                return None
            self.signals.cancel(kind, connection)
            if kind is not FrameKind.RESEND or self.remote is End.OPEN:
                return self._signal(kind, connection, now_s)
        return None

    def _signal(self, kind: FrameKind, connection: int, now_s: float) -> Outgoing:
        received, sent_through = self._resequencer.received, self.outbound.sent_through
        match kind:
            case FrameKind.ACK:
                passed = self._resequencer.passed if len(self.connections) > 1 else ()
                return self.signals.pack(kind, received, now_s, self._arrivals.tell(received, passed).pack())
            case FrameKind.HELLO:
                return self.signals.pack_hello(now_s, connection)
            case FrameKind.RESEND:
                return self.signals.pack_numbers(kind, received, now_s, self._heard_on, self._resequencer.round)
            case FrameKind.RESUME:
                return self.signals.pack_numbers(kind, sent_through, now_s, connection, self._round)
        number = self.heartbeats.leave(now_s, is_alone=self.outbound.is_settled)
        return self.signals.pack_numbers(kind, sent_through, now_s, connection, self._round, number)

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
        connection = self._byes_said
        self._byes_said += 1
        self.signals.cancel(FrameKind.HEARTBEAT, connection)
        if self._byes_said == len(self.connections):
            self._change(Event.SAID_BYE, now_s)
        reason = self._bye_reason.encode("utf-8", "replace")[:MAX_REASON_NBYTES]
        return self.signals.pack(FrameKind.BYE, self.outbound.last_sequence, now_s, reason, connection)

    # Time

    def _plan_hellos(self) -> None:
        """Say HELLO again where it was not answered, if this end dials."""
        if self._spec.dials:
            self.signals.plan(FrameKind.HELLO, [each for each in self.connections if each not in self._greeted])

    def handle_timer(self, now_s: float) -> None:
        """Do what is due, after `receive` and `heard`; PeerLostError if the peer has been silent for too long."""
        if self.remote is End.CLOSED or self.is_settled:
            self.timer_s = math.inf
            return
        is_beat_due = self._liveness.beat(now_s)
        if self.local is End.CLOSED:
            if is_beat_due and not self._bye_reason:
                self._change(Event.LOST, now_s)
            self.timer_s = self._liveness.beat_at_s
            return
        if now_s >= self._arrivals.due_s:
            self._arrivals.due_s = math.inf
            self.signals.plan(FrameKind.ACK)
        self.timer_s = min(self._liveness.beat_at_s, self._arrivals.due_s, self._liveness.silent_at_s)
        self._liveness.check(now_s, self._spec)
        if is_beat_due and self.remote is End.OPEN:
            self.signals.plan(FrameKind.HEARTBEAT, self.connections[self._byes_said :])
        elif is_beat_due:
            self._plan_hellos()
