"""A connection that is dialled from here, and dialled again where ZMQ has given it up."""

import errno
import logging
import socket
import time
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import zmq

from tahq.comm.zmq import monitor
from tahq.comm.zmq.addresses import parse_address
from tahq.comm.zmq.monitor import Event, Monitor
from tahq.comm.zmq.rate_limited_log import RateLimitedLog
from tahq.comm.zmq.socket_wait import Socket
from tahq.comm.zmq.sockets import HANDSHAKE_S
from tahq.errors import UserError

_KINDS = (monitor.CONNECTED, monitor.SUCCEEDED, monitor.DISCONNECTED, *monitor.FAILURES)


class Outcome(Enum):
    """How a handshake ended."""

    SUCCEEDED = "the peer has taken us in"
    REFUSED = "it refuses our key"
    NO_CURVE = "one end uses CURVE and the other does not"
    BROKEN = "it broke ZMQ's protocol"
    HUNG_UP = "it hung up"
    """Which is what a peer does whose public key is not the one that we were given."""


class Handshakes:
    """Those of one DEALER; used by the thread that owns it, made before it connects."""

    def __init__(self, dealer: Socket, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._monitor = Monitor(dealer, *_KINDS)
        self._connected_s = clock()
        self._is_undecided = False
        self.num_hang_ups = 0
        """Connections that ended at once, in a row: the peer may have another key, be no ZMQ socket, or just start."""
        self.has_succeeded = False
        """Whether one ever has: keys that were right stay right."""

    @property
    def socket(self) -> Socket:
        """Has input when one has ended."""
        return self._monitor.socket

    def take(self) -> list[Outcome]:
        """How those ended that have since the last call."""
        outcomes = [self._outcome(event) for event in self._monitor.take()]
        return [outcome for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        """Look no more."""
        self._monitor.close()

    def _outcome(self, event: Event) -> Outcome | None:
        if event.kind == monitor.CONNECTED:
            self._connected_s, self._is_undecided = self._clock(), True
            return None
        # Of who does not even begin as ZMQ does, all that is told is that the connection is gone.
        was_undecided, self._is_undecided = self._is_undecided, False
        if event.kind == monitor.DISCONNECTED:
            return self._count(Outcome.BROKEN) if was_undecided else None
        if event.kind == monitor.SUCCEEDED:
            self.num_hang_ups, self.has_succeeded = 0, True
            return Outcome.SUCCEEDED
        if event.kind == monitor.CLOSED:
            # One that took its time has run out of it, which says nothing about keys.
            is_prompt = self._clock() - self._connected_s < HANDSHAKE_S / 2
            return self._count(Outcome.HUNG_UP) if is_prompt else Outcome.HUNG_UP
        if event.kind == monitor.REFUSED:
            return Outcome.REFUSED
        return Outcome.NO_CURVE if event.value == monitor.OTHER_MECHANISM else self._count(Outcome.BROKEN)

    def _count(self, outcome: Outcome) -> Outcome:
        self.num_hang_ups += 1
        return outcome


def redial(dealer: Socket, endpoint: str) -> None:
    """Connect anew a DEALER that ZMQ has given up, or that it has not; what it had queued is dropped."""
    try:
        dealer.disconnect(endpoint)
    except zmq.ZMQError as error:
        if error.errno != errno.ENOENT:
            raise
    dealer.connect(endpoint)


_log = logging.getLogger(__name__)
_REDIAL_S = 1.0
_SUSPICIOUS_HANG_UPS = 3
_OBSTACLES = {
    Outcome.REFUSED: "the peer does not take this worker's key; are both of this run, and of this start of it?",
    Outcome.NO_CURVE: "one end uses CURVE and the other does not",
    Outcome.BROKEN: "what answers there is no worker of tahq",
    Outcome.HUNG_UP: "the peer hangs up in the handshake; is it another worker, with another key or without CURVE?",
}


class Dialling(Protocol):
    """What somebody is dialled for."""

    obstacle: str
    """Why it is not connected, as far as that is known."""

    @property
    def spec(self) -> object:
        """What messages call it."""

    def reconnected(self, connection: int) -> None:
        """Another connection has taken the place of one that was lost."""


class Dialled:
    """A DEALER, which it connects; after that used by one thread.

    Args:
        socket: set up, and not connected yet.
        endpoint: what to connect it to.
        end: what it is for; told why it is not connected, and when it is again.
        connection: which one of a link's.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        socket: Socket,
        endpoint: str,
        end: Dialling,
        connection: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.socket = socket
        self.redial_s: float | None = None
        """When to call `look` at the latest."""
        self._endpoint = endpoint
        self._end = end
        self._connection = connection
        self._is_again = False
        """Whether the next connection is not the first."""
        self._clock = clock
        self._handshakes = Handshakes(socket, clock)
        self._warnings = RateLimitedLog(_log, clock=clock)
        socket.connect(endpoint)

    @property
    def events(self) -> Socket:
        """Has input when a handshake has ended."""
        return self._handshakes.socket

    @property
    def obstacle(self) -> str:
        """Why it is not connected, as far as that is known; "": it is, or nothing is."""
        return self._end.obstacle

    def close(self) -> None:
        """Release the sockets; what they hold is dropped."""
        self._handshakes.close()
        self.socket.close(linger=0)

    def look(self) -> None:
        """See how it stands, and dial again if that is due."""
        for outcome in self._handshakes.take():
            self._note(outcome)
        if self.redial_s is not None and self.redial_s <= self._clock():
            self.redial_s = None
            self._is_again = True
            redial(self.socket, self._endpoint)

    def _note(self, outcome: Outcome) -> None:
        if outcome is Outcome.SUCCEEDED:
            self._end.obstacle = ""
            if self._is_again:
                self._end.reconnected(self._connection)
            self._is_again = True
            return
        if outcome is not Outcome.HUNG_UP:  # after which ZMQ dials by itself
            self.redial_s = self._clock() + _REDIAL_S
        elif self._handshakes.num_hang_ups < _SUSPICIOUS_HANG_UPS:
            return
        self._end.obstacle = _OBSTACLES[outcome]
        self._warnings.warning(f"{self._end.spec}: {self._end.obstacle}")


_NBYTES = 64
_MECHANISM = slice(12, 32)
_BEGINNING = b"\xff" + bytes(8) + b"\x7f" + b"\x03"
"""Of a greeting, up to the version: enough for the other end to say all of its own, and nothing to disagree with."""


class Listener(Enum):
    """Who answers."""

    CURVE = "a ZMQ socket with CURVE"
    OTHER_ZMQ = "a ZMQ socket without CURVE"
    STRANGER = "another program"
    NOBODY = "nobody"
    """Or a tunnel whose other end reaches nobody."""


def who_listens(address: str, timeout_s: float = 2.0) -> Listener:
    """Connect to host:port and see how it introduces itself; takes at most about twice the time."""
    try:
        with socket.create_connection(parse_address(address, "address"), timeout_s) as connection:
            connection.sendall(_BEGINNING)
            said = b""
            while len(said) < _NBYTES and (piece := connection.recv(_NBYTES - len(said))):
                said += piece
    except (OSError, UserError):
        return Listener.NOBODY
    if not said:
        return Listener.NOBODY
    if len(said) < _NBYTES or said[0] != 0xFF or not said[9] & 1:
        return Listener.STRANGER
    return Listener.CURVE if said[_MECHANISM].rstrip(b"\0") == b"CURVE" else Listener.OTHER_ZMQ
