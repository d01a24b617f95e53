"""A worker that a person has started comes back by itself when it is killed: a parent process starts it again.

The parent imports nothing heavy, forks, and waits; the child serves the stage. A child that a signal has killed (the
kernel's out-of-memory killer, a crash in a kernel) is followed by another, which tells the coordinator that it comes
after it, so that nobody has to wait for the dead one to be missed. Whatever else ends the child ends the parent, with
its status. Signals go to the child, whose part it is to leave in order; when the parent is killed the child dies too.
"""

import ctypes
import logging
import multiprocessing
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import BinaryIO, NoReturn

from tahq.errors import PeerLostError

_FIRST_S = 1.0
_LONGEST_S = 30.0


class RestartTimes:
    """Counts restarts.

    Args:
        max_restarts: of each stage.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._counts: dict[int, int] = {}

    def delay_s(self, stage: int) -> float:
        """Seconds until a stage's worker may be started once more, which is counted: 0, 1, 2, 4, … at most 30.

        Raises:
            PeerLostError: that was done too often; the message names the stage.
        """
        count = self._counts.get(stage, 0)
        if count >= self._max_restarts:
            raise PeerLostError(
                f"the worker of stage {stage} was killed, and was started again {count} times before (run.restarts)"
            )
        self._counts[stage] = count + 1
        return 0.0 if count == 0 else float(min(_FIRST_S * 2 ** (count - 1), _LONGEST_S))


log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


Serve = Callable[[str, bool], int]
"""(the name that the children have in common, whether this is the first) -> exit status; called in the child, and
raises nothing.
"""


def supervise(serve: Serve, max_restarts: int) -> int:
    """Serve in child after child until one ends by itself.

    Args:
        serve: what a child does.
        max_restarts: how often a killed child is followed by another.

    Returns:
        The exit status of the last child: 128 + signal if it was killed once too often.
    """
    worker_id, times, is_first = secrets.token_hex(16), RestartTimes(max_restarts), True
    while True:
        status = _one_child(serve, worker_id, is_first)
        is_first = False
        if status >= 0:
            return status
        try:
            delay_s = times.delay_s(0)
        except PeerLostError:
            log.error("the worker was killed by %s, and is not started again: too often by now", _name(-status))
            return 128 - status
        log.warning("the worker was killed by %s; it is started again in %.0f s", _name(-status), delay_s)
        time.sleep(delay_s)


def _one_child(serve: Serve, worker_id: str, is_first: bool) -> int:
    """Exit status of a child, negative for a signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    # One that comes before it can be forwarded would end the parent alone.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    pid = os.fork()
    if pid == 0:
        _die_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _leave_with(serve(worker_id, is_first))
    before = {number: signal.signal(number, _to(pid)) for number in _FORWARDED}
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_with(status: int) -> NoReturn:
    """End this process here: what called `supervise` goes on in the parent alone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _to(pid: int) -> Callable[[int, FrameType | None], None]:
    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(pid, number)

    return forward


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; it may have died already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _name(number: int) -> str:
    return signal.Signals(number).name


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
