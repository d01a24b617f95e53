"""Files from worker to worker, by their SHA-256, over the files channel of a link to the owner's endpoint.

The worker that wants a file asks for it piece by piece; the session below delivers requests and pieces once and in
order. A path cannot be asked for: only files that were offered exist.
docs/dev/protocol.md has the layout.
"""

import logging
import math
import os
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tahq.comm.link.session import Session
from tahq.comm.link.spec import LinkSpec
from tahq.comm.link.transitions import End
from tahq.comm.relay.tickets import RelayTicket
from tahq.comm.zmq.socket_wait import Inbox
from tahq.comm.zmq.transport import LinkEnd
from tahq.errors import PeerLostError, RemoteProtocolError, TahqError

_log = logging.getLogger(__name__)

MAX_PIECE_NBYTES = 256 * 1024
LEAST_PIECE_NBYTES = 4096
MAX_FILE_NBYTES = 1 << 44
"""16 TiB."""
WINDOW_PIECES = 16
"""Requests that may be under way: 4 MiB in pieces of full size."""
GIVE_UP_S = 30.0
"""A source that is silent this long is given up."""
_PIECE_S = 0.1
"""Time that a piece may take at the rate."""
_LOOK_S = 0.2
"""How often to check whether the file is still wanted."""
_RETRY_S = 0.5
"""Pause before a link that broke is opened again."""

_REQUEST = struct.Struct("<QQI32s")
_REPLY = struct.Struct("<BQQ")
MAX_MESSAGE_NBYTES = _REPLY.size + MAX_PIECE_NBYTES


class Status(IntEnum):
    """Answer to a request."""

    HERE = 0
    UNKNOWN = 1
    """No such file is here, or no longer."""
    BEYOND = 2
    """The file is shorter than the offset."""


@dataclass(frozen=True, slots=True)
class FileSource:
    """Where to fetch a file: host:port, number of its run, SHA-256 (hex), the owner's public key ("": no CURVE)."""

    address: str | RelayTicket
    run: int
    sha256: str
    public_key: str = ""

    def __str__(self) -> str:
        return f"{self.address} (file {self.sha256[:16]}…)"


class FileRequest(NamedTuple):
    """`length` bytes of a file from `offset` on."""

    run: int
    offset: int
    length: int
    sha256: bytes

    def pack(self) -> bytes:
        """The message."""
        return _REQUEST.pack(*self)


def unpack_request(data: bytes, peer: str) -> FileRequest:
    """Parse a request; RemoteProtocolError if it is malformed, or asks for too much at once."""
    if len(data) != _REQUEST.size:
        raise RemoteProtocolError(f"{peer}: sent a request of {len(data)} bytes; expected {_REQUEST.size}")
    request = FileRequest(*_REQUEST.unpack(data))
    if not 0 < request.length <= MAX_PIECE_NBYTES or request.offset > MAX_FILE_NBYTES:
        raise RemoteProtocolError(
            f"{peer}: asked for {request.length} bytes at {request.offset}; at most {MAX_PIECE_NBYTES} at once"
        )
    return request


