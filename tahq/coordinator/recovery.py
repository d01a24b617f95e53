"""When a stage is lost and when it is given up, and how it comes back alone while the others wait.

Pure: functions of the table and the time; some raise what ends the run. ::

    lost ──▶ JOIN, ASSIGN, HELLO ──all are greeted──▶ RELINK to its neighbours ──all have answered──▶ PLAN, READY, START

Its neighbours resend the frames since the checkpoint from their logs; nothing that the other stages hold is
touched, so the run goes on bit-exactly, as if nothing had happened. Every return has a new epoch: frames of an earlier
epoch, from a process that was taken for dead, are rejected. If a stage is lost meanwhile, the return starts again.

A stage at position p wants the training frames of step p and all later steps; while it is behind the run, it takes them
a few steps at a time (`AHEAD`). Where replicas share updates, it may still wait for the weights of step p − 1.
"""

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from tahq.comm.control.messages import Commit, Plan, Relink
from tahq.comm.topology import LinkEnds, Ticket
from tahq.coordinator import copies
from tahq.coordinator.context import CoordinatorOptions, command_by_hand
from tahq.coordinator.joining.gathering import data_position, link_rows
from tahq.coordinator.joining.seats import RestorePoint, Seat, SeatPhase, Seats, stage_list
from tahq.coordinator.run_state import UNDER_WAY, WITH_STEPS, RunPhase, RunState, signal_name
from tahq.errors import NonFiniteError, OutOfMemoryError, PeerLostError, TahqError, UserError

AHEAD = 2
"""Steps of frames, the current step included, that a stage behind the run is sent."""
NO_END = -1
LAST_WORDS_S = 0.3
"""How long the last messages of a process that has ended may still be in transit."""
ERROR_OF_STATUS: Mapping[int, type[TahqError]] = {2: UserError, 4: OutOfMemoryError, 5: NonFiniteError}
"""Exit statuses of a worker that say why it ended."""


# -- losing ----------------------------------------------------------------------------------------


def killed(run: RunState, seats: Seats, now_s: float) -> dict[int, str]:
    """Stages whose processes were killed, with a message.

    A process that ended otherwise raises PeerLostError, or the error of its exit status where that says more.
    """
    messages = {}
    for seat in seats:
        end = seat.exit
        if end is None or end.when_s > now_s - LAST_WORDS_S:
            continue
        if end.status == UserError.exit_status and seat.refusal:
            raise UserError(seat.refusal)
        said = f"; {end.last_words}" if end.last_words else ""
        status = f"{end.status} ({signal_name(-end.status)})" if end.status < 0 else end.status
        words = f"{seat.name}: its worker exited with status {status}{_when(run)}{said}"
        # a signal, or ssh (255) lost its connection
        if end.status in (128 + signal.SIGINT, 128 + signal.SIGTERM) or 0 <= end.status < 128:
            raise ERROR_OF_STATUS.get(end.status, PeerLostError)(words)
        messages[seat.stage] = words
    return messages


def lost_after_s(options: CoordinatorOptions) -> float:
    """How long a worker or a spare may be silent until it is taken for lost."""
    return max(options.peer_timeout_s, options.give_up_s / 2)


def silent(seats: Seats, since_s: float) -> list[Seat]:
    """Workers from which nothing has come after this time."""
    return [seat for seat in seats.held if seat.last_seen_s < since_s]


def silence(run: RunState, seat: Seat, timeout_s: float) -> str:
    """The message about a silent worker."""
    return f"{seat.name} has given no sign of life for {timeout_s:.1f} s{_when(run)}"


def _when(run: RunState) -> str:
    return f" at step {run.step + 1}" if run.phase is RunPhase.TRAINING else ""


# -- giving up -------------------------------------------------------------------------------------


def deadline_s(options: CoordinatorOptions, run: RunState, seats: Seats, seat: Seat) -> float:
    """When the run is given up if this seat is still in its phase; infinity: it waits for nothing.

    Before training all stages have `run.join_timeout`. Later a stage without a worker has `run.give_up`; one whose
    worker loads or fetches its checkpoint, connects, or makes its links ready has as long as joining may take, and so
    has one that owes the run's last reports.
    """
    longest_s = options.longest_wait_s
    if run.phase is RunPhase.JOINING or (run.phase is RunPhase.CONNECTING and seat.phase is not SeatPhase.READY):
        return run.since_s + options.join_timeout_s
    if run.phase not in UNDER_WAY:
        return math.inf
    lost_since_s = seat.since_s if seat.lost_since_s is None else seat.lost_since_s
    match seat.phase:
        case SeatPhase.EMPTY:
            return lost_since_s + options.give_up_s
        case SeatPhase.ASSIGNED:
            return lost_since_s + longest_s
        case SeatPhase.GREETED:  # it waits for other stages, which have deadlines, and then for its neighbours
            return longest_s + max(other.since_s for other in seats if other.phase is not SeatPhase.READY)
        case SeatPhase.PLANNED:
            return seat.since_s + longest_s
        case SeatPhase.READY if seat.relinking_since_s is not None:
            return seat.relinking_since_s + longest_s
        case SeatPhase.READY if run.phase is RunPhase.FINISHING and owes(run, seats, seat):
            return longest_s + max(run.since_s, run.reported_s, *(other.since_s for other in seats))
    return math.inf


