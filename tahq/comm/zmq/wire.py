"""Messages on ZMQ sockets: two parts each, header and payload, behind a routing id on a ROUTER."""

from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from tahq.comm.link.frame import FrameHeader, FrameKind, LogicalId, pack_header
from tahq.comm.link.outbound import Outgoing
from tahq.comm.zmq.socket_wait import Socket, has_input
from tahq.comm.zmq.transport import LinkEnd

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
