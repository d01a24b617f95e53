"""Measures the paths from one worker to others: a near end that dials, and a far end that answers.

Each direction is timed by the end that receives, with its own clock alone. Plain TCP, on which ZMQ's sockets are built.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from tahq.comm.zmq.addresses import advertised_address, parse_address
from tahq.errors import PeerLostError, RemoteProtocolError, UserError
from tahq.plan.measure.meter_wire import (
    GREETING,
    MAGIC,
    REQUEST,
    STALL_S,
    VERSION,
    Kind,
    MeterRequest,
    Welcome,
    receive_exactly,
    receive_stream,
    send_stream,
    tune,
)

log = logging.getLogger(__name__)

Direction = Literal["out", "in"]
"""Seen from the end that dials."""

MAX_CONNECTIONS = 64
_TRIP_GAP_S = 0.01
_LOOK_S = 0.2
"""How often the thread that accepts checks whether it is to end."""

_REASONS = {
    Welcome.OTHER_RUN: "a worker of another run answers there",
    Welcome.OTHER_STAGE: "the worker of another stage answers there; do two hosts advertise one address?",
    Welcome.BUSY: "it answers too many others",
}


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker to dial; `host` is for messages."""

    stage: int
    host: str
    address: str

    @property
    def name(self) -> str:
        """``host1 (10.77.0.2:40001)``."""
        return f"{self.host} ({self.address})"


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Shortest and longest time to look at a stream, in seconds from its first byte."""

    least_s: float
    most_s: float


class Meter:
    """The near end.

    Args:
        run: number of the run.
        stage: this worker's.
    """

    def __init__(self, run: int, stage: int) -> None:
        self._run = run
        self._stage = stage

    def round_trip_s(self, peer: Peer, count: int) -> float:
        """The least of several small exchanges: in longer ones one end was late.

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
        """Bits per second of streams to (`out`) or from (`in`) several peers at the same time, in their order.

        Args:
            peers: a peer that is listed twice gets two connections.
            windows_s: of each, the window of its rate; a round trip or more.
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
        # a peer that cannot be reached breaks the others' wait for it, and is the one to report
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def _dial(self, peer: Peer) -> socket.socket:
        """A connection to the peer, which has welcomed it."""
        try:
            connection = socket.create_connection(parse_address(peer.address, peer.host), timeout=STALL_S)
        except OSError as error:
            raise _lost(peer, error) from error
        try:
            tune(connection)
            connection.sendall(GREETING.pack(MAGIC, VERSION, self._run, self._stage, peer.stage))
            answer = receive_exactly(connection, 1)
            if not answer:
                raise ConnectionError("it hangs up; is it another program, or another version of tahq?")
            if answer[0] != Welcome.WELCOME:
                reason = _REASONS.get(Welcome(answer[0])) if answer[0] in list(Welcome) else None
                raise RemoteProtocolError(f"{peer.name}: {reason or 'a program that is no worker of tahq answers'}")
        except OSError as error:
            connection.close()
            raise _lost(peer, error) from error
        except RemoteProtocolError:
            connection.close()
            raise
        return connection


def _exchange_s(connection: socket.socket) -> float:
    time.sleep(_TRIP_GAP_S)
    start_s = time.monotonic()
    connection.sendall(MeterRequest(Kind.ECHO).pack())
    if not receive_exactly(connection, 1):
        raise ConnectionError("the connection was closed before an answer")
    return time.monotonic() - start_s


def _stream(connection: socket.socket, peer: Peer, window_s: float, direction: Direction, times: StreamTimes) -> float:
    kind = Kind.TAKE if direction == "out" else Kind.GIVE
    request = MeterRequest(kind, window_s, times.least_s, times.most_s)
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


class MeterServer:
    """The far end: listens where the worker's data would, for others of the same run, and answers in threads.

    Args:
        run: number of the run; others are turned away.
        stage: this worker's.
        bind: host:port to listen on; port 0: any free one.
        advertise: the address that others dial, if another; `none`: this host cannot be dialled.

    Raises:
        UserError: the address is malformed, not this machine's, or in use.
    """

    def __init__(self, run: int, stage: int, bind: str, advertise: str | None) -> None:
        self._run = run
        self._stage = stage
        self._listener = _listen(bind)
        self.address: str = advertised_address(bind, int(self._listener.getsockname()[1]), advertise)
        """host:port that others dial; empty: this host only dials out."""
        self._places = threading.Semaphore(MAX_CONNECTIONS)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="tahq-meter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections; those that are being answered go on to their end."""
        self._is_closed.set()
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            with suppress(TimeoutError):
                connection, address = self._listener.accept()
                peer = f"measuring connection from {address[0]}"
                threading.Thread(target=self._serve, args=(connection, peer), name="tahq-metered", daemon=True).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        with connection:
            has_place = self._places.acquire(blocking=False)
            try:
                tune(connection)
                if self._greet(connection, peer, has_place):
                    _answer(connection, peer)
            except RemoteProtocolError as error:
                log.warning("%s", error)
            except OSError as error:  # the near end notices the same, and reports it
                log.info("%s: %s", peer, error)
            finally:
                if has_place:
                    self._places.release()

    def _greet(self, connection: socket.socket, peer: str, has_place: bool) -> bool:
        data = receive_exactly(connection, GREETING.size)
        if not data:
            return False
        magic, version, run, _, meant = GREETING.unpack(data)
        if magic != MAGIC or version != VERSION:
            raise RemoteProtocolError(f"{peer}: not from tahq, or from another version")
        answer = Welcome.WELCOME
        if not has_place:
            answer = Welcome.BUSY
        elif run != self._run:
            answer = Welcome.OTHER_RUN
        elif meant != self._stage:
            answer = Welcome.OTHER_STAGE
        connection.sendall(bytes([answer]))
        return answer is Welcome.WELCOME


def _answer(connection: socket.socket, peer: str) -> None:
    """Echo, and then carry at most one stream."""
    while data := receive_exactly(connection, REQUEST.size):
        request = MeterRequest.unpack(data, peer)
        if request.kind is Kind.TAKE:
            receive_stream(connection, request.settling())
            return
        if request.kind is Kind.GIVE:
            send_stream(connection, request.most_s, peer)
            return
        connection.sendall(b"\0")


def _listen(bind: str) -> socket.socket:
    host, port = parse_address(bind, "bind")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server((str(address[0]), port), family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        raise UserError(f"bind: cannot listen on {bind}: {error.strerror}") from None
    listener.settimeout(_LOOK_S)
    return listener
