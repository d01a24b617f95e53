"""The connections of a link: what has been said and heard on each, and what is due.

HELLO, HEARTBEAT and BYE are said on each connection, since none knows anything of another. A peer has been met when
its HELLO has come on all, and has left when its BYE has come on all; after BYE, silence means nothing.
"""

from collections.abc import Iterator


class LinkConnections:
    """Connections 0, 1, … of one end of a link; the end that `dials` says HELLO first."""

    def __init__(self, count: int, dials: bool) -> None:
        self._all = range(count)
        self._dials = dials
        self._greeted: set[int] = set()
        self._dismissed: set[int] = set()
        self._hellos_due = set(self._all) if dials else set()
        self._heartbeats_due: set[int] = set()
        self._resumes_due: set[int] = set()
        self._byes_said = 0
        self._heard_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    # The peer

    def has_met(self, connection: int) -> bool:
        """Whether the peer has said HELLO on it."""
        return connection in self._greeted

    @property
    def have_met(self) -> bool:
        """Whether the peer has said HELLO on all."""
        return len(self._greeted) == len(self._all)

    @property
    def have_left(self) -> bool:
        """Whether the peer has said BYE on all."""
        return len(self._dismissed) == len(self._all)

    def take_hello(self, connection: int) -> None:
        """The peer has said HELLO: an answer, or to be answered."""
        self._greeted.add(connection)
        if self._dials:
            self._hellos_due.discard(connection)
        else:
            self._hellos_due.add(connection)

    def take_bye(self, connection: int) -> None:
        """The peer has said BYE."""
        self._dismissed.add(connection)
        self._heard_s.pop(connection, None)

    def forget_byes(self) -> None:
        """The peer's BYEs came before all was there, and will be said again."""
        self._dismissed.clear()

    def note_heard(self, connection: int, now_s: float) -> None:
        """The peer gives a sign of life."""
        if connection not in self._dismissed:
            self._heard_s[connection] = now_s

    @property
    def heard_s(self) -> float | None:
        """When the peer was last heard on the connection that is silent for longest; None: none is listened to."""
        return min(self._heard_s.values(), default=None)

    def forget_silence(self) -> None:
        """Expect no more signs of life."""
        self._heard_s.clear()

    # This end

    def plan_hellos(self) -> None:
        """Say HELLO again where it was not answered, if this end dials."""
        if self._dials:
            self._hellos_due.update(set(self._all) - self._greeted)

    def plan_heartbeats(self) -> None:
        """Say HEARTBEAT on each that we have not left."""
        self._heartbeats_due.update(self._all[self._byes_said :])

    def next_hello(self) -> int | None:
        """Where HELLO is due; asked once for each."""
        return self._hellos_due.pop() if self._hellos_due else None

    def plan_heartbeat(self, connection: int) -> None:
        """Say HEARTBEAT on this one, unless we have left it."""
        if connection >= self._byes_said:
            self._heartbeats_due.add(connection)

    def next_heartbeat(self) -> int | None:
        """Where HEARTBEAT is due; asked once for each."""
        return self._heartbeats_due.pop() if self._heartbeats_due else None

    def plan_resumes(self) -> None:
        """Say RESUME on each."""
        self._resumes_due.update(self._all)

    def retract_byes(self) -> None:
        """Say BYE again on each, when it is its turn."""
        self._byes_said = 0

    def next_resume(self) -> int | None:
        """Where RESUME is due; asked once for each."""
        return self._resumes_due.pop() if self._resumes_due else None

    def next_bye(self) -> int:
        """Where BYE is to be said next; once for each, and not beyond the last."""
        connection = self._all[self._byes_said]
        self._byes_said += 1
        self._heartbeats_due.discard(connection)
        return connection

    @property
    def are_left(self) -> bool:
        """Whether this end has said BYE on all."""
        return self._byes_said == len(self._all)
