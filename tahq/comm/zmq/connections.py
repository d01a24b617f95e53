"""The connections that a listening ZMQ socket has accepted, and a bound on those of which nothing is known yet.

ZMQ accepts whoever comes, and gives each the whole time of a handshake. Here the longest silent one is hung up on when
there are too many, of one address or of all, so that descriptors are left for members and files. A connection
is known once a message has come over it, which is after the handshake.
"""

import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq

from tahq.comm.zmq.addresses import format_address

MOST_UNKNOWN: Final = 1024
MOST_OF_ONE_ADDRESS: Final = 256

UNKNOWN_ADDRESS: Final = "an unknown address"


@dataclass(frozen=True, slots=True)
class Accepted:
    """One connection: from which address and port, and when."""

    host: str
    port: int
    accepted_s: float

    def __str__(self) -> str:
        return format_address(self.host, self.port) if self.host else UNKNOWN_ADDRESS


class Connections:
    """Connections by descriptor, oldest first; used by the thread that owns the socket.

    Args:
        clock: seconds, monotonic.
        most: unknown ones at a time.
        most_of_one: unknown ones of one address at a time.
    """

    def __init__(
        self, clock: Callable[[], float], *, most: int = MOST_UNKNOWN, most_of_one: int = MOST_OF_ONE_ADDRESS
    ) -> None:
        self._clock = clock
        self._most = most
        self._most_of_one = most_of_one
        self._unknown: dict[int, Accepted] = {}
        self._known: dict[int, Accepted] = {}
        self._by_host: Counter[str] = Counter()

    def accept(self, descriptor: int) -> Accepted | None:
        """Note a new one; the one that was hung up on for it, if there were too many."""
        self.forget(descriptor)
        peer = _peer_of(descriptor)
        host, port = peer or ("", 0)
        self._unknown[descriptor] = Accepted(host, port, self._clock())
        self._by_host[host] += 1
        if self._by_host[host] > self._most_of_one:
            return self._hang_up(next(number for number, other in self._unknown.items() if other.host == host))
        return self._hang_up(next(iter(self._unknown))) if len(self._unknown) > self._most else None

    def know(self, frame: zmq.Frame) -> bool:
        """This message, received with ``copy=False``, came over one of them; whether it was the first to."""
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
        """It is closed; what was noted of it."""
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
        """ZMQ then closes it; what was noted of it goes with the word that it did."""
        connection = self._unknown[descriptor]
        # Moved to the end, so that another goes next, should ZMQ take its time.
        self._unknown[descriptor] = self._unknown.pop(descriptor)
        if _peer_of(descriptor) != (connection.host, connection.port):
            return None  # the number is somebody else's by now
        try:
            with socket.fromfd(descriptor, socket.AF_INET6, socket.SOCK_STREAM) as copy:
                copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            return None  # he was faster
        return connection


def _peer_of(descriptor: int) -> tuple[str, int] | None:
    """Address and port at the other end of a connection that ZMQ owns; None if it has closed it by now."""
    try:
        # A copy, of the family whose addresses are the longest: those of IPv4 fit in too.
        with socket.fromfd(descriptor, socket.AF_INET6, socket.SOCK_STREAM) as copy:
            host, port, *_ = copy.getpeername()
            return str(host).removeprefix("::ffff:"), int(port)
    except (OSError, ValueError):
        return None
