"""A slow network imitated between session and socket: what a host sends and receives is held back.

Pure cores: items and times in, items that are due out; the I/O thread brings the clock.

- `Uplink` serialises what the host sends, on all its links, at `rate`, then holds each message for
  `delay`. A message starts when the uplink is free *and* it was ready, both in virtual time, so that
  a thread that wakes late catches up and an idle uplink saves nothing for later.
- `Downlink` lets what the host receives through at `rate`: release = max(arrival, free + n/rate),
  free = release. A message has already been serialised by its sender, so where the rates are equal
  and nobody else sends, nothing is added; two senders to one receiver share its downlink.

Both are first in, first out: nothing that has entered is overtaken. Priority is given before the
uplink, by choosing what enters next whenever it is free (`is_free`).
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Shaping:
    """What a host's connection to the others is capped to.

    `rate_bits_per_s` caps the uplink and, separately, the downlink (None: not capped); `delay_s` is
    one-way; a frame longer than `piece_nbytes` travels in pieces.
    """

    rate_bits_per_s: float | None = None
    delay_s: float = 0.0
    piece_nbytes: int = 256 * 1024

    def serialisation_s(self, nbytes: int) -> float:
        """Seconds that `nbytes` occupy the wire: 8·n / rate."""
        return 8 * nbytes / self.rate_bits_per_s if self.rate_bits_per_s else 0.0


class DelayLine(Generic[Item]):
    """Items that wait, in order, each for its time."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, Item]] = deque()

    def put(self, item: Item, release_s: float) -> None:
        """Hold `item` until `release_s`, and until all before it are released."""
        self._waiting.append((release_s, item))

    def take_due(self, now_s: float) -> Iterator[Item]:
        """Everything whose time has come, oldest first."""
        while self._waiting and self._waiting[0][0] <= now_s:
            yield self._waiting.popleft()[1]

    def next_s(self) -> float | None:
        """When the next item is due; None if there is none."""
        return self._waiting[0][0] if self._waiting else None

    def __len__(self) -> int:
        return len(self._waiting)


class Uplink(DelayLine[Item]):
    """What one host sends: serialised at the rate, then under way for the delay."""

    def __init__(self, shaping: Shaping) -> None:
        super().__init__()
        self._shaping = shaping
        self.free_s = -math.inf

    def reshape(self, shaping: Shaping) -> None:
        """Use another rate and delay for what enters from now on."""
        self._shaping = shaping

    def is_free(self, now_s: float) -> bool:
        """Whether the next message may enter."""
        return self.free_s <= now_s

    def send(self, item: Item, nbytes: int, ready_s: float) -> None:
        """Enter a message of `nbytes` that has been waiting since `ready_s`."""
        start_s = max(self.free_s, ready_s)
        end_s = start_s + self._shaping.serialisation_s(nbytes)
        if self._shaping.rate_bits_per_s:
            self.free_s = end_s
        self.put(item, end_s + self._shaping.delay_s)


class Downlink(DelayLine[Item]):
    """What one host receives: let through at the rate."""

    def __init__(self, shaping: Shaping) -> None:
        super().__init__()
        self._shaping = shaping
        self._free_s = -math.inf

    def reshape(self, shaping: Shaping) -> None:
        """Use another rate for what enters from now on."""
        self._shaping = shaping

    def receive(self, item: Item, nbytes: int, arrival_s: float) -> None:
        """Enter a message of `nbytes` that has just arrived whole."""
        self._free_s = max(arrival_s, self._free_s + self._shaping.serialisation_s(nbytes))
        self.put(item, self._free_s)
