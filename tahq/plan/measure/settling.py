"""The rate of a stream of bytes, from what has arrived when, and whether it has settled.

Arrivals are gathered into windows. The rate has settled when the median of the newest windows is hardly above that
of the windows before them: TCP's slow start is over then. Pure: the times are arguments.
"""

import statistics

WINDOW_S = 0.1
"""Of the shortest window; one is at least a round trip long, since TCP sends in bursts of that distance."""

_SPAN = 4
_GROWTH = 1.05
_WINDOW_NBYTES = 64 * 1024
_LONGEST_WINDOW_S = 1.0


class Settling:
    """What has arrived of one stream.

    Args:
        window_s: length of a window, at least. It goes on until it holds 64 KiB, at 5 Mbit/s and less for a second
            at most, so that a packet more or less does not count.
        least_s: how long to look at least, from the first arrival on.
        most_s: how long at most, settled or not.
    """

    def __init__(self, window_s: float, least_s: float, most_s: float) -> None:
        self._window_s = max(window_s, WINDOW_S)
        self._least_s = least_s
        self._most_s = most_s
        self._rates: list[float] = []
        self._begun_s: float | None = None
        self._window_from_s = 0.0
        self._window_nbytes = 0
        self._now_s = 0.0
        self.nbytes = 0
        """All that has arrived."""

    def add(self, now_s: float, nbytes: int) -> None:
        """So many bytes have arrived now."""
        self.nbytes += nbytes
        self._now_s = now_s
        if self._begun_s is None:
            # These came over a time before now that nobody knows.
            self._begun_s = self._window_from_s = now_s
            return
        self._window_nbytes += nbytes
        lasted_s = now_s - self._window_from_s
        is_full = lasted_s >= self._window_s and self._window_nbytes >= _WINDOW_NBYTES
        if is_full or lasted_s >= max(_LONGEST_WINDOW_S, self._window_s):
            self._rates.append(8 * self._window_nbytes / lasted_s)
            self._window_from_s, self._window_nbytes = now_s, 0

    @property
    def lasted_s(self) -> float:
        """From the first arrival to the newest."""
        return self._now_s - self._begun_s if self._begun_s is not None else 0.0

    @property
    def is_over(self) -> bool:
        """Whether the stream may end: it has settled, or taken its time."""
        if self.lasted_s >= self._most_s:
            return True
        newest, before = self._rates[-_SPAN:], self._rates[-2 * _SPAN : -_SPAN]
        if self.lasted_s < self._least_s or len(before) < _SPAN:
            return False
        return statistics.median(newest) <= _GROWTH * statistics.median(before)

    @property
    def rate_bits_per_s(self) -> float:
        """Median of the newest windows, or the mean of what came if that filled none; 0.0 if hardly anything came."""
        if self._rates:
            return statistics.median(self._rates[-2 * _SPAN :])
        return 8 * self._window_nbytes / self.lasted_s if self.lasted_s > 0 else 0.0
