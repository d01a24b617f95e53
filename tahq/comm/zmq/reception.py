"""Which peer sent each message that comes in on the ROUTER, and where the messages of a link go.

A sender is a stranger until its HELLO names a link that is open here, or one that any admitted peer may open (for
control or files), and everything in it matches. A HELLO for a link that is not open yet is kept, since a peer may have
its plan a moment before us. All else from strangers is dropped with a line in the log; nothing of it is delivered.
"""

import contextlib
import logging
import time
from collections.abc import Callable

import zmq

from tahq.comm.link.frame import FrameHeader, FrameKind, unpack_header
from tahq.comm.link.signals import pack_refusal, pack_reset
from tahq.comm.link.spec import LinkHello, unpack_hello
from tahq.comm.zmq.gate import Gate
from tahq.comm.zmq.monitor import RateLimitedLog
from tahq.comm.zmq.socket_wait import Socket
from tahq.comm.zmq.sockets import peer_key
from tahq.comm.zmq.transport import Arrival, LinkEnd, LinkSockets
from tahq.errors import RemoteProtocolError

_log = logging.getLogger(__name__)
_MAX_WAITING = 64
Accept = Callable[[bytes, LinkHello, str], LinkEnd]
"""(routing id, HELLO, public key) -> this end of a link that a peer opens; may raise RemoteProtocolError."""


class Reception:
    """Sorts messages that come in on the ROUTER, which is bound, by link.

    `accept` has, by link number, what makes this end of a link that a peer opens; peers dial `address`, host:port.
    """

    def __init__(
        self,
        router: Socket,
        gate: Gate,
        accept: dict[int, Accept],
        address: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.router = router
        self.address = address
        self.gate = gate
        self.opened: list[LinkSockets] = []
        """Links that peers have opened since this was last emptied."""
        self._accept = accept
        self._clock = clock
        self._wires: dict[int, LinkSockets] = {}
        self._routes: dict[bytes, tuple[LinkSockets, int]] = {}
        self._waiting: dict[bytes, list[zmq.Frame]] = {}
        self._warnings = RateLimitedLog(_log, clock=clock)

    def open(self, end: LinkEnd) -> tuple[LinkSockets, list[Arrival]]:
        """Admit the peer of this link from now on; also returns the HELLOs that came too early."""
        count = len(end.session.connections)
        wire = LinkSockets(end, [self.router] * count, False, [None] * count, self._clock())
        self._wires[end.spec.link] = wire
        if end.peer_key:
            self.gate.allow(end.peer_key)
        waiting, self._waiting = self._waiting, {}
        arrivals = [self.sort(route, parts) for route, parts in waiting.items()]
        return wire, [arrival for arrival in arrivals if arrival is not None]

    def close(self, wire: LinkSockets) -> None:
        """Drop what the peer of this link sends from now on."""
        if self._wires.get(wire.end.spec.link) is wire:
            del self._wires[wire.end.spec.link]
        for route in wire.routes:
            if route is not None:
                self._routes.pop(route, None)

    def wire_of(self, route: bytes, parts: list[zmq.Frame]) -> tuple[LinkSockets, int] | None:
        """The link, and which connection of it, whose admitted peer has this routing id and sent this with its key."""
        known = self._routes.get(route)
        expected = known[0].end.peer_key if known is not None else ""
        if expected and parts and peer_key(parts[0]) != expected:  # without CURVE there is no key to look up
            return None
        return known

    def sort(self, route: bytes, parts: list[zmq.Frame]) -> Arrival | None:
        """A message from the stranger with this routing id, if it makes the stranger one of our peers."""
        name = f"a stranger at {_origin(parts[0])}" if parts else "a stranger"
        try:
            if len(parts) != 2:
                raise RemoteProtocolError(f"{name}: sent {len(parts)} message parts; expected 2")
            header = unpack_header(parts[0].buffer, parts[1].buffer, name)
            if header.kind is FrameKind.HELLO:
                return self._greet(route, header, parts, name)
            if header.link not in self._accept or header.kind is FrameKind.RESET:
                raise RemoteProtocolError(f"{name}: sent {header.kind.name} before HELLO")
            self._send(route, pack_reset(header.id.run, header.epoch, header.link))
        except RemoteProtocolError as error:
            self._warnings.warning(f"dropped a message: {error}")
        return None

    def _greet(self, route: bytes, header: FrameHeader, parts: list[zmq.Frame], name: str) -> Arrival | None:
        wire = self._wires.get(header.link)
        try:
            if route in self._routes:
                raise RemoteProtocolError(f"{name}: has another key than the peer with its routing id")
            if header.link in self._accept:
                wire, connection = self._accept_link(route, header, parts, name), 0
            elif wire is None:
                self._waiting[route] = parts
                if len(self._waiting) > _MAX_WAITING:
                    del self._waiting[next(iter(self._waiting))]
                return None
            else:
                connection = self._check(wire, header, *parts)
        except RemoteProtocolError as error:
            self._send(route, pack_refusal(header, str(error)))
            raise
        wire.routes[connection] = route
        self._routes[route] = (wire, connection)
        return Arrival(wire, connection, *parts)

    def _accept_link(self, route: bytes, header: FrameHeader, parts: list[zmq.Frame], name: str) -> LinkSockets:
        end = self._accept[header.link](route, unpack_hello(parts[1].buffer, name), peer_key(parts[0]))
        end.session.signals.check_hello(header, parts[1].buffer)
        wire = LinkSockets(end, [self.router], False, [None], self._clock())
        self.opened.append(wire)
        return wire

    def _check(self, wire: LinkSockets, header: FrameHeader, hello: zmq.Frame, payload: zmq.Frame) -> int:
        """The connection that this HELLO of a link's peer is about."""
        if None not in wire.routes:
            raise RemoteProtocolError(f"{wire.end.spec}: is connected already; a second peer for it was refused")
        if peer_key(hello) != wire.end.peer_key:
            raise RemoteProtocolError(f"{wire.end.spec}: has another key than this member; it was refused")
        connection = wire.end.session.signals.check_hello(header, payload.buffer).connection
        if wire.routes[connection] is not None:
            raise RemoteProtocolError(f"{wire.end.spec}: has connection {connection} already; a second was refused")
        return connection

    def _send(self, route: bytes, message: tuple[bytes, bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the peer may have hung up
            self.router.send_multipart([route, *message], zmq.NOBLOCK)


def _origin(part: zmq.Frame) -> str:
    try:
        return str(part.get("Peer-Address")).removeprefix("::ffff:")
    except zmq.ZMQError:
        return "an unknown address"
