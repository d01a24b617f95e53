"""The far end of a worker's measurements: answers those who dial it, in threads of its own."""

import logging
import socket
import threading
from contextlib import suppress

from tahq.comm.zmq.addresses import advertised_address, parse_address
from tahq.errors import RemoteProtocolError, UserError
from tahq.plan.measure.meter_wire import (
    GREETING,
    MAGIC,
    REQUEST,
    VERSION,
    Kind,
    Request,
    Verdict,
    receive_exactly,
    receive_stream,
    send_stream,
    tune,
)

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
_LOOK_S = 0.2
"""How often the thread that accepts looks whether it is to end."""


class MeterServer:
    """Listens where the worker's data would, for others of the same run.

    Args:
        run: its number; who has another is turned away.
        stage: this worker's.
        bind: host:port to listen on; port 0: any free one.
        advertise: what others dial, if another; `none`: nobody can.

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
        """Accept nobody any more; what is being answered goes on to its end."""
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
                    self._answer(connection, peer)
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
            raise RemoteProtocolError(f"{peer}: is not of tahq, or of another version")
        verdict = self._verdict(run, meant) if has_place else Verdict.BUSY
        connection.sendall(bytes([verdict]))
        return verdict is Verdict.WELCOME

    def _verdict(self, run: int, meant: int) -> Verdict:
        if run != self._run:
            return Verdict.OTHER_RUN
        return Verdict.WELCOME if meant == self._stage else Verdict.OTHER_STAGE

    def _answer(self, connection: socket.socket, peer: str) -> None:
        """Echo, and then carry one stream at most."""
        while data := receive_exactly(connection, REQUEST.size):
            request = Request.unpack(data, peer)
            if request.kind is not Kind.ECHO:
                self._stream(connection, request, peer)
                return
            connection.sendall(b"\0")

    def _stream(self, connection: socket.socket, request: Request, peer: str) -> None:
        if request.kind is Kind.TAKE:
            receive_stream(connection, request.settling())
        else:
            send_stream(connection, request.most_s, peer)


def _listen(bind: str) -> socket.socket:
    host, port = parse_address(bind, "bind")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server((str(address[0]), port), family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        raise UserError(f"bind: cannot listen on {bind}: {error.strerror}") from None
    listener.settimeout(_LOOK_S)
    return listener
