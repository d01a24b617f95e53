"""The relay's process: a SOCKS5 proxy that joins connections which ask for opposite places, and copies their bytes.

It sees cipher text only, and counts it, in memory that the coordinator reads. `Relay` starts it with the secret on
stdin, and it ends when that is closed. A connection that asks for a place takes it from the one before, which may be
of a host that is gone. Never more than a socket's buffers are kept for a slow receiver.
"""

import asyncio
import mmap
import socket
import sys
from typing import Final

from tahq.comm.relay.tickets import Place, place_of

COUNTER_NBYTES: Final = 8
HANDSHAKE_S: Final = 10.0
MOST_UNKNOWN: Final = 256
"""Connections that have not asked for a place yet."""
_MOST_REQUEST_NBYTES: Final = 600
_PROBES: Final = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_UNACKNOWLEDGED_MS: Final = 20_000
_CHOSEN: Final = b"\5\0"
_JOINED: Final = b"\5\0\0\1\0\0\0\0\0\0"
_CONNECT: Final = b"\5\1\0\3"
"""SOCKS5 (RFC 1928): no authentication; connected; the request to connect to a name."""


class Places:
    """Who is at which place, and the bytes that each end of each link has sent.

    `counters` has a u64 for each end: of link 0 the lower and the upper one, of link 1…
    """

    def __init__(self, secret: bytes, counters: mmap.mmap) -> None:
        self._secret = secret
        self._present: dict[Place, Visitor] = {}
        self._numbers = memoryview(counters).cast("Q")
        self.unknown: dict[Visitor, None] = {}
        """Connections that have not asked for a place, the oldest first."""

    def come(self, visitor: "Visitor") -> None:
        """Watch a new connection; the oldest that has asked for nothing makes room."""
        self.unknown[visitor] = None
        if len(self.unknown) > MOST_UNKNOWN:
            next(iter(self.unknown)).transport.abort()

    def take(self, visitor: "Visitor", name: str) -> None:
        """Give a connection the place that it asks for, and join it to the opposite one if that is taken."""
        place = place_of(self._secret, name)
        if place is None or 2 * place.link >= len(self._numbers):
            visitor.transport.abort()
            return
        del self.unknown[visitor]
        before, visitor.place = self._present.get(place), place
        self._present[place] = visitor
        if before is not None:
            before.transport.abort()
        other = self._present.get(place.opposite)
        if other is not None and other.peer is None:
            visitor.peer, other.peer = other, visitor
            for end in (visitor, other):
                end.transport.write(_JOINED)

    def leave(self, visitor: "Visitor") -> None:
        """A connection is closed."""
        self.unknown.pop(visitor, None)
        if visitor.place is not None and self._present.get(visitor.place) is visitor:
            del self._present[visitor.place]

    def count(self, place: Place, nbytes: int) -> None:
        """Bytes that an end of a link has sent."""
        self._numbers[2 * place.link + place.end] += nbytes


class Visitor(asyncio.Protocol):
    """One connection."""

    transport: asyncio.Transport

    def __init__(self, places: Places) -> None:
        self.place: Place | None = None
        self.peer: Visitor | None = None
        """The connection that it is joined to; stays when that is closed."""
        self._places = places
        self._request = b""
        self._has_chosen = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Notice soon if the other end's host is gone."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (*_PROBES, (socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._places.come(self)
        asyncio.get_running_loop().call_later(HANDSHAKE_S, self._check_known)

    def _check_known(self) -> None:
        if self.place is None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Pass bytes on, or go on with the handshake."""
        if self.peer is not None and self.place is not None:
            self._places.count(self.place, len(data))
            self.peer.transport.write(data)
            return
        self._request += data
        if self.place is not None or len(self._request) > _MOST_REQUEST_NBYTES or not self._answer():
            self.transport.abort()

    def _answer(self) -> bool:
        """Go on with the handshake as far as it has come; False: this is not SOCKS."""
        request = self._request
        if not self._has_chosen and len(request) >= 2 and len(request) >= 2 + request[1]:
            self._has_chosen = True
            self._request = request = request[2 + request[1] :]
            self.transport.write(_CHOSEN)
        if not self._has_chosen:
            return request[:1] in (b"", b"\5")
        if len(request) > len(_CONNECT) and len(request) >= len(_CONNECT) + 3 + request[4]:
            name = request[5 : 5 + request[4]]
            if not request.startswith(_CONNECT) or not name.isascii():
                return False
            self._places.take(self, name.decode())
            return True
        return _CONNECT.startswith(request[: len(_CONNECT)])

    def pause_writing(self) -> None:
        """Take no more from the sender: this receiver is slow."""
        if self.peer is not None:
            self.peer.transport.pause_reading()

    def resume_writing(self) -> None:
        """Take more from the sender."""
        if self.peer is not None:
            self.peer.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the other end's connection, too, once it has what was sent."""
        self._places.leave(self)
        if self.peer is not None:
            self.peer.transport.close()


async def _serve(listener: socket.socket, places: Places) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), over.set)
    await loop.create_server(lambda: Visitor(places), sock=listener, backlog=MOST_UNKNOWN)
    await over.wait()


def main() -> None:
    """Forward until stdin is closed; the arguments are descriptors of the listening socket and of the counters."""
    secret = bytes.fromhex(sys.stdin.readline().strip())
    listening, counting = map(int, sys.argv[1:])
    with socket.socket(fileno=listening) as listener:
        asyncio.run(_serve(listener, Places(secret, mmap.mmap(counting, 0))))


if __name__ == "__main__":
    main()
