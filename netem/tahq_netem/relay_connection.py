"""A TCP connection between two hosts, relayed: two sockets, and a flow in each direction between them.

A flow takes from one socket no faster than the lines carry, so that the sender feels the rate through its full
socket buffer; what is under way waits for its time; then it goes into the other socket. The end of a stream
travels like data. Chunks of one flow never overtake each other.
"""

import socket
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from tahq_netem.reactor import READABLE, WRITABLE, Reactor
from tahq_netem.relay_line import RelayPaths

BUFFER_BYTES: Final = 256 * 1024
"""Of the sockets that the relay reads from: what it has not taken yet holds the sender back."""

_AHEAD_S: Final = 1e-3
"""How long before its turn a chunk is taken, so that a loop that wakes late leaves no gap."""
_CATCH_UP_S: Final = 20e-3
"""How late a chunk that was waiting may be taken, and still be sent as if it had been in time."""
_END: Final = b""
_RESET: Final = struct.pack("ii", 1, 0)  # struct linger: on, for no time


class Endpoint:
    """One socket, and what the loop watches it for."""

    def __init__(self, reactor: Reactor, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Always there, and does not pace: bbr would spread each chunk over the time of the one before.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        self.socket = connected
        self.on_readable: Callable[[], None] = _nothing
        self.on_writable: Callable[[], None] = _nothing
        self._reactor = reactor
        self._descriptor = connected.fileno()
        self._wanted = 0

    def want(self, events: int, *, is_wanted: bool) -> None:
        """Watch for these events, or no more."""
        wanted = self._wanted | events if is_wanted else self._wanted & ~events
        if wanted == self._wanted or self.socket.fileno() < 0:
            return
        self._wanted = wanted
        if wanted:
            self._reactor.watch(self._descriptor, wanted, self._act)
        else:
            # Errors and hang-ups are reported unasked, again and again, until somebody reads or writes.
            self._reactor.forget(self._descriptor)

    def _act(self, _events: int) -> None:
        # Whatever was reported, whoever waits tries, and gets an error as an exception.
        if self._wanted & READABLE:
            self.on_readable()
        if self._wanted & WRITABLE and self.socket.fileno() >= 0:
            self.on_writable()

    def close(self, *, with_reset: bool) -> None:
        """Close the socket; with a reset, the peer gets RST instead of what was still to be sent."""
        if self.socket.fileno() < 0:
            return
        self._reactor.forget(self._descriptor)
        if with_reset:
            close_with_reset(self.socket)
        else:
            self.socket.close()


def close_with_reset(connected: socket.socket) -> None:
    """Close a socket so that its peer gets RST."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    connected.close()


def _nothing() -> None:
    """What happens before anybody is interested."""


class Flow:
    """One direction of a connection."""

    def __init__(
        self,
        paths: RelayPaths,
        reactor: Reactor,
        ends: tuple[str, str],
        sockets: tuple[Endpoint, Endpoint],
        on_over: Callable[[bool], None],
    ) -> None:
        self.ends = ends
        self.is_over = False
        self._paths = paths
        self._reactor = reactor
        self._reader, self._writer = sockets
        self._on_over = on_over
        self._is_stalled = False
        self._num_under_way = 0
        self._last_arrival_s = 0.0
        self._held: deque[bytes] = deque()
        self._unsent: deque[memoryview] = deque()
        self._reader.on_readable = lambda: self._take(self._reactor.now_s())
        self._writer.on_writable = self._flush

    def start(self) -> None:
        """Begin to take what the sender sends."""
        self._reader.want(READABLE, is_wanted=True)

    def wake(self) -> None:
        """Go on, if the path is open (again): what was held up arrives, and more is taken."""
        if self._paths.is_open(*self.ends):
            held, self._held = self._held, deque()
            for chunk in held:
                self._arrive(chunk, self._reactor.now_s())
            if self._is_stalled:
                self._is_stalled = False
                self._take_waiting()

    def _take_waiting(self) -> None:
        """Take a chunk that was there before its turn came."""
        self._take(self._reactor.now_s() - _CATCH_UP_S)

    def _take(self, ready_s: float) -> None:
        if self.is_over or self._reader.socket.fileno() < 0:
            return
        self._reader.want(READABLE, is_wanted=False)
        if not self._paths.is_open(*self.ends) or self._num_under_way >= self._paths.window_bytes(*self.ends):
            self._is_stalled = True
        elif (turn_s := self._paths.free_s(*self.ends) - _AHEAD_S) > self._reactor.now_s():
            self._reactor.call_at(turn_s, self._take_waiting)
        else:
            self._receive(ready_s)

    def _receive(self, ready_s: float) -> None:
        try:
            chunk = self._reader.socket.recv(self._paths.chunk_bytes(*self.ends))
        except BlockingIOError:
            self._reader.want(READABLE, is_wanted=True)
        except OSError:
            self._on_over(True)
        else:
            self._send(chunk, ready_s)

    def _send(self, chunk: bytes, ready_s: float) -> None:
        self._num_under_way += len(chunk)
        arrival_s = max(self._last_arrival_s, self._paths.send(*self.ends, len(chunk), ready_s))
        self._last_arrival_s = arrival_s
        self._reactor.call_at(arrival_s, partial(self._arrive, chunk, arrival_s))
        if chunk != _END:
            self._reactor.call_at(self._paths.free_s(*self.ends) - _AHEAD_S, self._take_waiting)

    def _arrive(self, chunk: bytes, arrival_s: float) -> None:
        if self._held or not self._paths.is_open(*self.ends):
            self._held.append(chunk)
            return
        delivered_s = self._paths.deliver(*self.ends, len(chunk), arrival_s)
        self._reactor.call_at(delivered_s, partial(self._deliver, chunk))

    def _deliver(self, chunk: bytes) -> None:
        self._unsent.append(memoryview(chunk))
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent and self._writer.socket.fileno() >= 0:
                self._write(self._unsent[0])
        except BlockingIOError:
            self._writer.want(WRITABLE, is_wanted=True)
        except OSError:
            self._on_over(True)
        else:
            self._writer.want(WRITABLE, is_wanted=False)
        if self._is_stalled:
            self.wake()

    def _write(self, chunk: memoryview) -> None:
        if not chunk:
            self._unsent.popleft()
            self._writer.socket.shutdown(socket.SHUT_WR)
            self.is_over = True
            self._on_over(False)
            return
        num_written = self._writer.socket.send(chunk)
        self._num_under_way -= num_written
        self._unsent[0] = chunk[num_written:]
        if num_written == len(chunk):
            self._unsent.popleft()


class Connection:
    """A relayed connection that `source` has made to a port of `destination`."""

    def __init__(
        self,
        paths: RelayPaths,
        reactor: Reactor,
        ends: tuple[str, str],
        sockets: tuple[socket.socket, socket.socket],
        on_closed: Callable[["Connection"], None],
    ) -> None:
        """`sockets`: the one that the source has connected to, and one that is connecting to the destination."""
        self.ends = ends
        self._near, self._far = (Endpoint(reactor, connected) for connected in sockets)
        self._on_closed = on_closed
        self.flows = (
            Flow(paths, reactor, ends, (self._near, self._far), self._over),
            Flow(paths, reactor, ends[::-1], (self._far, self._near), self._over),
        )
        self._flush = self._far.on_writable
        self._far.on_writable = self._connected
        self._far.want(WRITABLE, is_wanted=True)

    def _connected(self) -> None:
        if self._far.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.reset()
            return
        self._far.on_writable = self._flush
        self._far.want(WRITABLE, is_wanted=False)
        for flow in self.flows:
            flow.start()

    def _over(self, is_broken: bool) -> None:
        if is_broken:
            self.reset()
        elif all(flow.is_over for flow in self.flows):
            self._close(with_reset=False)

    def reset(self) -> None:
        """End it with RST to both ends."""
        self._close(with_reset=True)

    def _close(self, *, with_reset: bool) -> None:
        self._near.close(with_reset=with_reset)
        self._far.close(with_reset=with_reset)
        self._on_closed(self)
