"""Admits peers to a ROUTER whose keys are on its allow-list, and logs the other attempts and what was wrong.

ZMQ asks (ZAP, its RFC 27), by a message inside the process, about each connection whose CURVE handshake has shown that
the peer has its secret key and knows the ROUTER's public key; without that, ZMQ rejects it earlier.
The thread that owns the ROUTER answers, between its other work. Invariants: a connection is let in by an answer from
here and by nothing else; nothing that a peer sends before that is read.
"""

import math
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from logging import getLogger
from typing import Final, NamedTuple

import zmq

from tahq.comm.keys import KeyPair
from tahq.comm.zmq import monitor
from tahq.comm.zmq.addresses import format_address
from tahq.comm.zmq.monitor import Monitor, RateLimitedLog, SocketEvent
from tahq.comm.zmq.socket_wait import Socket, take_messages
from tahq.comm.zmq.sockets import HANDSHAKE_S, limit_handshakes, serve_curve

MOST_UNKNOWN: Final = 1024
MOST_OF_ONE_ADDRESS: Final = 256

_log = getLogger(__name__)
_ZAP = "inproc://zeromq.zap.01"
_REQUEST_PARTS = 9
"""Return route, nothing, version, number, domain, address, routing id, mechanism, key."""
_MOST_HELD = 256
_EVENTS = (monitor.ACCEPTED, monitor.SUCCEEDED, monitor.DISCONNECTED, *monitor.FAILURES)


class Accepted(NamedTuple):
    """One connection: the peer's address and port; empty if it was closed already."""

    host: str
    port: int

    def __str__(self) -> str:
        return format_address(self.host, self.port) if self.host else "an unknown address"


class Connections:
    """The connections that a listening socket has accepted, by descriptor, oldest first; bounds the unknown ones.

    ZMQ accepts every connection and gives each the full time of a handshake. Here the one that has been silent longest
    is closed when there are too many, of one address or of all, so that descriptors are left for members and files. A
    connection is known once a message has come over it, which is after the handshake.
    """

    def __init__(self, *, most: int = MOST_UNKNOWN, most_of_one: int = MOST_OF_ONE_ADDRESS) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._unknown: dict[int, Accepted] = {}
        self._known: dict[int, Accepted] = {}
        self._by_host: Counter[str] = Counter()

    def accept(self, descriptor: int) -> Accepted | None:
        """Note a new connection; returns the one that was closed for it, if there were too many."""
        self.forget(descriptor)
        host, port = _peer_of(descriptor) or ("", 0)
        self._unknown[descriptor] = Accepted(host, port)
        self._by_host[host] += 1
        if self._by_host[host] > self._most_of_one:
            return self._hang_up(next(number for number, other in self._unknown.items() if other.host == host))
        return self._hang_up(next(iter(self._unknown))) if len(self._unknown) > self._most else None

    def know(self, frame: zmq.Frame) -> bool:
        """A message, received with ``copy=False``, has come; returns whether it is the first over its connection."""
        if not self._unknown:
            return False
        descriptor = int(frame.get(zmq.SRCFD))
        connection = self._unknown.get(descriptor)
        if connection is None:
            return False
        self.forget(descriptor)
        self._known[descriptor] = connection
        return True

    def forget(self, descriptor: int) -> Accepted | None:
        """The connection is closed; returns what was noted of it."""
        connection = self._unknown.pop(descriptor, None)
        if connection is None:
            return self._known.pop(descriptor, None)
        self._by_host[connection.host] -= 1
        if not self._by_host[connection.host]:
            del self._by_host[connection.host]
        return connection

    def is_known(self, descriptor: int) -> bool:
        """Whether a message has come over it."""
        return descriptor in self._known

    def _hang_up(self, descriptor: int) -> Accepted | None:
        """Shut the connection down; ZMQ then closes it, and says so, and only then it is forgotten."""
        # Moved to the end, so that another goes next while ZMQ has not closed it.
        connection = self._unknown[descriptor] = self._unknown.pop(descriptor)
        if _peer_of(descriptor) != connection:
            return None  # the number belongs to another connection by now
        try:
            with socket.fromfd(descriptor, socket.AF_INET6, socket.SOCK_STREAM) as copy:
                copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            return None  # the peer was faster
        return connection


def _peer_of(descriptor: int) -> Accepted | None:
    """Address and port at the other end of a connection that ZMQ owns; None if it has closed it by now."""
    try:
        # A copy, of the family whose addresses are the longest: those of IPv4 fit in too.
        with socket.fromfd(descriptor, socket.AF_INET6, socket.SOCK_STREAM) as copy:
            host, port, *_ = copy.getpeername()
            return Accepted(str(host).removeprefix("::ffff:"), int(port))
    except (OSError, ValueError):
        return None


class _Asked(NamedTuple):
    """A peer at the gate that waits for an answer."""

    envelope: list[bytes]
    address: str
    key: str
    until_s: float


