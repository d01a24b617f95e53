"""The coordinator's end of the control channel: one ROUTER, polled by the thread that coordinates."""

import contextlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

import zmq

from tahq.comm.control.client import CONTROL_IDENTITY
from tahq.comm.control.clock_offset import ClockOffset, clock_offset
from tahq.comm.control.encoding import MAX_MESSAGE_NBYTES, decode_message, encode_message
from tahq.comm.control.messages import Abort, Bye, Message, Refuse, StartOver
from tahq.comm.keys import KeyPair
from tahq.comm.link.frame import Channel
from tahq.comm.link.session import Session
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import ANY_STAGE, CONTROL_LINK, LinkHello, LinkSpec, SessionLimits
from tahq.comm.link.transitions import End
from tahq.comm.zmq.addresses import advertised_address, bind_router
from tahq.comm.zmq.endpoint_loop import EndpointLoop
from tahq.comm.zmq.gate import Gate
from tahq.comm.zmq.reception import Reception
from tahq.comm.zmq.socket_wait import Socket
from tahq.comm.zmq.sockets import open_router
from tahq.comm.zmq.transport import LinkEnd
from tahq.errors import RemoteProtocolError, TahqError

_log = logging.getLogger(__name__)
_HEARTBEATS_A_TIMEOUT = 5
MAX_STRANGERS = 512
_FAREWELLS = Refuse | Abort | Bye | StartOver
"""A worker that is told one of these is no member any more."""


class ControlServer:
    """Receives from, and sends to, every worker by the identity that `poll` gives it.

    `poll` also gives every worker a sign of life every `heartbeat_s`, so it must be called at least that often. A
    worker whose messages cannot be read is told to abort and not heard any more. Messages of strangers are dropped;
    nothing of them raises. With `keys`, only members are heard.

    Remembered are the workers that were told something for members, and as many of the others as were heard last.
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
            keys: the coordinator's; None: no CURVE, and anybody is heard.
            allowed: public keys of the workers.
            max_strangers: how many peers that are no members are remembered.
            clock: seconds, monotonic.

        Raises:
            UserError: the address is malformed, not this machine's, or in use.
        """
        self._clock = clock
        self._limits = SessionLimits(
            peer_timeout_s=_HEARTBEATS_A_TIMEOUT * heartbeat_s,
            heartbeat_s=heartbeat_s,
            give_up_s=math.inf,
            max_message_nbytes=MAX_MESSAGE_NBYTES + 16,
        )
        self._places = Places(max_strangers)
        self._heard: list[tuple[bytes, Message]] = []
        self._is_closed = False
        self._context: zmq.Context[Socket] = zmq.Context()
        router = open_router(self._context, self._limits.peer_timeout_s)
        self._gate = Gate(router, keys, allowed, where="coordinator", clock=clock)
        try:
            self.address = advertised_address(bind, bind_router(router, bind, "coordinator"), advertise)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        reception = Reception(router, self._gate, {CONTROL_LINK: self._welcome}, self.address, clock)
        self._loop = EndpointLoop(reception, Shaping(), clock=clock)

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
        place = self._places.find(identity)
        if place is not None:
            self._say(place, message)
            self._forget(self._places.told(identity, message))

    def _say(self, place: "Place", message: Message) -> None:
        if place.end.session.local is End.OPEN:
            place.end.session.send_message(Channel.CONTROL, encode_message(message), self._clock())

    def clock_offset(self, identity: bytes) -> ClockOffset | None:
        """This worker's clock minus this one's, by heartbeats; None: none has come back yet."""
        place = self._places.find(identity)
        return clock_offset(place.end.session.heartbeats.recent) if place is not None else None

    def public_key(self, identity: bytes) -> str:
        """The key that this worker has proved to have; "" without CURVE."""
        place = self._places.find(identity)
        return place.end.peer_key if place is not None else ""

    def take_refused(self) -> list[str]:
        """Log lines about keys that were refused since the last call."""
        return self._gate.take_refused()

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
        self._gate.close()
        self._loop.release()
        self._context.destroy(linger=0)

    # Called by the loop

    def _welcome(self, identity: bytes, hello: LinkHello, key: str) -> LinkEnd:
        spec = LinkSpec(CONTROL_LINK, ANY_STAGE, "", dials=False, title=_name(identity))
        end = _WorkerEnd(spec, Session(CONTROL_IDENTITY, spec, self._limits), key, identity, self)
        known = self._places.find(identity)
        if known is not None:
            known.end = end
        else:
            self._forget(self._places.give(identity, Place(end)))
        return end

    def _forget(self, evicted: "Place | None") -> None:
        if evicted is not None:
            self._loop.forget(evicted.end)

    def take(self, identity: bytes, data: bytes) -> None:
        """Handle a message that has come."""
        place = self._places.find(identity)
        if place is None or place.is_lost:
            return
        self._places.heard(identity)
        try:
            self._heard.append((identity, decode_message(data, _name(identity))))
        except RemoteProtocolError as error:
            _log.warning("%s", error)
            place.is_lost = True
            self.send(identity, Abort(str(error), error.exit_status))


