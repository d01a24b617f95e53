"""How the handshakes of a DEALER end, so that a wrong key does not look like a network that is down.

ZMQ dials again by itself where a connection was closed. It gives up for good, without a word, where the peer has said
no or the two ends do not agree about CURVE.
"""

import errno
import time
from collections.abc import Callable
from enum import Enum

import zmq

from tahq.comm.zmq import monitor
from tahq.comm.zmq.curve import HANDSHAKE_S
from tahq.comm.zmq.monitor import Event, Monitor
from tahq.comm.zmq.socket_wait import Socket

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
