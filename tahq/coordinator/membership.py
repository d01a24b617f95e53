"""Who holds which stage: joining, comparing what workers made of the configuration, signs of life.

Pure: identities and times are arguments, nothing is sent. Invariants:

- a stage has at most one holder, and an identity holds at most one stage;
- a refused worker holds nothing, so another may take the stage;
- how far a worker has come only changes along `PROGRESS`.

::

    Join            Hello            (Plan)            Ready
    ────▶ ASSIGNED ──────▶ GREETED ───────▶ PLANNED ──────▶ READY
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tahq.comm.control.messages import Heartbeat, Hello, Join, Plan, Ready, Refuse
from tahq.coordinator.agreement import differences, torch_warning
from tahq.errors import RemoteProtocolError


class Standing(Enum):
    """How far a worker has come."""

    ASSIGNED = "building its model"
    GREETED = "waiting for the others"
    PLANNED = "connecting"
    READY = "ready"


PROGRESS: dict[tuple[Standing, type[Hello | Plan | Ready]], Standing] = {
    (Standing.ASSIGNED, Hello): Standing.GREETED,
    (Standing.GREETED, Plan): Standing.PLANNED,
    (Standing.PLANNED, Ready): Standing.READY,
}


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that holds a stage."""

    identity: bytes
    stage: int
    host: str
    pid: int
    last_seen_s: float
    worker_id: str = ""
    """Whose processes follow each other; empty: nobody knows."""
    standing: Standing = Standing.ASSIGNED
    hello: Hello | None = None
    step: int = -1
    activity: str = ""

    @property
    def name(self) -> str:
        """``stage 2 (host, pid 41)``, as messages call it."""
        return f"stage {self.stage} ({self.host}, pid {self.pid})"


