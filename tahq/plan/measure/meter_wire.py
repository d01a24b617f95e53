"""The two ends' side of a measuring connection: its messages and its streams; docs/dev/protocol.md has the bytes.

One end dials and asks, the other answers. Either may send the stream. The receiving end decides when it has enough,
and reports; the sender then closes its direction, and the receiver discards what is still under way, so that the path
is empty for the next measurement.
"""

import contextlib
import math
import os
import select
import socket
import statistics
import struct
import time
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import NamedTuple

from tahq.errors import RemoteProtocolError

GREETING = struct.Struct("<4sBQII")
"""Magic, version, run, the stage that dials, the stage that it means."""
REQUEST = struct.Struct("<Bddd")
"""Kind, then seconds: of a window, least and most of the stream."""
REPORT = struct.Struct("<dQd")
"""Bits per second, bytes, seconds, as the receiver saw them."""
MAGIC, VERSION = b"TAHM", 1

LONGEST_S = 60.0
"""Longest stream; a request for more is refused."""
STALL_S = 10.0
"""Give up a silent peer, or a stalled stream, after this long."""
WINDOW_S = 0.1
"""Shortest window; a window is at least a round trip long, since TCP sends in bursts of that distance."""

_BLOCK_NBYTES = 256 * 1024
_SCRATCH_NBYTES = 1024 * 1024
_UNSENT_NBYTES = 256 * 1024
_TCP_NOTSENT_LOWAT = 25  # socket has no name for it everywhere
_SPAN = 4
_GROWTH = 1.05
_WINDOW_NBYTES = 64 * 1024
_LONGEST_WINDOW_S = 1.0


class Kind(IntEnum):
    """The request of the end that dialled: echo a byte, receive a stream from me, send me a stream."""

    ECHO = 0
    TAKE = 1
    GIVE = 2


class Welcome(IntEnum):
    """The answer to a greeting: one byte."""

    WELCOME = 1
    OTHER_RUN = 2
    OTHER_STAGE = 3
    BUSY = 4


class MeterRequest(NamedTuple):
    """A request, with seconds of a window, and the least and most of the stream."""

    kind: Kind
    window_s: float = 0.0
    least_s: float = 0.0
    most_s: float = 0.0

    @classmethod
    def unpack(cls, data: bytes, peer: str) -> "MeterRequest":
        """The request in these bytes; RemoteProtocolError if they are malformed."""
        kind, *times_s = REQUEST.unpack(data)
        if kind not in list(Kind) or not all(0 <= time_s <= LONGEST_S for time_s in times_s):
            raise RemoteProtocolError(
                f"{peer}: asked for an unknown measurement: kind {kind}, times {times_s}; expected a kind of 0 to 2 "
                f"and at most {LONGEST_S:g} s"
            )
        return cls(Kind(kind), *times_s)


