"""What tests ask about processes, through /proc."""

import os
import time
from collections.abc import Callable
from pathlib import Path

_LISTEN = "0A"


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    return _stat(pid)[:1] not in ([], ["Z"])


def children(pid: int) -> list[int]:
    """The processes that this one started and that still run."""
    numbers = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    return [number for number in numbers if _stat(number)[1:2] == [str(pid)] and is_alive(number)]


def workers(launcher: int) -> list[int]:
    """The local workers of a launcher: the children of its fork server that have their names."""
    started = [pid for child in children(launcher) for pid in children(child)]
    return [pid for pid in started if name(pid).startswith("tahq stage")]


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Return when the condition holds; fail the test if it does not in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)


def command_line(pid: int) -> list[str]:
    """A process's arguments, which one that has just begun does not have for a moment; empty if there is none."""
    deadline_s, text = time.monotonic() + 1.0, ""
    while not text and time.monotonic() < deadline_s:
        try:
            text = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        except OSError:
            return []
    return text.split("\0")


def listening_ports(pid: int) -> list[int]:
    """TCP ports that a process listens on."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    inodes = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    tables = [Path(f"/proc/{pid}/net/{table}").read_text() for table in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTEN and row[9] in inodes]


def name(pid: int) -> str:
    """What ps calls a process; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """State, parent and what follows, of /proc/PID/stat; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
