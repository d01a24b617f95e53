"""Whether a schedule can be executed, found by counting its actions and then by running it.

A `ScheduleError` says what is wrong, draws the schedule by position, and marks the place.
"""

from collections import Counter
from collections.abc import Iterable

from tahq.errors import ScheduleError
from tahq.pipeline.schedule.grid import Cell, render
from tahq.pipeline.schedule.schedule import Action, ActionKind, Schedule, schedule_dependencies

Place = tuple[int, int]
"""(stage, position in its row)."""


def validate(schedule: Schedule) -> None:
    """Check a schedule: complete, in ascending order, forward before backward, free of deadlock.

    Raises:
        ScheduleError: the first thing that is wrong, with the grid.
    """
    _check_placed(schedule)
    _check_complete(schedule)
    _check_ascending(schedule)
    _check_runs(schedule)


def _check_placed(schedule: Schedule) -> None:
    for place, action in _places(schedule):
        if not (action.chunk < schedule.num_chunks and action.micro_batch < schedule.num_micro_batches):
            limits = f"{schedule.num_chunks} chunks and {schedule.num_micro_batches} micro-batches"
            raise _error(schedule, f"{action} is out of range: there are {limits}", [place])
        if schedule.placement[action.chunk] != place[0]:
            holder = schedule.placement[action.chunk]
            raise _error(schedule, f"{action} is on stage {place[0]}, but stage {holder} holds its chunk", [place])


def _check_complete(schedule: Schedule) -> None:
    counts = Counter(action for row in schedule.actions for action in row)
    for place, action in _places(schedule):
        if counts[action] > 1:
            raise _error(schedule, f"{action} appears {counts[action]} times, expected once", [place])
    for chunk in range(schedule.num_chunks):
        for micro_batch in range(schedule.num_micro_batches):
            _check_kinds(schedule, counts, chunk, micro_batch)


def _check_kinds(schedule: Schedule, counts: Counter[Action], chunk: int, micro_batch: int) -> None:
    """Exactly one F, and exactly one of B and the pair I, W."""
    kinds = "".join(kind for kind in ActionKind if counts[Action(chunk, kind, micro_batch)])
    if kinds in ("FB", "FIW"):
        return
    place = [place for place, action in _places(schedule) if (action.chunk, action.micro_batch) == (chunk, micro_batch)]
    raise _error(
        schedule,
        f"chunk {chunk} computes {' '.join(kinds) or 'nothing'} of micro-batch {micro_batch}, expected F B or F I W",
        place,
    )


def _check_ascending(schedule: Schedule) -> None:
    last: dict[int, Action] = {}
    for place, action in _places(schedule):
        if action.kind not in (ActionKind.B, ActionKind.W):
            continue
        before = last.get(action.chunk)
        if before is not None and before.micro_batch > action.micro_batch:
            raise _error(
                schedule,
                f"{action} comes after {before}: weight gradients must be added in ascending order of micro-batch",
                [place],
            )
        last[action.chunk] = action


def _check_runs(schedule: Schedule) -> None:
    """Run every stage as far as it gets; whoever then stands still waits for ever."""
    needs = schedule_dependencies(schedule)
    done: set[Action] = set()
    position = [0] * schedule.num_stages
    while any(_advance(row, stage, position, needs, done) for stage, row in enumerate(schedule.actions)):
        pass
    stuck = [(stage, at) for stage, at in enumerate(position) if at < len(schedule.actions[stage])]
    if stuck:
        waits = [_wait(schedule.actions[stage][at], needs, done, stage) for stage, at in stuck]
        raise _error(schedule, f"deadlock: {'; '.join(waits)}", stuck)


def _advance(
    row: tuple[Action, ...],
    stage: int,
    position: list[int],
    needs: dict[Action, tuple[Action, ...]],
    done: set[Action],
) -> bool:
    """Compute as many actions of a row as are ready; whether there was any."""
    start = position[stage]
    while position[stage] < len(row) and done.issuperset(needs[row[position[stage]]]):
        done.add(row[position[stage]])
        position[stage] += 1
    return position[stage] > start


def _wait(action: Action, needs: dict[Action, tuple[Action, ...]], done: set[Action], stage: int) -> str:
    missing = " and ".join(str(need) for need in needs[action] if need not in done)
    return f"stage {stage} waits at {action} for {missing}"


def _places(schedule: Schedule) -> Iterable[tuple[Place, Action]]:
    for stage, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            yield (stage, position), action


def _error(schedule: Schedule, what: str, marks: list[Place]) -> ScheduleError:
    cells = [Cell(stage, at, at + 1, str(action), (stage, at) in marks) for (stage, at), action in _places(schedule)]
    grid = render(cells, [f"stage {stage}  " for stage in range(schedule.num_stages)])
    return ScheduleError(f"schedule {schedule.name}: {what}\n{grid}")
