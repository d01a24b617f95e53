"""Waiting for one descriptor, whatever its number, to the microsecond: `ppoll`.

Python's `select` takes no descriptor above 1023, which a process under a flood of connections has, and its `poll`
and `epoll` count whole milliseconds.
"""

import ctypes
import errno
import os

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
        """Whether it can be read by then; true, too, if a signal came first."""
        self._time.s, self._time.ns = divmod(int(1e9 * timeout_s), 1_000_000_000)
        number = int(self._ppoll(*self._arguments))
        if number < 0 and ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), f"ppoll: {os.strerror(ctypes.get_errno())}")
        return number != 0
