"""What was sent on a link, counted where it is sent so that a step's figures are exact and repeatable."""

import math
from collections.abc import Callable

from tahq.comm.frame import HEADER_NBYTES, Direction, Frame
from tahq.comm.transport import LinkStats


class _Count:
    def __init__(self) -> None:
        self.frames = self.payload_bytes = self.wire_bytes = self.elements = 0
        self.busy_until_last_take_s = 0.0


class LinkCounter:
    """Counts frames by direction; used by the thread that sends."""

    def __init__(self, link: int, piece_nbytes: int) -> None:
        self._link = link
        self._piece_nbytes = piece_nbytes
        self._counts = {direction: _Count() for direction in Direction}

    def count(self, frame: Frame) -> None:
        """A frame was sent; on the wire it has one header a piece."""
        count = self._counts[frame.id.direction]
        nbytes = frame.payload.numel()
        count.frames += 1
        count.payload_bytes += nbytes
        count.wire_bytes += nbytes + HEADER_NBYTES * max(1, math.ceil(nbytes / self._piece_nbytes))
        count.elements += math.prod(frame.shape)

    def take(self, busy_s: Callable[[Direction], float]) -> list[LinkStats]:
        """Figures since the last call, one entry a direction that had traffic; `busy_s` is since the start."""
        return [self._take(direction, busy_s(direction)) for direction, n in self._counts.items() if n.frames]

    def _take(self, direction: Direction, busy_s: float) -> LinkStats:
        old, new = self._counts[direction], _Count()
        new.busy_until_last_take_s = busy_s
        self._counts[direction] = new
        return LinkStats(
            link=self._link,
            direction=direction,
            frames=old.frames,
            payload_bytes=old.payload_bytes,
            wire_bytes=old.wire_bytes,
            elements=old.elements,
            busy_s=busy_s - old.busy_until_last_take_s,
        )
