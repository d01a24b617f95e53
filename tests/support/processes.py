"""What tests ask about processes, through /proc."""

import os
import time
from collections.abc import Callable
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    return _stat(pid)[:1] not in ([], ["Z"])


def children(pid: int) -> list[int]:
    """The processes that this one started and that still run."""
    numbers = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    return [number for number in numbers if _stat(number)[1:2] == [str(pid)] and is_alive(number)]


def with_argument(text: str) -> list[int]:
    """The processes that have `text` in their command line, this one left out."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        if text.encode() in arguments and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Return when the condition holds; fail the test if it does not in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)


def _stat(pid: int) -> list[str]:
    """State, parent and what follows, of /proc/PID/stat; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