def owes(run: RunState, seats: Seats, seat: Seat) -> list[str]:
    """The reports that a stage still owes, in words; empty while it recomputes steps before them."""
    if is_behind(run, seat):
        return []
    loss = ["the validation loss"] if run.evaluating is not None and seat.stage == seats.evaluator else []
    return [*loss, *(f"the checkpoint after step {step}" for step in run.owed if owes_part(run, seat, step))]


def check_deadlines(options: CoordinatorOptions, run: RunState, seats: Seats, now_s: float, address: str) -> None:
    """Raise if a stage has not come as far as it should by now; the message names it.

    Raises:
        UserError: workers did not join before training.
        PeerLostError: workers did not connect, did not come back, or did not report.
    """
    late = [seat for seat in seats if now_s > deadline_s(options, run, seats, seat)]
    stages = stage_list(seat.stage for seat in late)
    if run.phase is RunPhase.JOINING and late and (missing := seats.before(SeatPhase.GREETED)):
        command = command_by_hand(options, missing, address)
        advice = f"start each with `{command}`" if command else f"see {options.run_folder}/logs"
        raise UserError(
            f"{stage_list(missing)} did not join within {options.join_timeout_s:.0f} s; {advice}, or raise "
            "run.join_timeout"
        )
    if run.phase is RunPhase.CONNECTING and late:
        raise PeerLostError(
            f"{stages} did not connect to their neighbours within {options.join_timeout_s:.0f} s (run.join_timeout)"
        )
    if run.phase in WITH_STEPS and late:
        raise PeerLostError(f"{_overdue(options, run, seats, late)}{_why(run, seats, late)}")


def _overdue(options: CoordinatorOptions, run: RunState, seats: Seats, late: Sequence[Seat]) -> str:
    absent = [seat.stage for seat in late if not seat.is_held]
    if absent:
        return f"{stage_list(absent)} did not come back within {options.give_up_s:.0f} s (run.give_up)"
    if all(seat.phase is SeatPhase.ASSIGNED for seat in late):
        done = "load the checkpoint"
    elif all(seat.phase is SeatPhase.READY and seat.relinking_since_s is None for seat in late):
        done = f"report {' and '.join(dict.fromkeys(words for seat in late for words in owes(run, seats, seat)))}"
    else:
        done = "connect to the neighbours"
    stages = stage_list(seat.stage for seat in late)
    return f"{stages} did not {done} within {options.longest_wait_s:.0f} s (run.join_timeout)"


def _why(run: RunState, seats: Seats, late: Sequence[Seat]) -> str:
    lacking = [copies.lacks(run, seats, seat.stage) for seat in late] if seats.spares else []
    files = "".join(f"; no spare could take it, since no other host has a copy of {file}" for file in lacking if file)
    return "".join(f"; {words}" for seat in seats for words in seat.degraded.values()) + files


# -- going on without a replica --------------------------------------------------------------------


def left_out(options: CoordinatorOptions, run: RunState, seats: Seats, now_s: float) -> frozenset[int]:
    """The lost stages without which the run goes on from now, abandoning its current step; empty: it does not.

    That is when one of them was lost `replicas_wait_s` ago and another replica is complete; once the step is abandoned,
    whenever another stage is lost. An evaluation is never abandoned: the replica that makes it is waited for.
    """
    wait_s = options.replicas_wait_s
    if wait_s is None or run.phase is not RunPhase.TRAINING:
        return frozenset()
    lost = {seat.stage: seat.lost_since_s for seat in seats if seat.lost_since_s is not None}
    evaluating = None if run.evaluating is None else seats.replica(seats[seats.evaluator])
    if evaluating in {seats.replica(seats[stage]) for stage in lost}:
        return frozenset()
    if run.abandoned_for:
        return frozenset() if lost.keys() <= run.abandoned_for else frozenset(lost)
    is_late = any(now_s - wait_s >= lost[stage] for stage in lost if seats.replica(seats[stage]) in seats.computing)
    can_go_on = not set(seats.computing).isdisjoint(seats.whole)
    return frozenset(lost) if is_late and can_go_on else frozenset()


def awaited(run: RunState, seats: Seats) -> list[Seat]:
    """The stages whose PREPARE the current step waits for: not lost ones that it goes on without."""
    return [
        seat
        for seat in seats
        if seat.lost_since_s is None or (seats.replica(seat) in seats.computing and not run.abandoned_for)
    ]


# -- coming back -----------------------------------------------------------------------------------


