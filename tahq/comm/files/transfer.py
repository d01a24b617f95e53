"""Fetching a file piece by piece, without a socket: which pieces to ask for, and when.

Pure: times and bytes are arguments. Invariants:

- bytes come out in order, each once;
- at most a window's worth of pieces is asked for and not there yet, so a long link is used and memory is bounded;
- under a rate no piece is asked for before the bytes of those before it had their time (nothing is saved up);
- whose requests or replies were lost asks again after `resend_s`, from the first byte that it lacks.
"""

import math
from collections import deque
from dataclasses import dataclass

from tahq.comm.files.wire import (
    MAX_PIECE_NBYTES,
    FileRequest,
    Status,
    crc_of,
    pack_request,
    unpack_reply,
)
from tahq.errors import PeerLostError, RemoteProtocolError

WINDOW_PIECES = 64
"""Requests that may be under way: 16 MiB in pieces of full size, a second at 134 Mbit/s."""
LEAST_PIECE_NBYTES = 4096
_PIECE_S = 0.1
"""What a piece may take of the rate."""


@dataclass(frozen=True, slots=True)
class FileSource:
    """Who has a file: host:port, the number of the run that it is of, its SHA-256 (hex), the owner's public key."""

    address: str
    run: int
    sha256: str
    public_key: str = ""
    """Empty without CURVE."""

    def __str__(self) -> str:
        return f"{self.address} (file {self.sha256[:16]}…)"


@dataclass(frozen=True, slots=True)
class Patience:
    """After how many seconds of silence the same is asked again, and the source is given up."""

    resend_s: float = 5.0
    lost_s: float = 30.0


class FileTransfer:
    """One file's way here.

    Args:
        source: who has it.
        offset: the first byte that is wanted.
        rate_bits_per_s: at most so fast; None: as fast as it goes.
        patience: see there.
        now_s: now.
    """

    def __init__(
        self, source: FileSource, offset: int, rate_bits_per_s: float | None, patience: Patience, now_s: float
    ) -> None:
        self._source = source
        self._sha256 = bytes.fromhex(source.sha256)
        self._rate = rate_bits_per_s or math.inf
        self._patience = patience
        self._piece_nbytes = int(min(MAX_PIECE_NBYTES, max(LEAST_PIECE_NBYTES, self._rate * _PIECE_S / 8)))
        self._under_way: deque[FileRequest] = deque()
        self._number = 0
        self._offset = offset
        self._asked = offset
        self._total: int | None = None
        self._free_s = now_s
        self._heard_s = self._waits_since_s = now_s
        self._asks_again = False

    @property
    def is_done(self) -> bool:
        """Whether the last byte is there."""
        return self._total is not None and self._offset >= self._total

    def requests(self, now_s: float) -> list[bytes]:
        """What to send now.

        Raises:
            PeerLostError: the source has been silent for too long.
        """
        if self._under_way and now_s - self._waits_since_s >= self._patience.resend_s:
            self._ask_again(now_s)
        if now_s - self._heard_s >= self._patience.lost_s:
            raise PeerLostError(f"{self._source}: silent for {self._patience.lost_s:g} s")
        due = []
        while self._may_ask() and now_s >= self._free_s:
            due.append(pack_request(self._next_request(now_s)))
        return due

    def _ask_again(self, now_s: float) -> None:
        self._under_way.clear()
        self._asked = self._offset
        self._asks_again = True

    def _may_ask(self) -> bool:
        if self._total is None:
            return not self._under_way  # how long it is, the first reply says
        return len(self._under_way) < WINDOW_PIECES and self._asked < self._total

    def _next_request(self, now_s: float) -> FileRequest:
        length = self._piece_nbytes if self._total is None else min(self._piece_nbytes, self._total - self._asked)
        self._number = (self._number + 1) % 2**32
        request = FileRequest(self._source.run, self._number, self._sha256, self._asked, length)
        if not self._under_way:
            self._waits_since_s = now_s
            if not self._asks_again:
                self._heard_s = now_s  # it had nothing to answer
        self._under_way.append(request)
        self._asked += length
        self._free_s = max(now_s, self._free_s) + length * 8 / self._rate
        return request

    def wait_s(self, now_s: float) -> float:
        """How long nothing but a reply can make a difference."""
        times = [self._heard_s + self._patience.lost_s]
        if self._under_way:
            times.append(self._waits_since_s + self._patience.resend_s)
        if self._may_ask():
            times.append(self._free_s)
        return max(0.0, min(times) - now_s)

    def take(self, header: bytes, data: bytes, now_s: float) -> bytes:
        """The bytes that a reply brings, in order; empty if it is not the next one.

        Raises:
            RemoteProtocolError: it makes no sense, or is damaged.
            PeerLostError: the source does not have the file.
        """
        peer = str(self._source)
        reply = unpack_reply(header, peer)
        if not self._under_way or reply.number != self._under_way[0].number:
            return b""
        request = self._under_way.popleft()
        self._heard_s = self._waits_since_s = now_s
        self._asks_again = False
        if reply.status is Status.UNKNOWN:
            raise PeerLostError(f"{peer}: it is not there any more")
        if self._total not in (None, reply.total):
            raise RemoteProtocolError(f"{peer}: had {self._total} bytes, and has {reply.total} now")
        expected = max(0, min(request.length, reply.total - request.offset))
        if reply.status is not Status.HERE or (reply.offset, len(data)) != (request.offset, expected):
            raise RemoteProtocolError(
                f"{peer}: sent {len(data)} bytes at {reply.offset} of {reply.total}; asked for {expected} at "
                f"{request.offset}"
            )
        if crc_of(data) != reply.data_crc:
            raise RemoteProtocolError(f"{peer}: the bytes at {reply.offset} are damaged")
        self._total = reply.total
        self._offset += len(data)
        if not self._under_way:
            self._asked = self._offset  # the first piece of a file may be shorter than what was asked for
        return data
