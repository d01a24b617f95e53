"""When this end gives its next sign of life, and when the peer last gave one on each connection."""

import math
from dataclasses import replace

from tahq.comm.link.spec import SessionLimits
from tahq.errors import PeerLostError

_SILENT_HEARTBEATS = 2.5
"""A peer that is silent for this many is in trouble."""


class Liveness:
    """The end that `dials` is due to speak at once, the other when the two have met (`begin`)."""

    def __init__(self, limits: SessionLimits, dials: bool) -> None:
        self.limits = limits
        self.beat_at_s = 0.0 if dials else math.inf
        """When the next HEARTBEAT, or HELLO, is due."""
        self.is_held = False
        """Whether silence is no error any more: the peer is known to be lost."""
        self._heard_s: dict[int, float] = {}
        """When the peer was last heard, on the connections that must not fall silent."""
        self._left: set[int] = set()

    def begin(self, now_s: float) -> None:
        """The two ends have met: a HEARTBEAT leaves now, and the next one after the interval."""
        self.beat_at_s = now_s + self.limits.heartbeat_s

    def beat(self, now_s: float) -> bool:
        """Whether the next sign of life is due."""
        is_due = now_s >= self.beat_at_s
        if is_due:
            self.beat_at_s = now_s + self.limits.heartbeat_s
        return is_due

    def hear(self, connection: int, now_s: float) -> None:
        """The peer has given a sign of life."""
        if not self.is_held and connection not in self._left:
            self._heard_s[connection] = now_s

    def leave(self, connection: int) -> None:
        """The peer has said BYE there: after that, silence means nothing."""
        self._left.add(connection)
        self._heard_s.pop(connection, None)

    def forget_byes(self) -> None:
        """The peer's BYEs came before all was there, and will be said again."""
        self._left.clear()

    @property
    def num_left(self) -> int:
        """The number of connections on which the peer has said BYE."""
        return len(self._left)

    def hold(self) -> None:
        """Silence is no error from now on."""
        self.is_held = True
        self._heard_s.clear()

    @property
    def last_heard_s(self) -> float:
        """When the peer was last heard on the connection that is silent for longest; inf: none is listened to."""
        return min(self._heard_s.values(), default=math.inf)

    @property
    def silent_at_s(self) -> float:
        """When the peer will have been silent for too long."""
        return self.last_heard_s + self.limits.silence_s

    def is_quiet(self, now_s: float) -> bool:
        """Whether the peer has missed heartbeats."""
        return now_s - self.last_heard_s > _SILENT_HEARTBEATS * self.limits.heartbeat_s

    def check(self, now_s: float, peer: object) -> None:
        """Raise PeerLostError, once, if the peer has been silent for too long."""
        if now_s >= self.silent_at_s:
            self._heard_s.clear()
            raise PeerLostError(f"{peer}: no sign of life for {self.limits.silence_s:.1f} s")

    def use_times(self, limits: SessionLimits, now_s: float) -> SessionLimits:
        """Take the times of these limits from now on; the bounds stay. Returns both."""
        times = {name: getattr(limits, name) for name in ("peer_timeout_s", "heartbeat_s", "give_up_s")}
        self.limits = replace(self.limits, **times)
        if self.beat_at_s < math.inf:
            self.beat_at_s = min(self.beat_at_s, now_s + self.limits.heartbeat_s)
        return self.limits