@dataclass(slots=True)
class Settling:
    """The rate of a stream of bytes, and whether it has settled. Pure: times are arguments.

    Arrivals are gathered into windows. The rate has settled when the median of the newest windows is hardly above that
    of the windows before them: TCP's slow start is over then.

    Attributes:
        window_s: least length of a window. It goes on until it holds 64 KiB, at 5 Mbit/s and less for a second at
            most, so that a packet more or less does not count.
        least_s: shortest time to look, from the first arrival on.
        most_s: longest time, settled or not.
        nbytes: all bytes that have arrived.
        lasted_s: from the first arrival to the newest.
    """

    window_s: float
    least_s: float
    most_s: float
    nbytes: int = 0
    lasted_s: float = 0.0
    _rates: list[float] = field(default_factory=list)
    _begun_s: float | None = None
    _window_from_s: float = 0.0
    _window_nbytes: int = 0

    def add(self, now_s: float, nbytes: int) -> None:
        """Bytes have arrived now."""
        self.nbytes += nbytes
        if self._begun_s is None:
            # these came over an unknown time before now
            self._begun_s = self._window_from_s = now_s
            return
        self.lasted_s = now_s - self._begun_s
        self._window_nbytes += nbytes
        lasted_s, shortest_s = now_s - self._window_from_s, max(self.window_s, WINDOW_S)
        is_full = lasted_s >= shortest_s and self._window_nbytes >= _WINDOW_NBYTES
        if is_full or lasted_s >= max(_LONGEST_WINDOW_S, shortest_s):
            self._rates.append(8 * self._window_nbytes / lasted_s)
            self._window_from_s, self._window_nbytes = now_s, 0

    @property
    def is_over(self) -> bool:
        """Whether the stream may end: it has settled, or taken its time."""
        if self.lasted_s >= self.most_s:
            return True
        newest, before = self._rates[-_SPAN:], self._rates[-2 * _SPAN : -_SPAN]
        if self.lasted_s < self.least_s or len(before) < _SPAN:
            return False
        return statistics.median(newest) <= _GROWTH * statistics.median(before)

    @property
    def rate_bits_per_s(self) -> float:
        """Median of the newest windows, or the mean if no window is full; 0.0 if hardly anything came."""
        if self._rates:
            return statistics.median(self._rates[-2 * _SPAN :])
        return 8 * self._window_nbytes / self.lasted_s if self.lasted_s > 0 else 0.0


def receive_exactly(connection: socket.socket, nbytes: int) -> bytes:
    """This many bytes, or none if the peer closes before them."""
    received = b""
    while len(received) < nbytes and (piece := connection.recv(nbytes - len(received))):
        received += piece
    return received if len(received) == nbytes else b""


def tune(connection: socket.socket) -> None:
    """Send small messages at once, and keep little unsent in the socket, which would have to drain after a stream."""
    connection.settimeout(STALL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # it only saves time
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_NBYTES)


def receive_stream(connection: socket.socket, request: MeterRequest) -> float:
    """Receive a stream until its rate has settled, report to the sender, and discard the rest of it.

    Returns bits per second. OSError: the stream stalled (TimeoutError), or ended too early (ConnectionError).
    """
    settling = Settling(request.window_s, request.least_s, request.most_s)
    scratch = bytearray(_SCRATCH_NBYTES)
    while not settling.is_over:
        nbytes = connection.recv_into(scratch)
        if nbytes == 0:
            raise ConnectionError("the stream ended before its rate had settled")
        settling.add(time.monotonic(), nbytes)
    rate = settling.rate_bits_per_s
    connection.sendall(REPORT.pack(rate, settling.nbytes, settling.lasted_s))
    while connection.recv_into(scratch):
        pass
    return rate


def send_stream(connection: socket.socket, most_s: float, peer: str) -> float:
    """Send until the receiver reports, and wait until it has received everything.

    Returns bits per second, as the receiver saw them. OSError: the receiver has stopped reading, or has gone.
    RemoteProtocolError: its report is malformed.
    """
    block, deadline_s = _random_block(), time.monotonic() + most_s + 2 * STALL_S
    while True:
        readable, writable, _ = select.select([connection], [connection], [], STALL_S)
        if readable:
            break
        if not writable or time.monotonic() > deadline_s:
            raise TimeoutError("the receiver has stopped reading")
        with contextlib.suppress(BlockingIOError):
            connection.send(block, socket.MSG_DONTWAIT)
    data = receive_exactly(connection, REPORT.size)
    if not data:
        raise ConnectionError("the connection was closed before the far end had reported")
    rate, _, _ = REPORT.unpack(data)
    if not 0 <= rate < math.inf:
        raise RemoteProtocolError(f"{peer}: reported a rate of {rate} bit/s; expected a finite positive number")
    connection.shutdown(socket.SHUT_WR)
    receive_exactly(connection, 1)
    return float(rate)


@cache
def _random_block() -> memoryview:
    """Random, so that nothing on the path can compress it."""
    return memoryview(os.urandom(_BLOCK_NBYTES))
