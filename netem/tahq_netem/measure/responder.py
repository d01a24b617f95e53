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
from contextlib import suppress
from dataclasses import astuple, dataclass

from tahq_netem.programs import hurry

STREAM_HEADER = struct.Struct("!Qd")
"""Bytes that follow (0: report at once), and seconds from the first of them that do not count as steady."""
STREAM_REPORT = struct.Struct("!QQQQ")
"""The fields of `StreamReport`."""
DATAGRAM = struct.Struct("!cQQ")
"""Kind, train or nonce, and the datagram's number in it; in the answer to `ASK`, how many have arrived."""
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
    """Bytes at the end of the skipped time."""
    marked_ns: int
    """When that was; 0: the stream had ended before."""


class Responder:
    """Answers on `address` of the calling thread's namespace, in threads, until it is closed."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), backlog=16)
        self.port: int = self._listener.getsockname()[1]
        self._datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        # Keeps a busy machine from losing datagrams here; only root may exceed the system's limit.
        try:
            self._datagrams.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER_BYTES)
        except PermissionError:
            self._datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self._datagrams.bind((address, self.port))
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._accept, self._answer_datagrams)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop answering."""
        for each in (self._listener, self._datagrams):
            with suppress(OSError):  # an unconnected socket says so, but wakes its thread up
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        self._datagrams.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _peer = self._listener.accept()
                threading.Thread(target=_serve_streams, args=(connection,), daemon=True).start()

    def _answer_datagrams(self) -> None:
        hurry()
        tallies: dict[int, int] = {}
        while True:
            datagram, sender = self._datagrams.recvfrom(2048)
            if sender is None:
                return  # closed
            if len(datagram) < DATAGRAM.size:
                continue
            kind, train, _number = DATAGRAM.unpack_from(datagram)
            if kind == ECHO:
                self._datagrams.sendto(datagram, sender)
            elif kind == COUNT:
                tallies[train] = tallies.get(train, 0) + 1
            elif kind == ASK:
                self._datagrams.sendto(DATAGRAM.pack(ASK, train, tallies.get(train, 0)), sender)


def _serve_streams(connection: socket.socket) -> None:
    """Receive and report one stream after another, until the peer closes or a fault resets the connection."""
    hurry()
    with connection, suppress(ConnectionError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while header := _receive_exactly(connection, STREAM_HEADER.size):
            report = _swallow(connection, *STREAM_HEADER.unpack(header))
            connection.sendall(STREAM_REPORT.pack(*astuple(report)))


def receive_report(connection: socket.socket) -> StreamReport:
    """The far end's report, at the near end."""
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
