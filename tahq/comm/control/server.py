"""The coordinator's end of the control channel: one ROUTER, polled by the thread that coordinates."""

import contextlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import zmq

from tahq.comm.control.client import CONTROL_IDENTITY
from tahq.comm.control.encoding import MAX_MESSAGE_NBYTES, decode_message, encode_message
from tahq.comm.control.messages import Abort, Bye, FilePlaces, Message, Refuse, RunLines, StartOver
from tahq.comm.keys import KeyPair
from tahq.comm.link.frame import Channel
from tahq.comm.link.session import Session
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import ANY_STAGE, CONTROL_LINK, LinkHello, LinkSpec, SessionLimits
from tahq.comm.link.transitions import End
from tahq.comm.link.wire_time import HeartbeatTimes
from tahq.comm.zmq.addresses import advertised_address, bind_router
from tahq.comm.zmq.endpoint_loop import EndpointLoop
from tahq.comm.zmq.gate import Gate
from tahq.comm.zmq.reception import Reception
from tahq.comm.zmq.socket_wait import Socket
from tahq.comm.zmq.sockets import open_router
from tahq.comm.zmq.transport import LinkEnd
from tahq.errors import RemoteProtocolError, TahqError

_log = logging.getLogger(__name__)
_HEARTBEATS_PER_TIMEOUT = 5
MAX_STRANGERS = 512
_FAREWELLS = Refuse | Abort | Bye | StartOver | RunLines | FilePlaces
"""A peer that is sent one of these is no member, or no more."""
LONGEST_ROUND_TRIP_S = 60.0


