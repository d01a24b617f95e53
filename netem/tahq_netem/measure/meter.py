"""Both ends of a measurement: the far end is a `Responder`, and functions at the near end send to it.

A measurement takes place on the host whose namespace the calling thread has entered. Results are raw durations and
counts; `figures` judges them. TCP and UDP have the same port number. Times are the machine's monotonic clock, which
all hosts share, so one end may subtract the other's time from its own.

    TCP   → header (length of the data, how long to skip)  → the data, or less and a half-close
          ← report (bytes received, time of the last, bytes at the end of the skipped time, when that was)
    UDP   → echo: comes back    → count: is counted under its train    → ask: the train's tally comes back
"""

import os
import random
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tahq.plan.measure.meter_wire import receive_exactly
from tahq_netem.programs import hurry, hurrying

Target = tuple[str, int]
"""Address and port of a responder."""
DATAGRAM_BYTES: Final = 64
"""Length of the datagrams that are echoed or counted."""

_STREAM_HEADER = struct.Struct("!Qd")
"""Bytes that follow (0: report at once), and seconds from the first of them that do not count as steady."""
_STREAM_REPORT = struct.Struct("!QQQQ")
"""Bytes received, time of the last in ns, bytes at the end of the skipped time, when that was (0: ended before)."""
_DATAGRAM = struct.Struct("!cQQ")
"""Kind, train or nonce, and the datagram's number in it; in the answer to `_ASK`, how many have arrived."""
_ECHO, _COUNT, _ASK = b"E", b"C", b"A"

_BLOCK_BYTES: Final = 1024 * 1024
_RECEIVE_BUFFER_BYTES: Final = 8 * 1024 * 1024
_UNSENT_BYTES: Final = 256 * 1024
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE, _TCP_NOTSENT_LOWAT = 32, 33, 25  # socket has no names for these
_ASK_ATTEMPTS: Final = 20
_WAKER_INTERVAL_S: Final = 5e-4
_WAKER_WAIT_S: Final = 0.05
_PATIENCE_S: Final = 20.0
"""For data still under way when the time of a measurement is over."""


