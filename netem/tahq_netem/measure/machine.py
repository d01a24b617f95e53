"""The machine that a result was measured on: versions, hardware, and how many cores were busy meanwhile.

Stages that sleep leave the cores to codecs and sockets; when these want more cores than there are, a measurement shows
the machine and not the network. Processes are counted by /proc, time in the kernel included, so a network's own
processes count too. Kernel work that is accounted to no process (forwarding packets) does not.
"""

import os
import platform
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tahq import __version__
from tahq_netem.programs import stat_fields

_PACKAGES = ("torch", "numpy", "numba", "triton", "pyzmq", "pyroute2", "transformers")


def describe_machine(device: str) -> dict[str, Any]:
    """Processor, cores, kernel, versions and, where stages compute on CUDA, the accelerators."""
    kernel, python = platform.release(), platform.python_version()
    found: dict[str, Any] = {"processor": processor(), "cores": num_usable_cores(), "kernel": kernel, "python": python}
    found["tahq"] = __version__
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if device != "cpu" and torch.cuda.is_available():
        found["accelerators"] = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}"
    return found


def one_line(machine: dict[str, Any]) -> str:
    """The same for the head of a table."""
    accelerators = f"{machine['accelerators']}; " if "accelerators" in machine else ""
    return (
        f"{accelerators}{machine['processor']}, {machine['cores']} cores, Linux {machine['kernel']}, "
        f"Python {machine['python']}, torch {machine.get('torch', '?')}"
    )


def processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


_PARENT, _USER, _SYSTEM = 1, 11, 12
"""Fields of /proc/PID/stat behind the name."""


@dataclass(frozen=True, slots=True)
class BusyCores:
    """Mean number of busy cores: of this process and its descendants, and of the whole machine (or container)."""

    own: float
    machine: float

    @property
    def others(self) -> float:
        """Cores that other programs kept busy."""
        return max(0.0, self.machine - self.own)


class BusyMeter:
    """Counts busy cores from its creation on."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._own = _tree_ticks(os.getpid())
        self._machine = _machine_ticks()

    def read(self) -> BusyCores:
        """Busy cores since creation; processes that ended meanwhile are not counted."""
        ticks = (time.monotonic() - self._begin_s) * os.sysconf("SC_CLK_TCK")
        now = _tree_ticks(os.getpid())
        own = sum(count - self._own.get(pid, 0) for pid, count in now.items())
        return BusyCores(own / ticks, (_machine_ticks() - self._machine) / ticks)


def num_usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _tree_ticks(root: int) -> dict[int, int]:
    """Clock ticks used so far, of a process and each of its descendants."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        fields = stat_fields(entry) if entry.isdigit() else []
        if fields:
            ticks[int(entry)] = int(fields[_USER]) + int(fields[_SYSTEM])
            children[int(fields[_PARENT])].append(int(entry))
    tree = [root]
    for pid in tree:  # which grows meanwhile
        tree += children[pid]
    return {pid: ticks.get(pid, 0) for pid in tree}


def _machine_ticks() -> int:
    """Ticks that all cores together did not spend idle or waiting for disks."""
    user, nice, system, _, _, interrupts, soft_interrupts, *_ = map(
        int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    )
    return user + nice + system + interrupts + soft_interrupts
