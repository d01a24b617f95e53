"""Which copies of snapshots there are off their stages' hosts, and which are to be made.

Pure. One snapshot at a time is copied, the newest when the one before was copied everywhere; one that cannot be, since
a host is lost with its part or a copy has failed, is passed over for the next. The holder of a stage's copy is its
nearest neighbour on another host, the next stage rather than the one before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tahq.comm.control.messages import Copied, Copy
from tahq.coordinator.membership import Member
from tahq.coordinator.recovery import RestorePoint

_Part = tuple[int, int]
"""Steps behind a snapshot, and whose part of it."""


@dataclass(frozen=True, slots=True)
class _Order:
    holder: bytes
    source: bytes


class Copies:
    """What is known of copies.

    Args:
        is_on: whether any are made.
        within_host: whether a worker on the same host may hold them.
        num_stages: stages are 0 … num_stages − 1.
        base: where lost stages begin at the beginning.
    """

    def __init__(self, *, is_on: bool, within_host: bool, num_stages: int, base: RestorePoint) -> None:
        self._is_on = is_on
        self._within_host = within_host
        self._num_stages = num_stages
        self._base = base
        self._newest = base
        self._target: RestorePoint | None = None
        self._ordered: dict[_Part, _Order] = {}
        self._held: dict[_Part, _Order] = {}
        self._failed: set[_Part] = set()
        """Parts that could not be copied; tried again when the next snapshot is complete."""
        self._places: dict[int, int] = {}
        """Which stage's worker was told last to hold a stage's copy."""
        self._gone: set[_Part] = set()
        """Parts that their stages do not have any more."""

    @property
    def target(self) -> RestorePoint | None:
        """The snapshot that is being copied."""
        return self._target

    def published(self, point: RestorePoint) -> None:
        """A snapshot is complete."""
        self._newest = point
        if self._target is None or any(step == self._target.step for step, _ in self._gone | self._failed):
            self._target = point
        for part in self._failed:
            self._ordered.pop(part, None)
        self._failed.clear()

    def based(self, point: RestorePoint) -> None:
        """Nobody begins before this one any more; the newest is next."""
        self._base = point
        self._target = self._newest if self._newest.step > point.step else None
        for parts in (self._ordered, self._held):
            for part in [part for part in parts if part[0] < point.step]:
                del parts[part]
        self._gone = {part for part in self._gone if part[0] >= point.step}

    def began(self, stage: int, step: int) -> None:
        """A stage's worker begins here: of what is newer and complete already it has nothing."""
        for point in (self._base, self._target, self._newest):
            if point is not None and point.step > step:
                self._gone.add((point.step, stage))
        if self._target is not None and (self._target.step, stage) in self._gone:
            self._target = self._newest if (self._newest.step, stage) not in self._gone else None

    def is_needed(self, members: Sequence[Member]) -> bool:
        """Whether any stage can be copied to another host."""
        return any(self._holder(member, members) is not None for member in members)

    def uncopied(self, members: Sequence[Member]) -> list[Member]:
        """Whose snapshots should be copied, and cannot be, since nobody can ask for them."""
        return [
            member
            for member in members
            if self._is_on
            and member.hello is not None
            and not member.hello.files_address
            and any(self._within_host or other.host != member.host for other in members if other != member)
        ]

    def is_complete(self, members: Sequence[Member]) -> bool:
        """Whether what is being copied is copied, of every stage that can be."""
        target = self._target
        if target is None or not self._is_on:
            return target is not None
        if len(members) < self._num_stages or not self._can_be_copied(target):
            return False
        return all(
            self._held.get((target.step, member.stage)) == order
            for member in members
            if (order := self._order_for(member.stage, members)[0]) is not None
        ) and not any(step == target.step for step, _ in self._gone)

    def orders(self, members: Sequence[Member]) -> list[tuple[bytes, Copy]]:
        """Whom to tell to keep what, that have not been told: the base's parts, and those of what is being copied."""
        due = []
        orders = {stage: self._order_for(stage, members) for stage in range(self._num_stages)}
        for point in filter(None, (self._base, self._target)):
            for stage, (order, address) in orders.items() if self._can_be_copied(point) else ():
                part = (point.step, stage)
                if order is None or part in self._gone or self._ordered.get(part) == order:
                    continue
                name = _file_of(point, stage)
                due.append((order.holder, Copy(point.step, stage, name, point.files[name], address)))
                self._ordered[part] = order
        return due

    def _order_for(self, stage: int, members: Sequence[Member]) -> tuple[_Order | None, str]:
        """Who is to hold a stage's copy, and where it is had: nowhere, if the stage has no worker."""
        source = _at(stage, members)
        if source is None:
            holder = _at(self._places.get(stage, -1), members)
            has_begun = holder is not None and holder.hello is not None
            return (_Order(holder.identity, b"") if holder is not None and has_begun else None), ""
        holder = self._holder(source, members)
        if holder is None or source.hello is None:
            return None, ""
        self._places[stage] = holder.stage
        return _Order(holder.identity, source.identity), source.hello.files_address

    def copied(self, holder: Member, copied: Copied) -> None:
        """A holder has a copy, or could not get it."""
        part = (copied.step, copied.stage)
        order = self._ordered.get(part)
        if order is None or order.holder != holder.identity:
            return  # it was asked by another coordinator, or for what nobody wants any more
        if copied.error:
            self._failed.add(part)
        else:
            self._failed.discard(part)
            self._held[part] = order

    def sources(self, stage: int, members: Sequence[Member]) -> list[tuple[int, Member, str]]:
        """Who else has a stage's files, as (steps behind the snapshot, who, host:port), the newest first."""
        rows = []
        for (step, number), order in sorted(self._held.items(), reverse=True):
            holder = next((member for member in members if member.identity == order.holder), None)
            if number == stage and holder is not None and holder.hello is not None and holder.hello.files_address:
                rows.append((step, holder, holder.hello.files_address))
        return rows

    def lacks(self, stage: int, members: Sequence[Member]) -> str:
        """The file without which a stage cannot begin on another host; empty: it can."""
        if not self._base.snapshot:
            return ""
        steps = {step for step, *_ in self.sources(stage, members)}
        if steps & {self._base.step, self._newest.step}:
            return ""
        return _file_of(self._base, stage) or f"files of {self._base.snapshot}"

    def _can_be_copied(self, point: RestorePoint) -> bool:
        """Whether it is in parts of the run's own stages."""
        parts = [_file_of(point, stage) for stage in range(self._num_stages)]
        return self._is_on and len(point.files) == self._num_stages and all(parts)

    def _holder(self, source: Member, members: Sequence[Member]) -> Member | None:
        if not self._is_on or source.hello is None or not source.hello.files_address:
            return None
        others = (
            member
            for member in members
            if member.stage != source.stage
            and member.hello is not None
            and member.hello.files_address
            and (self._within_host or member.host != source.host)
        )
        return min(others, key=lambda m: (abs(m.stage - source.stage), m.stage < source.stage), default=None)


def _at(stage: int, members: Sequence[Member]) -> Member | None:
    return next((member for member in members if member.stage == stage), None)


def _file_of(point: RestorePoint, stage: int) -> str:
    return next((name for name in point.files if name.startswith(f"stage-{stage:03d}-")), "")
