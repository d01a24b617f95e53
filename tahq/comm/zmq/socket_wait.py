"""Waiting: the I/O thread for ZMQ sockets, other threads and timers at once, other threads for the I/O thread.

The I/O thread waits to the microsecond. `zmq.Poller` counts whole milliseconds, and so do Python's `poll` and `epoll`;
`select` takes no descriptor above 1023. So `WaitSet` waits with `ppoll` for an epoll that has the sockets' descriptors.
Those signal edges, not levels: all sockets must be asked for their events after anything was done with one and before
waiting, which `WaitSet.wait` does.
"""

import ctypes
import errno
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import zmq

Socket = zmq.Socket[bytes]
Item = TypeVar("Item")

_READABLE = 1
_MAX_WAIT_S = 3600.0
# Plain integers: arithmetic on enum members costs more than the system call that it prepares.
_POLLIN = int(zmq.POLLIN)
NOWAIT = int(zmq.NOBLOCK)


def take_messages(socket: Socket, limit: int) -> Iterator[list[zmq.Frame]]:
    """Up to `limit` messages that are there already, part by part."""
    for _ in range(limit):
        try:
            part = socket.recv(NOWAIT, copy=False)
        except zmq.Again:
            return
        parts = [part]
        while part.more:
            part = socket.recv(NOWAIT, copy=False)
            parts.append(part)
        yield parts


class _Descriptor(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("wanted", ctypes.c_short), ("found", ctypes.c_short))


class _Time(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class Waker:
    """Lets any thread wake the thread that waits; many calls between two waits cost one system call."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._changing = threading.Lock()
        self._is_set = False
        self._is_closed = False

    def wake(self) -> None:
        """End the present wait, or the next one."""
        if self._is_set:
            return
        with self._changing:
            if not self._is_closed:
                self._is_set = True
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Take the signal; look at the queue of other threads only after that, so that nothing is missed.

        Flag and descriptor change together: a descriptor that is set where the flag is not would end every wait at
        once, until the next wake.
        """
        if self._is_set:
            with self._changing:
                os.eventfd_read(self._descriptor)
                self._is_set = False

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._descriptor

    def close(self) -> None:
        """Release the descriptor; waking has no effect afterwards."""
        with self._changing:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._descriptor)


class WaitSet:
    """The waker and the sockets of one thread, each socket with the function that takes its input."""

    def __init__(self, waker: Waker) -> None:
        self._epoll = select.epoll()
        self._epoll.register(waker.fileno(), select.EPOLLIN)
        self._ppoll = ctypes.CDLL(None, use_errno=True).ppoll
        self._descriptor, self._time = _Descriptor(self._epoll.fileno(), _READABLE, 0), _Time()
        self._arguments = (ctypes.byref(self._descriptor), ctypes.c_ulong(1), ctypes.byref(self._time), None)
        self._handlers: dict[Socket | int, Callable[[], None]] = {waker.fileno(): waker.clear}
        self._ready: Sequence[tuple[Any, int]] | None = None

    def add(self, socket: Socket, handle: Callable[[], None]) -> None:
        """Wait for this socket too, until it is removed, or closed with the others."""
        self._handlers[socket] = handle
        self._epoll.register(int(socket.get(zmq.FD)), select.EPOLLIN)

    def remove(self, socket: Socket) -> None:
        """Wait for it no longer; it is the caller's to close."""
        del self._handlers[socket]
        self._epoll.unregister(int(socket.get(zmq.FD)))

    def wait(self, timeout_s: float) -> None:
        """Return when a socket has input, the waker was woken, or the time is over."""
        deadline_s = time.monotonic() + min(timeout_s, _MAX_WAIT_S)
        # A ZMQ descriptor also signals events internal to ZMQ, so look again before returning.
        while not (ready := self._look()) and self._has_signalled(max(0.0, deadline_s - time.monotonic())):
            pass
        self._ready = ready

    def _has_signalled(self, timeout_s: float) -> bool:
        """Wait for the epoll, or a signal to the process."""
        self._time.s, self._time.ns = divmod(int(1e9 * timeout_s), 1_000_000_000)
        number = int(self._ppoll(*self._arguments))
        if number < 0 and ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), f"ppoll: {os.strerror(ctypes.get_errno())}")
        return number != 0

    def serve(self) -> None:
        """Take the input that the last wait has found, or that is there now."""
        ready, self._ready = self._ready, None
        for source, _ in self._look() if ready is None else ready:
            handle = self._handlers.get(source)
            if handle is not None:  # the one before may have removed it
                handle()

    def _look(self) -> Sequence[tuple[Any, int]]:
        return zmq.zmq_poll([(source, _POLLIN) for source in self._handlers], 0)

    def close(self, linger_ms: int) -> None:
        """Close the sockets; a second time does nothing."""
        self._epoll.close()
        sockets = [socket for socket in self._handlers if not isinstance(socket, int) and not socket.closed]
        for socket in sockets:
            socket.disable_monitor()  # ZMQ's thread would wait for ever until an event that it reports is taken
        for socket in sockets:
            socket.close(linger=linger_ms)


class Inbox(Generic[Item]):
    """A queue from the I/O thread to the thread that computes; it can be made to raise instead.

    `get` blocks in the operating system, without polling. A failure comes after what was put before it; an abort comes
    at once. Either stays: every later `get` raises it too. `name` begins the message of a TimeoutError.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # None wakes the waiting thread, so that it looks at the errors
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._abort: Exception | None = None

    @property
    def error(self) -> Exception | None:
        """What `get` raises sooner or later; None while all is well."""
        return self._abort or self._failure

    def put(self, item: Item) -> None:
        """Add an item."""
        self._queue.put(item)

    def fail(self, error: Exception) -> None:
        """Raise `error` after everything put so far was taken; the first failure counts."""
        self._failure = self._failure or error
        self._queue.put(None)

    def abort(self, error: Exception) -> None:
        """Raise `error` from now on, whatever is queued; the first abort counts."""
        self._abort = self._abort or error
        self._queue.put(None)

    def get(self, timeout_s: float | None) -> Item:
        """The next item.

        Args:
            timeout_s: how long to wait; None = until there is one; 0 = only look.

        Raises:
            TimeoutError: there was none in time.
            Exception: what `fail` or `abort` was given.
        """
        self._raise(self._abort)
        try:
            item = self._queue.get(timeout=None if timeout_s is None else max(0.0, timeout_s))
        except queue.Empty:
            raise TimeoutError(f"{self._name}: nothing came within {timeout_s} s") from None
        self._raise(self._abort)
        if item is None:
            self._queue.put(None)
            self._raise(self._failure)
            raise AssertionError("woken without a reason")
        return item

    def _raise(self, error: Exception | None) -> None:
        if error is not None:
            raise error.with_traceback(None)
