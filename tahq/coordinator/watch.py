"""The timers of a run: processes that ended, workers that fell silent, waiting that took too long.

Pure: functions of the table and the time; some raise what ends the run. Every phase of a seat but READY has a deadline.
"""

import signal
from collections.abc import Mapping, Sequence

from tahq.coordinator import copies
from tahq.coordinator.options import CoordinatorOptions
from tahq.coordinator.run_state import UNDER_WAY, WITH_STEPS, RunPhase, RunState, signal_name
from tahq.coordinator.seats import ProcessExit, Seat, SeatPhase, Seats, stage_list
from tahq.errors import NonFiniteError, OutOfMemoryError, PeerLostError, TahqError, UserError

LAST_WORDS_S = 0.3
"""How long the last messages of a process that has ended may still be on their way."""

TELLING: Mapping[int, type[TahqError]] = {2: UserError, 4: OutOfMemoryError, 5: NonFiniteError}
"""Exit statuses of a worker that say more than that it is gone."""


def killed(run: RunState, seats: Seats, now_s: float) -> dict[int, str]:
    """Stages whose processes were killed, with a message; a process that ended otherwise ends the run.

    Raises:
        PeerLostError, or the error with the worker's own status where that says more.
    """
    messages = {}
    for seat in seats:
        if seat.exit is None or seat.exit.when_s > now_s - LAST_WORDS_S:
            continue
        if seat.exit.status == UserError.exit_status and seat.refusal:
            raise UserError(seat.refusal)
        words = _exited(run, seat, seat.exit)
        if not was_killed(seat.exit.status):
            raise TELLING.get(seat.exit.status, PeerLostError)(words)
        messages[seat.stage] = words
    return messages


def _exited(run: RunState, seat: Seat, end: ProcessExit) -> str:
    said = f"; {end.last_words}" if end.last_words else ""
    return f"{seat.name}: its worker exited with {status_name(end.status)}{_when(run)}{said}"


def was_killed(status: int) -> bool:
    """Whether a process with this exit status did not end by itself: a signal, or ssh (255) lost its connection."""
    return status < 0 or (status >= 128 and status not in (128 + signal.SIGINT, 128 + signal.SIGTERM))


def lost_after_s(options: CoordinatorOptions) -> float:
    """How long a worker or a spare may be silent until it is taken for lost."""
    return max(options.peer_timeout_s, options.give_up_s / 2)


def silent(seats: Seats, since_s: float) -> list[Seat]:
    """Workers from which nothing has come after this time."""
    return [seat for seat in seats.held if seat.last_seen_s < since_s]


def silence(run: RunState, seat: Seat, timeout_s: float) -> str:
    """The message about a silent worker."""
    return f"{seat.name} has given no sign of life for {timeout_s:.1f} s{_when(run)}"


def deadline_s(options: CoordinatorOptions, run: RunState, seats: Seats, seat: Seat) -> float | None:
    """When the run is given up if this seat is still in its phase; None: it waits for nothing.

    Before training all stages have `run.join_timeout`. Later a stage without a worker has `run.give_up`; one whose
    worker loads or fetches its checkpoint, connects, or makes its links ready has as long as joining may take.
    """
    longer_s = max(options.give_up_s, options.join_timeout_s)
    if run.phase is RunPhase.JOINING or (run.phase is RunPhase.CONNECTING and seat.phase is not SeatPhase.READY):
        return run.since_s + options.join_timeout_s
    if run.phase not in UNDER_WAY:
        return None
    lost_since_s = seat.since_s if seat.lost_since_s is None else seat.lost_since_s
    match seat.phase:
        case SeatPhase.EMPTY:
            return lost_since_s + options.give_up_s
        case SeatPhase.ASSIGNED:
            return lost_since_s + longer_s
        case SeatPhase.GREETED:  # it waits for stages that have deadlines of their own, and then for its neighbours
            return longer_s + max(other.since_s for other in seats if other.phase is not SeatPhase.READY)
        case SeatPhase.PLANNED:
            return seat.since_s + longer_s
        case SeatPhase.READY:
            return None if seat.relinking_since_s is None else seat.relinking_since_s + longer_s


def check_deadlines(options: CoordinatorOptions, run: RunState, seats: Seats, now_s: float, address: str) -> None:
    """Raise if a stage has not come as far as it should by now; the message names it.

    Raises:
        UserError: workers did not join before training.
        PeerLostError: workers did not connect, or did not come back.
    """
    late = []
    for seat in seats:
        by_s = deadline_s(options, run, seats, seat)
        if by_s is not None and now_s > by_s:
            late.append(seat)
    if run.phase is RunPhase.JOINING and late and (stages := seats.before(SeatPhase.GREETED)):
        raise UserError(
            f"{stage_list(stages)} did not join within {options.join_timeout_s:.0f} s; start each with "
            f"`tahq-worker --stage {stages[0]} --peer {address}`, or raise run.join_timeout"
        )
    if run.phase is RunPhase.CONNECTING and late:
        stages = tuple(seat.stage for seat in late)
        raise PeerLostError(
            f"{stage_list(stages)} did not connect to their neighbours within {options.join_timeout_s:.0f} s "
            "(run.join_timeout)"
        )
    if run.phase in WITH_STEPS and late:
        raise PeerLostError(f"{_overdue(options, late)}{_why(run, seats, late)}")


def _overdue(options: CoordinatorOptions, late: Sequence[Seat]) -> str:
    absent = [seat.stage for seat in late if not seat.is_held]
    if absent:
        return f"{stage_list(absent)} did not come back within {options.give_up_s:.0f} s (run.give_up)"
    if all(seat.phase is SeatPhase.ASSIGNED for seat in late):
        done = "load the checkpoint"
    else:
        done = "connect to the neighbours"
    longer_s = max(options.give_up_s, options.join_timeout_s)
    return f"{stage_list(seat.stage for seat in late)} did not {done} within {longer_s:.0f} s (run.join_timeout)"


def _why(run: RunState, seats: Seats, late: Sequence[Seat]) -> str:
    lacking = [copies.lacks(run, seats, seat.stage) for seat in late] if seats.spares else []
    files = "".join(f"; no spare could take it, since no other host has a copy of {file}" for file in lacking if file)
    return "".join(f"; {words}" for seat in seats for words in seat.degraded.values()) + files


def status_name(status: int) -> str:
    """``status 1``; ``status -9 (SIGKILL)`` for a process that a signal ended."""
    return f"status {status}" if status >= 0 else f"status {status} ({signal_name(-status)})"


def _when(run: RunState) -> str:
    return f" at step {run.step + 1}" if run.phase is RunPhase.TRAINING else ""
