"""What a device has free for a stage."""

import resource
from collections.abc import Iterator
from pathlib import Path

import torch

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes that could be allocated on a device now; 0: nothing, or this system does not say.

    CUDA: as the driver has it. CPU: the least of MemAvailable, what the limits of this process's control groups (v2)
    leave, and what its limit on address space does.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = _table(proc / "meminfo").get("MemAvailable")
    if available is None:
        return 0
    left = (*_left_by_groups(proc / "self" / "cgroup", cgroups), *_left_of_addresses(proc / "self" / "status"))
    return max(0, min(available, *left)) if left else available


def _left_by_groups(membership: Path, cgroups: Path) -> Iterator[int]:
    """Of every group of the unified hierarchy that this process is in, and that has a limit."""
    path = next((line[3:] for line in _lines(membership) if line.startswith("0::")), None)
    if path is None:
        return
    group = cgroups / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(cgroups):
            break
        limit, used = (next(iter(_lines(folder / f"memory.{name}")), "") for name in ("max", "current"))
        if limit.isdecimal() and used.isdecimal():
            yield int(limit) - (int(used) - _given_back_on_demand(folder))


def _given_back_on_demand(group: Path) -> int:
    """Cached files that count as used until somebody needs the memory."""
    rows = (line.split() for line in _lines(group / "memory.stat"))
    return next((int(row[1]) for row in rows if row[:1] == ["inactive_file"]), 0)


def _left_of_addresses(status: Path) -> Iterator[int]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _table(status).get("VmSize")
    if limit != resource.RLIM_INFINITY and used is not None:
        yield limit - used


def _table(path: Path) -> dict[str, int]:
    """Rows such as ``MemAvailable: 12 kB``, in bytes."""
    cells = (line.split() for line in _lines(path))
    return {row[0].rstrip(":"): 1024 * int(row[1]) for row in cells if len(row) == 3 and row[2] == "kB"}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
