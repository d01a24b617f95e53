"""Carries out what moves seats: workers that join, are refused, are lost and come back.

The decisions are in `gathering`, `recovery` and `copies`; this sends what follows from them.
"""

from collections.abc import Callable
from dataclasses import replace

from tahq.comm.control.messages import (
    Admit,
    Failed,
    Hello,
    Hold,
    Join,
    Message,
    Ready,
    Refuse,
    Rejoin,
    Relinked,
    StandBy,
    Start,
    StartOver,
    Widen,
)
from tahq.coordinator import copies, gathering, recovery
from tahq.coordinator.context import RunContext
from tahq.coordinator.journal import JournalledHolder
from tahq.coordinator.run_state import UNDER_WAY, WITH_STEPS, RunEvent
from tahq.coordinator.seats import Former, Seat, SeatEvent, SeatPhase
from tahq.coordinator.watch import lost_after_s
from tahq.errors import PeerLostError

Restart = Callable[[int], bool]
"""Kills what is left of a stage's process and starts its worker again; False if it is not started from here.

Raises PeerLostError if that was done too often.
"""


class Seating:
    """Fills and empties seats.

    Args:
        context: the run.
        restart: see there.
        forget: called before a seat is emptied in a run with steps.
    """

    def __init__(self, context: RunContext, restart: Restart, forget: Callable[[], None]) -> None:
        self._context = context
        self._run, self._seats, self._options = context.run, context.seats, context.options
        self._restart = restart
        self._forget = forget
        is_same = context.journal.is_of(context.options.run_id, context.options.config_hash)
        self._holders = context.journal.holders() if is_same else {}
        """The workers that trained under the coordinator before this one."""

    # -- joining ---------------------------------------------------------------------------------

    def join(self, identity: bytes, join: Join) -> None:
        """Give a worker the seat that it asks for, have it wait as a spare, or refuse it; asking again changes nothing.

        The worker that holds the seat is replaced only by one that may have it.
        """
        present, is_wanted = self._seats.find(identity), gathering.is_free(self._seats, join.stage)
        if join.spare and not self._options.is_measuring and present is None and not is_wanted:
            self._admit_spare(identity, join)
            return
        if join.spare and not (0 <= join.stage < len(self._seats) and self._seats[join.stage].given_to is not None):
            join = replace(join, spare=False)  # it is on the stage's own host
        if present is not None and join.stage not in (-1, present.stage):
            self._refuse(
                identity,
                join,
                Refuse(f"this worker already holds stage {present.stage}; start another for stage {join.stage}"),
            )
        elif present is not None:
            self._assign(present)
        else:
            self._seat(identity, join)

    def _seat(self, identity: bytes, join: Join) -> None:
        replaced = gathering.replaced_by(self._seats, identity, join)
        key = self._context.server.public_key(identity)
        refusal = gathering.refusal(self._options, self._seats, join, key, replaced)
        if refusal is not None:
            self._refuse(identity, join, refusal)
            return
        if replaced is not None:
            reason = "a person takes its stage over" if join.takeover else "it was started again"
            self.lose(replaced.stage, f"{replaced.name}: {reason}", is_replaced=True)
        stage = join.stage if join.stage >= 0 else self._seats.missing[0]
        host = self._options.hosts[stage] if self._options.hosts and not join.spare else ""
        self._assign(self._seats.join(stage, identity, join, self._context.clock(), host=host, key=key))

    def _assign(self, seat: Seat) -> None:
        rows = self._sources(seat)
        self._context.send(seat, gathering.assignment(self._options, self._run, seat.stage, rows))
        self._context.tell_stage(seat)
        self._context.tell_phase()

    def _sources(self, seat: Seat) -> list[list[str | int]]:
        """The workers that have copies of a stage's files, which are told to admit its worker."""
        rows = list[list[str | int]]()
        for step, holder, address in copies.sources(self._seats, seat.stage):
            if seat.public_key:
                self._context.send(holder, Admit([seat.public_key]))
            rows.append([step, address, holder.public_key])
        return rows

    def _admit_spare(self, identity: bytes, join: Join) -> None:
        if join.version != self._options.version:
            refusal = gathering.refusal(self._options, self._seats, join, "", None)
            self._refuse(identity, join, refusal or Refuse("no stage needs a worker"))
            return
        is_new = self._seats.add_spare(identity, join, self._context.clock())
        self._context.server.send(identity, StandBy(self._options.peer_timeout_s, self._options.give_up_s))
        if is_new:
            name = self._seats.spares[identity].name
            self._context.observer.warned(f"a spare worker stands by ({name}); {self._seats.num_spares}")

    def hello(self, identity: bytes, hello: Hello) -> None:
        """Accept or refuse a worker that has read the configuration.

        Raises:
            RemoteProtocolError: it may not say HELLO now.
        """
        context, seat = self._context, self._seats.claim(identity, hello.stage)
        origin = self._run.origin_at(hello.start_step)
        if seat.phase is SeatPhase.ASSIGNED and origin is None:
            self._start_over(seat, f"no stage begins at step {hello.start_step} any more", Former.REFUSED)
            context.tell_phase()
            return
        rows = gathering.differences(self._options, self._seats, hello) if seat.phase is SeatPhase.ASSIGNED else []
        if rows:
            fields = ", ".join(row[0] for row in rows)
            reason = f"stage {seat.stage} does not agree with the run about {fields}"
            self.dismiss(seat, Refuse(reason, rows))
            return
        lines = gathering.warnings(self._seats, seat, hello)
        self._seats.greet(seat, hello, context.clock())
        if origin is not None:
            seat.position, seat.origin = hello.start_step, origin
        context.tell_stage(seat)
        for line in lines:
            context.observer.warned(line)
        context.tell_phase()

    def plan(self) -> None:
        """Tell every stage that waits for its plan; UserError for neighbours that cannot be connected."""
        for stage, order in recovery.plans(self._options, self._run, self._seats).items():
            seat = self._seats.advance(stage, SeatEvent.PLAN, self._context.clock())
            self._context.send(seat, order)
        self._run.returning = None

    def ready(self, identity: bytes, ready: Ready) -> Seat:
        """Note that a worker is connected; RemoteProtocolError if it may not say so now."""
        seat = self._seats.claim(identity, ready.stage)
        self._seats.advance(seat.stage, SeatEvent.READY, self._context.clock())
        self._context.tell_stage(seat)
        self._context.tell_phase()
        if seat.hello is not None:
            who = (seat.host, seat.pid, seat.worker_id)
            self._context.journal.held(JournalledHolder(seat.stage, identity, seat.hello, *who))
        return seat

    def rejoin(self, identity: bytes, rejoin: Rejoin) -> Seat | None:
        """Give a worker the seat back that it held under the coordinator before, or have it begin anew."""
        holder = self._holders.get(rejoin.stage) if rejoin.run_id == self._options.run_id else None
        if holder is None or holder.identity != identity or self._seats[holder.stage].is_held:
            self._context.server.send(identity, StartOver("another worker has its stage"))
            return None
        seat = self._seats.advance(holder.stage, SeatEvent.REJOIN, self._context.clock())
        seat.identity, seat.hello, seat.worker_id = identity, holder.hello, holder.worker_id
        seat.public_key = self._context.server.public_key(identity)
        seat.host, seat.pid, seat.last_seen_s = holder.host, holder.pid, self._context.clock()
        self._context.tell_stage(seat)
        return seat

    # -- workers without a seat ------------------------------------------------------------------

    def dismiss(self, seat: Seat, refusal: Refuse) -> None:
        """Refuse the worker of a stage, and free it for another."""
        self._refuse(seat.identity, Join(seat.stage, "", seat.host, seat.pid), refusal, name=seat.name)
        self._empty(seat, Former.REFUSED)
        self._context.tell_phase()

    def _refuse(self, identity: bytes, join: Join, refusal: Refuse, name: str = "") -> None:
        self._seats.former[identity] = Former.REFUSED
        self._context.server.send(identity, refusal)
        rows = "".join(f"; {field}: {yours}, expected {expected}" for field, yours, expected in refusal.differences)
        if 0 <= join.stage < len(self._seats):
            self._seats[join.stage].refusal = f"{refusal.reason}{rows}"
        name = name or f"{join.host}, pid {join.pid}"
        self._context.observer.warned(f"refused the worker {name}: {refusal.reason}{rows}")

    def turn_away(self, identity: bytes, message: Message) -> None:
        """Answer a worker that holds no stage and did not ask for one."""
        spare = self._seats.spares.pop(identity, None)
        if spare is not None and isinstance(message, Failed):
            self._context.observer.warned(f"the spare worker {spare.name} is gone; {self._seats.num_spares}")
        elif identity in self._seats.former:
            self.remind(identity)
        elif isinstance(message, Failed):
            self._context.observer.warned(f"a worker without a stage failed: {message.message}")
        else:
            said = type(message).__name__
            self._context.server.send(identity, Refuse(f"got {said} from a worker without a stage; start it again"))

    def remind(self, identity: bytes) -> None:
        """Tell a worker that has lost its stage, and still lives, that it has."""
        former = self._seats.former.get(identity)
        if former is Former.TAKEN_BACK:
            self._seats.former[identity] = Former.REFUSED
            self._context.server.send(identity, StartOver("its stage was taken back"))
        elif former is Former.REFUSED:
            self._context.server.send(identity, Refuse("it holds no stage; start this worker again"))

    def check_spares(self, polled_s: float) -> None:
        """Forget spares that have been silent for too long, and give the stages of lost hosts to others."""
        since_s = polled_s - lost_after_s(self._options)
        for spare in [spare for spare in self._seats.spares.values() if spare.last_seen_s < since_s]:
            del self._seats.spares[spare.identity]
            self._seats.former[spare.identity] = Former.TAKEN_BACK
            self._context.observer.warned(f"the spare worker {spare.name} is gone; {self._seats.num_spares}")
        self._give_to_spares()

    def _start_over(self, seat: Seat, why: str, former: Former) -> None:
        """Empty a seat whose worker lives, and have that worker join again."""
        self._context.send(seat, StartOver(why))
        self._empty(seat, former)

    def _empty(self, seat: Seat, former: Former) -> None:
        self._seats.former[seat.identity] = former
        self._context.journal.lost(seat.stage)
        self._seats.leave(seat.stage, self._context.clock(), position=self._run.base.step)
        self._context.observer.stage_left(seat.stage)

    # -- losing ----------------------------------------------------------------------------------

    def lose(self, stage: int, why: str, *, is_replaced: bool = False, is_silent: bool = False) -> None:
        """Empty the seat of a worker that is gone, and have it started again where that is possible.

        Args:
            stage: its stage.
            why: in words.
            is_replaced: whether another worker is there already.
            is_silent: whether it has been silent long enough for its host to be lost.

        Raises:
            PeerLostError: it has been started again too often, or the run only measures.
        """
        context = self._context
        if self._options.is_measuring:
            raise PeerLostError(why)
        if self._run.phase in WITH_STEPS:
            self._forget()
        context.journal.lost(stage)
        before = self._seats.leave(stage, context.clock(), position=self._run.base.step, is_silent=is_silent)
        if before.is_held:
            self._seats.former[before.identity] = Former.TAKEN_BACK
        context.observer.stage_left(stage)
        self._abandon_return()
        for ends, other in recovery.links_of(self._options, stage):
            if self._seats[other].phase in (SeatPhase.PLANNED, SeatPhase.READY):
                context.send(self._seats[other], Hold([ends.link]))  # however long the next worker takes
        point = self._run.newest
        begins = f"begins again after step {point.step}" if point.snapshot else "begins again from the start"
        if not is_replaced and self._start_again(self._seats[stage], is_silent):
            context.observer.warned(f"{why}; it is started again, and {begins}; the others wait")
        else:
            context.observer.warned(f"{why}; its next worker {begins}; the others wait")
        context.tell_phase()

    def free_silent(self, seat: Seat) -> None:
        """Free the seat of a worker that has fallen silent before the run began."""
        self._context.observer.warned(f"{seat.name} has given no sign of life; its stage is free again")
        self._empty(seat, Former.TAKEN_BACK)
        self._context.tell_phase()

    def _start_again(self, seat: Seat, is_silent: bool) -> bool:
        """Start the stage's worker again where it was, unless that is in vain and a spare can take it."""
        now_s, options = self._context.clock(), self._options
        can_be_given = bool(self._seats.spares) and not copies.lacks(self._run, self._seats, seat.stage)
        seat.spare_from_s = now_s
        if is_silent and can_be_given:
            return False
        try:
            is_started = self._restart(seat.stage)
        except PeerLostError as error:
            if not can_be_given:
                raise
            self._context.observer.warned(str(error))
            return False
        if is_started:
            seat.given_to = None
        if not is_silent or is_started:
            seat.spare_from_s = now_s + (options.give_up_s / 2 if is_started else options.peer_timeout_s)
        return is_started

    def _give_to_spares(self) -> None:
        now_s = self._context.clock()
        for seat in [seat for seat in self._seats if not seat.is_held] if self._run.phase in UNDER_WAY else ():
            is_due = seat.spare_from_s is not None and now_s >= seat.spare_from_s
            if not is_due or not self._seats.spares or copies.lacks(self._run, self._seats, seat.stage):
                continue
            spare = self._seats.spares.pop(next(iter(self._seats.spares)))
            self._context.observer.warned(
                f"stage {seat.stage} is given to the spare worker {spare.name}; {self._seats.num_spares}"
            )
            seat.given_to = self._context.server.public_key(spare.identity)
            self._seat(spare.identity, replace(spare.join, stage=seat.stage))

    def wait_for(self, seat: Seat) -> None:
        """Wait for a stage's worker, which is expected to come by itself."""
        now_s = self._context.clock()
        if seat.lost_since_s is None:
            seat.lost_since_s = now_s
        if seat.spare_from_s is None:
            seat.spare_from_s = now_s + self._options.give_up_s / 2

    # -- coming back -----------------------------------------------------------------------------

    def bring_back(self) -> None:
        """Once no worker is missing, have the neighbours of those that come back make their links ready."""
        stages = recovery.returning(self._seats)
        if not stages or self._run.returning is not None:
            return
        if not recovery.fit_together(self._options, self._seats, stages):
            self.roll_back("neighbours come back at different checkpoints")
            return
        self._run.epoch += 1
        self._context.journal.note(epoch=self._run.epoch)
        self._run.returning = self._run.epoch
        for stage, order in recovery.relinks(self._options, self._run, self._seats, stages).items():
            self._seats[stage].relinking_since_s = self._context.clock()
            self._context.send(self._seats[stage], order)
        self._plan_if_linked()

    def relinked(self, seat: Seat, relinked: Relinked) -> None:
        """A neighbour has made its links ready, or cannot."""
        if relinked.epoch != self._run.epoch:
            return  # of a return that has begun anew since
        if relinked.lacking:  # perhaps found only while the frames are sent
            self.roll_back(f"stage {seat.stage} has not kept all that it sent on link {relinked.lacking[0]}")
            return
        seat.relinking_since_s = None
        if self._run.returning is not None:
            self._plan_if_linked()

    def _plan_if_linked(self) -> None:
        if all(seat.relinking_since_s is None for seat in self._seats):
            self.plan()

    def _abandon_return(self) -> None:
        self._run.returning = None
        for seat in self._seats:
            seat.relinking_since_s = None

    def roll_back(self, why: str) -> None:
        """Have every stage begin again at a point that all have: a lost stage cannot come back alone."""
        if self._run.phase in WITH_STEPS:
            self._forget()
        self._run.newest = recovery.common_point(self._run, self._seats)
        self.start_all_over(why)

    def start_all_over(self, why: str) -> None:
        """Have every stage begin again at the newest checkpoint, or at the base."""
        self._context.observer.warned(
            f"{why}: all stages go back to step {self._run.newest.step}, and go on from there"
        )
        for seat in self._seats.held:
            self._start_over(seat, why, Former.TAKEN_BACK)
        for seat in self._seats:
            seat.position = self._run.base.step
            self.wait_for(seat)
        self._abandon_return()

    def start(self, seat: Seat) -> None:
        """Have a stage that came back begin."""
        codecs = [list(row) for row in seat.origin.codecs]
        self._context.send(seat, Start(seat.origin.step, codecs))
        self.note_position(seat)

    def recomputed(self, seat: Seat) -> None:
        """A stage has computed a step again: its neighbours may send it more."""
        for ends, other in recovery.links_of(self._options, seat.stage):
            self._context.send(self._seats[other], Widen(ends.link, recovery.through(self._run, seat)))
        self.note_position(seat)

    def note_position(self, seat: Seat) -> None:
        """Tell the user once when a stage is where the run is."""
        if seat.lost_since_s is not None and not recovery.is_behind(self._run, seat):
            lasted_s = self._context.clock() - seat.lost_since_s
            seat.lost_since_s = seat.spare_from_s = None
            self._context.observer.warned(f"{seat.name} is back after {lasted_s:.1f} s")

    def all_there(self) -> None:
        """Training begins: no stage is lost."""
        for seat in self._seats:
            seat.lost_since_s = seat.spare_from_s = None
        self._context.advance(RunEvent.ALL_READY)
