"""Workers that wait for the stage of a host that is lost. Pure: times are arguments."""

from dataclasses import dataclass, replace

from tahq.comm.control.messages import Join


@dataclass(frozen=True, slots=True)
class Spare:
    """A worker that waits."""

    identity: bytes
    join: Join
    last_seen_s: float

    @property
    def name(self) -> str:
        """``host, pid 41``, as messages call it."""
        return f"{self.join.host}, pid {self.join.pid}"


class Spares:
    """All that wait, who came first being the first to go."""

    def __init__(self) -> None:
        self._spares: dict[bytes, Spare] = {}

    def __len__(self) -> int:
        return len(self._spares)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._spares

    @property
    def identities(self) -> tuple[bytes, ...]:
        """Whom to tell that the run is over."""
        return tuple(self._spares)

    def add(self, identity: bytes, join: Join, now_s: float) -> Spare:
        """Somebody waits, or says so again."""
        self._spares[identity] = Spare(identity, join, now_s)
        return self._spares[identity]

    def seen(self, identity: bytes, now_s: float) -> None:
        """Something came from this identity."""
        if identity in self._spares:
            self._spares[identity] = replace(self._spares[identity], last_seen_s=now_s)

    def take(self) -> Spare | None:
        """Who has waited longest; waits no more."""
        return self._spares.pop(next(iter(self._spares))) if self._spares else None

    def remove(self, identity: bytes) -> Spare | None:
        """This one waits no more."""
        return self._spares.pop(identity, None)

    def silent(self, since_s: float) -> tuple[Spare, ...]:
        """From whom nothing has come after this time."""
        return tuple(spare for spare in self._spares.values() if spare.last_seen_s < since_s)

    def __str__(self) -> str:
        return f"{len(self)} spare{'s' * (len(self) != 1)}"
