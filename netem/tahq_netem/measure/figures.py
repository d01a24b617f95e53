"""The figures that a network should measure, and how far off they may be: pure arithmetic over a plan.

- Goodput is 1448/1514 = 0.956 of the rate (bytes of data in a full Ethernet frame with TCP timestamps), ± 3 %.
- A round trip is the sum of both delays, ± 2 ms; with jitter the median of n trips varies, too.
- A loss is a binomial count, inside its 99.9 % interval.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tahq.comm.network_model import DATAGRAM_HEADERS_NBYTES, GOODPUT_SHARE
from tahq.errors import NetworkError, file_errors
from tahq.units import format_rate
from tahq_netem.measure.meter import DATAGRAM_BYTES
from tahq_netem.network.description import NetworkPlan, PathShape

RATE_TOLERANCE: Final = 0.03
ROUND_TRIP_TOLERANCE_S: Final = 2e-3
LOSS_CONFIDENCE: Final = 0.999
DATAGRAM_WIRE_BITS: Final = 8 * (DATAGRAM_BYTES + DATAGRAM_HEADERS_NBYTES)
_MEDIAN_SPREAD: Final = 1.25 * 3.3
"""σ of a median is 1.25·σ/√n; 3.3 of them are passed once in a thousand times."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured figure of the path between two hosts, and the bounds that it should keep (None: any value)."""

    what: str
    source: str
    destination: str
    unit: Literal["s", "bit/s", "share"]
    measured: float
    expected: float | None = None
    low: float | None = None
    high: float | None = None
    num_samples: int = 1
    num_attempts: int = 1
    """More than one: the machine was busy, and the fastest counts."""

    @property
    def is_too_slow(self) -> bool:
        """Whether it is off in the direction of a busy machine."""
        bound = self.high if self.unit == "s" else self.low
        return bound is not None and (self.measured > bound if self.unit == "s" else self.measured < bound)

    @property
    def speed(self) -> float:
        """Larger is faster."""
        return -self.measured if self.unit == "s" else self.measured

    @property
    def is_within(self) -> bool:
        """Whether it is within its bounds."""
        return (self.low is None or self.measured >= self.low) and (self.high is None or self.measured <= self.high)

    def line(self) -> str:
        """The figure and its bounds as text."""
        path = f"{self.source} → {self.destination}: {self.what} {self._text(self.measured)}"
        if self.expected is None or self.low is None or self.high is None:
            return path
        return f"{path}, expected {self._text(self.expected)} ({self._text(self.low)} to {self._text(self.high)})"

    def _text(self, value: float) -> str:
        if self.unit == "bit/s":
            return format_rate(value)
        return f"{value * 1e3:.2f} ms" if self.unit == "s" else f"{value:.3%}"


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measured figures of a network, and its description."""

    figures: tuple[Figure, ...]
    congestion_controls: tuple[str, ...]
    """TCP's, as the measuring sockets had it."""
    network: dict[str, Any]
    is_quick: bool

    def check(self) -> None:
        """Raise NetworkError if a figure is off; names all of them."""
        wrong = [figure.line() for figure in self.figures if not figure.is_within]
        if wrong:
            advice = "end what else runs on this machine and try again, or ask for less than it can imitate"
            raise NetworkError(f"the network is not as described: {'; '.join(wrong)}; {advice}")

    def lines(self) -> list[str]:
        """A line for each figure."""
        return [f"{'ok ' if figure.is_within else 'OFF'}  {figure.line()}" for figure in self.figures]

    def as_dict(self) -> dict[str, Any]:
        """All figures and the network, fit for JSON."""
        figures = [asdict(figure) | {"is_within": figure.is_within} for figure in self.figures]
        return {
            "is_within": all(figure.is_within for figure in self.figures),
            "is_quick": self.is_quick,
            "congestion_controls": list(self.congestion_controls),
            "figures": figures,
            "network": self.network,
        }

    def write(self, path: Path) -> None:
        """Write the figures as JSON."""
        with file_errors("write", path):
            path.write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def goodput(plan: NetworkPlan, source: str, destination: str) -> float | None:
    """Payload in bit/s that TCP moves over a path limited by its rate alone; None: not shaped."""
    rate = plan.rate_bits_per_s(source, destination)
    return None if rate is None else GOODPUT_SHARE * rate


