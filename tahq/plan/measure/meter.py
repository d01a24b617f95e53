"""The near end of a worker's measurements: dials other workers' meter servers, and says what the paths carry.

Each direction is timed by the end that receives, with its own clock alone. Plain TCP, which ZMQ's sockets are made of.
"""

import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from tahq.comm.zmq.addresses import parse_address
from tahq.errors import PeerLostError, RemoteProtocolError
from tahq.plan.measure.meter_wire import (
    GREETING,
    MAGIC,
    REASONS,
    STALL_S,
    VERSION,
    Kind,
    Request,
    Verdict,
    receive_exactly,
    receive_stream,
    send_stream,
    tune,
)

Direction = Literal["out", "in"]
"""Seen from the end that dials."""

_TRIP_GAP_S = 0.01


@dataclass(frozen=True, slots=True)
class Peer:
    """Whom to dial."""

    stage: int
    host: str
    """For messages."""
    address: str

    @property
    def name(self) -> str:
        """``host1 (10.77.0.2:40001)``."""
        return f"{self.host} ({self.address})"


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """How long streams are looked at, in seconds from their first byte: at least, and settled or not at most."""

    least_s: float
    most_s: float


class Meter:
    """Measures the ways from here to others.

    Args:
        run: its number.
        stage: this worker's.
    """

    def __init__(self, run: int, stage: int) -> None:
        self._run = run
        self._stage = stage

    def round_trip_s(self, peer: Peer, count: int) -> float:
        """The least of several small exchanges: in longer ones somebody was late.

        Raises:
            PeerLostError: the peer cannot be reached, or falls silent; the message names it.
            RemoteProtocolError: something else answers there.
        """
        with self._dial(peer) as connection:
            try:
                return min(_exchange_s(connection) for _ in range(count))
            except OSError as error:
                raise _lost(peer, error) from error

    def rates(
        self, peers: Sequence[Peer], windows_s: Sequence[float], direction: Direction, times: StreamTimes
    ) -> list[float]:
        """Bits a second of streams to (`out`) or from (`in`) several peers at the same time, in their order.

        Args:
            peers: who is there twice has two connections.
            windows_s: of each, what its rate is looked at in; a round trip or more.
            direction: seen from here.
            times: of every stream.

        Raises:
            PeerLostError: a peer cannot be reached, or a stream stands still; the message names it.
            RemoteProtocolError: something else answers there.
        """
        together = threading.Barrier(len(peers), timeout=3 * STALL_S)

        def rate(peer: Peer, window_s: float) -> float:
            try:
                with self._dial(peer) as connection:
                    together.wait()
                    return _stream(connection, peer, window_s, direction, times)
            except BaseException:
                together.abort()
                raise

        with ThreadPoolExecutor(len(peers), "tahq-meter") as pool:
            futures = [pool.submit(rate, *pair) for pair in zip(peers, windows_s, strict=True)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        # One that cannot be reached breaks the others' wait for it, and is what is worth telling.
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def _dial(self, peer: Peer) -> socket.socket:
        """A connection to the peer, which has said that it is the one that is meant."""
        try:
            connection = socket.create_connection(parse_address(peer.address, peer.host), timeout=STALL_S)
        except OSError as error:
            raise _lost(peer, error) from error
        try:
            tune(connection)
            connection.sendall(GREETING.pack(MAGIC, VERSION, self._run, self._stage, peer.stage))
            _check_verdict(receive_exactly(connection, 1), peer)
        except OSError as error:
            connection.close()
            raise _lost(peer, error) from error
        except RemoteProtocolError:
            connection.close()
            raise
        return connection


def _check_verdict(data: bytes, peer: Peer) -> None:
    if not data:
        raise ConnectionError("what listens there hangs up; is it another program, or another version of tahq?")
    if data[0] != Verdict.WELCOME:
        reason = REASONS[Verdict(data[0])] if data[0] in REASONS else "what answers there is no worker of tahq"
        raise RemoteProtocolError(f"{peer.name}: {reason}")


def _exchange_s(connection: socket.socket) -> float:
    time.sleep(_TRIP_GAP_S)
    start_s = time.monotonic()
    connection.sendall(Request(Kind.ECHO).pack())
    if not receive_exactly(connection, 1):
        raise ConnectionError("the connection was closed before an answer")
    return time.monotonic() - start_s


def _stream(connection: socket.socket, peer: Peer, window_s: float, direction: Direction, times: StreamTimes) -> float:
    kind = Kind.TAKE if direction == "out" else Kind.GIVE
    request = Request(kind, window_s, times.least_s, times.most_s)
    try:
        connection.sendall(request.pack())
        if direction == "out":
            rate = send_stream(connection, times.most_s, peer.name)
        else:
            rate = receive_stream(connection, request.settling())
    except OSError as error:
        raise _lost(peer, error) from error
    if rate <= 0:
        raise PeerLostError(f"{peer.name}: hardly a byte of a stream arrived")
    return rate


def _lost(peer: Peer, error: OSError) -> PeerLostError:
    if isinstance(error, TimeoutError):
        reason = f"no answer within {STALL_S:g} s"
    else:
        reason = os.strerror(error.errno) if error.errno else str(error)
    return PeerLostError(f"{peer.name}: {reason}")
