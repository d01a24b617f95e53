"""Numbers as people read them."""

import math
import time
from collections.abc import Callable, Mapping

from tahq.coordinator.observer import LinkRecord
from tahq.units import format_rate


def duration(seconds: float) -> str:
    """``0.85 s``, ``1:22`` (minutes), ``3:04:05`` (hours)."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Silence:
    """The time since anything was printed: overdue after 5 s, then after 10, 20 and every 30 s more."""

    FIRST_S, LONGEST_S = 5.0, 30.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.end()

    def end(self) -> None:
        """Something was printed."""
        self._since_s, self._gap_s = self._clock(), self.FIRST_S

    def is_overdue(self) -> bool:
        """Whether to print how far the work is; if so, the next time is later."""
        now_s = self._clock()
        if now_s - self._since_s < self._gap_s:
            return False
        self._since_s, self._gap_s = now_s, min(2 * self._gap_s, self.LONGEST_S)
        return True


def loss(value: float) -> str:
    """``3.2140``; ``–`` where there is none."""
    return f"{value:.4f}" if not math.isnan(value) else "–"


def rewards(values: Mapping[str, float]) -> str:
    """``75 % right, margin 0.0312``, of DPO; empty where there are none."""
    return f"{share(values['accuracy'])} right, margin {values['margin']:.4f}" if values else ""


def tokens_rate(tokens_per_s: float) -> str:
    """``4,812 tokens/s``."""
    return f"{tokens_per_s:,.0f} tokens/s"


def share(value: float) -> str:
    """``37 %``."""
    return f"{100 * value:.0f} %"


def goodput(link: LinkRecord) -> str:
    """``95.6 Mbit/s``; ``–`` where nothing was sent."""
    return format_rate(link.goodput_bits_per_s) if link.goodput_bits_per_s > 0 else "–"
