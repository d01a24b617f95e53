"""How much memory this process came to hold at its peak."""

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATUS = Path("/proc/self/status")
_FORGET_THE_PEAK = "5"


class Growth:
    """Resident memory at the peak of a block, beyond what there was at its beginning."""

    nbytes = 0


@contextmanager
def peak_growth() -> Iterator[Growth]:
    """Measure the block; the figure is there when it has ended."""
    growth = Growth()
    gc.collect()
    Path("/proc/self/clear_refs").write_text(_FORGET_THE_PEAK)
    before = _kib("VmRSS")
    yield growth
    growth.nbytes = max(0, _kib("VmHWM") - before) * 1024


def _kib(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert match is not None, f"no {name} in {_STATUS}"
    return int(match.group(1))
