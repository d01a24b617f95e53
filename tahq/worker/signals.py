"""Signals to a worker: the first asks for an orderly stop, which has its time; the second ends the process at once."""

import signal
from collections.abc import Callable
from types import FrameType

from tahq.errors import InterruptedRunError


class WorkerSignals:
    """What has been asked of this process by SIGINT and SIGTERM.

    Args:
        name: what messages call the worker, e.g. ``stage 2``.
        step: the step that is being computed, from 0; −1: none yet.
    """

    def __init__(self, name: Callable[[], str], step: Callable[[], int]) -> None:
        self._name = name
        self._step = step
        self._numbers: list[int] = []
        self._is_told = False
        self.grace_s: float | None = None
        """How long the step and its snapshot may take after SIGTERM; None: it is not known yet."""

    def install(self) -> None:
        """Have them handled here; from the main thread."""
        signal.signal(signal.SIGINT, self._note)
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGALRM, self._grace_is_over)

    def take_request(self) -> int | None:
        """The signal that asks for a stop, once; None: nothing is asked, or it was said before."""
        if not self._numbers or self._is_told:
            return None
        self._is_told = True
        return self._numbers[0]

    def _note(self, number: int, frame: FrameType | None) -> None:
        """First: ask for an orderly stop at the next action. Second, or before training: leave now."""
        self._numbers.append(number)
        if len(self._numbers) > 1 or self._step() < 0 or self.grace_s is None:
            raise InterruptedRunError(f"{self._name()} stopped by {signal.Signals(number).name}", number)
        if number == signal.SIGTERM:
            signal.setitimer(signal.ITIMER_REAL, self.grace_s)

    def _grace_is_over(self, number: int, frame: FrameType | None) -> None:
        """The step and its snapshot have taken too long: leave, whatever this thread is doing or waiting for."""
        raise InterruptedRunError(
            f"{self._name()} stopped by SIGTERM: step {self._step() + 1} and its snapshot took longer than run.grace "
            f"({self.grace_s:g} s), so they are given up",
            signal.SIGTERM,
        )
