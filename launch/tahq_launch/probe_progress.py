"""How far `tahq probe` is, on stderr, since its report comes all at once at the end.

A bar on a terminal; elsewhere plain lines: one at the start, then one every `QUIET_S` seconds at most.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tahq.observe import figures

QUIET_S = 5.0


def gradients_of(first_step: int, warm_up: int, steps: int, batches: int, num_wires: int) -> list[str]:
    """What each gradient of a probe is for, in the order that `GradientProbe` computes them: batches last to first.

    Args:
        first_step: steps of training that were taken before the probe.
        warm_up: steps of training before the first that is probed.
        steps: probed ones.
        batches: at each of them.
        num_wires: tried on each batch, after its gradient without codecs.
    """
    wires = ("without codecs", *(f"wire {number} of {num_wires}" for number in range(1, num_wires + 1)))
    probed = range(first_step + warm_up, first_step + warm_up + steps)
    trained = [f"step {step}, warm-up" for step in range(first_step, probed.start)]
    numbers = range(batches, 0, -1)
    return trained + [f"step {s}, batch {n} of {batches}, {wire}" for s in probed for n in numbers for wire in wires]


def progress_of(gradients: Sequence[str]) -> "ProgressBar | ProgressLines":
    """What tells on stderr which of `gradients` is computed, inside a `with`."""
    return ProgressBar(gradients) if sys.stderr.isatty() else ProgressLines(gradients, sys.stderr)


class ProgressBar:
    """A bar of rich, which is gone when all is done."""

    def __init__(self, gradients: Sequence[str]) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._names = iter([*gradients, "done"])
        self._task = self._bar.add_task(next(self._names), total=len(gradients))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self) -> None:
        """One more is done."""
        self._bar.update(self._task, advance=1, description=next(self._names))


@dataclass(slots=True)
class ProgressLines:
    """Lines such as ``12 of 32 gradients, 40 s left: step 20, batch 2 of 2, wire 1 of 5``; the first at once."""

    gradients: Sequence[str]
    stream: TextIO
    clock: Callable[[], float] = time.monotonic
    _num_done: int = 0
    _begun_s: float = 0.0
    _said_s: float = 0.0

    def __enter__(self) -> Self:
        self._begun_s = self.clock()
        self._say("")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def advance(self) -> None:
        """One more is done."""
        self._num_done += 1
        num_left, now_s = len(self.gradients) - self._num_done, self.clock()
        if num_left and now_s - self._said_s >= QUIET_S:
            left_s = num_left * (now_s - self._begun_s) / self._num_done
            self._say(f", {figures.duration(round(left_s))} left")

    def _say(self, left: str) -> None:
        self._said_s = self.clock()
        count = f"{self._num_done} of {len(self.gradients)} gradients{left}"
        print(f"{count}: {self.gradients[self._num_done]}", file=self.stream, flush=True)
