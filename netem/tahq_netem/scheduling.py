"""Real-time priority for short work on which a measured time depends: moving packets, answering a datagram.

On a machine whose cores are busy training, whoever waits for a turn waits for milliseconds, which then look as
if they were the network's. The lowest real-time priority goes before everything ordinary; between equals the
kernel takes turns, and of every second it leaves 50 ms to the others.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

_PRIORITY: Final = 1
_NICE: Final = -10


def hurry() -> str:
    """Ask for a priority that busy neighbours don't delay, for the calling thread; returns what was granted."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
        return "real-time"
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
        return f"nice {_NICE}"
    return "normal"


@contextmanager
def hurrying() -> Iterator[None]:
    """The calling thread has real-time priority within the block, where it may have it."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
        yield
    finally:
        os.sched_setscheduler(0, *before)
