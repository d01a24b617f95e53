"""Free and used memory of a device, and errors that mean that it is full."""

import resource
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_TEXTS = ("can't allocate memory", "CUDA error: out of memory")
"""Messages of the CPU's allocator, and of CUDA's for pinned host memory."""
_CONTEXT = 600 << 20  # Bytes that CUDA is assumed to take for each process


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; torch has no exception type for the CPU's memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
    )


def free_bytes(device: torch.device, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes that could be allocated on a device now; 0: none, or unknown.

    CUDA: as the driver reports. CPU: the least of MemAvailable and what is left under the limits of this process's
    control groups (v2) and of its address space.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = _table(proc / "meminfo").get("MemAvailable")
    if available is None:
        return 0
    left = (*_left_by_groups(proc / "self" / "cgroup", cgroups), *_left_of_addresses(proc / "self" / "status"))
    return max(0, min(available, *left)) if left else available


def shares_of_memory(devices: Sequence[torch.device]) -> list[int] | None:
    """Bytes free for each of new processes, on CPUs or on GPUs, which they may share; None: unknown, or none is.

    Unlike `free_bytes` it makes no CUDA context, which would take some.
    """
    if devices[0].type != "cuda":
        return [free_bytes(devices[0]) // len(devices)] * len(devices)
    command = ("nvidia-smi", "--query-gpu=memory.free,uuid", "--format=csv,noheader,nounits")
    try:
        rows = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    uuids = [str(torch.cuda.get_device_properties(device).uuid) for device in devices]
    free = [next((row.partition(",")[0] for row in rows if row.endswith(uuid)), "") for uuid in uuids]
    if not all(map(str.isdecimal, free)):
        return None
    shares = [(int(mib) << 20) // uuids.count(uuid) - _CONTEXT for mib, uuid in zip(free, uuids, strict=True)]
    return shares if min(shares) > 0 else None


def peak_bytes(device: torch.device) -> int:
    """Most bytes that this process has held on a device: on CUDA in torch's allocator, on the CPU resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _left_by_groups(membership: Path, cgroups: Path) -> Iterator[int]:
    """Bytes left under each limit of the unified hierarchy that applies to this process."""
    path = next((line[3:] for line in _lines(membership) if line.startswith("0::")), None)
    if path is None:
        return
    group = cgroups / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(cgroups):
            break
        limit, used = (next(iter(_lines(folder / f"memory.{name}")), "") for name in ("max", "current"))
        if limit.isdecimal() and used.isdecimal():
            rows = (line.split() for line in _lines(folder / "memory.stat"))
            # cached files count as used until the memory is needed
            reclaimable = next((int(row[1]) for row in rows if row[:1] == ["inactive_file"]), 0)
            yield int(limit) - (int(used) - reclaimable)


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
