"""Imitates a slow network between session and socket by holding back what a host sends and receives.

Pure: items and times in, items that are due out; the I/O thread brings the clock. Both lines follow `network_model`:

- `Uplink` serialises what the host sends, on all its links, at the rate, then holds each message for the delay. A
  message starts when the uplink is free *and* it was ready, both in virtual time, so that a thread that wakes late
  catches up and an idle uplink saves nothing for later. Under a cap it is a token bucket of 20 ms instead.
- `Downlink` passes what the host receives at the rate. A message has already been serialised by its sender, so where
  the rates are equal and nothing else comes in, nothing is added; two senders to one receiver share its downlink.

Rates imitate a network, caps use a share of a real one; where both are set, the lower holds. Both lines are first in,
first out. Priority is given before the uplink, by choosing what enters next whenever it is free (`free_s`).
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from tahq.comm.network_model import Line, transmission_s

Item = TypeVar("Item")

_BURST_S = 0.02
"""Depth of the bucket of a cap, as time at its rate."""
_MESSAGE_S = 0.025
"""Longest message under a cap, as time at the cap: with the bucket, less than a twentieth of a second."""
_LEAST_MESSAGE_NBYTES = 4096
_WINDOW_S = 0.25
"""Most that may be under way to a host whose downlink is capped, as time at the cap: longer than most round trips."""
_LEAST_WINDOW_NBYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Shaping:
    """The limits on a host's connection to the others.

    `rate_bits_per_s` is imitated on the uplink and, separately, on the downlink (None: not); `delay_s` is
    one-way; a frame longer than `piece_nbytes` travels in pieces; the caps limit what tahq uses of a real connection.
    """

    rate_bits_per_s: float | None = None
    delay_s: float = 0.0
    piece_nbytes: int = 256 * 1024
    cap_up_bits_per_s: float | None = None
    cap_down_bits_per_s: float | None = None

    @property
    def up_bits_per_s(self) -> float:
        """The uplink's rate; inf: unlimited."""
        return min(self.rate_bits_per_s or math.inf, self.cap_up_bits_per_s or math.inf)

    @property
    def down_bits_per_s(self) -> float:
        """The downlink's rate; inf: unlimited."""
        return min(self.rate_bits_per_s or math.inf, self.cap_down_bits_per_s or math.inf)

    @property
    def is_up_capped(self) -> bool:
        """Whether the cap, not the rate, limits the uplink."""
        return self.up_bits_per_s < (self.rate_bits_per_s or math.inf)

    @property
    def message_nbytes(self) -> int:
        """Longest message: a piece, or less where a cap would pass pieces in bursts."""
        if self.cap_up_bits_per_s is None:
            return self.piece_nbytes
        return min(self.piece_nbytes, max(_LEAST_MESSAGE_NBYTES, int(_MESSAGE_S * self.cap_up_bits_per_s / 8)))

    def receive_window_nbytes(self, most: int) -> int:
        """Most that may be under way to this host on a link: little if its downlink is capped, so that senders wait."""
        if self.cap_down_bits_per_s is None:
            return most
        return min(most, max(_LEAST_WINDOW_NBYTES, int(_WINDOW_S * self.cap_down_bits_per_s / 8)))


class DelayLine(Generic[Item]):
    """A line at a rate, and items that have passed it and wait, in order, each for its time."""

    def __init__(self, shaping: Shaping) -> None:
        self._line = Line()
        self._waiting: deque[tuple[float, Item]] = deque()
        self.reshape(shaping)

    def reshape(self, shaping: Shaping) -> None:
        """Use other rates and another delay for what enters from now on."""
        raise NotImplementedError

    def take_due(self, now_s: float) -> Iterator[Item]:
        """Everything whose time has come, oldest first."""
        while self._waiting and self._waiting[0][0] <= now_s:
            yield self._waiting.popleft()[1]

    @property
    def next_s(self) -> float:
        """When the next item is due; inf if there is none."""
        return self._waiting[0][0] if self._waiting else math.inf

    def __len__(self) -> int:
        return len(self._waiting)


class Uplink(DelayLine[Item]):
    """Serialises what one host sends at the rate, then holds it for the delay."""

    def reshape(self, shaping: Shaping) -> None:
        """Use other rates and another delay for what enters from now on."""
        self._line.rate_bits_per_s, self._line.delay_s = shaping.up_bits_per_s, shaping.delay_s
        self._is_capped = shaping.is_up_capped
        self._line.burst_s = _BURST_S if self._is_capped else 0.0
        self._imitated_bits_per_s = shaping.rate_bits_per_s or math.inf

    @property
    def free_s(self) -> float:
        """When the next message may enter."""
        return self._line.free_s

    def send(self, item: Item, nbytes: int, ready_s: float, now_s: float | None = None) -> None:
        """Enter, at `now_s`, a message of `nbytes` that has been waiting since `ready_s` (None: it has not)."""
        now_s = ready_s if now_s is None else now_s
        _, left_s = self._line.serve(nbytes, now_s if self._is_capped else ready_s)
        if self._is_capped:
            # A full bucket passes it at once, but the imitated line still takes its time.
            left_s = max(left_s, now_s + transmission_s(nbytes, self._imitated_bits_per_s))
        self._waiting.append((left_s + self._line.delay_s, item))


class Downlink(DelayLine[Item]):
    """Passes what one host receives at the rate."""

    def reshape(self, shaping: Shaping) -> None:
        """Use another rate for what enters from now on."""
        self._line.rate_bits_per_s = shaping.down_bits_per_s

    @property
    def is_limited(self) -> bool:
        """Whether a message may have to wait."""
        return self._line.rate_bits_per_s < math.inf

    def receive(self, item: Item, nbytes: int, arrival_s: float) -> None:
        """Enter a message of `nbytes` that has just arrived whole."""
        _, left_s = self._line.serve(nbytes, -math.inf, arrival_s)
        self._waiting.append((left_s, item))
