"""How a worker notices that whoever started it is gone, so that no orphan keeps a machine busy.

A local worker asks the kernel for SIGKILL when its parent dies: a launcher that was killed cannot
clean up, and what is committed is safe in snapshots. A worker started over ssh has sshd as its
parent, which outlives the connection; but its stdin ends with the connection, so it watches that.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1
GRACE_S = 5.0
"""How long a worker whose connection ended has to leave in order."""


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; leave at once if it already has.

    Args:
        parent: the process that started this one.

    Raises:
        OSError: the kernel refused prctl(PR_SET_PDEATHSIG).
        SystemExit: the parent died before the kernel was asked.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGKILL)


def exit_with_stdin() -> None:
    """Watch stdin from a thread: its end is SIGTERM for this process and, after `GRACE_S`, SIGKILL."""
    threading.Thread(target=_leave_at_end, args=(sys.stdin.buffer,), name="stdin-watch", daemon=True).start()


def _leave_at_end(stream: BinaryIO) -> None:
    while os.read(stream.fileno(), 4096):
        pass
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        os.kill(os.getpid(), signal_number)
        time.sleep(GRACE_S)