class FileTransfer:
    """Which pieces of a file to ask for, and when; pure.

    Invariants: bytes come out in order from `offset` on, each once; at most a window of pieces is asked for and not
    there yet; under a rate no piece is asked for before the bytes of those before it had their time (nothing is saved
    up).
    """

    def __init__(self, source: FileSource, offset: int, rate_bits_per_s: float | None, now_s: float) -> None:
        self._source = source
        self._sha256 = bytes.fromhex(source.sha256)
        self._rate = rate_bits_per_s or math.inf
        self._piece_nbytes = int(min(MAX_PIECE_NBYTES, max(LEAST_PIECE_NBYTES, self._rate * _PIECE_S / 8)))
        self._under_way: deque[FileRequest] = deque()
        self._offset = self._asked = offset
        self._total: int | None = None
        self._asks_again = False
        self._free_s = self.heard_s = now_s

    @property
    def is_done(self) -> bool:
        """Whether the last byte is there."""
        return self._total is not None and self._offset >= self._total

    def begin_again(self) -> None:
        """Requests that are under way will not be answered: ask again, from the first byte that is missing."""
        self._under_way.clear()
        self._asked = self._offset
        self._asks_again = True

    def requests(self, now_s: float) -> Iterator[bytes]:
        """Messages to send now."""
        while self._may_ask() and now_s >= self._free_s:
            length = self._piece_nbytes if self._total is None else min(self._piece_nbytes, self._total - self._asked)
            self._under_way.append(FileRequest(self._source.run, self._asked, length, self._sha256))
            if len(self._under_way) == 1 and not self._asks_again:
                self.heard_s = now_s  # there was nothing to answer before
            self._asked += length
            self._free_s = max(now_s, self._free_s) + length * 8 / self._rate
            yield self._under_way[-1].pack()

    def _may_ask(self) -> bool:
        if self._total is None:
            return not self._under_way  # the first reply tells the length
        return len(self._under_way) < WINDOW_PIECES and self._asked < self._total

    def wait_s(self, now_s: float) -> float:
        """Time until the next request is due; inf: not before a reply has come."""
        return max(0.0, self._free_s - now_s) if self._may_ask() else math.inf

    def take(self, reply: bytes, now_s: float) -> bytes:
        """The bytes of a reply, which must answer the oldest request."""
        peer = str(self._source)
        if len(reply) < _REPLY.size or not self._under_way:
            raise RemoteProtocolError(f"{peer}: sent {len(reply)} bytes for {len(self._under_way)} requests")
        status, offset, total = _REPLY.unpack_from(reply)
        data, request = reply[_REPLY.size :], self._under_way.popleft()
        self.heard_s, self._asks_again = now_s, False
        if status == Status.UNKNOWN:
            raise PeerLostError(f"{peer}: the file is no longer there")
        if self._total not in (None, total):
            raise RemoteProtocolError(f"{peer}: the file had {self._total} bytes, and now has {total}")
        expected = max(0, min(request.length, total - request.offset))
        if status != Status.HERE or (offset, len(data)) != (request.offset, expected):
            raise RemoteProtocolError(
                f"{peer}: sent {len(data)} bytes at {offset} of {total}; expected {expected} at {request.offset}"
            )
        self._total = total
        self._offset += len(data)
        if not self._under_way:
            self._asked = self._offset  # the first piece may be shorter than was asked for
        return data


# The worker that wants a file


class FetchingEnd(LinkEnd):
    """This end of a link that was opened to fetch a file; `send` queues a request."""

    is_temporary = True

    def __init__(self, spec: LinkSpec, session: Session, peer_key: str, send: Callable[[LinkEnd, bytes], None]) -> None:
        super().__init__(spec, session, peer_key)
        self.inbox: Inbox[bytes] = Inbox(str(spec))
        self.send = partial(send, self)

    def publish(self) -> None:
        """Hand over pieces, and say when no more will come."""
        for _, data in self.session.take_messages():
            self.inbox.put(data)
        super().publish()
        if self.session.remote is End.CLOSED and self.inbox.error is None:
            self.inbox.fail(PeerLostError(f"{self.spec}: the peer has closed the link"))

    def give_up(self, error: TahqError) -> None:
        """Have the thread that waits for pieces raise this."""
        self.inbox.fail(error)
        super().give_up(error)


