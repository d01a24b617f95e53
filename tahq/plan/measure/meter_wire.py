"""What the two ends of a measuring connection say to each other; docs/protocol.md has the bytes.

One end dials and asks, the other answers. Either may be the one that sends the stream. The receiving end decides when
enough has come, and says so; the sender then closes its direction, and the receiver swallows what was still under
way, so that the path is empty for what is measured next.
"""

import contextlib
import math
import os
import select
import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

from tahq.errors import RemoteProtocolError
from tahq.plan.measure.settling import Settling

GREETING = struct.Struct("<4sBQII")
"""Magic, version, run, the stage that dials, the stage that it means."""
REQUEST = struct.Struct("<Bddd")
"""Kind, then seconds: of a window, least and most of the stream."""
REPORT = struct.Struct("<dQd")
"""Bits a second, bytes, seconds: what the receiver saw."""
MAGIC, VERSION = b"TAHM", 1

LONGEST_S = 60.0
"""Of a stream: who asks for more is refused."""
STALL_S = 10.0
"""A peer that is silent for so long, or a stream that stands still, is given up."""

_BLOCK_NBYTES = 256 * 1024
_SCRATCH_NBYTES = 1024 * 1024
_UNSENT_NBYTES = 256 * 1024
_TCP_NOTSENT_LOWAT = 25  # socket has no name for it everywhere


class Kind(IntEnum):
    """What the end that dialled asks for."""

    ECHO = 0
    """One byte back."""
    TAKE = 1
    """Receive a stream from me."""
    GIVE = 2
    """Send me a stream."""


class Verdict(IntEnum):
    """The answer to a greeting: one byte."""

    WELCOME = 1
    OTHER_RUN = 2
    OTHER_STAGE = 3
    BUSY = 4


REASONS = {
    Verdict.OTHER_RUN: "a worker of another run answers there",
    Verdict.OTHER_STAGE: "the worker of another stage answers there; do two hosts advertise one address?",
    Verdict.BUSY: "it answers too many others",
}


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for, parsed."""

    kind: Kind
    window_s: float = 0.0
    least_s: float = 0.0
    most_s: float = 0.0

    def pack(self) -> bytes:
        """Its bytes."""
        return REQUEST.pack(self.kind, self.window_s, self.least_s, self.most_s)

    @classmethod
    def unpack(cls, data: bytes, peer: str) -> "Request":
        """The request in these bytes; RemoteProtocolError if they are none."""
        kind, *times_s = REQUEST.unpack(data)
        if kind not in list(Kind) or not all(0 <= time_s <= LONGEST_S for time_s in times_s):
            raise RemoteProtocolError(f"{peer}: asked for a measurement that there is not: {kind}, {times_s}")
        return cls(Kind(kind), *times_s)

    def settling(self) -> Settling:
        """What judges the stream that is asked for."""
        return Settling(self.window_s, self.least_s, self.most_s)


def receive_exactly(connection: socket.socket, nbytes: int) -> bytes:
    """So many bytes, or none if the peer closes before them."""
    received = b""
    while len(received) < nbytes:
        piece = connection.recv(nbytes - len(received))
        if not piece:
            return b""
        received += piece
    return received


def tune(connection: socket.socket) -> None:
    """Small messages at once; little unsent in the socket, which would have to drain when the stream is over."""
    connection.settimeout(STALL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # it only saves time
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_NBYTES)


def receive_stream(connection: socket.socket, settling: Settling) -> float:
    """Swallow a stream until its rate has settled, tell the sender, and swallow the rest of it.

    Returns:
        Bits a second.

    Raises:
        OSError: the stream stood still (TimeoutError), or ended before its time (ConnectionError).
    """
    scratch = bytearray(_SCRATCH_NBYTES)
    while not settling.is_over:
        piece = connection.recv_into(scratch)
        if piece == 0:
            raise ConnectionError("the stream ended before its rate had settled")
        settling.add(time.monotonic(), piece)
    rate = settling.rate_bits_per_s
    connection.sendall(REPORT.pack(rate, settling.nbytes, settling.lasted_s))
    while connection.recv_into(scratch):
        pass
    return rate


def send_stream(connection: socket.socket, most_s: float, peer: str) -> float:
    """Send until the receiver says that it has seen enough, and then until it has got all.

    Returns:
        Bits a second, as the receiver saw them.

    Raises:
        OSError: the receiver takes nothing, or has gone.
        RemoteProtocolError: what it says is no report.
    """
    block, deadline_s = _block(), time.monotonic() + most_s + 2 * STALL_S
    while True:
        readable, writable, _ = select.select([connection], [connection], [], STALL_S)
        if readable:
            break
        if not writable or time.monotonic() > deadline_s:
            raise TimeoutError("nothing more is taken there")
        with contextlib.suppress(BlockingIOError):
            connection.send(block, socket.MSG_DONTWAIT)
    rate = _reported(receive_exactly(connection, REPORT.size), peer)
    connection.shutdown(socket.SHUT_WR)
    receive_exactly(connection, 1)
    return rate


def _reported(data: bytes, peer: str) -> float:
    if len(data) != REPORT.size:
        raise ConnectionError("the connection was closed before the far end had reported")
    rate, _, _ = REPORT.unpack(data)
    if not 0 <= rate < math.inf:
        raise RemoteProtocolError(f"{peer}: reported a rate of {rate} bit/s")
    return float(rate)


@cache
def _block() -> memoryview:
    """What is sent: random, so that nothing on the way packs it."""
    return memoryview(os.urandom(_BLOCK_NBYTES))
