"""How this package's own programs are started on a host, and made to react quickly and to end with their parent.

Run as a program, it is another module that ends with its stdin::

    python -m tahq_netem.programs MODULE ARGUMENT …

Short work on which a measured time depends (moving packets, answering a datagram) asks for real-time priority: on busy
cores a thread waits milliseconds for its turn, which would be measured as the network's. The kernel reserves 50 ms of
every second for other work.
"""

import os
import runpy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_PRIORITY: Final = 1
_NICE: Final = -10


def module_argv(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module with this Python."""
    return [sys.executable, "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """An environment in which a program finds the same modules as this process, in whatever folder it runs."""
    folders = [str(Path(__file__).parents[1]), *sys.path]
    return os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in folders)}


def stat_fields(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may hold spaces and brackets; empty: no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def leave_with_stdin() -> None:
    """End this process when its stdin ends: the kernel closes that pipe however the parent ends."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="stdin-watch", daemon=True).start()


def hurry() -> None:
    """Ask for real-time priority, else a lower nice value, for the calling thread."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
    except PermissionError:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)


@contextmanager
def hurrying() -> Iterator[None]:
    """Real-time priority for the calling thread within the block, if this user may have it."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
        yield
    finally:
        os.sched_setscheduler(0, *before)


if __name__ == "__main__":
    leave_with_stdin()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