class Gate:
    """Lets members in, and no other peers; used by the thread that owns the ROUTER.

    Args:
        router: not bound yet.
        keys: this end's; None: no CURVE, and every peer is let in.
        allowed: public keys of the members.
        where: name of the ROUTER in messages.
        hold_s: how long an unknown peer waits for `allow` before it is refused.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        router: Socket,
        keys: KeyPair | None,
        allowed: Collection[str] = (),
        *,
        where: str,
        hold_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._where = where
        self._allowed = set(allowed)
        self._hold_s = hold_s
        self._clock = clock
        self._held: list[_Asked] = []
        self.next_s = math.inf
        """When to call `serve` even if none of the sockets has input."""
        self._connections = Connections()
        self._num_taken_in = 0
        """Members that have sent nothing yet; ZMQ does not tell which connections are theirs."""
        self._failure: str | None = None
        """Why the connection that is about to be closed failed; "": it was logged."""
        self._refused: deque[str] = deque(maxlen=_MOST_HELD)
        self._refusals = RateLimitedLog(_log, clock=clock)
        self._warnings = RateLimitedLog(_log, clock=clock)
        limit_handshakes(router)
        self._monitor = Monitor(router, *_EVENTS)
        self._requests: Socket | None = None
        if keys is not None:
            self._requests = router.context.socket(zmq.ROUTER)
            self._requests.setsockopt(zmq.LINGER, 0)
            self._requests.bind(_ZAP)
            serve_curve(router, keys)

    @property
    def sockets(self) -> list[Socket]:
        """Call `serve` as soon as one of these has input."""
        return [self._monitor.socket, *([self._requests] if self._requests is not None else [])]

    def allow(self, *keys: str) -> None:
        """Let the owners of these public keys in from now on, even if they are waiting already.

        All keys before any answer: an owner of the last must not be refused because the first was let in.
        """
        self._allowed.update(keys)
        self.serve()

    def know(self, frame: zmq.Frame) -> None:
        """A message, received with ``copy=False``, has come: its sender is in, and needs no more watching."""
        if self._connections.know(frame):
            self._num_taken_in -= 1

    def take_refused(self) -> list[str]:
        """Log lines about keys that were refused since the last call."""
        refused = list(self._refused)
        self._refused.clear()
        return refused

    def serve(self) -> None:
        """Answer peers that have come, and note connections that have failed."""
        if self._requests is not None:
            self._answer_all(self._requests)
        for event in self._monitor.take():
            self._note(event)

    # Answers to ZMQ

    def _answer_all(self, requests: Socket) -> None:
        now_s = self._clock()
        asked, self._held = self._held, []
        for frames in take_messages(requests, sys.maxsize):
            parts = [frame.bytes for frame in frames]
            is_curve = len(parts) == _REQUEST_PARTS and parts[7] == b"CURVE"
            address = parts[5].decode("ascii", "replace").removeprefix("::ffff:") if len(parts) > 5 else "?"
            asked.append(_Asked(parts[:4], address, parts[8].hex() if is_curve else "", now_s + self._hold_s))
        for peer in asked:
            if peer.key not in self._allowed and peer.until_s > now_s and len(self._held) < _MOST_HELD:
                self._held.append(peer)
            else:
                self._answer(requests, peer)
        self.next_s = min((peer.until_s for peer in self._held), default=math.inf)

    def _answer(self, requests: Socket, peer: _Asked) -> None:
        is_member = peer.key in self._allowed
        status, text = (b"200", b"") if is_member else (b"400", b"this key is not in the allow-list")
        requests.send_multipart([*peer.envelope, status, text, peer.key.encode(), b""], zmq.NOBLOCK)
        message = (
            f"{self._where}: refused a connection from {peer.address}: its public key {peer.key} is not one of "
            f"the {len(self._allowed)} that may connect here"
        )
        if not is_member and self._refusals.warning(message):
            self._refused.append(message)

    # Failed connections

    def _note(self, event: SocketEvent) -> None:
        if event.kind == monitor.ACCEPTED:
            hung_up = self._connections.accept(event.value)
            if hung_up is not None:
                self._report(hung_up, "closed to make room for the next: too many connections have sent nothing")
        elif event.kind == monitor.SUCCEEDED:
            self._num_taken_in += 1
        elif event.kind != monitor.DISCONNECTED:
            self._failure = self._reason(event)
        else:
            failure, self._failure = self._failure, None
            is_known, connection = self._connections.is_known(event.value), self._connections.forget(event.value)
            if failure is None and not is_known and self._num_taken_in > 0:
                self._num_taken_in -= 1
            elif failure is None and not is_known:
                failure = "connection closed before it sent anything, or it does not speak ZMQ's protocol"
            if failure:
                self._report(connection or Accepted("", 0), failure)

    def _report(self, peer: Accepted, failure: str) -> None:
        self._warnings.warning(f"{self._where}: rejected a connection from {peer}: {failure}")

    def _reason(self, event: SocketEvent) -> str:
        if event.kind == monitor.REFUSED:
            return ""
        if event.kind == monitor.CLOSED:
            return f"connection closed during the handshake, or the handshake took longer than {HANDSHAKE_S:g} s"
        if event.value == monitor.OTHER_SERVER_KEY:
            return "it has another public key for this end than the right one"
        if event.value == monitor.OTHER_MECHANISM:
            return "it uses CURVE, which is off at this end" if self._requests is None else "it does not use CURVE"
        return f"it broke ZMQ's protocol ({event.value:#x})"
