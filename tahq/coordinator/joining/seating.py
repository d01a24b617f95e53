"""Fills and empties seats: workers join, are refused, are lost and come back.

The decisions are in `gathering`, `recovery` and `copies`; this carries them out.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

from tahq.comm.control.members import other_version
from tahq.comm.control.messages import (
    Admit,
    Failed,
    Hello,
    Hold,
    Join,
    Message,
    Refuse,
    Rejoin,
    Relinked,
    StandBy,
    StartOver,
    Widen,
)
from tahq.comm.topology import link_name, obstacles
from tahq.coordinator import copies, recovery
from tahq.coordinator.context import RunContext
from tahq.coordinator.joining import gathering, reaching
from tahq.coordinator.joining.seats import Former, Seat, SeatEvent, SeatPhase
from tahq.coordinator.journal import JournalledHolder
from tahq.coordinator.run_state import UNDER_WAY
from tahq.errors import PeerLostError, brief

Restart = Callable[[int], bool]
"""Kills what is left of a stage's process and starts its worker again; False if it is not started from here.

Raises PeerLostError if that was done too often.
"""


class Seating:
    """Moves seats; calls `settle`, which takes note of every complete checkpoint, before a seat is emptied."""

    def __init__(self, ctx: RunContext, restart: Restart, settle: Callable[[], object]) -> None:
        self._ctx, self._run, self._seats = ctx, ctx.run, ctx.seats
        self._restart, self._settle = restart, settle
        self.is_trying = False
        """Whether it is not known yet which neighbours can dial each other."""

    # -- joining ---------------------------------------------------------------------------------

    def join(self, identity: bytes, join: Join) -> None:
        """Give a worker the seat that it asks for, make it a spare, or refuse it; asking again changes nothing.

        The worker that holds the seat is replaced only by one that may have it.
        """
        seats, present = self._seats, self._seats.find(identity)
        key = self._ctx.server.public_key(identity)
        join = gathering.with_own_stage(self._ctx.options, seats, join, key)
        if join.spare and not present and gathering.stands_by(self._ctx.options, seats, identity, join, key):
            self._admit_spare(identity, join)
            return
        if join.spare and not (0 <= join.stage < len(seats) and seats[join.stage].given_to is not None):
            join = replace(join, spare=False)  # it is on the stage's own host
        if present is None:
            self._seat(identity, join, key)
        elif join.stage in (-1, present.stage):
            self._assign(present)
        else:
            reason = f"this worker already holds stage {present.stage}; start another for stage {join.stage}"
            self._refuse_join(identity, join, Refuse(reason))

    def _seat(self, identity: bytes, join: Join, key: str) -> None:
        options, seats = self._ctx.options, self._seats
        replaced = gathering.replaced_by(seats, identity, join, key)
        refusal = gathering.refusal(options, seats, join, key, replaced)
        if refusal is not None:
            self._refuse_join(identity, join, refusal)
            return
        if replaced is not None:
            is_taken = join.takeover and not options.by_invite
            reason = "a person takes its stage over" if is_taken else "it was started again"
            self.lose(replaced.stage, f"{replaced.name}: {reason}", is_replaced=True)
        stage = join.stage if join.stage >= 0 else seats.missing[0]
        host = options.hosts[stage] if options.hosts and not join.spare else ""
        self._assign(seats.join(stage, identity, join, self._ctx.clock(), host=host, key=key))

    def _assign(self, seat: Seat) -> None:
        """Send ASSIGN; the workers that have copies of the stage's files are told to admit its worker."""
        rows = list[list[str | int]]()
        for step, holder, address in copies.sources(self._seats, seat.stage):
            if seat.public_key:
                self._ctx.send(holder, Admit([seat.public_key]))
            rows.append([step, address, holder.public_key])
        self._ctx.send(seat, gathering.assignment(self._ctx.options, self._run, seat.stage, rows))
        self._ctx.tell_stage(seat)
        self._ctx.tell_phase()

    def _admit_spare(self, identity: bytes, join: Join) -> None:
        options, seats = self._ctx.options, self._seats
        if refusal := other_version(options.version, join):
            self._refuse_join(identity, join, refusal)
            return
        is_new = seats.add_spare(identity, join, self._ctx.clock())
        self._ctx.server.send(identity, StandBy(options.peer_timeout_s, options.give_up_s))
        if is_new:
            self._ctx.warn(f"a spare worker stands by ({seats.spares[identity].name}); {seats.num_spares}")

    def hello(self, seat: Seat, hello: Hello) -> None:
        """Accept or refuse a worker that has read the configuration; RemoteProtocolError if HELLO may not come now."""
        origin = self._run.origin_at(hello.start_step)
        if seat.phase is SeatPhase.ASSIGNED:
            if origin is None:
                self._start_over(seat, f"no stage begins at step {hello.start_step} any more", Former.REFUSED)
                self._ctx.tell_phase()
                return
            if rows := gathering.differences(self._ctx.options, self._seats, hello):
                fields = ", ".join(row[0] for row in rows)
                self.dismiss(seat, Refuse(f"stage {seat.stage} does not agree with the run about {fields}", rows))
                return
        self._seats.advance(seat.stage, SeatEvent.HELLO, self._ctx.clock())
        lines = gathering.warnings(self._seats, seat, hello)
        seat.hello = hello
        if origin is not None:
            seat.position, seat.origin = hello.start_step, origin
        self._ctx.tell_stage(seat)
        for line in lines:
            self._ctx.warn(line)
        self._ctx.tell_phase()

    def try_links(self) -> bool:
        """Have neighbours find out which of them can dial the other; whether that is known of every link by now."""
        options, seats = self._ctx.options, self._seats
        for stage, order in reaching.order_tries(options, seats, self._ctx.clock()).items():
            for peer, *_ in order.peers:
                if seats[stage].public_key:
                    self._ctx.send(seats[int(peer)], Admit([seats[stage].public_key]))
            self._ctx.send(seats[stage], order)
        self.is_trying = not reaching.are_settled(options, seats)
        return not self.is_trying

    def plan(self) -> None:
        """Tell every stage that waits for its plan; UserError for neighbours that cannot be connected."""
        plans = recovery.plans(self._ctx.options, self._run, self._seats, self._ctx.ticket)
        self._tell_relayed({int(row[0]) for order in plans.values() for row in order.links if "/" in str(row[3])})
        for stage, order in plans.items():
            self._ctx.send(self._seats.advance(stage, SeatEvent.PLAN, self._ctx.clock()), order)
        self._run.returning = None

    def _tell_relayed(self, links: Collection[int]) -> None:
        """Tell the user which links go over the relay, and note for a later coordinator that there is one."""
        if not links:
            return
        self._ctx.journal.note(has_relay=True)
        workers = gathering.endpoints(self._ctx.options, self._seats)
        for ends in self._ctx.options.grid.links():
            if ends.link in links:
                lower, upper = workers[ends.lower], workers[ends.upper]
                name = link_name(ends.link, lower, upper)
                self._ctx.warn(f"{name} is relayed through this machine: {obstacles(lower, upper)}")

    def ready(self, seat: Seat) -> None:
        """Note that a worker is connected; RemoteProtocolError if READY may not come now."""
        self._seats.advance(seat.stage, SeatEvent.READY, self._ctx.clock())
        self._ctx.tell_stage(seat)
        self._ctx.tell_phase()
        if seat.hello is not None:
            held = (seat.stage, seat.identity, seat.hello, seat.host, seat.pid, seat.worker_id)
            self._ctx.journal.held(JournalledHolder(*held))

    def rejoin(self, identity: bytes, rejoin: Rejoin) -> Seat | None:
        """Give a worker back the seat that it held under the previous coordinator, or make it start over."""
        ctx = self._ctx
        is_same = rejoin.run_id == ctx.options.run_id and ctx.journal.is_of(rejoin.run_id, ctx.options.config_hash)
        holder = ctx.journal.holders().get(rejoin.stage) if is_same else None
        if holder is None or holder.identity != identity or self._seats[holder.stage].is_held:
            ctx.server.send(identity, StartOver("another worker has its stage"))
            return None
        seat = self._seats.advance(holder.stage, SeatEvent.REJOIN, ctx.clock())
        seat.identity, seat.hello, seat.worker_id = identity, holder.hello, holder.worker_id
        seat.public_key = ctx.server.public_key(identity)
        seat.host, seat.pid, seat.last_seen_s = holder.host, holder.pid, ctx.clock()
        ctx.tell_stage(seat)
        return seat

    # -- workers without a seat ------------------------------------------------------------------

    def dismiss(self, seat: Seat, refusal: Refuse) -> None:
        """Refuse the worker of a stage, and free it for another."""
        self._refuse(seat.identity, seat.stage, seat.name, refusal)
        self._empty(seat, Former.REFUSED)
        self._ctx.tell_phase()

    def _refuse_join(self, identity: bytes, join: Join, refusal: Refuse) -> None:
        self._refuse(identity, join.stage, f"{brief(join.host)}, pid {join.pid}", refusal)

    def _refuse(self, identity: bytes, stage: int, name: str, refusal: Refuse) -> None:
        self._seats.former[identity] = Former.REFUSED
        self._ctx.server.send(identity, refusal)
        rows = "".join(f"; {field}: {yours}, expected {expected}" for field, yours, expected in refusal.differences)
        if 0 <= stage < len(self._seats):
            self._seats[stage].refusal = f"{refusal.reason}{rows}"
        self._ctx.warn(f"refused the worker {name}: {refusal.reason}{rows}")

    def turn_away(self, identity: bytes, message: Message) -> None:
        """Answer a worker that holds no stage and did not ask for any."""
        spare = self._seats.spares.pop(identity, None)
        if spare is not None and isinstance(message, Failed):
            self._ctx.warn(f"the spare worker {spare.name} is gone; {self._seats.num_spares}")
        elif identity in self._seats.former:
            self.remind(identity)
        elif isinstance(message, Failed):
            self._ctx.warn(f"a worker without a stage failed: {message.message}")
        else:
            name = type(message).__name__
            self._ctx.server.send(identity, Refuse(f"got {name} from a worker without a stage; start it again"))

    def remind(self, identity: bytes) -> None:
        """Tell a worker that is still alive that it has lost its stage."""
        former = self._seats.former.get(identity)
        if former is Former.TAKEN_BACK:
            self._seats.former[identity] = Former.REFUSED
            self._ctx.server.send(identity, StartOver("its stage was taken back"))
        elif former is Former.REFUSED:
            self._ctx.server.send(identity, Refuse("it holds no stage; start this worker again"))

    def _start_over(self, seat: Seat, why: str, former: Former) -> None:
        """Empty a seat whose worker is alive, and make that worker join again."""
        self._ctx.send(seat, StartOver(why))
        self._empty(seat, former)

    def _empty(self, seat: Seat, former: Former, *, is_silent: bool = False) -> None:
        if seat.is_held:
            self._seats.former[seat.identity] = former
        self._ctx.journal.lost(seat.stage)
        self._seats.leave(seat.stage, self._ctx.clock(), position=self._run.base.step, is_silent=is_silent)
        self._ctx.observer.stage_left(seat.stage)

    # -- losing ----------------------------------------------------------------------------------

    def lose(self, stage: int, why: str, *, is_replaced: bool = False, is_silent: bool = False) -> None:
        """Empty the seat of a worker that is gone, and start it again where that is possible.

        `is_replaced`: another worker is there already; `is_silent`: it was silent until its host counts as lost.

        Raises:
            PeerLostError: it has been started again too often, or the run only measures.
        """
        if self._ctx.options.is_measuring:
            raise PeerLostError(why)
        self._settle()
        self._empty(self._seats[stage], Former.TAKEN_BACK, is_silent=is_silent)
        self._abandon_return()
        for ends, other in recovery.links_of(self._ctx.options, stage):
            if self._seats[other].phase in (SeatPhase.PLANNED, SeatPhase.READY):
                self._ctx.send(self._seats[other], Hold([ends.link]))  # however long the next worker takes
        point = self._run.newest
        begins = f"begins again after step {point.step}" if point.snapshot else "begins again from the start"
        is_started = not is_replaced and self._start_again(self._seats[stage], is_silent)
        then = f"it is started again, and {begins}" if is_started else f"its next worker {begins}"
        wait_s = self._ctx.options.replicas_wait_s
        self._ctx.warn(f"{why}; {then}; the others wait{'' if wait_s is None else f', for {wait_s:g} s'}")
        self._ctx.tell_phase()

    def free_silent(self, seat: Seat) -> None:
        """Free the seat of a worker that has fallen silent before the run began."""
        self._ctx.warn(f"{seat.name} has given no sign of life; its stage is free again")
        self._empty(seat, Former.TAKEN_BACK)
        self._ctx.tell_phase()

    def _start_again(self, seat: Seat, is_silent: bool) -> bool:
        """Start the stage's worker again on its host, unless that is silent and a spare can take the stage."""
        now_s, options = self._ctx.clock(), self._ctx.options
        can_be_given = bool(self._seats.spares) and not copies.lacks(self._run, self._seats, seat.stage)
        seat.spare_from_s = now_s
        if is_silent and can_be_given:
            return False
        try:
            is_started = self._restart(seat.stage)
        except PeerLostError as error:
            if not can_be_given:
                raise
            self._ctx.warn(str(error))
            return False
        if is_started:
            seat.given_to = None
            seat.spare_from_s = now_s + options.give_up_s / 2
        elif not is_silent:
            seat.spare_from_s = now_s + options.peer_timeout_s
        return is_started

    def check_spares(self, polled_s: float) -> None:
        """Forget spares that have been silent for too long, and give the stages of lost hosts to others."""
        seats, since_s = self._seats, polled_s - recovery.lost_after_s(self._ctx.options)
        for spare in [spare for spare in seats.spares.values() if spare.last_seen_s < since_s]:
            del seats.spares[spare.identity]
            seats.former[spare.identity] = Former.TAKEN_BACK
            self._ctx.warn(f"the spare worker {spare.name} is gone; {seats.num_spares}")
        for seat in list(seats) if self._run.phase in UNDER_WAY else ():
            is_due = not seat.is_held and seat.spare_from_s is not None and self._ctx.clock() >= seat.spare_from_s
            if not is_due or not seats.spares or copies.lacks(self._run, seats, seat.stage):
                continue
            spare = seats.spares.pop(next(iter(seats.spares)))
            self._ctx.warn(f"stage {seat.stage} is given to the spare worker {spare.name}; {seats.num_spares}")
            seat.given_to = self._ctx.server.public_key(spare.identity)
            self._seat(spare.identity, replace(spare.join, stage=seat.stage), seat.given_to)

    def wait_for(self, seat: Seat) -> None:
        """Wait for a stage's worker, which is expected to come by itself."""
        now_s = self._ctx.clock()
        if seat.lost_since_s is None:
            seat.lost_since_s = now_s
        if seat.spare_from_s is None:
            seat.spare_from_s = now_s + self._ctx.options.give_up_s / 2

    # -- coming back -----------------------------------------------------------------------------

    def bring_back(self) -> None:
        """Once no worker is missing, tell the neighbours of returning workers to make their links ready."""
        ctx, run, seats = self._ctx, self._run, self._seats
        stages = recovery.returning(seats)
        if not stages or run.returning is not None:
            return
        if not recovery.fit_together(ctx.options, seats, stages):
            self.roll_back("neighbours come back at different checkpoints")
            return
        if not self.try_links():
            return
        run.epoch += 1
        ctx.journal.note(epoch=run.epoch)
        run.returning = run.epoch
        for stage, order in recovery.relinks(ctx.options, run, seats, stages, ctx.ticket).items():
            seats[stage].relinking_since_s = ctx.clock()
            ctx.send(seats[stage], order)
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
        """Make every stage begin again at a checkpoint that all have: a lost stage cannot come back alone."""
        self._settle()
        self._run.newest = recovery.common_point(self._run, self._seats)
        self.start_all_over(why)

    def start_all_over(self, why: str) -> None:
        """Make every stage begin again at the newest checkpoint, or at the base."""
        self._ctx.warn(f"{why}: all stages go back to step {self._run.newest.step}, and go on from there")
        self._run.abandoned_for = frozenset()
        for seat in self._seats.held:
            self._start_over(seat, why, Former.TAKEN_BACK)
        for seat in self._seats:
            seat.position = self._run.base.step
            self.wait_for(seat)
        self._abandon_return()

    def start(self, seat: Seat) -> None:
        """Start a stage that came back."""
        self._ctx.send(seat, seat.origin.start)
        self._note_position(seat)

    def recomputed(self, seat: Seat) -> None:
        """A stage has recomputed a step: its neighbours may send it more frames."""
        for ends, other in recovery.links_of(self._ctx.options, seat.stage):
            self._ctx.send(self._seats[other], Widen(ends.link, recovery.through(self._run, seat)))
        self._note_position(seat)

    def _note_position(self, seat: Seat) -> None:
        """Tell the user once when a stage is where the run is."""
        if seat.lost_since_s is not None and not recovery.is_behind(self._run, seat):
            lasted_s = self._ctx.clock() - seat.lost_since_s
            seat.lost_since_s = seat.spare_from_s = None
            self._ctx.warn(f"{seat.name} is back after {lasted_s:.1f} s")
            self._ctx.observer.stage_returned(seat.stage, lasted_s)
            # its links are new, and nothing is reported of them
            for ends, other in recovery.links_of(self._ctx.options, seat.stage):
                if self._seats[other].degraded.pop(ends.link, None) is not None:
                    self._ctx.observer.link_changed(other, ends.link, "")
