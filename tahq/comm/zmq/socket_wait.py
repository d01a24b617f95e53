"""Waiting for ZMQ sockets, other threads and timers at once, to the microsecond.

`zmq.Poller` counts whole milliseconds, and so do Python's `poll` and `epoll`; `select` takes no descriptor above 1023.
So this waits with `ppoll` for an epoll that has the sockets' descriptors. Those signal edges, not levels: a socket must
be asked for its events after anything was done with it and before waiting, which `WaitSet.wait` does.
"""

import ctypes
import errno
import os
import select
import threading
import time

import zmq

_READABLE = 1


class _Descriptor(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("wanted", ctypes.c_short), ("found", ctypes.c_short))


class _Time(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class ReadableWait:
    """Waits until a descriptor can be read; for one thread.

    Args:
        descriptor: open for as long as this is used.
    """

    def __init__(self, descriptor: int) -> None:
        self._ppoll = ctypes.CDLL(None, use_errno=True).ppoll
        self._descriptor = _Descriptor(descriptor, _READABLE, 0)
        self._time = _Time()
        self._arguments = (ctypes.byref(self._descriptor), ctypes.c_ulong(1), ctypes.byref(self._time), None)

    def wait(self, timeout_s: float) -> bool:
        """Wait; returns whether the descriptor can be read, or a signal came."""
        self._time.s, self._time.ns = divmod(int(1e9 * timeout_s), 1_000_000_000)
        number = int(self._ppoll(*self._arguments))
        if number < 0 and ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), f"ppoll: {os.strerror(ctypes.get_errno())}")
        return number != 0


Socket = zmq.Socket[bytes]

_MAX_WAIT_S = 3600.0
# Plain integers: arithmetic on enum members costs more than the system call it prepares.
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)


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


def has_input(socket: Socket) -> bool:
    """Whether a message can be received without waiting."""
    return bool(int(socket.get(_EVENTS)) & _POLLIN)


class WaitSet:
    """A waker and the sockets of one thread."""

    def __init__(self, waker: Waker) -> None:
        self._epoll = select.epoll()
        self._precise = ReadableWait(self._epoll.fileno())
        self._waker_descriptor = waker.fileno()
        self._epoll.register(self._waker_descriptor, select.EPOLLIN)
        self._sockets: list[Socket] = []

    def add(self, socket: Socket) -> None:
        """Wait for this socket too, until it is removed, or closed with the others."""
        self._sockets.append(socket)
        self._epoll.register(int(socket.get(zmq.FD)), select.EPOLLIN)

    def remove(self, socket: Socket) -> None:
        """Wait for it no longer; it is the caller's to close."""
        self._sockets.remove(socket)
        self._epoll.unregister(int(socket.get(zmq.FD)))

    def wait(self, timeout_s: float | None) -> None:
        """Return when a socket has input, the waker was woken, or the time is over (None: no limit)."""
        deadline_s = time.monotonic() + (_MAX_WAIT_S if timeout_s is None else min(timeout_s, _MAX_WAIT_S))
        # A ZMQ descriptor also signals events internal to ZMQ, so look again before returning.
        while not self._has_input():
            is_ready = self._precise.wait(max(0.0, deadline_s - time.monotonic()))
            if not is_ready or any(descriptor == self._waker_descriptor for descriptor, _ in self._epoll.poll(0)):
                return

    def _has_input(self) -> bool:
        return any(has_input(socket) for socket in self._sockets)

    def close(self, linger_ms: int) -> None:
        """Close the sockets; a second time does nothing."""
        self._epoll.close()
        for socket in self._sockets:
            socket.close(linger=linger_ms)