class Responder:
    """Answers on `address` of the calling thread's namespace, in threads, until it is closed."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), backlog=16)
        self.port: int = self._listener.getsockname()[1]
        self._datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        # Keeps a busy machine from losing datagrams here; only root may exceed the system's limit.
        with suppress(PermissionError):
            self._datagrams.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER_BYTES)
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
            if len(datagram) < _DATAGRAM.size:
                continue
            kind, train, _number = _DATAGRAM.unpack_from(datagram)
            if kind == _ECHO:
                self._datagrams.sendto(datagram, sender)
            elif kind == _COUNT:
                tallies[train] = tallies.get(train, 0) + 1
            elif kind == _ASK:
                self._datagrams.sendto(_DATAGRAM.pack(_ASK, train, tallies.get(train, 0)), sender)


def _serve_streams(connection: socket.socket) -> None:
    """Receive and report one stream after another, until the peer closes or a fault resets the connection."""
    hurry()
    with connection, suppress(ConnectionError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while header := receive_exactly(connection, _STREAM_HEADER.size):
            connection.sendall(_swallow(connection, *_STREAM_HEADER.unpack(header)))


def _swallow(connection: socket.socket, num_bytes: int, skip_s: float) -> bytes:
    """Receive a stream; return the report."""
    received = marked_bytes = 0
    now_ns = marked_ns = mark_ns = 0
    # MSG_TRUNC has the kernel drop the data instead of copying it, which leaves more time to the network.
    scratch = bytearray(_BLOCK_BYTES)
    while received < num_bytes:
        piece = connection.recv_into(scratch, min(_BLOCK_BYTES, num_bytes - received), socket.MSG_TRUNC)
        now_ns = time.monotonic_ns()
        if piece == 0:
            break
        mark_ns = mark_ns or now_ns + int(skip_s * 1e9)
        received += piece
        if marked_ns == 0 and now_ns >= mark_ns:
            marked_bytes, marked_ns = received, now_ns
    return _STREAM_REPORT.pack(received, now_ns, marked_bytes, marked_ns)


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """A stream as both ends saw it.

    `total_s` lasts from the first byte's sending to the last byte's arrival; the steady figures count bytes that
    arrived after the skipped time.
    """

    num_bytes: int
    total_s: float
    steady_bytes: int
    steady_s: float
    congestion_control: str


def round_trips(target: Target, count: int, interval_s: float, wait_s: float) -> list[float]:
    """Round trip of each of `count` datagrams, in seconds; lost datagrams are missing.

    One is sent every `interval_s`, whether or not an answer has come; the answer to the last is awaited for `wait_s`.
    """
    nonce = random.SystemRandom().getrandbits(63)
    sent_ns: list[int] = []
    trips_s: dict[int, float] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams, hurrying():

        def collect(until_ns: int) -> None:
            """Note the answers until then, or until all are back."""
            while len(trips_s) < count and (left_ns := until_ns - time.monotonic_ns()) > 0:
                if not select.select([datagrams], [], [], left_ns / 1e9)[0]:
                    return
                received_ns = time.monotonic_ns()
                _kind, answered, number = _DATAGRAM.unpack_from(datagrams.recv(2048))
                if answered == nonce:
                    trips_s.setdefault(number, (received_ns - sent_ns[number]) / 1e9)

        datagrams.connect(target)
        start_ns = time.monotonic_ns()
        for number in range(count):
            collect(start_ns + int(number * interval_s * 1e9))
            sent_ns.append(time.monotonic_ns())
            datagrams.send(_DATAGRAM.pack(_ECHO, nonce, number).ljust(DATAGRAM_BYTES, b"\0"))
        collect(time.monotonic_ns() + int(wait_s * 1e9))
    return list(trips_s.values())


def message(target: Target, num_bytes: int, idle_s: float, timeout_s: float, num_wakers: int) -> StreamFigures:
    """Send one message on a connection that was idle, as between the messages of a slow pipeline.

    A machine that sleeps for a second takes up to a millisecond to wake up, which at 1 Gbit/s is a tenth of a message
    of 1 MB. So at the end of the idle time `num_wakers` datagrams are echoed. After `timeout_s` the message is cut off,
    and the figures count the bytes that did arrive.
    """
    with _connect(target, timeout_s) as connection:
        # Room for the whole message, so that none of it waits for this program to wake up. Only root may set any
        # length. SO_SNDBUF would keep TCP from widening the buffer by itself.
        with suppress(PermissionError):
            connection.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 4 * num_bytes)
        time.sleep(idle_s)
        with hurrying():
            round_trips(target, num_wakers, _WAKER_INTERVAL_S, _WAKER_WAIT_S)
            return _stream(connection, num_bytes, skip_s=0.0, timeout_s=timeout_s)


def steady(target: Target, max_bytes: int, skip_s: float, duration_s: float) -> StreamFigures:
    """Send for `duration_s`, or `max_bytes`; the steady figures leave out the first `skip_s`."""
    with _connect(target, duration_s) as connection:
        # Unsent data in the socket's buffer would still have to drain when the time is over.
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        return _stream(connection, max_bytes, skip_s, duration_s)


def _connect(target: Target, timeout_s: float) -> socket.socket:
    connection = socket.create_connection(target, timeout=timeout_s + _PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _stream(connection: socket.socket, num_bytes: int, skip_s: float, timeout_s: float) -> StreamFigures:
    start_ns = time.monotonic_ns()
    # MSG_MORE: a separate packet would be one more to wait for.
    connection.sendall(_STREAM_HEADER.pack(num_bytes, skip_s), socket.MSG_MORE)
    if _send_zeros(connection, num_bytes, start_ns + int(timeout_s * 1e9)) < num_bytes:
        connection.shutdown(socket.SHUT_WR)
    connection.settimeout(timeout_s + _PATIENCE_S)
    report = receive_exactly(connection, _STREAM_REPORT.size)
    if not report:
        raise ConnectionResetError("the measuring connection was closed before the far end had reported")
    received, last_ns, marked_bytes, marked_ns = _STREAM_REPORT.unpack(report)
    control = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return StreamFigures(
        num_bytes=received,
        total_s=max(0, last_ns - start_ns) / 1e9,
        steady_bytes=received - marked_bytes if marked_ns else 0,
        steady_s=(last_ns - marked_ns) / 1e9 if marked_ns else 0.0,
        congestion_control=control.split(b"\0")[0].decode(),
    )


def _send_zeros(connection: socket.socket, num_bytes: int, deadline_ns: int) -> int:
    """Send until done or late, without copying: a copy would take time from the network."""
    block = os.memfd_create("tahq-netem-zeros", os.MFD_CLOEXEC)
    sent = 0
    try:
        os.ftruncate(block, _BLOCK_BYTES)
        while sent < num_bytes and (left_ns := deadline_ns - time.monotonic_ns()) > 0:
            if select.select([], [connection], [], left_ns / 1e9)[1]:
                sent += os.sendfile(connection.fileno(), block, 0, min(_BLOCK_BYTES, num_bytes - sent))
    finally:
        os.close(block)
    return sent


def count_datagrams(target: Target, count: int, datagrams_per_s: float, wait_s: float) -> int:
    """Send a train of datagrams and return how many arrive.

    `datagrams_per_s` is to be low enough that no queue fills and drops some. The tally is asked for after `wait_s`, the
    longest round trip, and again until an answer arrives.
    """
    train = random.SystemRandom().getrandbits(63)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.connect(target)
        start_s = time.monotonic()
        for number in range(count):
            time.sleep(max(0.0, start_s + number / datagrams_per_s - time.monotonic()))
            datagrams.send(_DATAGRAM.pack(_COUNT, train, number).ljust(DATAGRAM_BYTES, b"\0"))
        time.sleep(wait_s)
        for _ in range(_ASK_ATTEMPTS):
            datagrams.send(_DATAGRAM.pack(_ASK, train, 0))
            if select.select([datagrams], [], [], wait_s)[0]:
                _kind, answered, tally = _DATAGRAM.unpack_from(datagrams.recv(2048))
                if answered == train:
                    return int(tally)
    raise TimeoutError(f"no answer to {_ASK_ATTEMPTS} requests for the number of datagrams that had arrived")