def links_of(options: CoordinatorOptions, stage: int) -> list[tuple[LinkEnds, int]]:
    """The links that end at a stage, each with the stage at its other end."""
    return [(ends, ends.other(stage)) for ends in options.grid.links_of(stage)]


def is_behind(run: RunState, seat: Seat) -> bool:
    """Whether a stage has to compute steps that are decided."""
    return seat.position < run.step


def through(run: RunState, seat: Seat) -> int:
    """The last step whose frames a stage takes for now, or NO_END."""
    last = seat.position + AHEAD - 1
    return last if last < run.step - 1 else NO_END


def open_evaluation(options: CoordinatorOptions, run: RunState) -> int | None:
    """The step after which some stage may still be evaluating; None: no stage is.

    Where replicas lend each other weights, a loss that is reported does not say that all others are done; a step that
    is decided after it does.
    """
    return run.step - 1 if run.evaluating is None and options.shares_weights else run.evaluating


def wanted(options: CoordinatorOptions, run: RunState, link: int, receiver: Seat, since: int) -> list[int]:
    """The row of RELINK and PLAN about the frames that one end of a link wants from the other."""
    evaluating = open_evaluation(options, run)
    evaluations_since = run.step if evaluating is None else max(0, evaluating)
    return [link, since, evaluations_since, through(run, receiver)]


def first_lacking(seat: Seat, *, shares_updates: bool) -> int:
    """The first step of which a stage that computes may lack frames."""
    return max(0, seat.position - int(shares_updates))


def returning(seats: Seats) -> frozenset[int]:
    """Stages that have sent HELLO and can be sent their plan; empty while any stage has yet to send it."""
    return frozenset() if seats.before(SeatPhase.GREETED) else frozenset(seats.before(SeatPhase.PLANNED))


def fit_together(options: CoordinatorOptions, seats: Seats, stages: frozenset[int]) -> bool:
    """Whether neighbours that come back together begin at the same step: neither has earlier frames for the other."""
    return all(
        seats[stage].position == seats[other].position
        for stage in stages
        for _, other in links_of(options, stage)
        if other in stages
    )


def relinks(
    options: CoordinatorOptions, run: RunState, seats: Seats, stages: frozenset[int], ticket: Ticket | None = None
) -> dict[int, Relink]:
    """RELINK for each neighbour of stages that come back; the run's epoch is that of their return."""
    rows = link_rows(options, seats, ticket)
    orders = {}
    for stage in sorted({other for each in stages for _, other in links_of(options, each)} - stages):
        links = [(ends.link, other) for ends, other in links_of(options, stage) if other in stages]
        numbers = {link for link, _ in links}
        wants = [wanted(options, run, link, seats[other], seats[other].position) for link, other in links]
        orders[stage] = Relink(run.epoch, [row for row in rows[stage] if row[0] in numbers], wants)
    return orders


def plans(options: CoordinatorOptions, run: RunState, seats: Seats, ticket: Ticket | None = None) -> dict[int, Plan]:
    """PLAN for each stage that has said HELLO; UserError if two neighbours cannot be connected as configured."""
    rows, orders = link_rows(options, seats, ticket), {}
    is_new = run.returning is None
    since = partial(first_lacking, shares_updates=options.shares_updates)
    for seat in (seat for seat in seats if seat.phase is SeatPhase.GREETED):
        links = [] if is_new else [(ends.link, seats[other]) for ends, other in links_of(options, seat.stage)]
        orders[seat.stage] = Plan(
            run.epoch,
            seat.position,
            run.num_steps,
            rows[seat.stage],
            *data_position(options, run, seat.position),
            live_step=run.step,
            wanted=[wanted(options, run, link, other, since(other)) for link, other in links],
        )
    return orders


def can_rebase(run: RunState, seats: Seats, point: RestorePoint | None, *, shares_updates: bool = False) -> bool:
    """Whether no stage can still need anything from before this point."""
    least = min(first_lacking(seat, shares_updates=shares_updates) for seat in seats)
    return point is not None and run.base.step <= point.step <= least


def common_point(run: RunState, seats: Seats) -> RestorePoint:
    """Where all stages can begin again: the newest checkpoint, or the base if a stage lacks its part of that."""
    return run.base if any(seat.position < run.newest.step for seat in seats) else run.newest


def answer_again(options: CoordinatorOptions, run: RunState, seat: Seat, commit: Commit) -> Commit:
    """A decision as repeated to a stage: it asks only for what other stages, or reports, still need."""
    is_open = commit.step == open_evaluation(options, run)
    done = commit.step + 1
    before, after = (owes_part(run, seat, step) for step in (commit.step, done))
    before, after = commit.snapshot_before and before, commit.snapshot and after
    evaluate, sample = commit.evaluate and is_open, commit.sample and is_open
    return replace(commit, evaluate=evaluate, sample=sample, snapshot_before=before, snapshot=after)


def owes_part(run: RunState, seat: Seat, step: int) -> bool:
    """Whether a stage owes its part of the checkpoint after so many steps."""
    return step in run.owed and step not in seat.parts
