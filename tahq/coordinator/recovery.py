"""How a lost stage comes back alone while the others wait: functions over the table.

::

    lost ──▶ JOIN, ASSIGN, HELLO ──all are greeted──▶ RELINK to its neighbours ──all have answered──▶ PLAN, READY, START

Its neighbours send it again what they sent since the checkpoint, from their logs; nothing that the other stages hold is
touched, so the run goes on as if nothing had happened, to the bit. Every return has an epoch of its own: frames of the
one before, from a process that was taken for dead, are rejected. A stage that is lost meanwhile begins the return anew.

A stage at position p wants the training frames of step p and of all later ones; one that is behind the run takes them a
few steps at a time (`AHEAD`).
"""

from dataclasses import replace

from tahq.comm.control.messages import Commit, Plan, Relink
from tahq.comm.topology import LinkEnds, link_ends
from tahq.coordinator.gathering import data_position, link_rows
from tahq.coordinator.options import CoordinatorOptions
from tahq.coordinator.run_state import RunState
from tahq.coordinator.seats import RestorePoint, Seat, SeatPhase, Seats

AHEAD = 2
"""Steps of frames that a stage which is behind is sent, counting the one that it is at."""
NO_END = -1


def links_of(options: CoordinatorOptions, stage: int) -> list[tuple[LinkEnds, int]]:
    """The links that end at a stage, each with the stage at its other end."""
    links = link_ends(options.num_stages, options.tie_link, options.chunks_per_stage)
    return [
        (ends, ends.upper if ends.lower == stage else ends.lower) for ends in links if stage in (ends.lower, ends.upper)
    ]


def is_behind(run: RunState, seat: Seat) -> bool:
    """Whether a stage has to compute steps that are decided."""
    return seat.position < run.step


def through(run: RunState, seat: Seat) -> int:
    """The last step whose frames a stage takes for now, or NO_END."""
    last = seat.position + AHEAD - 1
    return last if last < run.step - 1 else NO_END


def wanted(run: RunState, link: int, receiver: Seat) -> list[int]:
    """The row of RELINK and PLAN about the frames that one end of a link wants from the other."""
    evaluations_since = run.step if run.evaluating is None else run.evaluating
    return [link, receiver.position, evaluations_since, through(run, receiver)]


def returning(seats: Seats) -> frozenset[int]:
    """Stages that have said HELLO and can be told their plan, since no stage is still to come; else none."""
    return frozenset() if seats.before(SeatPhase.GREETED) else frozenset(seats.before(SeatPhase.PLANNED))


def fit_together(options: CoordinatorOptions, seats: Seats, stages: frozenset[int]) -> bool:
    """Whether neighbours that both come back begin at the same step: neither has earlier frames for the other."""
    return all(
        seats[stage].position == seats[other].position
        for stage in stages
        for _, other in links_of(options, stage)
        if other in stages
    )


def relinks(options: CoordinatorOptions, run: RunState, seats: Seats, stages: frozenset[int]) -> dict[int, Relink]:
    """RELINK for each neighbour of stages that come back; the run's epoch is that of their return."""
    rows = link_rows(options, seats)
    orders = {}
    for stage in sorted({other for each in stages for _, other in links_of(options, each)} - stages):
        links = [(ends.link, other) for ends, other in links_of(options, stage) if other in stages]
        numbers = {link for link, _ in links}
        wants = [wanted(run, link, seats[other]) for link, other in links]
        orders[stage] = Relink(run.epoch, [row for row in rows[stage] if row[0] in numbers], wants)
    return orders


def plans(options: CoordinatorOptions, run: RunState, seats: Seats) -> dict[int, Plan]:
    """PLAN for each stage that has said HELLO and waits for it.

    Raises:
        UserError: two neighbours that cannot be connected as configured.
    """
    rows, orders = link_rows(options, seats), {}
    is_new = run.returning is None
    for seat in (seat for seat in seats if seat.phase is SeatPhase.GREETED):
        links = [] if is_new else [(ends.link, seats[other]) for ends, other in links_of(options, seat.stage)]
        orders[seat.stage] = Plan(
            run.epoch,
            seat.position,
            run.num_steps,
            rows[seat.stage],
            *data_position(options, run, seat.position),
            live_step=run.step,
            wanted=[wanted(run, link, other) for link, other in links],
        )
    return orders


def can_rebase(run: RunState, seats: Seats, point: RestorePoint) -> bool:
    """Whether no stage can need anything of before this point."""
    return point.step >= run.base.step and all(seat.position >= point.step for seat in seats)


def common_point(run: RunState, seats: Seats) -> RestorePoint:
    """Where all stages can begin again: the newest checkpoint, unless one begins before it since it lacks its part."""
    return run.base if any(seat.position < run.newest.step for seat in seats) else run.newest


def answer_again(run: RunState, seat: Seat, commit: Commit) -> Commit:
    """A decision as it is repeated to a stage: with what is still owed of it."""
    evaluate = commit.evaluate and commit.step == run.evaluating
    done = commit.step + 1
    return replace(commit, evaluate=evaluate, snapshot=commit.snapshot and owes_part(run, seat, done))


def owes_part(run: RunState, seat: Seat, step: int) -> bool:
    """Whether a stage owes its part of the checkpoint after so many steps."""
    return step in run.owed and step not in seat.parts
