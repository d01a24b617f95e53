"""Gives the files that it was told of to those who ask by their SHA-256; in a thread of its own.

Nobody can ask for a path. What is not registered is not there, and neither is what belongs to another run.
"""

import logging
import os
import threading
from collections.abc import Collection
from pathlib import Path

import zmq

from tahq.comm.files.sockets import serving_socket
from tahq.comm.files.wire import FileReply, FileRequest, Status, crc_of, pack_reply, unpack_request
from tahq.comm.keys import KeyPair
from tahq.comm.zmq.addresses import advertised_address
from tahq.comm.zmq.rate_limited_log import RateLimitedLog
from tahq.comm.zmq.socket_wait import Socket, has_input
from tahq.errors import RemoteProtocolError

_log = logging.getLogger(__name__)
_LOOK_MS = 100
"""How often the thread looks whether it is to end."""


class FileServer:
    """Serves the snapshots of one run; any thread may call it.

    Args:
        run: its number.
        bind: host:port to listen on; port 0: any free one.
        advertise: what others dial, if another (port 0: the bound one).
        keys: this worker's; None: no CURVE, and whoever knows a hash is given the file.

    Raises:
        UserError: the address is malformed, not this machine's, or in use.
    """

    def __init__(self, run: int, bind: str, advertise: str | None, keys: KeyPair | None) -> None:
        self._run_number = run
        self._lock = threading.Lock()
        self._paths: dict[bytes, Path] = {}
        self._allowed: set[str] = set()
        self._stack = serving_socket(bind, keys)
        self._router, self._gate, port = self._stack.__enter__()
        self.address = advertised_address(bind, port, advertise)
        """host:port that others dial."""
        self._odd = RateLimitedLog(_log)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tahq-files", daemon=True)
        self._thread.start()

    def offer(self, sha256: str, path: Path) -> None:
        """Give this file to who asks for this hash (hex), for as long as it is there."""
        with self._lock:
            self._paths = {key: other for key, other in self._paths.items() if other.is_file()}
            self._paths[bytes.fromhex(sha256)] = path

    def allow(self, public_keys: Collection[str]) -> None:
        """Let the owners of these keys ask, from now on."""
        with self._lock:
            self._allowed |= set(public_keys)

    def close(self) -> None:
        """Answer nobody any more; safe to call twice."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._router, *self._gate.sockets):
            poller.register(socket, zmq.POLLIN)
        try:
            while not self._is_closed.is_set():
                poller.poll(_LOOK_MS)
                self._serve_gate()
                if has_input(self._router):
                    self._answer(self._router)
        finally:
            self._stack.__exit__(None, None, None)

    def _serve_gate(self) -> None:
        with self._lock:
            allowed, self._allowed = self._allowed, set()
        for key in allowed:
            self._gate.allow(key)
        self._gate.serve()

    def _answer(self, router: Socket) -> None:
        route, *frames = router.recv_multipart(copy=False)
        self._gate.know(route)
        identity, parts = route.bytes, [frame.bytes for frame in frames]
        try:
            if len(parts) != 1:
                raise RemoteProtocolError(f"somebody sent {len(parts)} message parts to the port for files; expected 1")
            request = unpack_request(parts[0], "somebody at the port for files")
        except RemoteProtocolError as error:
            self._odd.warning(str(error))
            return
        reply, data = self._reply(request)
        try:
            router.send_multipart([identity, pack_reply(reply), data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._odd.warning(f"a piece of a file could not be sent: {error}")

    def _reply(self, request: FileRequest) -> tuple[FileReply, bytes]:
        with self._lock:
            path = self._paths.get(request.sha256) if request.run == self._run_number else None
        try:
            total, data = _read(path, request) if path is not None else (-1, b"")
        except OSError as error:
            self._odd.warning(f"{path} cannot be given to who asks for it: {error.strerror}")
            total, data = -1, b""
        if total < 0:
            return FileReply(Status.UNKNOWN, request.number, request.offset, 0, 0), b""
        status = Status.HERE if request.offset <= total else Status.BEYOND
        return FileReply(status, request.number, request.offset, total, crc_of(data)), data


def _read(path: Path, request: FileRequest) -> tuple[int, bytes]:
    with path.open("rb", buffering=0) as file:
        return os.fstat(file.fileno()).st_size, os.pread(file.fileno(), request.length, request.offset)
