"""Resident memory of processes, and the peak of this process."""

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATUS = Path("/proc/self/status")
_FORGET_THE_PEAK = "5"


class Growth:
    """Peak of resident memory during a block, less that at its beginning."""

    nbytes = 0


@contextmanager
def peak_growth() -> Iterator[Growth]:
    """Measure the block; the figure is set when it ends.

    Python runs a full collection only once new objects number a quarter of the old ones: with torch imported, tens of
    MB of finished runs' cyclic garbage may wait for it. So the objects before the block are not counted as old.
    """
    growth = Growth()
    gc.collect()
    gc.freeze()
    gc.collect()  # sets the number of old objects to zero
    Path("/proc/self/clear_refs").write_text(_FORGET_THE_PEAK)
    before = resident_kib()
    try:
        yield growth
    finally:
        gc.unfreeze()
    growth.nbytes = max(0, _kib(_STATUS, "VmHWM") - before) * 1024


def resident_kib(pid: int | None = None) -> int:
    """Resident memory of a process; None: this one."""
    return _kib(_STATUS if pid is None else Path(f"/proc/{pid}/status"), "VmRSS")


def _kib(status: Path, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", status.read_text(), re.MULTILINE)
    assert match is not None, f"no {name} in {status}"
    return int(match.group(1))
