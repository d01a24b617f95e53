"""Measures the paths from one worker to others: a near end that dials, and a far end that answers.

Each direction is timed by the end that receives, with its own clock alone. Plain TCP, on which ZMQ's sockets are built.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

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

MAX_CONNECTIONS = 64
DIAL_S = 4.0
"""Give up a peer that takes no connection after this long; Linux tries at 0, 1 and 3 s."""
_TRIP_GAP_S = 0.01
_LOOK_S = 0.2
"""How often the thread that accepts checks whether it is to end."""

_REASONS: Mapping[int, str] = {
    Welcome.OTHER_RUN: "a worker of another run answers there",
    Welcome.OTHER_STAGE: "the worker of another stage answers there; do two hosts advertise one address?",
    Welcome.BUSY: "it is busy with too many connections",
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
class Meter:
    """The near end, of this run and stage.

    Its methods raise PeerLostError, which names the peer, if it cannot be reached or falls silent, or a stream stalls,
    and RemoteProtocolError if another program answers there.
    """

    run: int
    stage: int

    def round_trip_s(self, peer: Peer, count: int) -> float:
        """Seconds of the shortest of several small exchanges; in the others, one of the ends was late."""
        with self._dialled(peer) as connection:
            return min(_exchange_s(connection) for _ in range(count))

    def rates(self, peers: Sequence[Peer], requests: Sequence[MeterRequest]) -> list[float]:
        """Bits per second of streams to (TAKE) or from (GIVE) several peers at the same time, in their order.

        A peer that is listed twice gets two connections.
        """
        together = threading.Barrier(len(peers), timeout=3 * STALL_S)

        def rate(peer: Peer, request: MeterRequest) -> float:
            try:
                with self._dialled(peer) as connection:
                    together.wait()
                    return _stream(connection, peer, request)
            except BaseException:
                together.abort()
                raise

        with ThreadPoolExecutor(len(peers), "tahq-meter") as pool:
            futures = [pool.submit(rate, *pair) for pair in zip(peers, requests, strict=True)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        # a peer that cannot be reached breaks the others' wait for it, and is the one to report
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    @contextmanager
    def _dialled(self, peer: Peer) -> Iterator[socket.socket]:
        """A connection that the peer has welcomed; an OSError on it names the peer."""
        patience_s = DIAL_S
        try:
            with socket.create_connection(parse_address(peer.address, peer.host), timeout=DIAL_S) as connection:
                patience_s = STALL_S
                tune(connection)
                connection.sendall(GREETING.pack(MAGIC, VERSION, self.run, self.stage, peer.stage))
                answer = receive_exactly(connection, 1)
                if not answer:
                    raise ConnectionError(
                        "it closed the connection; is it another program, or another version of tahq?"
                    )
                if answer[0] != Welcome.WELCOME:
                    reason = _REASONS.get(answer[0], "a program other than a tahq worker answers there")
                    raise RemoteProtocolError(f"{peer.name}: {reason}")
                yield connection
        except TimeoutError as error:
            raise PeerLostError(f"{peer.name}: no answer within {patience_s:g} s") from error
        except OSError as error:
            raise PeerLostError(f"{peer.name}: {os.strerror(error.errno) if error.errno else error}") from error


def _exchange_s(connection: socket.socket) -> float:
    time.sleep(_TRIP_GAP_S)
    start_s = time.monotonic()
    connection.sendall(REQUEST.pack(*MeterRequest(Kind.ECHO)))
    if not receive_exactly(connection, 1):
        raise ConnectionError("the connection was closed before an answer")
    return time.monotonic() - start_s


def _stream(connection: socket.socket, peer: Peer, request: MeterRequest) -> float:
    connection.sendall(REQUEST.pack(*request))
    if request.kind is Kind.TAKE:
        rate = send_stream(connection, request.most_s, peer.name)
    else:
        rate = receive_stream(connection, request)
    if rate <= 0:
        raise PeerLostError(f"{peer.name}: almost nothing of a stream arrived")
    return rate


class MeterServer:
    """The far end: listens where the worker's data would, for others of the same run, and answers in threads.

    Args:
        run: number of the run; workers of others are rejected.
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
        has_place = self._places.acquire(blocking=False)
        try:
            with connection:
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
        """Answer a greeting; whether the connection is welcome."""
        data = receive_exactly(connection, GREETING.size)
        if not data:
            return False
        magic, version, run, _, meant = GREETING.unpack(data)
        if magic != MAGIC or version != VERSION:
            raise RemoteProtocolError(f"{peer}: not from tahq, or from another version")
        if not has_place:
            answer = Welcome.BUSY
        elif run != self._run:
            answer = Welcome.OTHER_RUN
        else:
            answer = Welcome.WELCOME if meant == self._stage else Welcome.OTHER_STAGE
        connection.sendall(bytes([answer]))
        return answer is Welcome.WELCOME


def _answer(connection: socket.socket, peer: str) -> None:
    """Echo, and then carry at most one stream."""
    while data := receive_exactly(connection, REQUEST.size):
        request = MeterRequest.unpack(data, peer)
        if request.kind is Kind.TAKE:
            receive_stream(connection, request)
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
