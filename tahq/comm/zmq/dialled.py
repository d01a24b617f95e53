"""A connection that is dialled from here, and dialled again where ZMQ has given it up."""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from tahq.comm.zmq.handshakes import Handshakes, Outcome, redial
from tahq.comm.zmq.rate_limited_log import RateLimitedLog
from tahq.comm.zmq.socket_wait import Socket

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
