"""The network model that link shaping, the planner's simulator and bound, and netem's user-space network share.

A line serves messages first in, first out, at a rate, and what has left it is under way for a propagation delay. What
waits is queued: in the sender's memory without a limit, before a line further on up to `queue_limit_nbytes`, beyond
which packets are dropped (netem) or flow control keeps them in the sender (simulator). For a message of n bytes whose
first and last byte reach the line at `first_s` and `last_s`, on a line that saves up `burst_s` while it is idle,

    start  = max(first − burst, free)        left = max(last, start + n / rate)
    free   = max(last − burst, start + n / rate)                  arrival = left + delay

- first = last: the message waits whole in the sender's memory, and the line serialises it.
- first < last: cut-through; its bytes are still coming from the line before.
- first = −∞: the line before has serialised it, at no lower a rate unless several lines meet here, so a free line
  adds nothing.

Rates are bits per second of everything that the line carries; `inf` never limits. A rate that counts Ethernet frames
carries `GOODPUT_SHARE` of itself as TCP's data. Pure: times are arguments, in seconds.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:  # tahq-netem's own processes start without numpy
    import numpy as np
    from numpy.typing import NDArray

Quantity = TypeVar("Quantity", float, "NDArray[np.float64]")

ETHERNET_HEADER_NBYTES: Final = 14
MTU_NBYTES: Final = 1500
IP_HEADER_NBYTES: Final = 20
TCP_HEADER_NBYTES: Final = 32
"""With timestamps, which Linux sends."""
UDP_HEADER_NBYTES: Final = 8

FULL_FRAME_NBYTES: Final = ETHERNET_HEADER_NBYTES + MTU_NBYTES
"""1,514 bytes, as a real interface counts them."""
SEGMENT_NBYTES: Final = MTU_NBYTES - IP_HEADER_NBYTES - TCP_HEADER_NBYTES
"""1,448 bytes: TCP's data in a full frame."""
DATAGRAM_HEADERS_NBYTES: Final = ETHERNET_HEADER_NBYTES + IP_HEADER_NBYTES + UDP_HEADER_NBYTES
GOODPUT_SHARE: Final = SEGMENT_NBYTES / FULL_FRAME_NBYTES
ACKNOWLEDGED_SHARE: Final = (FULL_FRAME_NBYTES - SEGMENT_NBYTES) / (2 * SEGMENT_NBYTES)
"""Bytes of acknowledgements for each byte of data: an empty frame for every second segment. This holds where packets
come one by one; on fast links the kernel merges some (benchmarks/results/two_way_epyc2_202611.md)."""

SHORTEST_QUEUE_S: Final = 0.2
"""How long queues before slow lines are at least, as time at the line's rate: about what access networks have."""
_SMALLEST_QUEUE_NBYTES: Final = 128 * FULL_FRAME_NBYTES
_BURST_S: Final = 1e-4


def transmission_s(nbytes: Quantity | float, rate_bits_per_s: Quantity) -> Quantity:
    """Seconds that bytes take at a rate."""
    return 8 * nbytes / rate_bits_per_s


def goodput_bits_per_s(rate_bits_per_s: float | None) -> float:
    """What TCP carries of a rate that counts Ethernet frames; None: unlimited, inf."""
    return math.inf if rate_bits_per_s is None else GOODPUT_SHARE * rate_bits_per_s


def queue_limit_nbytes(rate_bits_per_s: float, rtt_s: float) -> int:
    """Length of a drop-tail queue: one round trip at its rate, but at least 200 ms and 128 full frames.

    With a bandwidth-delay product one flow of a loss-based congestion control keeps the line full: it may halve its
    window at a loss and must still cover the round trip. 200 ms let a message of 1 MB pass where only the receiver's
    side is slow.
    """
    return max(_SMALLEST_QUEUE_NBYTES, math.ceil(rate_bits_per_s / 8 * max(SHORTEST_QUEUE_S, rtt_s)))


def burst_nbytes(rate_bits_per_s: float) -> int:
    """How much an idle packet line passes at once: two full frames, or 100 µs of a fast line.

    More would show as a faster first message after a pause (at 100 Mbit/s, 70 kB are 10 % of 1 MB); less would turn
    every late wake-up of a shaper into lost rate.
    """
    return max(2 * FULL_FRAME_NBYTES, math.ceil(rate_bits_per_s / 8 * _BURST_S))


@dataclass(slots=True)
class Line:
    """A line, and until when it is taken. Its rate, delay and burst may be changed for what enters afterwards."""

    rate_bits_per_s: float = math.inf
    delay_s: float = 0.0
    burst_s: float = 0.0
    free_s: float = -math.inf

    def serve(self, nbytes: float, first_s: float, last_s: float | None = None) -> tuple[float, float]:
        """Let a message enter.

        Args:
            nbytes: its length.
            first_s: when its first byte reaches the line; -inf: see the module.
            last_s: when its last byte does; None: at the same time.

        Returns:
            When it starts on the line, and when its last byte has left it; it arrives `delay_s` later.
        """
        last_s = first_s if last_s is None else last_s
        start_s = max(first_s - self.burst_s, self.free_s)
        end_s = start_s + 8 * nbytes / self.rate_bits_per_s
        if self.rate_bits_per_s < math.inf:
            self.free_s = max(last_s - self.burst_s, end_s)
        return start_s, max(last_s, end_s)
