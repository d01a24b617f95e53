"""A worker that a person has started comes back by itself when it is killed: a parent process starts it again.

The parent imports nothing heavy, forks, and waits; the child serves the stage. A child that a signal has killed (the
kernel's out-of-memory killer, a crash in a kernel) is followed by another, which tells the coordinator that it comes
after it, so that nobody has to wait for the dead one to be missed. Whatever else ends the child ends the parent, with
its status. Signals go to the child, whose part it is to leave in order; when the parent is killed the child dies too.
"""

import ctypes
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from tahq.errors import PeerLostError
from tahq_launch.restart_times import RestartTimes

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
