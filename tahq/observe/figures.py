"""Numbers as people read them."""

import math

from tahq.coordinator.observer import LinkRecord
from tahq.units import format_rate


def duration(seconds: float) -> str:
    """``0.85 s``, ``1:22`` (minutes), ``3:04:05`` (hours)."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def loss(value: float) -> str:
    """``3.2140``; ``–`` where there is none."""
    return f"{value:.4f}" if not math.isnan(value) else "–"


def tokens_rate(tokens_per_s: float) -> str:
    """``4,812 tokens/s``."""
    return f"{tokens_per_s:,.0f} tokens/s"


def share(value: float) -> str:
    """``37 %``."""
    return f"{100 * value:.0f} %"


def goodput(link: LinkRecord) -> str:
    """``95.6 Mbit/s``; ``–`` where nothing was sent."""
    return format_rate(link.goodput_bits_per_s) if link.goodput_bits_per_s > 0 else "–"
