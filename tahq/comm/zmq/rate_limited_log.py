"""Warnings that a stranger can cause as often as it likes, written once in a while."""

import logging
import math
import time
from collections.abc import Callable


class RateLimitedLog:
    """At most one warning every `interval_s`, which says how many were left out."""

    def __init__(
        self, logger: logging.Logger, interval_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._quiet_until_s = -math.inf
        self._left_out = 0

    def warning(self, message: str) -> bool:
        """Write the message, or count it; returns whether it was written."""
        now_s = self._clock()
        if now_s < self._quiet_until_s:
            self._left_out += 1
            return False
        more = f" ({self._left_out} more like this were left out)" if self._left_out else ""
        self._logger.warning("%s%s", message, more)
        self._quiet_until_s, self._left_out = now_s + self._interval_s, 0
        return True