def pieces(
    fetching: Callable[[FileSource], AbstractContextManager[FetchingEnd]],
    source: FileSource,
    *,
    offset: int = 0,
    rate_bits_per_s: float | None = None,
    give_up_s: float = GIVE_UP_S,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Iterator[bytes]:
    """Fetch a file in the caller's thread: its bytes, in order; ends early once it is not wanted any more.

    The caller compares the SHA-256 at the end.

    Args:
        fetching: opens a link to the source; `ZmqEndpoint.fetching`.
        source: owner of the file.
        offset: the first byte that is wanted.
        rate_bits_per_s: the fastest rate, counting the file's bytes; None: unlimited.
        give_up_s: a source that is silent this long is given up.
        is_wanted: called again and again; False ends it.

    Raises:
        PeerLostError: the source is silent, or does not have the file; the message says if the keys are the reason.
        RemoteProtocolError: its answer does not match the request.
        UserError: its address is malformed.
    """
    transfer = FileTransfer(source, offset, rate_bits_per_s, time.monotonic())
    while not transfer.is_done and is_wanted():
        with fetching(source) as end:
            while not transfer.is_done and is_wanted():
                now_s = time.monotonic()
                for request in transfer.requests(now_s):
                    end.send(request)
                is_late = now_s - transfer.heard_s >= give_up_s
                try:
                    reply = end.inbox.get(min(transfer.wait_s(now_s), _LOOK_S))
                except TimeoutError:
                    if is_late:
                        reason = f"; {end.obstacle}" if end.obstacle else ""
                        raise PeerLostError(f"{source}: silent for {give_up_s:g} s{reason}") from None
                except PeerLostError:
                    if is_late:
                        raise
                    transfer.begin_again()
                    time.sleep(_RETRY_S)
                    break  # another link may do better
                else:
                    yield transfer.take(reply, time.monotonic())


# The worker that has the file


class ServingEnd(LinkEnd):
    """This end of a link that another worker has opened to fetch files."""

    is_temporary = True
    warns = False

    def __init__(self, spec: LinkSpec, session: Session, peer_key: str, store: "FileStore") -> None:
        super().__init__(spec, session, peer_key)
        self.num_pending = 0
        """Requests that are not answered yet; an integer that two threads change under the store's lock."""
        self._store = store

    def publish(self) -> None:
        """Hand requests to the thread that reads files."""
        super().publish()
        try:
            for _, data in self.session.take_messages():
                self._store.ask(self, unpack_request(data, str(self.spec)))
        except RemoteProtocolError as error:
            self.fail(error)

    def fail(self, error: TahqError) -> None:
        """Say in the log why the link ends."""
        _log.warning("%s", error)
        super().fail(error)


class FileStore:
    """The files of one run that others may fetch from here; any thread may call it.

    Another thread reads them, so that a slow disk holds up no frames. `send` puts a message on a link.
    """

    def __init__(self, send: Callable[[LinkEnd, bytes], None]) -> None:
        self._send = send
        self._run_number = 0
        self._lock = threading.Lock()
        self._paths: dict[bytes, Path] = {}
        self._requests: queue.SimpleQueue[tuple[ServingEnd, FileRequest] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def offer(self, run: int, sha256: str, path: Path) -> None:
        """Give this file of the run to those who ask for this hash (hex), while it is there."""
        with self._lock:
            self._run_number = run
            self._paths = {key: other for key, other in self._paths.items() if other.is_file()}
            self._paths[bytes.fromhex(sha256)] = path

    def ask(self, end: ServingEnd, request: FileRequest) -> None:
        """Answer this, soon; RemoteProtocolError if too many requests of this peer wait for an answer."""
        with self._lock:
            if end.num_pending >= 2 * WINDOW_PIECES:
                raise RemoteProtocolError(f"{end.spec}: asked for more than {2 * WINDOW_PIECES} pieces at once")
            end.num_pending += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tahq-files", daemon=True)
                self._thread.start()
        self._requests.put((end, request))

    def close(self) -> None:
        """Answer no more; safe to call twice."""
        self._requests.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (asked := self._requests.get()) is not None:
            end, request = asked
            self._send(end, self._reply(request))
            with self._lock:
                end.num_pending -= 1

    def _reply(self, request: FileRequest) -> bytes:
        with self._lock:
            path = self._paths.get(request.sha256) if request.run == self._run_number else None
        if path is None:
            return _REPLY.pack(Status.UNKNOWN, request.offset, 0)
        try:
            with path.open("rb", buffering=0) as file:
                total = os.fstat(file.fileno()).st_size
                data = os.pread(file.fileno(), request.length, request.offset)
        except OSError as error:
            _log.warning("%s cannot be read for another worker: %s", path, error.strerror)
            return _REPLY.pack(Status.UNKNOWN, request.offset, 0)
        status = Status.HERE if request.offset <= total else Status.BEYOND
        return _REPLY.pack(status, request.offset, total) + data
