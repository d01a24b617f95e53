"""Bringing lost stages back while the others wait: from the loss of a worker to the START of the one in its place.

::

    lost ──started again──▶ Join, Assign, Hello ──all are there──▶ Relink ──all neighbours have──▶ Plan, Ready, Start

Every such return has an epoch of its own: frames of the one before, which a process may still send that was taken for
dead, are not taken any more. A stage that is lost meanwhile begins the return anew.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tahq.comm.control.messages import Hold, LinkState, Plan, Relink, Relinked, Start, StartOver, Widen
from tahq.coordinator.context import RunContext
from tahq.coordinator.gathering import Gathering
from tahq.coordinator.membership import Standing, stage_list
from tahq.coordinator.recovery import other_end
from tahq.errors import PeerLostError

Restart = Callable[[int], bool]
"""Starts a stage's worker again, after whatever is left of it has been killed; False if it is not started from here.

Raises PeerLostError if that was done too often.
"""


@dataclass(slots=True)
class _Return:
    """A return that is under way."""

    epoch: int
    returning: frozenset[int]
    """Stages that are told a plan once their neighbours are ready for them."""
    awaited: set[int] = field(default_factory=set)
    """Neighbours that have not answered yet."""


class Returning:
    """Answers what lost stages and their neighbours say.

    Args:
        context: the run.
        gathering: greets who joins, and knows the links.
        restart: see there.
        note_epoch: told the epoch of a return before anybody else is.
        forget: told of a stage that lives, and will say again what it has said of the present step.
    """

    def __init__(
        self,
        context: RunContext,
        gathering: Gathering,
        restart: Restart,
        note_epoch: Callable[[int], None],
        forget: Callable[[int], None],
    ) -> None:
        self._context = context
        self._gathering = gathering
        self._recovery = context.recovery
        self._restart = restart
        self._note_epoch = note_epoch
        self._forget = forget
        self.num_steps = 0
        """Length of the run, once that is known."""
        self._return: _Return | None = None
        self._spare_from_s: dict[int, float] = {}
        """When each of them may be given to a spare."""
        self.given: set[int] = set()
        """Stages that spares have: what becomes of the processes that were started for them is nobody's concern."""
        self._lost: dict[int, float] = {}
        """Since when each stage is lost that has not come back to where the run is."""
        self._degraded: dict[tuple[int, int], str] = {}
        """What stages have said of links on which their peers are silent, by stage and link."""

    def begin(self) -> None:
        """Training begins: whoever was lost before is back."""
        self._lost.clear()
        self._spare_from_s.clear()

    def lose(self, stage: int, why: str, *, is_replaced: bool = False, is_silent: bool = False) -> None:
        """A worker is gone: free its stage, and have it started again where that is possible here.

        Args:
            stage: its stage.
            why: in words.
            is_replaced: whether another one is there already.
            is_silent: whether nothing has come from it for so long that its host is taken for lost.

        Raises:
            PeerLostError: it has been started again too often.
        """
        context, point = self._context, self._recovery.point
        member = context.membership.leave(stage)
        if member is not None:
            self._gathering.note_lost(member.identity)
        context.observer.stage_left(stage)
        self._recovery.lose(stage)
        self._return = None
        since_s = member.last_seen_s if member is not None and is_silent else context.clock()
        self._lost.setdefault(stage, since_s)
        self._degraded = {key: words for key, words in self._degraded.items() if key[0] != stage}
        self._hold_links(stage)
        begins = f"begins again after step {point.step}" if point.snapshot else "begins again from the start"
        if not is_replaced and self._start_again(stage, is_silent):
            context.observer.warned(f"{why}; it is started again, and {begins}; the others wait")
        else:
            context.observer.warned(f"{why}; its next worker {begins}; the others wait")
        context.tell_phase(self._gathering.missing)

    def _hold_links(self, stage: int) -> None:
        """Have neighbours wait for whoever comes next, however long a file takes on its way there."""
        for ends in self._recovery.links_of(stage):
            neighbour = self._context.membership.at(other_end(ends, stage))
            if neighbour is not None and neighbour.standing in (Standing.PLANNED, Standing.READY):
                self._context.server.send(neighbour.identity, Hold([ends.link]))

    def _start_again(self, stage: int, is_silent: bool) -> bool:
        """Have the stage's worker started again where it was, unless that is in vain and a spare can take it."""
        now_s, options = self._context.clock(), self._context.options
        can_be_given = len(self._context.spares) > 0 and not self._lacks(stage)
        self._spare_from_s[stage] = now_s
        if is_silent and can_be_given:
            return False
        try:
            is_started = self._restart(stage)
        except PeerLostError as error:
            if not can_be_given:
                raise
            self._context.observer.warned(str(error))
            return False
        if is_started:
            self.given.discard(stage)
        if not is_silent or is_started:
            self._spare_from_s[stage] = now_s + (options.give_up_s / 2 if is_started else options.peer_timeout_s)
        return is_started

    def _lacks(self, stage: int) -> str:
        return self._context.copies.lacks(stage, self._context.membership.members)

    def give_to_spares(self) -> None:
        """Give stages whose hosts are lost to who waits for them."""
        context, now_s = self._context, self._context.clock()
        for stage in [stage for stage in self._lost if context.membership.at(stage) is None]:
            if now_s < self._spare_from_s.get(stage, math.inf) or self._lacks(stage):
                continue
            spare = context.spares.take()
            if spare is None:
                return
            context.observer.warned(f"stage {stage} is given to the spare worker {spare.name}; {context.spares}")
            self.given.add(stage)
            self._gathering.join(spare.identity, replace(spare.join, stage=stage), is_given=True)

    def wait_for(self, stage: int) -> None:
        """A stage has no worker, or none that has said so."""
        now_s = self._context.clock()
        self._lost.setdefault(stage, now_s)
        self._spare_from_s.setdefault(stage, now_s + self._context.options.give_up_s / 2)

    def link_state(self, name: str, state: LinkState) -> None:
        """A link of a stage is degraded, or works again."""
        if state.reason:
            self._degraded[state.stage, state.link] = f"{name}: link {state.link} to stage {state.peer_stage} is silent"
        else:
            self._degraded.pop((state.stage, state.link), None)

    def rejoined(self, stage: int) -> None:
        """The worker of a stage goes on under this coordinator."""
        self._lost.pop(stage, None)
        self._spare_from_s.pop(stage, None)
        self.greeted()

    def roll_back(self, why: str) -> None:
        """Have every stage begin again at the restore point: a lost one cannot come back alone."""
        context = self._context
        self._recovery.roll_back()
        context.observer.warned(f"{why}: all stages go back to step {self._recovery.point.step}, and go on from there")
        for member in context.membership.members:
            context.server.send(member.identity, StartOver(why))
            context.membership.leave(member.stage)
            self._gathering.note_lost(member.identity)
            self._recovery.lose(member.stage)
            self._forget(member.stage)
            self.wait_for(member.stage)
        self._return = None

    def check_waiting(self, give_up_s: float) -> None:
        """Raise PeerLostError once a stage has been gone for too long; the message names it.

        One that is there again, and still loads or fetches its snapshot, may take as long as joining may.
        """
        now_s, membership = self._context.clock(), self._context.membership
        longest_s = dict.fromkeys(membership.missing, give_up_s)
        for stage in set(membership.lacking(Standing.GREETED)) - longest_s.keys():
            longest_s[stage] = max(give_up_s, self._context.options.join_timeout_s)
        late = [stage for stage, since_s in self._lost.items() if now_s - since_s > longest_s.get(stage, math.inf)]
        if late:
            raise PeerLostError(
                f"{stage_list(late)} did not come back within {give_up_s:.0f} s (run.give_up){self._why(late)}"
            )

    def _why(self, late: Sequence[int]) -> str:
        lacking = [self._lacks(stage) for stage in late] if self._context.spares else []
        files = "".join(f"; a spare could not take it, since nobody has a copy of {file}" for file in lacking if file)
        return "".join(f"; {words}" for words in self._degraded.values()) + files

    # -- the return ------------------------------------------------------------------------------

    def greeted(self) -> None:
        """A worker has been greeted: once nobody is missing, have the neighbours make ready."""
        membership = self._context.membership
        returning = frozenset(membership.lacking(Standing.PLANNED))
        if membership.lacking(Standing.GREETED) or self._return is not None or not returning:
            return
        if not self._fit_together(returning):
            self.roll_back("neighbours come back at different snapshots")
            return
        self._recovery.epoch += 1
        self._note_epoch(self._recovery.epoch)
        self._return = _Return(self._recovery.epoch, returning)
        for stage in {other_end(ends, s) for s in returning for ends in self._recovery.links_of(s)} - returning:
            self._relink(self._return, stage)
        self._plan_when_ready(self._return)

    def _fit_together(self, returning: frozenset[int]) -> bool:
        """Whether neighbours that both begin again do so at the same step: neither has what the other wants before."""
        links = [ends for stage in returning for ends in self._recovery.links_of(stage)]
        return all(
            self._recovery.position(ends.lower) == self._recovery.position(ends.upper)
            for ends in links
            if {ends.lower, ends.upper} <= returning
        )

    def _relink(self, under_way: _Return, stage: int) -> None:
        links = [ends for ends in self._recovery.links_of(stage) if other_end(ends, stage) in under_way.returning]
        numbers = {ends.link for ends in links}
        rows = [row for row in self._gathering.link_rows()[stage] if row[0] in numbers]
        wanted = [self._recovery.wanted(ends, other_end(ends, stage), self._context.state.evaluating) for ends in links]
        member = self._context.membership.at(stage)
        if member is not None:
            under_way.awaited.add(stage)
            self._context.server.send(member.identity, Relink(under_way.epoch, rows, wanted))

    def relinked(self, identity: bytes, relinked: Relinked) -> None:
        """A neighbour has made ready, or cannot."""
        self._context.membership.claim(identity, relinked.stage)
        if self._return is None or relinked.epoch != self._return.epoch:
            return  # of a return that has begun anew since
        if relinked.lacking:
            self.roll_back(f"stage {relinked.stage} has not kept all that it sent on link {relinked.lacking[0]}")
            return
        self._return.awaited.discard(relinked.stage)
        self._plan_when_ready(self._return)

    def _plan_when_ready(self, under_way: _Return) -> None:
        if under_way.awaited:
            return
        rows, evaluating = self._gathering.link_rows(), self._context.state.evaluating
        for stage in sorted(under_way.returning):
            member = self._context.membership.at(stage)
            if member is None:
                continue
            links = self._recovery.links_of(stage)
            plan = Plan(
                under_way.epoch,
                self._recovery.position(stage),
                self.num_steps,
                rows[stage],
                *self._gathering.data_position(self._recovery.position(stage)),
                live_step=self._recovery.step,
                wanted=[self._recovery.wanted(ends, other_end(ends, stage), evaluating) for ends in links],
            )
            self._context.membership.planned(stage)
            self._context.server.send(member.identity, plan)
        self._return = None

    def ready(self, stage: int) -> None:
        """A stage that has come back is linked with its neighbours: have it begin."""
        member = self._context.membership.at(stage)
        if member is None:
            return
        point = self._recovery.origin(stage)
        self._context.server.send(member.identity, Start(point.step, [list(row) for row in point.codecs]))
        self._note_position(stage)

    def prepared_again(self, stage: int) -> None:
        """A stage has computed a step again: its neighbours may send it more."""
        through = self._recovery.through(stage)
        for ends in self._recovery.links_of(stage):
            neighbour = self._context.membership.at(other_end(ends, stage))
            if neighbour is not None:
                self._context.server.send(neighbour.identity, Widen(ends.link, through))
        self._note_position(stage)

    def _note_position(self, stage: int) -> None:
        """Say once when a stage is where the run is."""
        if stage in self._lost and not self._recovery.is_behind(stage):
            lasted_s = self._context.clock() - self._lost.pop(stage)
            self._spare_from_s.pop(stage, None)
            self._context.observer.warned(f"{self._context.membership.name(stage)} is back after {lasted_s:.1f} s")