class ControlServer:
    """Receives from, and sends to, every worker by the identity that `poll` gives it.

    `poll` also gives every worker a sign of life every `heartbeat_s`, so it must be called at least that often. A
    worker whose messages cannot be read is told to abort, and its later messages are ignored. Messages of strangers are
    dropped and never raise. With `keys`, only owners of allowed keys may connect.

    Without CURVE anyone may connect, under as many names as they like. So the server remembers members (workers that
    were sent something for members) and `max_strangers` others: the one silent longest makes room for a newcomer.
    """

    def __init__(
        self,
        bind: str,
        *,
        heartbeat_s: float = 2.0,
        advertise: str | None = None,
        keys: KeyPair | None = None,
        allowed: Collection[str] = (),
        max_strangers: int = MAX_STRANGERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind to host:port.

        Args:
            bind: where to listen; port 0 = any free one.
            heartbeat_s: how often `poll` gives the workers a sign of life.
            advertise: host:port that workers dial (port 0 = the bound one); None = as bound.
            keys: the coordinator's; None: no CURVE, and any peer may connect.
            allowed: public keys of the workers.
            max_strangers: how many peers that are not members are remembered.
            clock: seconds, monotonic.

        Raises:
            UserError: the address is malformed, not this machine's, or in use.
        """
        self._clock = clock
        self._own_key = keys.public if keys is not None else ""
        self._limits = SessionLimits(
            peer_timeout_s=_HEARTBEATS_PER_TIMEOUT * heartbeat_s,
            heartbeat_s=heartbeat_s,
            give_up_s=math.inf,
            max_message_nbytes=MAX_MESSAGE_NBYTES + 16,
        )
        self._max_strangers = max_strangers
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        """The peer that was last heard, or sent a farewell, comes last."""
        self._heard: list[tuple[bytes, Message]] = []
        self._is_closed = False
        self._context: zmq.Context[Socket] = zmq.Context()
        router = open_router(self._context, self._limits.peer_timeout_s)
        gate = Gate(router, keys, allowed, where="coordinator", clock=clock)
        try:
            self.port = bind_router(router, bind, "coordinator")
            self.address = advertised_address(bind, self.port, advertise)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        reception = Reception(router, gate, {CONTROL_LINK: self._welcome}, self.address, clock)
        self._loop = EndpointLoop(reception, Shaping(), clock=clock)
        self.take_refused = gate.take_refused
        """Log lines about keys that were refused since the last call."""
        self.allow = gate.allow
        """Let the owners of these public keys in from now on."""

    def poll(self, timeout_s: float) -> list[tuple[bytes, Message]]:
        """Messages that have come, heartbeats included; waits up to `timeout_s` for the first."""
        deadline_s = self._clock() + timeout_s
        while True:
            self._loop.step()
            if self._heard or deadline_s <= self._clock():
                heard, self._heard = self._heard, []
                return heard
            self._loop.wait(deadline_s)

    def send(self, identity: bytes, message: Message) -> None:
        """Queue a message for the worker that `poll` gave this identity; returns at once.

        A worker that was never heard, or has left, is skipped.
        """
        peer = self._peers.get(identity)
        if peer is None:
            return
        if peer.end.session.local is End.OPEN:
            peer.end.session.send_message(Channel.CONTROL, encode_message(message), self._clock())
        peer.is_member = not isinstance(message, _FAREWELLS)
        if not peer.is_member:
            self._peers.move_to_end(identity)  # else it might be forgotten before the farewell has left
            self._forget_strangers()

    def flush(self) -> None:
        """Put what is queued on its way, which the next `poll` would do; takes in what has come, for that `poll`."""
        self._loop.step()

    def clock_offset(self, identity: bytes) -> "ClockOffset | None":
        """This worker's clock minus this one's, by heartbeats; None: none has come back yet."""
        peer = self._peers.get(identity)
        return clock_offset(peer.end.session.heartbeats.recent) if peer is not None else None

    def public_key(self, identity: bytes) -> str:
        """The key that this worker has proved to have; "" without CURVE."""
        peer = self._peers.get(identity)
        return peer.end.peer_key if peer is not None else ""

    def is_owner(self, identity: bytes) -> bool:
        """Whether this peer has proved to have the coordinator's own key; never without CURVE."""
        return bool(self._own_key) and self.public_key(identity) == self._own_key

    def close(self, linger_s: float = 1.0) -> None:
        """Release the socket when everything queued has gone, or after `linger_s`; safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline_s = self._clock() + linger_s
        self._loop.step()
        while not self._loop.is_idle and self._clock() < deadline_s:
            self._loop.wait(deadline_s)
            self._loop.step()
        self._loop.release()
        self._context.destroy(linger=0)

    # Called by the loop

    def _welcome(self, identity: bytes, hello: LinkHello, key: str) -> LinkEnd:
        spec = LinkSpec(CONTROL_LINK, ANY_STAGE, "", dials=False, title=_name(identity))
        end = _WorkerEnd(spec, Session(CONTROL_IDENTITY, spec, self._limits), key)
        end.take = lambda data: self._take(identity, data)
        if identity in self._peers:
            self._peers[identity].end = end
        else:
            self._peers[identity] = _Peer(end)
            self._forget_strangers()
        return end

    def _forget_strangers(self) -> None:
        strangers = [identity for identity, peer in self._peers.items() if not peer.is_member]
        for identity in strangers[: -self._max_strangers]:
            self._loop.forget(self._peers.pop(identity).end)

    def _take(self, identity: bytes, data: bytes) -> None:
        peer = self._peers.get(identity)
        if peer is None or peer.is_lost:
            return
        self._peers.move_to_end(identity)
        try:
            self._heard.append((identity, decode_message(data, _name(identity))))
        except RemoteProtocolError as error:
            _log.warning("%s", error)
            peer.is_lost = True
            self.send(identity, Abort(str(error), error.exit_status))


class _WorkerEnd(LinkEnd):
    """The server's end of a link that a worker has opened."""

    is_temporary = True
    warns = False
    take: Callable[[bytes], None]

    def publish(self) -> None:
        """Hand over messages."""
        for _, data in self.session.take_messages():
            self.take(data)

    def fail(self, error: TahqError) -> None:
        """The session has ended: its peer broke the protocol, or left for a reason."""
        _log.warning("%s", error)
        super().fail(error)


@dataclass(slots=True)
class _Peer:
    """One peer: its end of the link, whether it is a member, and whether it broke the protocol and is ignored."""

    end: LinkEnd
    is_member: bool = False
    is_lost: bool = False


def _name(identity: bytes) -> str:
    """The worker's own name, as the log may show it."""
    name, _, _ = identity.rpartition(b"#")
    with contextlib.suppress(UnicodeDecodeError):
        text = name.decode()
        if text and text.isprintable():
            return text
    return f"a stranger ({identity.hex()[:16]})"


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Another machine's clock minus this one's: `offset_s`, to within `error_s`."""

    offset_s: float
    error_s: float


def clock_offset(heartbeats: Iterable[HeartbeatTimes]) -> ClockOffset | None:
    """The difference between two clocks, by the round trips of heartbeats (as in NTP); None without a valid one.

        here  left ─────▶ arrived  there       offset = arrived - (left + answered) / 2
        here  answered ◀─                      round trip = answered - left

    However long each direction took, the offset is wrong by at most half the round trip, so the shortest round trip
    counts. Both clocks only run forward; there are no leaps.
    """
    samples = [
        ClockOffset(beat.arrived_s - (beat.left_s + beat.answered_s) / 2, (beat.answered_s - beat.left_s) / 2)
        for beat in heartbeats
        if 0 <= beat.answered_s - beat.left_s <= LONGEST_ROUND_TRIP_S
    ]
    return min(samples, key=lambda sample: sample.error_s, default=None)
