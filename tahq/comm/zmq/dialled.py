"""A connection that is dialled from here, and dialled again where ZMQ has given it up.

ZMQ dials again by itself where a connection was closed. It gives up for good, silently, where the peer refuses
our key, where the two ends do not agree about CURVE, and where the peer's bytes break ZMQ's protocol.
"""

import errno
import logging
import math
import socket
import time
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

import zmq

from tahq.comm.zmq import monitor
from tahq.comm.zmq.addresses import parse_address
from tahq.comm.zmq.monitor import Monitor, RateLimitedLog, SocketEvent
from tahq.comm.zmq.socket_wait import Socket
from tahq.comm.zmq.sockets import HANDSHAKE_S
from tahq.errors import UserError

if TYPE_CHECKING:
    from tahq.comm.zmq.transport import LinkEnd

_log = logging.getLogger(__name__)
_KINDS = (monitor.CONNECTED, monitor.SUCCEEDED, monitor.DISCONNECTED, monitor.RETRIED, *monitor.FAILURES)
_REDIAL_S = 1.0
_GIVEN_UP_S = 0.5
"""If ZMQ has not begun to dial again this long after a connection was lost, it never will."""
SUSPICIOUS_HANG_UPS = 3


class Outcome(Enum):
    """How a handshake ended."""

    SUCCEEDED = "the peer has let us in"
    REFUSED = "it refuses our key"
    NO_CURVE = "one end uses CURVE and the other does not"
    BROKEN = "it broke ZMQ's protocol"
    HUNG_UP = "it hung up"
    """As a peer does if its public key is not the one that we have."""


_OBSTACLES = {
    Outcome.REFUSED: "the peer refuses this worker's key; do both belong to this run, and to the same start of it?",
    Outcome.NO_CURVE: "one end uses CURVE and the other does not",
    Outcome.BROKEN: "the program that answers there is not a worker of tahq",
    Outcome.HUNG_UP: "the peer hangs up in the handshake; is it another worker, with another key or without CURVE?",
}


class Dialled:
    """A DEALER, not connected yet, which it connects to `address` (host:port); after that used by one thread.

    A ZMQ `endpoint` replaces the address where that is not what the socket connects to.
    """

    def __init__(
        self,
        socket: Socket,
        address: str,
        end: "LinkEnd",
        connection: int = 0,
        clock: Callable[[], float] = time.monotonic,
        endpoint: str = "",
    ) -> None:
        self.socket = socket
        self.address = address
        self.redial_s = math.inf
        """When to call `look` at the latest."""
        self.num_hang_ups = 0
        """Connections that ended at once, in a row: the peer may have another key, be no ZMQ socket, or just start."""
        self.has_succeeded = False
        """Whether a handshake ever has: keys that were right stay right."""
        self._end = end
        self._connection = connection
        self._clock = clock
        self._is_again = False
        """Whether the next connection is not the first."""
        self._connected_s = clock()
        self._is_undecided = False
        self._warnings = RateLimitedLog(_log, clock=clock)
        self._monitor = Monitor(socket, *_KINDS)
        self._endpoint = endpoint or f"tcp://{address}"
        socket.connect(self._endpoint)

    @property
    def events(self) -> Socket:
        """Has input when a handshake has ended."""
        return self._monitor.socket

    def close(self, linger_ms: int = 0) -> None:
        """Release the sockets; messages that they hold have `linger_ms` to leave."""
        self._monitor.close()
        self.socket.close(linger=linger_ms)

    def look(self) -> None:
        """Handle events, and dial again if that is due."""
        for event in self._monitor.take():
            if event.kind in (monitor.CONNECTED, monitor.RETRIED):
                self.redial_s = math.inf  # ZMQ dials by itself
            outcome = self._outcome(event)
            if outcome is Outcome.SUCCEEDED:
                self.redial_s = math.inf
                if self._is_again:
                    self._end.session.reconnected(self._connection)
                self._is_again = True
            elif outcome not in (None, Outcome.HUNG_UP):  # after which ZMQ dials by itself
                self.redial_s = self._clock() + _REDIAL_S
            if outcome is not None:
                self._end.note_outcome(outcome, self)
        if self.redial_s <= self._clock():
            self.redial_s = math.inf
            self._is_again = True
            try:
                self.socket.disconnect(self._endpoint)  # what it had queued is dropped
            except zmq.ZMQError as error:
                if error.errno != errno.ENOENT:
                    raise
            self.socket.connect(self._endpoint)

    def warn_of(self, outcome: Outcome) -> None:
        """Remember, and log, why the peer is not connected; the default for `LinkEnd.note_outcome`."""
        if outcome is Outcome.SUCCEEDED:
            self._end.obstacle = ""
        elif outcome is not Outcome.HUNG_UP or self.num_hang_ups >= SUSPICIOUS_HANG_UPS:
            self._end.obstacle = _OBSTACLES[outcome]
            self._warnings.warning(f"{self._end.spec}: {self._end.obstacle}")

    def _outcome(self, event: SocketEvent) -> Outcome | None:
        if event.kind == monitor.RETRIED:
            return None
        if event.kind == monitor.CONNECTED:
            self._connected_s, self._is_undecided = self._clock(), True
            return None
        # A peer that does not speak ZMQ's protocol at all shows only as a lost connection.
        was_undecided, self._is_undecided = self._is_undecided, False
        if event.kind == monitor.DISCONNECTED:
            self.redial_s = self._clock() + _GIVEN_UP_S
            if not was_undecided:
                return None
            self.num_hang_ups += 1
            return Outcome.BROKEN
        if event.kind == monitor.SUCCEEDED:
            self.num_hang_ups, self.has_succeeded = 0, True
            return Outcome.SUCCEEDED
        if event.kind == monitor.CLOSED:
            # A handshake that ran out of time says nothing about keys.
            if self._clock() - self._connected_s < HANDSHAKE_S / 2:
                self.num_hang_ups += 1
            return Outcome.HUNG_UP
        if event.kind == monitor.REFUSED:
            return Outcome.REFUSED
        if event.value == monitor.OTHER_MECHANISM:
            return Outcome.NO_CURVE
        self.num_hang_ups += 1
        return Outcome.BROKEN


# What listens at an address, by the first bytes that every ZMQ socket sends

_NBYTES = 64
_MECHANISM = slice(12, 32)
_BEGINNING = b"\xff" + bytes(8) + b"\x7f" + b"\x03"
"""A greeting up to the version: makes the other end send its whole greeting, and has nothing it could reject."""


class Listener(Enum):
    """What kind of program answers."""

    CURVE = "a ZMQ socket with CURVE"
    OTHER_ZMQ = "a ZMQ socket without CURVE"
    STRANGER = "another program"
    NOTHING = "nothing"
    """Or a tunnel whose other end reaches nothing."""


def identify_listener(address: str, timeout_s: float = 2.0) -> Listener:
    """Connect to host:port and look at the greeting; takes at most about twice the time."""
    try:
        with socket.create_connection(parse_address(address, "address"), timeout_s) as connection:
            connection.sendall(_BEGINNING)
            said = b""
            while len(said) < _NBYTES and (piece := connection.recv(_NBYTES - len(said))):
                said += piece
    except (OSError, UserError):
        return Listener.NOTHING
    if not said:
        return Listener.NOTHING
    if len(said) < _NBYTES or said[0] != 0xFF or not said[9] & 1:
        return Listener.STRANGER
    return Listener.CURVE if said[_MECHANISM].rstrip(b"\0") == b"CURVE" else Listener.OTHER_ZMQ
