"""Who dials in on the ROUTER: a stranger, until a HELLO of his names a link of ours and all in it matches.

A HELLO for a link that is not open yet is kept, since a peer may have its plan a moment before us.
Everything else from a stranger is dropped with a line in the log; nothing of it is ever delivered.
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from tahq.comm.link.frame import FrameHeader, FrameKind, LogicalId, pack_header, unpack_header
from tahq.comm.link.outbound import Outgoing
from tahq.comm.zmq.gate import Gate
from tahq.comm.zmq.rate_limited_log import RateLimitedLog
from tahq.comm.zmq.socket_wait import Socket, has_input
from tahq.comm.zmq.sockets import peer_key
from tahq.comm.zmq.transport import LinkEnd
from tahq.errors import RemoteProtocolError

_NOWAIT = int(zmq.NOBLOCK)
_NOWAIT_MORE = int(zmq.SNDMORE | zmq.NOBLOCK)


@dataclass(slots=True)
class Wire:
    """Where a link's messages go: by connection, its own DEALER, or the shared ROUTER and a routing id there."""

    end: LinkEnd
    sockets: list[Socket]
    is_dialled: bool
    routes: list[bytes | None]
    """Of a link that is dialled from elsewhere; None: not yet."""
    in_transit: int = 0
    """Messages that the uplink holds."""
    degraded_s: float | None = None
    """Since when the link has been degraded; None: it is not."""

    def put(self, outgoing: Outgoing) -> None:
        """Put a message on the socket; a long payload is not copied. Raises zmq.ZMQError if its peer is gone."""
        socket = self.sockets[outgoing.connection]
        if not self.is_dialled:
            socket.send(self.routes[outgoing.connection] or b"", _NOWAIT_MORE)
        socket.send(outgoing.header, _NOWAIT_MORE)
        socket.send(outgoing.payload, _NOWAIT, copy=False)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message that has come whole; the ZMQ frames keep the buffers alive."""

    wire: Wire
    connection: int
    header: zmq.Frame
    payload: zmq.Frame

    @property
    def nbytes(self) -> int:
        """Bytes of both parts."""
        return len(self.header) + len(self.payload)


def take_messages(socket: Socket, limit: int) -> Iterator[list[zmq.Frame]]:
    """Up to `limit` messages that are there already."""
    for _ in range(limit):
        if not has_input(socket):
            return
        part = socket.recv(_NOWAIT, copy=False)
        parts = [part]
        while part.more:
            part = socket.recv(_NOWAIT, copy=False)
            parts.append(part)
        yield parts


def whence(part: zmq.Frame) -> str:
    """The IP address that a message came from, for the log."""
    try:
        return str(part.get("Peer-Address")).removeprefix("::ffff:")
    except zmq.ZMQError:
        return "an unknown address"


def pack_refusal(hello: FrameHeader, reason: str) -> tuple[bytes, bytes]:
    """Header and payload of the BYE that answers a HELLO which is not welcome."""
    payload = f"refused: {reason}".encode()[:1024]
    id: LogicalId = hello.id
    bye = FrameHeader(FrameKind.BYE, hello.epoch, hello.link, sequence=0, id=id, payload_nbytes=len(payload))
    return pack_header(bye, payload), payload


_log = logging.getLogger(__name__)
_MAX_WAITING = 64


class Reception:
    """Sorts what comes in on the ROUTER by the link that it belongs to."""

    def __init__(self, router: Socket, gate: Gate) -> None:
        self.router = router
        self.gate = gate
        self._wires: dict[int, Wire] = {}
        self._routes: dict[bytes, tuple[Wire, int]] = {}
        self._waiting: dict[bytes, list[zmq.Frame]] = {}
        self._warnings = RateLimitedLog(_log)

    def open(self, wire: Wire) -> list[Arrival]:
        """Admit the peer of this link from now on; the HELLOs that may have come before their time."""
        self._wires[wire.end.spec.link] = wire
        if wire.end.peer_key:
            self.gate.allow(wire.end.peer_key)
        waiting, self._waiting = self._waiting, {}
        arrivals = [self.sort(route, parts) for route, parts in waiting.items()]
        return [arrival for arrival in arrivals if arrival is not None]

    def close(self, wire: Wire) -> None:
        """Hear no more of the peer of this link."""
        del self._wires[wire.end.spec.link]
        for route in [route for route, (known, _) in self._routes.items() if known is wire]:
            del self._routes[route]

    def wire_of(self, route: bytes) -> tuple[Wire, int] | None:
        """The link, and which connection of it, whose admitted peer has this routing id."""
        return self._routes.get(route)

    def sort(self, route: bytes, parts: list[zmq.Frame]) -> Arrival | None:
        """What the stranger with this routing id has sent, if it makes him one of our peers."""
        name = f"a stranger at {whence(parts[0])}" if parts else "a stranger"
        try:
            return self._admit(route, parts, name)
        except RemoteProtocolError as error:
            self._warnings.warning(f"dropped a message: {error}")
            return None

    def _admit(self, route: bytes, parts: list[zmq.Frame], name: str) -> Arrival | None:
        if len(parts) != 2:
            raise RemoteProtocolError(f"{name}: sent {len(parts)} message parts; expected 2")
        header = unpack_header(parts[0].buffer, parts[1].buffer, name)
        if header.kind is not FrameKind.HELLO:
            raise RemoteProtocolError(f"{name}: sent {header.kind.name} before HELLO")
        wire = self._wires.get(header.link)
        if wire is None:
            self._keep(route, parts)
            return None
        try:
            connection = self._check(wire, header, *parts)
        except RemoteProtocolError as error:
            self._refuse(route, header, str(error))
            raise
        wire.routes[connection] = route
        self._routes[route] = (wire, connection)
        return Arrival(wire, connection, *parts)

    def _check(self, wire: Wire, header: FrameHeader, hello: zmq.Frame, payload: zmq.Frame) -> int:
        if None not in wire.routes:
            raise RemoteProtocolError(f"{wire.end.spec}: is connected already; a second peer for it was refused")
        if peer_key(hello) != wire.end.peer_key:
            raise RemoteProtocolError(f"{wire.end.spec}: has another key than this member; he was refused")
        connection = wire.end.session.check_hello(header, payload.buffer).connection
        if wire.routes[connection] is not None:
            raise RemoteProtocolError(f"{wire.end.spec}: has connection {connection} already; a second was refused")
        return connection

    def _keep(self, route: bytes, parts: list[zmq.Frame]) -> None:
        self._waiting[route] = parts
        if len(self._waiting) > _MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def _refuse(self, route: bytes, hello: FrameHeader, reason: str) -> None:
        # He may have hung up before he hears it.
        with contextlib.suppress(zmq.ZMQError):
            self.router.send_multipart([route, *pack_refusal(hello, reason)], zmq.NOBLOCK)