class Membership:
    """The stages of a run and their holders.

    Args:
        num_stages: stages are 0 … num_stages − 1.
        version: tahq's version that every worker must have.
        config_hash: hash of the configuration that every worker must have understood.
        hosts: how messages call the stages' machines; empty: as the workers call them.
    """

    def __init__(self, num_stages: int, version: str, config_hash: str, hosts: Sequence[str] = ()) -> None:
        self._num_stages = num_stages
        self._version = version
        self._config_hash = config_hash
        self._hosts = tuple(hosts)
        self._members: dict[int, Member] = {}

    @property
    def members(self) -> tuple[Member, ...]:
        """The holders, by stage."""
        return tuple(self._members[stage] for stage in sorted(self._members))

    @property
    def missing(self) -> tuple[int, ...]:
        """Stages without a holder."""
        return tuple(stage for stage in range(self._num_stages) if stage not in self._members)

    def lacking(self, standing: Standing) -> tuple[int, ...]:
        """Stages whose worker has not come as far as `standing`, absent ones included."""
        order = list(Standing)
        behind = (m.stage for m in self._members.values() if order.index(m.standing) < order.index(standing))
        return tuple(sorted({*behind, *self.missing}))

    def find(self, identity: bytes) -> Member | None:
        """The holder with this identity."""
        return next((member for member in self._members.values() if member.identity == identity), None)

    def at(self, stage: int) -> Member | None:
        """The holder of this stage."""
        return self._members.get(stage)

    def name(self, stage: int) -> str:
        """How messages call this stage's worker."""
        member = self._members.get(stage)
        return member.name if member else f"stage {stage}"

    def join(self, identity: bytes, join: Join, now_s: float) -> Member | Refuse:
        """Give a worker the stage it asks for (-1: the lowest that is free), or say why not.

        Asking again changes nothing.
        """
        present = self.find(identity)
        if present is not None and join.stage in (-1, present.stage):
            return present
        if present is not None:
            return Refuse(f"this worker already holds stage {present.stage}; start another one for stage {join.stage}")
        if join.version != self._version:
            row = ["version", join.version, f"{self._version} (coordinator)"]
            return Refuse("this worker runs another version of tahq: install the coordinator's", [row])
        reason = self._why_not(join.stage)
        if reason:
            return Refuse(reason)
        stage = join.stage if join.stage >= 0 else self.missing[0]
        host = self._hosts[stage] if self._hosts and not join.spare else join.host
        self._members[stage] = Member(identity, stage, host, join.pid, now_s, join.worker_id)
        return self._members[stage]

    def restore(self, member: Member) -> None:
        """Give a free stage to who held it before this coordinator began."""
        self._members.setdefault(member.stage, member)

    def replaced_by(self, identity: bytes, join: Join) -> Member | None:
        """The holder whose place this worker takes: one that is known to be gone, since this one comes after it."""
        holder = self._members.get(join.stage)
        if holder is None or holder.identity == identity or join.version != self._version:
            return None
        follows = bool(join.worker_id) and join.worker_id == holder.worker_id
        return holder if follows or join.takeover else None

    def _why_not(self, stage: int) -> str:
        if not -1 <= stage < self._num_stages:
            return (
                f"there is no stage {stage}: this run has stages 0 to {self._num_stages - 1}; start with one of those"
            )
        if not self.missing and stage < 0:
            return f"all {self._num_stages} stages have a worker; stop one of them first"
        holder = self._members.get(stage)
        free = ", ".join(map(str, self.missing))
        if holder is None:
            return ""
        others = f"still free: {free}; " if free else ""
        return (
            f"stage {stage} already has a worker: {holder.name}; {others}if you know that it is gone, start this one "
            "with --takeover"
        )

    def greet(self, identity: bytes, hello: Hello) -> Refuse | None:
        """Compare what a worker made of the configuration; one that differs is refused and loses its stage.

        Raises:
            RemoteProtocolError: not a member, another's stage, or it has said Hello before.
        """
        member = self.claim(identity, hello.stage)
        standing = self._progress(member, Hello)
        rows = differences(hello, self._version, self._config_hash, self._greeted())
        if rows:
            del self._members[member.stage]
            fields = ", ".join(row[0] for row in rows)
            return Refuse(f"stage {member.stage} does not agree with the run about {fields}", rows)
        self._members[member.stage] = replace(member, hello=hello, standing=standing)
        return None

    def planned(self, stage: int) -> None:
        """A worker is told its links."""
        member = self._members[stage]
        self._members[stage] = replace(member, standing=self._progress(member, Plan))

    def ready(self, identity: bytes, ready: Ready) -> None:
        """A worker has its model and its links.

        Raises:
            RemoteProtocolError: not a member, another's stage, or not expected now.
        """
        member = self.claim(identity, ready.stage)
        self._members[member.stage] = replace(member, standing=self._progress(member, Ready))

    def warning(self, stage: int) -> str:
        """What is odd but allowed about this stage's Hello; empty if nothing is."""
        hello = self._members[stage].hello
        return torch_warning(hello, self._greeted()) if hello else ""

    def _greeted(self) -> list[tuple[str, Hello]]:
        return [(member.name, member.hello) for member in self.members if member.hello is not None]

    @staticmethod
    def _progress(member: Member, said: type[Hello | Plan | Ready]) -> Standing:
        standing = PROGRESS.get((member.standing, said))
        if standing is None:
            raise RemoteProtocolError(f"{member.name} said {said.__name__} while it was {member.standing.value}")
        return standing

    def claim(self, identity: bytes, stage: int) -> Member:
        """The member with this identity, if it holds the stage that it speaks for.

        Raises:
            RemoteProtocolError: it does not; the message names who it is.
        """
        member = self.find(identity)
        if member is None:
            raise RemoteProtocolError(f"a worker that holds no stage spoke for stage {stage}")
        if member.stage != stage:
            raise RemoteProtocolError(f"{member.name} spoke for stage {stage}, which is not its own")
        return member

    def seen(self, identity: bytes, now_s: float) -> None:
        """Something arrived from this identity: it lives."""
        member = self.find(identity)
        if member is not None:
            self._members[member.stage] = replace(member, last_seen_s=now_s)

    def doing(self, identity: bytes, heartbeat: Heartbeat) -> Member | None:
        """Note what a worker says it is doing; None if it holds no stage."""
        member = self.find(identity)
        if member is None:
            return None
        self._members[member.stage] = replace(member, step=heartbeat.step, activity=heartbeat.activity)
        return self._members[member.stage]

    def silent(self, since_s: float) -> tuple[Member, ...]:
        """Members from whom nothing has come after this time."""
        return tuple(member for member in self.members if member.last_seen_s < since_s)

    def leave(self, stage: int) -> Member | None:
        """Free a stage; returns who held it."""
        return self._members.pop(stage, None)


def stage_list(stages: Iterable[int]) -> str:
    """``stage 2`` or ``stages 2, 3``."""
    numbers = list(stages)
    return f"stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
