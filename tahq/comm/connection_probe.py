"""How many TCP connections fill the path to a peer: goodput measured with 1, 2, 4, …, and the choice.

One end runs a `ConnectionSink`, the other `probe_connections`; both are plain TCP, with nothing of tahq's sessions.
What a sender has handed to its kernel has not arrived, so it is the sink that counts: a connection that is half
closed is answered with the bytes that came over it (u64, little-endian), and a measurement ends with the last answer.
"""

import contextlib
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tahq.comm.link.hello import MAX_CONNECTIONS
from tahq.comm.zmq.addresses import format_address, parse_address
from tahq.errors import PeerLostError, UserError

_COUNT = struct.Struct("<Q")
_BLOCK_NBYTES = 256 * 1024
_MAX_AT_ONCE = 4 * MAX_CONNECTIONS


def choose_connections(goodputs: Mapping[int, float], within: float = 0.1) -> int:
    """The smallest number of connections whose goodput is within this share of the best.

    Args:
        goodputs: bits a second by number of connections; at least one.
        within: 0.1 is 10 %.
    """
    enough = (1 - within) * max(goodputs.values())
    return min(number for number, goodput in goodputs.items() if goodput >= enough)


def probe_connections(
    address: str, numbers: Sequence[int] = (1, 2, 4, 8), duration_s: float = 3.0, timeout_s: float = 30.0
) -> dict[int, float]:
    """Goodput in bits a second by number of connections, one number after another.

    Args:
        address: host:port of a `ConnectionSink`.
        numbers: of parallel connections, each at most 16.
        duration_s: how long to send with each; many times the round trip, or slow start is what is measured.
        timeout_s: how long to wait beyond that for what is still on its way.

    Raises:
        UserError: the address is malformed.
        PeerLostError: it cannot be reached, or takes nothing more.
    """
    return {number: measure_goodput(address, number, duration_s, timeout_s) for number in numbers}


def measure_goodput(address: str, connections: int, duration_s: float, timeout_s: float = 30.0) -> float:
    """Bits a second with so many connections at once; see `probe_connections`."""
    host, port = parse_address(address, "address of the sink")
    with contextlib.ExitStack() as opened:
        try:
            links = [
                opened.enter_context(socket.create_connection((host, port), timeout_s)) for _ in range(connections)
            ]
            started_s = time.monotonic()
            sent_nbytes = _send_all(links, started_s + duration_s)
            arrived_nbytes = sum(_counted(link, timeout_s) for link in links)
        except OSError as error:
            raise PeerLostError(f"{address}: cannot measure with {connections} connections: {error}") from error
        took_s = time.monotonic() - started_s
    if arrived_nbytes != sent_nbytes:
        raise PeerLostError(f"{address}: {sent_nbytes} bytes were sent to it, and it counts {arrived_nbytes}")
    return 8 * arrived_nbytes / took_s


def _send_all(links: Sequence[socket.socket], until_s: float) -> int:
    """Keep every connection busy until then; how many bytes the kernel took."""
    block, nbytes = bytes(_BLOCK_NBYTES), 0
    for link in links:
        link.setblocking(False)
    while (left_s := until_s - time.monotonic()) > 0:
        for link in select.select([], links, [], left_s)[1]:
            nbytes += link.send(block)
    return nbytes


def _counted(link: socket.socket, timeout_s: float) -> int:
    """What the sink has had of this connection, once that is all."""
    link.settimeout(timeout_s)
    link.shutdown(socket.SHUT_WR)
    answer = b""
    while len(answer) < _COUNT.size:
        part = link.recv(_COUNT.size - len(answer))
        if not part:
            raise ConnectionError("it has hung up")
        answer += part
    return int(_COUNT.unpack(answer)[0])


@dataclass(slots=True)
class _Intake:
    nbytes: int = 0


class ConnectionSink:
    """Takes whatever is sent to it, and counts; a context manager with a thread of its own.

    Anybody who reaches the port may send to it, so it is open only while it measures; it keeps nothing of what comes.

    Args:
        bind: host:port to listen on; port 0: any free one.

    Raises:
        UserError: the address is malformed or in use.
    """

    def __init__(self, bind: str) -> None:
        host, port = parse_address(bind, "address to measure on")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._server = socket.create_server((host, port), family=family, backlog=_MAX_AT_ONCE)
        except OSError as error:
            raise UserError(f"cannot listen on {bind}: {error.strerror}") from error
        self._server.setblocking(False)
        self.address = format_address(host, self._server.getsockname()[1])
        """host:port that it listens on."""
        self._buffer = bytearray(_BLOCK_NBYTES)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="tahq-sink", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up on everybody, and release the port; a second time does nothing."""
        self._waker.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake:
                    self._release()
                    return
                if key.fileobj is self._server:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._take(key.fileobj, key.data)

    def _accept(self) -> None:
        # Whoever has left again already is no concern.
        with contextlib.suppress(OSError):
            link, _ = self._server.accept()
            if len(self._selector.get_map()) > _MAX_AT_ONCE:
                link.close()
                return
            link.setblocking(False)
            self._selector.register(link, selectors.EVENT_READ, _Intake())

    def _take(self, link: socket.socket, intake: _Intake) -> None:
        # Who hangs up in the middle is told nothing.
        with contextlib.suppress(ConnectionError):
            nbytes = link.recv_into(self._buffer)
            intake.nbytes += nbytes
            if nbytes:
                return
            link.send(_COUNT.pack(intake.nbytes))
        self._selector.unregister(link)
        link.close()

    def _release(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
