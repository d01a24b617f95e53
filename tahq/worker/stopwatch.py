"""Seconds of something that is done again and again on a device."""

import statistics
import time
from collections.abc import Callable

import torch

BUDGET_S = 0.3
"""A thing is repeated for so long …"""
FEWEST = 3
"""… but at least so often, and …"""
MOST = 50
"""… at most so often, after one time that is not counted."""


class Timer:
    """Times what runs on a device, which is waited for before and after.

    Args:
        device: where.
        clock: seconds, monotonic.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._clock = clock

    def now_s(self) -> float:
        """The time, once the device has done what it was told."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()

    def medians_s(self, laps: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """Medians of what a function says over its repetitions.

        Args:
            laps: does the work, and returns the seconds of each of its parts.
        """
        laps()
        rows: list[tuple[float, ...]] = []
        until_s = self._clock() + BUDGET_S
        while len(rows) < FEWEST or (len(rows) < MOST and self._clock() < until_s):
            rows.append(laps())
        return tuple(statistics.median(column) for column in zip(*rows, strict=True))
