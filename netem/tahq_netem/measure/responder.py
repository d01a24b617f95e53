"""The far end of a measurement: receives TCP streams, echoes and counts datagrams, and reports what arrived when.

TCP and UDP have the same port number. Times are the machine's monotonic clock, which all hosts share, so one end may
subtract the other's time from its own.

    TCP   → header (length of the data, how long to skip)  → the data, or less and a half-close
          ← report (bytes received, time of the last, bytes at the end of the skipped time, when that was)
    UDP   → echo: comes back    → count: is counted under its train    → ask: the train's tally comes back
"""

import socket
import struct
import threading
import time
from dataclasses import dataclass

from tahq_netem.programs import hurry

STREAM_HEADER = struct.Struct("!Qd")
"""Bytes that follow (0: report at once), and seconds from the first of them that do not count as steady."""
STREAM_REPORT = struct.Struct("!QQQQ")
"""Bytes received, when the last came (ns), bytes at the end of the skipped time, when that was (ns)."""
DATAGRAM = struct.Struct("!cQQ")
"""Kind, train or nonce, and the datagram's number in it."""
TALLY = struct.Struct("!cQQ")
"""Kind, train, datagrams of it that have arrived."""
ECHO, COUNT, ASK = b"E", b"C", b"A"

_RECEIVE_BUFFER_BYTES = 8 * 1024 * 1024
_SCRATCH_BYTES = 1024 * 1024
_SO_RCVBUFFORCE = 33  # socket has no name for it


@dataclass(frozen=True, slots=True)
class StreamReport:
    """A stream as the far end saw it; times are its monotonic clock in nanoseconds."""

    num_bytes: int
    last_ns: int
    marked_bytes: int
    marked_ns: int


class Responder:
    """Answers on `address`, in threads, until the process ends."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), backlog=16)
        self.port: int = self._listener.getsockname()[1]
        self._datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        _widen_receive_buffer(self._datagrams)
        self._datagrams.bind((address, self.port))

    def start(self) -> None:
        """Begin to answer."""
        for target in (self._accept, self._answer_datagrams):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _peer = self._listener.accept()
            threading.Thread(target=serve_stream, args=(connection,), daemon=True).start()

    def _answer_datagrams(self) -> None:
        hurry()
        tallies: dict[int, int] = {}
        while True:
            datagram, sender = self._datagrams.recvfrom(2048)
            if len(datagram) < DATAGRAM.size:
                continue
            kind, train, _number = DATAGRAM.unpack_from(datagram)
            if kind == ECHO:
                self._datagrams.sendto(datagram, sender)
            elif kind == COUNT:
                tallies[train] = tallies.get(train, 0) + 1
            elif kind == ASK:
                self._datagrams.sendto(TALLY.pack(ASK, train, tallies.get(train, 0)), sender)


def _widen_receive_buffer(datagrams: socket.socket) -> None:
    """Keep a busy machine from losing datagrams here; only root may exceed the system's limit."""
    try:
        datagrams.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER_BYTES)
    except PermissionError:
        datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)


def serve_stream(connection: socket.socket) -> None:
    """Receive and report one stream after another, until the peer closes."""
    hurry()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while header := _receive_exactly(connection, STREAM_HEADER.size):
                num_bytes, skip_s = STREAM_HEADER.unpack(header)
                report = _swallow(connection, num_bytes, skip_s)
                connection.sendall(
                    STREAM_REPORT.pack(report.num_bytes, report.last_ns, report.marked_bytes, report.marked_ns)
                )
        except ConnectionError:
            return  # the near end gave up, or a fault reset the connection


def receive_report(connection: socket.socket) -> StreamReport:
    """The far end's report, at the near end.

    Raises:
        ConnectionError: the connection ended before it.
    """
    packed = _receive_exactly(connection, STREAM_REPORT.size)
    if not packed:
        raise ConnectionResetError("the measuring connection was closed before the far end had reported")
    return StreamReport(*STREAM_REPORT.unpack(packed))


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """That many bytes, or b"" if the peer closed before."""
    received = b""
    while len(received) < num_bytes:
        piece = connection.recv(num_bytes - len(received))
        if not piece:
            return b""
        received += piece
    return received


def _swallow(connection: socket.socket, num_bytes: int, skip_s: float) -> StreamReport:
    received = marked_bytes = 0
    now_ns = marked_ns = mark_ns = 0
    # MSG_TRUNC has the kernel drop the data instead of copying it, which leaves more time to the network.
    scratch = bytearray(_SCRATCH_BYTES)
    while received < num_bytes:
        piece = connection.recv_into(scratch, min(_SCRATCH_BYTES, num_bytes - received), socket.MSG_TRUNC)
        now_ns = time.monotonic_ns()
        if piece == 0:
            break
        mark_ns = mark_ns or now_ns + int(skip_s * 1e9)
        received += piece
        if marked_ns == 0 and now_ns >= mark_ns:
            marked_bytes, marked_ns = received, now_ns
    return StreamReport(received, now_ns, marked_bytes, marked_ns)
