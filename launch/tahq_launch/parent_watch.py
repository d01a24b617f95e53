"""How a worker notices that whoever started it is gone, so that no orphan keeps a machine busy.

A local worker watches the pipe that multiprocessing keeps between it and the fork server, which ends with the
launcher: one that was killed cannot clean up, and what is committed is safe in snapshots. A worker started over ssh has
sshd as its parent, which outlives the connection; but its stdin ends with the connection, so it watches that.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from typing import BinaryIO

GRACE_S = 5.0
"""How long a worker whose connection ended has to leave in order."""


def die_with_launcher() -> None:
    """In a process that multiprocessing has made: from now on, the end of who made it is SIGKILL for this one."""
    server = multiprocessing.parent_process()
    if server is None:
        raise AssertionError("only a worker that was forked for a launcher can die with it")
    threading.Thread(target=_die_after, args=(server,), name="launcher-watch", daemon=True).start()


def _die_after(server: BaseProcess) -> None:
    server.join()
    os.kill(os.getpid(), signal.SIGKILL)


def exit_with_stdin() -> None:
    """Watch stdin from a thread: its end is SIGTERM for this process and, after `GRACE_S`, SIGKILL."""
    threading.Thread(target=_leave_at_end, args=(sys.stdin.buffer,), name="stdin-watch", daemon=True).start()


def _leave_at_end(stream: BinaryIO) -> None:
    while os.read(stream.fileno(), 4096):
        pass
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        os.kill(os.getpid(), signal_number)
        time.sleep(GRACE_S)
