"""The coordinator's end of the control channel: one ROUTER, used by one thread, without a thread of its own."""

import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator

import zmq

from tahq.comm.control.clock_offset import ClockComparison, ClockOffset
from tahq.comm.control.encoding import MAX_MESSAGE_NBYTES, decode_message, encode_message
from tahq.comm.control.messages import Abort, Heartbeat, Message
from tahq.comm.control.numbering import Numbering, coordinator_of
from tahq.comm.control.places import MAX_STRANGERS, Place, Places
from tahq.comm.keys import KeyPair
from tahq.comm.zmq.addresses import advertised_address, bind_router
from tahq.comm.zmq.gate import Gate
from tahq.comm.zmq.rate_limited_log import RateLimitedLog
from tahq.comm.zmq.sockets import peer_key, replace_silent_connections
from tahq.errors import PeerLostError, RemoteProtocolError, TahqError

_log = logging.getLogger(__name__)
_MESSAGES_A_POLL = 1024
_HEARTBEATS_A_TIMEOUT = 5


class ControlServer:
    """Receives from, and sends to, every worker by the identity that `poll` gives it.

    `poll` also sends a Heartbeat to every worker heard from, every `heartbeat_s`, and one at once to a
    newcomer, so it must be called at least that often. Messages that were lost when a connection was reset are sent
    again. A worker that speaks of a run from before this end was started, or what nobody can read, is told to abort
    and not heard any more. What strangers send is dropped; nothing of it raises. With `keys`, only members are heard.
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
            keys: the coordinator's; None: no CURVE, and whoever comes is heard.
            allowed: public keys of the workers.
            max_strangers: the most that are remembered of those who are no members.
            clock: seconds, monotonic.

        Raises:
            UserError: the address is malformed, not this machine's, or in use.
        """
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._heartbeat_at_s = clock() + heartbeat_s
        self._places = Places(max_strangers)
        self._process = secrets.randbits(63) + 1
        self._warnings = RateLimitedLog(_log, clock=clock)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0), (zmq.IPV6, 1)):
            self._router.setsockopt(option, value)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_NBYTES + 1024)
        replace_silent_connections(self._router, _HEARTBEATS_A_TIMEOUT * heartbeat_s)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._gate = Gate(self._router, keys, allowed, where="coordinator", clock=clock)
        self._poller = zmq.Poller()
        for socket in (self._router, *self._gate.sockets):
            self._poller.register(socket, zmq.POLLIN)
        try:
            self.address = advertised_address(bind, bind_router(self._router, bind, "coordinator"), advertise)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def poll(self, timeout_s: float) -> list[tuple[bytes, Message]]:
        """What has come, heartbeats included; waits up to `timeout_s` for the first."""
        deadline_s = self._clock() + timeout_s
        while True:
            self._send_heartbeats()
            self._gate.serve()
            messages = list(self._receive())
            wait_s = min(deadline_s, self._heartbeat_at_s) - self._clock()
            if messages or deadline_s <= self._clock():
                return messages
            self._poller.poll(math.ceil(max(0.0, wait_s) * 1000))

    def send(self, identity: bytes, message: Message) -> None:
        """Queue a message for the worker that `poll` gave this identity; returns at once.

        One whose connection is gone is skipped: its silence will tell. So is one that was never heard.
        """
        place = self._places.find(identity)
        if place is not None:
            self._put(identity, place.numbering.wrap(encode_message(message)))
            self._places.told(identity, message)

    def _put(self, identity: bytes, parts: list[bytes]) -> None:
        try:
            self._router.send_multipart([identity, *parts], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _log.debug("%s: nothing can be sent now: %s", _name(identity), error)

    def clock_offset(self, identity: bytes) -> ClockOffset | None:
        """The clock of this worker minus this one's, by heartbeats; None: none has come back yet."""
        place = self._places.find(identity)
        return place.clocks.best if place is not None and place.clocks is not None else None

    def public_key(self, identity: bytes) -> str:
        """The key that this worker has proved to have; "" without CURVE."""
        place = self._places.find(identity)
        return place.key if place is not None else ""

    def take_refused(self) -> list[str]:
        """What there is to say of keys that were refused since the last call, for whoever watches the run."""
        return self._gate.take_refused()

    def close(self, linger_s: float = 1.0) -> None:
        """Release the socket after what is queued has gone, or `linger_s`; safe to call twice."""
        if not self._router.closed:
            self._router.close(linger=int(linger_s * 1000))
            self._gate.close()
            self._context.term()

    def _send_heartbeats(self) -> None:
        now_s = self._clock()
        if now_s >= self._heartbeat_at_s:
            self._heartbeat_at_s = now_s + self._heartbeat_s
            for identity, place in self._places:
                if not place.is_lost:
                    self.send(identity, Heartbeat(sent_s=now_s))

    def _receive(self) -> Iterator[tuple[bytes, Message]]:
        for _ in range(_MESSAGES_A_POLL):
            try:
                route, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = route.bytes
            self._gate.know(route)
            message = self._accept(identity, [frame.bytes for frame in frames], peer_key(route))
            if message is not None:
                yield identity, message

    def _accept(self, identity: bytes, parts: list[bytes], key: str) -> Message | None:
        known = self._places.find(identity)
        if known is not None and known.is_lost:
            return None
        try:
            return self._check(identity, known, parts, key)
        except RemoteProtocolError as error:
            self._warnings.warning(f"dropped a control message: {error}")
        except PeerLostError as error:
            self._lose(identity, known, error)
        return None

    def _check(self, identity: bytes, known: Place | None, parts: list[bytes], key: str) -> Message | None:
        name = _name(identity)
        if known is not None and known.key != key:  # one member cannot speak for another
            raise RemoteProtocolError(f"{name}: said by the owner of another key, {key}")
        if len(parts) != 2:
            raise RemoteProtocolError(f"{name}: sent {len(parts)} message parts; expected 2")
        place = known or Place(Numbering(self._process), key)
        if coordinator_of(parts[0], name) not in (0, self._process):
            if known is None:  # it was with the coordinator before this one; it hears of us, and begins anew
                self._decode(identity, known, parts[1], name)
                self._welcome(identity, place)
            return None
        is_next = place.numbering.take(parts[0], name)
        message = self._decode(identity, known, parts[1], name)
        if known is None:
            self._welcome(identity, place)
        self._places.heard(identity)
        for again in place.numbering.again():
            self._put(identity, again)
        if place.numbering.must_ask:
            self.send(identity, Heartbeat(sent_s=self._clock()))
        if not is_next:
            return None
        if isinstance(message, Heartbeat) and message.held_s >= 0:
            place.clocks = place.clocks or ClockComparison()
            place.clocks.note(message.echo_s, message.sent_s - message.held_s, message.sent_s, self._clock())
        return message

    def _decode(self, identity: bytes, known: Place | None, data: bytes, name: str) -> Message:
        """What a message says; who sends what nobody can read would wait for an answer without end.

        Raises:
            PeerLostError: it is none, and its sender was heard before.
            RemoteProtocolError: it is none, and a stranger's, who has been told.
        """
        try:
            return decode_message(data, name)
        except RemoteProtocolError as error:
            if known is not None:
                raise PeerLostError(str(error)) from error
            self._turn_away(identity, error)
            raise

    def _welcome(self, identity: bytes, place: Place) -> None:
        self._places.give(identity, place)
        self.send(identity, Heartbeat(sent_s=self._clock()))

    def _lose(self, identity: bytes, known: Place | None, error: PeerLostError) -> None:
        """Hear somebody no more; a stranger, of whom nothing is remembered, is told each time."""
        if known is None:
            self._warnings.warning(str(error))
            self._turn_away(identity, error)
            return
        _log.warning("%s", error)
        known.is_lost = True
        self.send(identity, Abort(str(error), error.exit_status))

    def _turn_away(self, identity: bytes, error: TahqError) -> None:
        refusal = Abort(str(error), error.exit_status)
        self._put(identity, Numbering(self._process).wrap(encode_message(refusal)))


def _name(identity: bytes) -> str:
    """What the worker calls itself, as the log may show it."""
    name, _, _ = identity.rpartition(b"#")
    with contextlib.suppress(UnicodeDecodeError):
        text = name.decode()
        if text and text.isprintable():
            return text
    return f"a stranger ({identity.hex()[:16]})"
