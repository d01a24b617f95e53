"""One link of a ZmqEndpoint, as the compute thread sees it.

It only puts commands into the I/O thread's queue and takes frames from an inbox that the I/O thread fills, so nothing
here can block except `recv` and `close`.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import zmq

from tahq.comm.link.frame import CPU, Channel, Frame, LogicalId, Outgoing, check_sendable
from tahq.comm.link.frame_log import FrameLog
from tahq.comm.link.outbound import LinkCounter
from tahq.comm.link.session import Session
from tahq.comm.link.spec import LinkSpec
from tahq.comm.link.transitions import End
from tahq.comm.transport import LinkStats
from tahq.comm.zmq.dialled import Dialled, Outcome
from tahq.comm.zmq.socket_wait import NOWAIT, Inbox, Socket
from tahq.errors import LocalProtocolError, PeerLostError, RemoteProtocolError, TahqError
from tahq.units import format_size

_log = logging.getLogger(__name__)
MAX_QUEUED_NBYTES = 4 << 30
"""What `send` accepts ahead of the peer's acknowledgements; more than any schedule has in flight."""

MAX_MESSAGE_NBYTES = 1024
"""Longest message on the control channel of a link."""
_NOWAIT_MORE = int(zmq.SNDMORE | zmq.NOBLOCK)
_LATE_S = 10.0
"""After this long the user is told that a peer has not connected."""
_MAX_MESSAGES = 256
"""Messages that are kept until they are taken; a sender has at most a window of 16 frames under way."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which frames the peer wants of a link: all, unless one of the ends was started again."""

    since: int = 0
    """First step whose training frames it lacks."""
    evaluations_since: int = 0
    """First step whose evaluation it takes part in."""
    through: int | None = None
    """Last step whose frames it has room for by now; None: there is no end."""

    def has(self, id: LogicalId) -> bool:
        """Whether this is one of them."""
        first = self.evaluations_since if id.is_evaluation else self.since
        return first <= id.step and (self.through is None or id.step <= self.through)


ALL = Wanted()


class LinkEnd:
    """State of one link that its owner and the I/O thread share; each field is written by one of them."""

    warns = True
    """Whether the user is warned about a link that is degraded or not connected yet."""
    is_temporary = False
    """Whether the I/O thread forgets the link when it is over."""

    def __init__(self, spec: LinkSpec, session: Session, peer_key: str = "") -> None:
        self.spec = spec
        self.session = session
        self.peer_key = peer_key
        """The peer's public key; "" without CURVE."""
        self.obstacle = ""
        """Why the peer has not accepted our connection, as far as the socket tells."""
        self.met = threading.Event()
        """Set when the peer has said HELLO, or never will."""
        self.flushed = threading.Event()
        """Set when everything was sent and acknowledged after a close, or never will be."""
        self._published = End.CONNECTING
        """The peer's state when it was last looked at."""

    # Called in the I/O thread

    def publish(self) -> None:
        """Hand over what the session has for its owner."""
        if self.session.remote is not self._published:
            self._published = self.session.remote
            if self._published is not End.CONNECTING:
                self.met.set()

    def fail(self, error: TahqError) -> None:
        """End the link with this error, and tell the peer."""
        self.give_up(error)
        self.session.close(time.monotonic(), reason=str(error))

    def give_up(self, error: TahqError) -> None:
        """Release every thread that waits."""
        self.met.set()

    def say(self, channel: Channel, data: bytes) -> None:
        """Queue a message, unless this end is closed."""
        if self.session.local is End.OPEN:
            self.session.send_message(channel, data, time.monotonic())

    def close(self, reason: str) -> None:
        """Say BYE."""
        self.session.close(time.monotonic(), reason)

    def note_outcome(self, outcome: Outcome, dialled: Dialled) -> None:
        """A handshake of ours has ended."""
        dialled.warn_of(outcome)


