"""How many cores were busy: with this process and everything that it started, and with anything at all.

Stages that sleep leave the cores to codecs and sockets; when these want more than there are, the machine is
measured and not the network. Processes are counted by /proc, time in the kernel included, so a network's own
processes are in it. What the kernel does on nobody's account (forwarding packets) is not.
"""

import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

_PARENT, _USER, _SYSTEM = 1, 11, 12
"""Fields of /proc/PID/stat behind the name."""


@dataclass(frozen=True, slots=True)
class BusyCores:
    """Mean number of busy cores over a time: ours, and of the whole machine (or container)."""

    own: float
    machine: float

    @property
    def others(self) -> float:
        """What disturbed the measurement."""
        return max(0.0, self.machine - self.own)


class BusyMeter:
    """Counts from its making on."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._own = _tree_ticks(os.getpid())
        self._machine = _machine_ticks()

    def read(self) -> BusyCores:
        """Busy cores since this was made; of a process that ended meanwhile nothing is known."""
        ticks = (time.monotonic() - self._begin_s) * os.sysconf("SC_CLK_TCK")
        now = _tree_ticks(os.getpid())
        own = sum(count - self._own.get(pid, 0) for pid, count in now.items())
        return BusyCores(own / ticks, (_machine_ticks() - self._machine) / ticks)


def num_usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _tree_ticks(root: int) -> dict[int, int]:
    """Clock ticks used so far by a process and by each of its descendants."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        fields = _stat(entry) if entry.isdigit() else []
        if fields:
            ticks[int(entry)] = int(fields[_USER]) + int(fields[_SYSTEM])
            children[int(fields[_PARENT])].append(int(entry))
    found, waiting = {}, [root]
    while waiting:
        pid = waiting.pop()
        found[pid] = ticks.get(pid, 0)
        waiting += children[pid]
    return found


def _stat(pid: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []  # it has ended


def _machine_ticks() -> int:
    """Ticks that all cores together spent on anything but idling and waiting for disks."""
    user, nice, system, _, _, interrupts, soft_interrupts, *_ = map(
        int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    )
    return user + nice + system + interrupts + soft_interrupts
