"""A loop over sockets and times, for the relay: one thread, and times to the microsecond.

asyncio's loop, and epoll's own timeout, round up to a millisecond, which a link of 1 Gbit/s would show.
"""

import heapq
import itertools
import select
import time
from collections.abc import Callable
from typing import Final

READABLE: Final = select.EPOLLIN
WRITABLE: Final = select.EPOLLOUT


class Reactor:
    """Calls what was registered for a descriptor, and what was scheduled for a time; never two things at once."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._actions: dict[int, Callable[[int], None]] = {}
        self._scheduled: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._is_running = True

    def now_s(self) -> float:
        """The time that `call_at` is about."""
        return time.monotonic()

    def watch(self, descriptor: int, events: int, action: Callable[[int], None]) -> None:
        """Call `action(events)` whenever the descriptor is ready for `events`; replaces what was registered."""
        if descriptor in self._actions:
            self._epoll.modify(descriptor, events)
        else:
            self._epoll.register(descriptor, events)
        self._actions[descriptor] = action

    def forget(self, descriptor: int) -> None:
        """Watch no more; before the descriptor is closed."""
        if self._actions.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def call_at(self, due_s: float, action: Callable[[], None]) -> None:
        """Call once, at that time or as soon after as possible; equal times in the order of the calls."""
        heapq.heappush(self._scheduled, (due_s, next(self._numbers), action))

    def stop(self) -> None:
        """Return from `run` after what is being called."""
        self._is_running = False

    def run(self) -> None:
        """Until `stop`."""
        while self._is_running:
            # epoll's own timeout has a resolution of 1 ms; that of select is 1 µs, and an epoll can be selected.
            if select.select([self._epoll], [], [], self._patience_s())[0]:
                for descriptor, events in self._epoll.poll(0):
                    self._act(descriptor, events)
            self._call_due()

    def _act(self, descriptor: int, events: int) -> None:
        # An action before this one, in the same round, may have closed it.
        if descriptor in self._actions:
            self._actions[descriptor](events)

    def _patience_s(self) -> float | None:
        return max(0.0, self._scheduled[0][0] - self.now_s()) if self._scheduled else None

    def _call_due(self) -> None:
        now_s = self.now_s()
        while self._scheduled and self._scheduled[0][0] <= now_s:
            heapq.heappop(self._scheduled)[2]()
