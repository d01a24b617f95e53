"""How long something of a training step was outstanding on a link.

Evaluations are in no step's figures, so their frames move no clock, whenever they are acknowledged.
"""

from tahq.comm.link.frame import Direction, LogicalId


class BusyClock:
    """How long something was outstanding, in all.

    One thread moves it, any thread may read it: the state is one tuple, replaced whole.
    """

    def __init__(self) -> None:
        self._outstanding = 0
        self._state: tuple[float, float | None] = (0.0, None)

    def start(self, now_s: float) -> None:
        """One thing more is outstanding."""
        self._outstanding += 1
        total_s, since_s = self._state
        if since_s is None:
            self._state = (total_s, now_s)

    def stop(self, now_s: float) -> None:
        """One thing less is outstanding."""
        self._outstanding -= 1
        total_s, since_s = self._state
        if self._outstanding == 0 and since_s is not None:
            self._state = (total_s + max(0.0, now_s - since_s), None)

    def total_s(self, now_s: float) -> float:
        """Seconds until now."""
        total_s, since_s = self._state
        return total_s if since_s is None else total_s + max(0.0, now_s - since_s)


class BusyClocks:
    """One a direction, which frames of evaluations leave alone."""

    def __init__(self) -> None:
        self._clocks = {direction: BusyClock() for direction in Direction}

    def start(self, id: LogicalId, now_s: float) -> None:
        """Something of this frame is outstanding."""
        if not id.is_evaluation:
            self._clocks[id.direction].start(now_s)

    def stop(self, id: LogicalId, now_s: float) -> None:
        """It is no more."""
        if not id.is_evaluation:
            self._clocks[id.direction].stop(now_s)

    def total_s(self, direction: Direction, now_s: float) -> float:
        """Seconds until now in which anything was."""
        return self._clocks[direction].total_s(now_s)
