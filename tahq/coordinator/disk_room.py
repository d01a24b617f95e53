"""What a coordinator does while its journal has no room on the disk: it waits, and lives.

Nothing is said that is not written down, so the decision that could not be written is held back, and with it the step.
Meanwhile workers get their signs of life, signals and ended processes are noticed, and what workers say is kept for
later.
"""

from collections.abc import Callable

from tahq.comm.control.messages import Heartbeat, Message
from tahq.coordinator.context import RunContext
from tahq.errors import SnapshotError

Again = Callable[[], SnapshotError | None]
"""Tries to write again; returns why there is still no room, or None."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 5.0
_POLL_S = 0.1


class WaitForRoom:
    """Called by the journal when the disk is full; returns when there is room, and it has been written.

    Args:
        context: the run; `give_up_s` of its options bounds the wait.
        attend: called about ten times a second: what must not wait, and needs no journal. May raise, which ends the
            wait.
        hear: answers a sign of life.
    """

    def __init__(
        self, context: RunContext, attend: Callable[[], None], hear: Callable[[bytes, Heartbeat], None]
    ) -> None:
        self._context = context
        self._attend = attend
        self._hear = hear
        self._heard: list[tuple[bytes, Message]] = []

    def take(self) -> list[tuple[bytes, Message]]:
        """What was said meanwhile, in order; it is to be answered before anything newer."""
        heard, self._heard = self._heard, []
        return heard

    def __call__(self, again: Again, error: SnapshotError) -> None:
        """Try until it is written.

        Raises:
            SnapshotError: there is no room within `give_up_s`; the message names file and folder.
        """
        context, give_up_s = self._context, self._context.options.give_up_s
        began_s = context.clock()
        context.observer.warned(f"{error}; training waits for room, for {give_up_s:.0f} s (run.give_up)")
        pause_s, left_s = FIRST_PAUSE_S, give_up_s
        why: SnapshotError | None = error
        while why is not None:
            if left_s <= 0:
                raise SnapshotError(
                    f"{why}; there was none within {give_up_s:.0f} s (run.give_up); make room, and resume"
                )
            self._pause(context.clock() + min(pause_s, left_s))
            why = again()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            left_s = began_s + give_up_s - context.clock()
        context.observer.warned(f"there is room again after {context.clock() - began_s:.1f} s: training goes on")

    def _pause(self, until_s: float) -> None:
        context = self._context
        while context.clock() < until_s:
            for identity, message in context.server.poll(_POLL_S):
                if isinstance(message, Heartbeat):
                    self._hear(identity, message)
                else:
                    self._heard.append((identity, message))
            self._attend()
