"""A clock that moves only when told to, and that lets its actors act on the way.

For fakes: whatever happens at a time happens exactly then, in order, and nothing sleeps.
"""

from typing import Protocol


class Actor(Protocol):
    """Something that has things to do at times."""

    def next_s(self) -> float | None:
        """When it next has something to do; None: not unless somebody else acts."""

    def act(self, now_s: float) -> None:
        """Do everything that is due by now."""


class VirtualClock:
    """Seconds since `start_s`, moved by `advance` and `step`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._actors: list[Actor] = []

    def __call__(self) -> float:
        """The time, as `time.monotonic` gives it."""
        return self._now_s

    def enrol(self, actor: Actor) -> None:
        """Let this one act when its times come."""
        self._actors.append(actor)

    def advance(self, duration_s: float) -> None:
        """Move on by so much, everything that is due on the way being done at its time."""
        until_s = self._now_s + duration_s
        while self.step(until_s):
            pass
        self._now_s = until_s

    def step(self, until_s: float) -> bool:
        """Move to the next time that somebody waits for and let all act; False if there is none by `until_s`."""
        times = [time_s for actor in self._actors if (time_s := actor.next_s()) is not None]
        if not times or min(times) > until_s:
            return False
        self._now_s = max(self._now_s, min(times))
        for actor in self._actors:
            actor.act(self._now_s)
        return True
