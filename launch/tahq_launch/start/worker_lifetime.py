"""How a worker is restarted when it is killed, and ends when its parent ends.

A worker that a person started has a light parent process (`supervise`), which forks the process that serves the stage
and forks another when that one is killed by a signal (out-of-memory killer, a crash in a kernel). The new process tells
the coordinator which worker it replaces, so the coordinator need not wait for the dead one to time out. If the child
ends in any other way, the parent ends with the same status. Signals to the parent are forwarded; if the parent is
killed, the kernel kills the child.

A worker of a launcher ends with it: a local one watches the pipe to the fork server, one that ssh started watches its
stdin, because its parent there is sshd, which outlives the connection.
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
from types import FrameType

from tahq.errors import PeerLostError

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MAX_DELAY_S = 30.0
GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL for a worker whose ssh connection ended."""

Serve = Callable[[str, bool], int]
"""(name that all children share, whether this is the first child) -> exit status; runs in the child, raises nothing."""


class RestartTimes:
    """Counts restarts per stage, and delays them: 0, 1, 2, 4, … at most 30 seconds."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._counts: dict[int, int] = {}

    def delay_s(self, stage: int) -> float:
        """Count a restart of a stage's worker; returns the seconds to wait first. PeerLostError if none are left."""
        count = self._counts.get(stage, 0)
        if count >= self._max_restarts:
            raise PeerLostError(
                f"the worker of stage {stage} was killed after {count} restarts, the most that run.restarts allows"
            )
        self._counts[stage] = count + 1
        return 0.0 if count == 0 else min(2.0 ** (count - 1), _MAX_DELAY_S)


def supervise(serve: Serve, max_restarts: int) -> int:
    """Run `serve` in a child process, and again in another whenever a signal kills the child.

    Returns:
        The exit status of the last child; 128 + signal if no restarts were left, or if the signal was forwarded to it.
    """
    worker_id, times, is_first = secrets.token_hex(16), RestartTimes(max_restarts), True
    while True:
        forwarded: set[int] = set()
        status = _one_child(serve, worker_id, is_first, forwarded)
        is_first = False
        if status >= 0:
            return status
        if -status in forwarded:  # before the child had a handler for it
            return 128 - status
        name = signal.Signals(-status).name
        try:
            delay_s = times.delay_s(0)
        except PeerLostError:
            log.error("the worker was killed by %s too often; not restarting it", name)
            return 128 - status
        log.warning("the worker was killed by %s; restarting it in %.0f s", name, delay_s)
        time.sleep(delay_s)


def _one_child(serve: Serve, worker_id: str, is_first: bool, forwarded: set[int]) -> int:
    """Exit status of a child, negative for a signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    # A signal that arrives before it can be forwarded would end the parent alone.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # when the parent dies
        if os.getppid() != parent:  # it is dead already
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = serve(worker_id, is_first)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # only the parent returns from `supervise`

    def forward(number: int, frame: FrameType | None) -> None:
        forwarded.add(number)
        os.kill(pid, number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with_launcher() -> None:
    """Kill this process, which multiprocessing created, when its parent ends."""
    server = multiprocessing.parent_process()
    if server is None:
        raise AssertionError("--die-with-launcher is for workers that were forked for a launcher")

    def watch() -> None:
        server.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def exit_with_stdin() -> None:
    """When stdin ends, send this process SIGTERM and, after `GRACE_S`, SIGKILL."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.kill(os.getpid(), number)
            time.sleep(GRACE_S)

    threading.Thread(target=watch, name="stdin-watch", daemon=True).start()
