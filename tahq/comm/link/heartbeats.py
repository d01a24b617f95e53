"""This end's heartbeats: their numbers, and when those came that met nothing of their link on the way.

What is under way with nothing of the same link before it takes as long as the way is, so that much of what a piece
takes is no work (`wire_time.py`). An ACK names the heartbeat that it answers: others may be on their way by then.
"""

from collections import deque

from tahq.comm.link.wire_time import HeartbeatTimes

_UNDER_WAY = 8
_REMEMBERED = 8


class Heartbeats:
    """Of one session; its epoch says with which process the peer's times are.

    One thread moves it, any thread may ask for `recent`.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self.last = 0
        """Number of the last one."""
        self._alone_s: dict[int, float] = {}
        """When those left that had the link for themselves, and are not answered yet."""
        self._recent: deque[HeartbeatTimes] = deque(maxlen=_REMEMBERED)

    def leave(self, now_s: float, *, is_alone: bool) -> int:
        """One leaves; its number. `is_alone`: with nothing of the link on its way before it."""
        self.last += 1
        if is_alone:
            self._alone_s[self.last] = now_s
            if len(self._alone_s) > _UNDER_WAY:
                del self._alone_s[next(iter(self._alone_s))]
        return self.last

    def answered(self, number: int, arrived_s: float, now_s: float) -> None:
        """The one with this number came at `arrived_s`, by the peer's clock; 0 is none.

        One that is answered at the moment it left has met no network, as when the ends of an `InprocPair` are joined.
        """
        left_s = self._alone_s.pop(number, None)
        if left_s is not None and now_s > left_s:
            self._recent.append(HeartbeatTimes(self._epoch, left_s, arrived_s))

    @property
    def recent(self) -> tuple[HeartbeatTimes, ...]:
        """The last few that were alone."""
        return tuple(self._recent)