class _WorkerEnd(LinkEnd):
    """The server's end of a link that a worker has opened."""

    is_temporary = True
    warns = False

    def __init__(self, spec: LinkSpec, session: Session, key: str, identity: bytes, server: ControlServer) -> None:
        super().__init__(spec, session, key)
        self._identity = identity
        self._server = server

    def publish(self) -> None:
        """Hand over messages."""
        for _, data in self.session.take_messages():
            self._server.take(self._identity, data)

    def fail(self, error: TahqError) -> None:
        """The session has ended: its peer broke the protocol, or left for a reason."""
        _log.warning("%s", error)
        super().fail(error)


@dataclass(slots=True)
class Place:
    """One peer: its end of the link, and whether it broke the protocol and is not heard any more."""

    end: LinkEnd
    is_lost: bool = False


class Places:
    """Peers by identity; bounded however many strangers come.

    Without CURVE anybody may come, under as many names as it likes. So a peer is kept only if it was told something
    that is for members; of the others, the one that has been silent longest makes room for a newcomer.
    """

    def __init__(self, max_strangers: int = MAX_STRANGERS) -> None:
        self._max_strangers = max_strangers
        self._members: dict[bytes, Place] = {}
        self._strangers: OrderedDict[bytes, Place] = OrderedDict()
        """The peer heard last comes last."""

    def __len__(self) -> int:
        return len(self._members) + len(self._strangers)

    def find(self, identity: bytes) -> Place | None:
        """The place of a peer that has one."""
        return self._members.get(identity) or self._strangers.get(identity)

    def give(self, identity: bytes, place: Place) -> Place | None:
        """Remember a newcomer; returns the peer that is forgotten for it, if there were too many."""
        self._strangers[identity] = place
        return self._strangers.popitem(last=False)[1] if len(self._strangers) > self._max_strangers else None

    def heard(self, identity: bytes) -> None:
        """A peer with a place gives a sign of life."""
        if identity in self._strangers:
            self._strangers.move_to_end(identity)

    def told(self, identity: bytes, message: Message) -> Place | None:
        """A peer with a place is told this, which makes it a member or ends that; returns the peer forgotten for it."""
        place = self._members.pop(identity, None) or self._strangers.pop(identity, None)
        if place is not None and isinstance(message, _FAREWELLS):
            return self.give(identity, place)
        if place is not None:
            self._members[identity] = place
        return None


def _name(identity: bytes) -> str:
    """The worker's own name, as the log may show it."""
    name, _, _ = identity.rpartition(b"#")
    with contextlib.suppress(UnicodeDecodeError):
        text = name.decode()
        if text and text.isprintable():
            return text
    return f"a stranger ({identity.hex()[:16]})"
