"""The near end of a measurement: sends to a `Responder` and times what arrives.

A measurement takes place on the host whose namespace the calling thread has entered. Results are raw durations and
counts; `path_measurements` judges them.
"""

import os
import random
import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from tahq_netem.measure.responder import ASK, COUNT, DATAGRAM, ECHO, STREAM_HEADER, receive_report
from tahq_netem.programs import hurrying

Target = tuple[str, int]
"""Address and port of a responder."""

ECHO_BYTES: Final = 64
COUNTED_BYTES: Final = 64
"""Length of the datagrams that are echoed, and of those that are counted."""

_BLOCK_BYTES: Final = 1024 * 1024
_UNSENT_BYTES: Final = 256 * 1024
_SO_SNDBUFFORCE: Final = 32  # socket has no names for these
_TCP_NOTSENT_LOWAT: Final = 25
_ASK_ATTEMPTS: Final = 20
_WAKER_INTERVAL_S: Final = 5e-4
_WAKER_WAIT_S: Final = 0.05
_PATIENCE_S: Final = 20.0
"""For data still under way when the time of a measurement is over."""


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


@dataclass(slots=True)
class _EchoTrain:
    """Datagrams under way to the responder and back."""

    datagrams: socket.socket
    length: int
    nonce: int = field(default_factory=lambda: random.SystemRandom().getrandbits(63))
    sent_ns: list[int] = field(default_factory=list)
    trips_s: dict[int, float] = field(default_factory=dict)

    def send(self) -> None:
        self.sent_ns.append(time.monotonic_ns())
        self.datagrams.send(DATAGRAM.pack(ECHO, self.nonce, len(self.sent_ns) - 1).ljust(ECHO_BYTES, b"\0"))

    def collect(self, until_ns: int) -> None:
        """Note the answers until then, or until all are back."""
        while len(self.trips_s) < self.length and (left_ns := until_ns - time.monotonic_ns()) > 0:
            if not select.select([self.datagrams], [], [], left_ns / 1e9)[0]:
                return
            received_ns = time.monotonic_ns()
            _kind, nonce, number = DATAGRAM.unpack_from(self.datagrams.recv(2048))
            if nonce == self.nonce:
                self.trips_s.setdefault(number, (received_ns - self.sent_ns[number]) / 1e9)


def round_trips(target: Target, count: int, interval_s: float, wait_s: float) -> list[float]:
    """Round trip of each of `count` datagrams, in seconds; lost datagrams are missing.

    One is sent every `interval_s`, whether or not an answer has come; the answer to the last is awaited for `wait_s`.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams, hurrying():
        datagrams.connect(target)
        train = _EchoTrain(datagrams, count)
        start_ns = time.monotonic_ns()
        for number in range(count):
            train.collect(start_ns + int(number * interval_s * 1e9))
            train.send()
        train.collect(time.monotonic_ns() + int(wait_s * 1e9))
    return list(train.trips_s.values())


def message(target: Target, num_bytes: int, idle_s: float, timeout_s: float, num_wakers: int) -> StreamFigures:
    """Send one message on a connection that was idle, as between the messages of a slow pipeline.

    A machine that sleeps for a second takes up to a millisecond to wake up, which at 1 Gbit/s is a tenth of a message
    of 1 MB. So at the end of the idle time `num_wakers` datagrams are echoed. After `timeout_s` the message is cut off,
    and the figures count the bytes that did arrive.
    """
    with _connect(target, timeout_s) as connection:
        _widen_send_buffer(connection, 4 * num_bytes)
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


def _widen_send_buffer(connection: socket.socket, num_bytes: int) -> None:
    """Make room for a whole message, so that none of it waits for this program to wake up."""
    # Only root may set any length. SO_SNDBUF would keep TCP from widening the buffer by itself.
    with suppress(PermissionError):
        connection.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, num_bytes)


def _stream(connection: socket.socket, num_bytes: int, skip_s: float, timeout_s: float) -> StreamFigures:
    start_ns = time.monotonic_ns()
    # MSG_MORE: a separate packet would be one more to wait for.
    connection.sendall(STREAM_HEADER.pack(num_bytes, skip_s), socket.MSG_MORE)
    if _send_zeros(connection, num_bytes, start_ns + int(timeout_s * 1e9)) < num_bytes:
        connection.shutdown(socket.SHUT_WR)
    connection.settimeout(timeout_s + _PATIENCE_S)
    report = receive_report(connection)
    control = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    is_marked = report.marked_ns > 0
    return StreamFigures(
        num_bytes=report.num_bytes,
        total_s=max(0, report.last_ns - start_ns) / 1e9,
        steady_bytes=report.num_bytes - report.marked_bytes if is_marked else 0,
        steady_s=(report.last_ns - report.marked_ns) / 1e9 if is_marked else 0.0,
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
            datagrams.send(DATAGRAM.pack(COUNT, train, number).ljust(COUNTED_BYTES, b"\0"))
        time.sleep(wait_s)
        for _ in range(_ASK_ATTEMPTS):
            datagrams.send(DATAGRAM.pack(ASK, train, 0))
            if select.select([datagrams], [], [], wait_s)[0]:
                _kind, answered, tally = DATAGRAM.unpack_from(datagrams.recv(2048))
                if answered == train:
                    return int(tally)
    raise TimeoutError(f"no answer to {_ASK_ATTEMPTS} requests for the number of datagrams that had arrived")