@dataclass(slots=True)
class LinkSockets:
    """Where a link's messages go: by connection, its own DEALER, or the shared ROUTER and a routing id there."""

    end: LinkEnd
    sockets: list[Socket]
    is_dialled: bool
    routes: list[bytes | None]
    """Of a link that is dialled by the peer; None: not yet."""
    opened_s: float
    late_s: float = math.inf
    """When to look whether the peer has connected; inf: that was done."""
    in_transit: int = 0
    """Messages that the uplink holds."""
    is_degraded: bool = False
    degraded_s: float = 0.0
    """Since when it is."""

    def __post_init__(self) -> None:
        self.late_s = self.opened_s + _LATE_S

    def put(self, outgoing: Outgoing) -> None:
        """Put a message on the socket; a long payload is not copied. Raises zmq.ZMQError if its peer is gone."""
        socket = self.sockets[outgoing.connection]
        if not self.is_dialled:
            socket.send(self.routes[outgoing.connection] or b"", _NOWAIT_MORE)
        socket.send(outgoing.header, _NOWAIT_MORE)
        socket.send(outgoing.payload, NOWAIT, copy=False)


class Arrival(NamedTuple):
    """A message that has come whole; the ZMQ frames keep the buffers alive."""

    wire: LinkSockets
    connection: int
    header: zmq.Frame
    payload: zmq.Frame


class DataEnd(LinkEnd):
    """One end of a link between neighbours, which carries frames."""

    def __init__(
        self, spec: LinkSpec, session: Session, wanted: Wanted = ALL, log: FrameLog | None = None, peer_key: str = ""
    ) -> None:
        super().__init__(spec, session, peer_key)
        self.log = log
        self._wanted = wanted
        self.inbox: Inbox[Frame] = Inbox(str(spec))
        self.messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """The peer's messages on the control channel, for a process group; None: no more will come."""

    def abort(self, error: Exception) -> None:
        """Have `recv` raise this at once, and end every other wait; any thread may call it."""
        self.inbox.abort(error)
        self.messages.put(None)
        self.met.set()

    # Called in the I/O thread

    def send(self, frame: Frame, now_s: float) -> None:
        """Queue a frame, if the peer wants it by now; if not, it is in the log."""
        if self._wanted.has(frame.id):
            self.session.send(frame, now_s)

    def expect(self, id: LogicalId, max_nbytes: int) -> None:
        """Post a receive, with the session of now: it may be another than when this was submitted."""
        self.session.expect(id, max_nbytes)

    def publish(self) -> None:
        """Hand over frames that were expected, and say when no more will come."""
        for frame in self.session.take_delivered():
            self.inbox.put(frame)
        for _, message in self.session.take_messages():
            if self.messages.qsize() < _MAX_MESSAGES:
                self.messages.put(message)
            elif self.inbox.error is None:
                self.fail(
                    RemoteProtocolError(f"{self.spec}: sent more messages than the {_MAX_MESSAGES} that may wait here")
                )
        super().publish()
        if self.session.remote is End.CLOSED and self.inbox.error is None:
            self.inbox.fail(PeerLostError(f"{self.spec}: the peer has closed it; nothing more will come"))
            self.messages.put(None)

    def fail(self, error: TahqError) -> None:
        """Deliver what has come, then the error; tell the peer."""
        if self.inbox.error is None:
            _log.warning("%s", error)
        for frame in self.session.take_delivered():
            self.inbox.put(frame)
        super().fail(error)

    def give_up(self, error: TahqError) -> None:
        """Have `recv` raise this."""
        self.inbox.fail(error)
        self.messages.put(None)
        super().give_up(error)

    def relink(self, spec: LinkSpec, session: Session, wanted: Wanted, peer_key: str) -> None:
        """Continue with another process, which begins with these frames; FrameLogError if the log lacks some."""
        now_s = time.monotonic()
        session.take_over(self.session, now_s)
        self.spec, self.session, self.peer_key, self.obstacle = spec, session, peer_key, ""
        self._wanted = replace(wanted, through=min(wanted.since, wanted.evaluations_since) - 1)
        self.widen(wanted.through)

    def widen(self, through: int | None) -> None:
        """Also send the frames of the steps through this one (None: all); FrameLogError if the log lacks some."""
        before = self._wanted.through
        if before is None or (through is not None and through <= before):
            return
        self._wanted = replace(self._wanted, through=through)
        now_s = time.monotonic()
        for frame in self.log.read(before + 1, through) if self.log is not None else ():
            if self._wanted.has(frame.id):
                self.session.send(frame, now_s)