def goodput_figure(plan: NetworkPlan, what: str, source: str, destination: str, measured: float) -> Figure:
    """A goodput, which should be within 3 % of 0.956 times the path's rate."""
    expected = goodput(plan, source, destination)
    if expected is None:
        return Figure(what, source, destination, "bit/s", measured)
    low, high = expected * (1 - RATE_TOLERANCE), expected * (1 + RATE_TOLERANCE)
    return Figure(what, source, destination, "bit/s", measured, expected, low, high)


def round_trip_figure(plan: NetworkPlan, source: str, destination: str, median_s: float, num_trips: int) -> Figure:
    """A median round trip, which should be within 2 ms of both delays, jitter and slow serialisation apart."""
    expected = plan.round_trip_s(source, destination)
    there, back = plan.paths[source, destination], plan.paths[destination, source]
    if (1 - there.reorder) * (1 - back.reorder) < 0.75:
        # So many packets overtake that the median says little about the delay.
        return Figure("round trip", source, destination, "s", median_s, num_samples=num_trips)
    spread = ROUND_TRIP_TOLERANCE_S + _jitter_spread((there, back), num_trips)
    # A datagram and its echo are serialised at both ends of each path.
    rates = plan.rate_bits_per_s(source, destination), plan.rate_bits_per_s(destination, source)
    wire_s = sum(2 * DATAGRAM_WIRE_BITS / rate for rate in rates if rate is not None)
    low, high = max(0.0, expected - spread), expected + spread + wire_s
    return Figure("round trip", source, destination, "s", median_s, expected, low, high, num_trips)


def _jitter_spread(paths: Sequence[PathShape], num_trips: int) -> float:
    if any(path.jitter_s > path.delay_s for path in paths):
        return sum(path.jitter_s for path in paths)  # cut off at zero, so not even
    variance = sum(path.jitter_s**2 / 3 for path in paths)
    return _MEDIAN_SPREAD * math.sqrt(variance / max(1, num_trips))


def loss_figure(plan: NetworkPlan, source: str, destination: str, num_sent: int, num_arrived: int) -> Figure:
    """A share of lost datagrams, which should be inside the 99.9 % interval of the loss that is set."""
    share = plan.paths[source, destination].loss
    low, high = acceptance_interval(num_sent, share, LOSS_CONFIDENCE)
    measured = 1 - num_arrived / num_sent
    return Figure("loss", source, destination, "share", measured, share, low / num_sent, high / num_sent, num_sent)


def acceptance_interval(num_packets: int, share: float, confidence: float) -> tuple[int, int]:
    """The smallest and largest numbers of lost packets that are not too improbable for a link with this loss.

    With k ~ B(n, p), the smallest and largest k for which P(K ≤ k) and P(K ≥ k) both exceed (1 − confidence)/2. A
    normal approximation would be off by more than the tolerance at 0.1 % of a few thousand packets.
    """
    if share in (0.0, 1.0):
        return round(num_packets * share), round(num_packets * share)
    tail = (1.0 - confidence) / 2.0
    return _first_above(num_packets, share, tail), num_packets - _first_above(num_packets, 1.0 - share, tail)


def _first_above(num_packets: int, share: float, tail: float) -> int:
    """The smallest k with P(K ≤ k) > tail; terms through logarithms, which neither overflow nor vanish."""
    cumulated = 0.0
    for count in range(num_packets + 1):
        choices = math.lgamma(num_packets + 1) - math.lgamma(count + 1) - math.lgamma(num_packets - count + 1)
        cumulated += math.exp(choices + count * math.log(share) + (num_packets - count) * math.log1p(-share))
        if cumulated > tail:
            return count
    return num_packets
