"""What ZMQ reports of a socket's connections (made, refused in the handshake, lost), and warnings about them."""

import logging
import math
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import zmq

from tahq.comm.zmq.socket_wait import Socket, take_messages

_EVENT = struct.Struct("=HI")

CLOSED: Final = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
PROTOCOL: Final = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
REFUSED: Final = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
SUCCEEDED: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
ACCEPTED: Final = int(zmq.EVENT_ACCEPTED)
CONNECTED: Final = int(zmq.EVENT_CONNECTED)
DISCONNECTED: Final = int(zmq.EVENT_DISCONNECTED)
RETRIED: Final = int(zmq.EVENT_CONNECT_RETRIED)
FAILURES: Final = (CLOSED, PROTOCOL, REFUSED)

OTHER_SERVER_KEY: Final = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)
"""A PROTOCOL event's value: the message could not be decrypted."""
OTHER_MECHANISM: Final = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
"""A PROTOCOL event's value: one end uses CURVE and the other does not."""


class SocketEvent(NamedTuple):
    """The kind of an event, and its value: a descriptor or a reason."""

    kind: int
    value: int


class Monitor:
    """The events of one socket, from before it binds or connects; used by the thread that owns the socket.

    ZMQ's own thread, which serves all connections of a context, waits until each event is taken. So a socket must
    stop reporting before the one that takes its events is closed.
    """

    def __init__(self, socket: Socket, *kinds: int) -> None:
        name = f"inproc://tahq-monitor-{os.urandom(8).hex()}"
        self._watched = socket
        socket.monitor(name, sum(kinds))
        self.socket: Socket = socket.context.socket(zmq.PAIR)
        # Without a limit: else ZMQ's own thread would wait for room, and with it all connections.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(name)

    def take(self) -> Iterator[SocketEvent]:
        """What has happened since the last call, in order."""
        for head, _ in take_messages(self.socket, sys.maxsize):
            yield SocketEvent(*_EVENT.unpack(head.bytes[: _EVENT.size]))

    def close(self) -> None:
        """Take no more events; before the watched socket is closed."""
        self._watched.disable_monitor()
        self.socket.close(linger=0)


class RateLimitedLog:
    """At most one warning every `interval_s`, which says how many were left out: a stranger may cause any number."""

    def __init__(
        self, logger: logging.Logger, interval_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._quiet_until_s = -math.inf
        self._left_out = 0

    def warning(self, message: str) -> bool:
        """Write the message, or count it; returns whether it was written."""
        now_s = self._clock()
        if now_s < self._quiet_until_s:
            self._left_out += 1
            return False
        more = f" ({self._left_out} more like this were left out)" if self._left_out else ""
        self._logger.warning("%s%s", message, more)
        self._quiet_until_s, self._left_out = now_s + self._interval_s, 0
        return True