class ZmqTransport:
    """A Transport; made by `ZmqEndpoint.open_link`, used by one thread. Payloads are CPU tensors."""

    payload_device = CPU

    def __init__(
        self, end: DataEnd, piece_nbytes: int, submit: Callable[[LinkEnd | None, Callable[[], None], bool], None]
    ) -> None:
        self.link = end.spec.link
        self.end = end
        self._counter = LinkCounter(self.link, piece_nbytes)
        self._submit = submit
        self._is_closed = False

    def __str__(self) -> str:
        return str(self.end.spec)

    def expect(self, id: LogicalId, max_nbytes: int) -> None:
        """Post a receive; see Transport.expect. A mistake shows at the next `recv`."""
        self._check_usable()
        self._submit(self.end, partial(self.end.expect, id, max_nbytes), False)
        # Only a frame that is here already needs the I/O thread now. No wake is lost: that thread looks for
        # commands after it has kept an early frame and before it waits, and we look the other way round.
        if self.end.session.inbound.has_already(id):
            self._submit(None, lambda: None, True)

    def send(self, frame: Frame) -> None:
        """Queue a frame; see Transport.send. LocalProtocolError: it cannot be sent, or too much is queued."""
        check_sendable(frame)
        self._check_usable()
        queued_nbytes = self.end.session.outbound.nbytes
        if queued_nbytes > MAX_QUEUED_NBYTES:
            raise LocalProtocolError(
                f"{self}: {format_size(queued_nbytes)} are queued already; the peer takes them too slowly for "
                f"what the schedule has in flight"
            )
        self._counter.count(frame)
        submit = partial(self._submit, self.end, partial(self.end.send, frame, time.monotonic()), True)
        if self.end.log is None:
            submit()
        else:
            self.end.log.append(frame, submit)

    def recv(self, timeout_s: float | None = None) -> Frame:
        """The next expected frame that is whole; see Transport.recv."""
        return self.end.inbox.get(timeout_s)

    def take_stats(self) -> list[LinkStats]:
        """What was sent since the last call; see Transport.take_stats."""
        session = self.end.session
        times = (session.outbound.take_piece_times(), session.heartbeats.recent)
        return self._counter.take(session.outbound.busy, session.outbound.sending, time.monotonic(), *times)

    def close(self, linger_s: float = 5.0) -> None:
        """Send what is queued, say BYE and wait up to `linger_s` until the peer has it; safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            reason = "" if self.end.inbox.error is None else str(self.end.inbox.error)
            self.end.inbox.fail(LocalProtocolError(f"{self}: closed on this side"))
            self._submit(self.end, partial(self.end.close, reason), True)
        self.end.flushed.wait(linger_s)

    # For a transport that sends frames over another path and watches the peer here; any thread may call these

    def say(self, message: bytes) -> None:
        """Send the peer a message on the control channel."""
        self._submit(self.end, partial(self.end.say, Channel.CONTROL, message), True)

    def fail(self, error: TahqError) -> None:
        """End the link with this error: `recv` raises it after what was delivered, and the peer is told."""
        self._submit(self.end, partial(self.end.fail, error), True)

    def _check_usable(self) -> None:
        if self.end.inbox.error is not None:
            raise self.end.inbox.error.with_traceback(None)
