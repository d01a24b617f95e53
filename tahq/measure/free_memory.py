"""What a device has free for a stage."""

from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int:
    """Bytes that could be allocated on a device now; 0: this system does not say.

    CUDA: as the driver has it. CPU: MemAvailable, which knows of no limit that a container has.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    rows = dict(line.split(":", 1) for line in lines if ":" in line)
    return 1024 * int(rows.get("MemAvailable", "0 kB").split()[0])
