"""A pipeline schedule as data: the actions of each stage, in order. It can be printed and validated.

An action in torch's notation is `2F0`: chunk 2, forward, micro-batch 0. `B` is a whole backward; a split one is `I`
(gradient of the input) and then `W` (gradient of the weights). Chunk c feeds chunk c + 1; a stage holds one chunk, or
several under interleaved schedules.

Engine and simulator rely on what `validate` checks:
- each micro-batch passes each chunk exactly once forward and once backward, on the stage that holds it;
- weight gradients of a chunk (B, W) come in ascending order of micro-batch under every schedule, so that sums do not
  depend on it;
- executed in the order given, with frames arriving at any time, no stage waits forever.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tahq.errors import ScheduleError
from tahq.pipeline.schedule.grid import Cell, render


class ActionKind(StrEnum):
    """Forward, backward, or a backward split into input and weight gradients."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - torch's letter
    W = "W"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One computation on one micro-batch in one chunk."""

    chunk: int
    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every stage, in the order in which it computes them.

    `actions[stage]` is a stage's row; `placement[chunk]` is the stage that holds a chunk.
    """

    name: str
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.actions)

    @property
    def num_stages(self) -> int:
        """Number of rows."""
        return len(self.actions)

    @property
    def num_chunks(self) -> int:
        """Pieces that the model is cut into."""
        return len(self.placement)

    def max_in_flight(self, stage: int) -> int:
        """Largest number of (chunk, micro-batch) pairs whose activations the stage holds at once.

        They are held from the forward to the end of the backward: B, or W where it is split. GPipe: m; 1F1B:
        min(m, P − r).
        """
        return max(in_flight(self.actions[stage]), default=0)


def in_flight(row: tuple[Action, ...]) -> Iterator[int]:
    """Activations held during each action of a row, including those that it makes or frees."""
    held = 0
    for action in row:
        held += action.kind is ActionKind.F
        yield held
        held -= action.kind in (ActionKind.B, ActionKind.W)


def schedule_dependencies(schedule: Schedule) -> dict[Action, tuple[Action, ...]]:
    """The actions whose results each action of a schedule needs.

    F needs the forward of the chunk before it; B and I need their own forward and the gradient from the chunk after
    it (its B or I); W needs its own I.
    """
    every = {action for row in schedule.actions for action in row}

    def needs(action: Action) -> tuple[Action, ...]:
        chunk, micro_batch = action.chunk, action.micro_batch
        if action.kind is ActionKind.F:
            return (Action(chunk - 1, ActionKind.F, micro_batch),) if chunk else ()
        if action.kind is ActionKind.W:
            return (Action(chunk, ActionKind.I, micro_batch),)
        forward, next_input = Action(chunk, ActionKind.F, micro_batch), Action(chunk + 1, ActionKind.I, micro_batch)
        if chunk == schedule.num_chunks - 1:
            return (forward,)
        return forward, next_input if next_input in every else Action(chunk + 1, ActionKind.B, micro_batch)

    return {action: needs(action) for action in every}


# -- validation --------------------------------------------------------------------------------------


def validate(schedule: Schedule) -> None:
    """Check a schedule: complete, in ascending order, forward before backward, free of deadlock.

    Raises:
        ScheduleError: the first error found, with the schedule drawn and the place marked.
    """
    _check_placement(schedule)
    _check_completeness(schedule)
    _check_order(schedule)
    _check_for_deadlock(schedule)


def _check_placement(schedule: Schedule) -> None:
    for place, action in _places(schedule):
        if not (action.chunk < schedule.num_chunks and action.micro_batch < schedule.num_micro_batches):
            limits = f"{schedule.num_chunks} chunks and {schedule.num_micro_batches} micro-batches"
            raise _error(schedule, f"{action} is out of range: there are {limits}", [place])
        holder = schedule.placement[action.chunk]
        if holder != place[0]:
            raise _error(schedule, f"{action} is on stage {place[0]}, but stage {holder} holds its chunk", [place])


def _check_completeness(schedule: Schedule) -> None:
    """Every action once; of each chunk and micro-batch one F, and either B or the pair I, W."""
    counts = Counter(action for row in schedule.actions for action in row)
    for place, action in _places(schedule):
        if counts[action] > 1:
            raise _error(schedule, f"{action} appears {counts[action]} times, expected once", [place])
    for pair in ((c, m) for c in range(schedule.num_chunks) for m in range(schedule.num_micro_batches)):
        kinds = "".join(kind for kind in ActionKind if counts[Action(pair[0], kind, pair[1])])
        if kinds not in ("FB", "FIW"):
            places = [place for place, action in _places(schedule) if (action.chunk, action.micro_batch) == pair]
            what = f"chunk {pair[0]} computes {' '.join(kinds) or 'nothing'} of micro-batch {pair[1]}"
            raise _error(schedule, f"{what}, expected F B or F I W", places)


def _check_order(schedule: Schedule) -> None:
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


def _check_for_deadlock(schedule: Schedule) -> None:
    """Execute every row as far as possible; stages that are not finished then wait forever."""
    needs = schedule_dependencies(schedule)
    done: set[Action] = set()
    position = [0] * schedule.num_stages
    has_moved = True
    while has_moved:
        has_moved = False
        for stage, row in enumerate(schedule.actions):
            while position[stage] < len(row) and done.issuperset(needs[row[position[stage]]]):
                done.add(row[position[stage]])
                position[stage] += 1
                has_moved = True
    stuck = [(stage, at) for stage, at in enumerate(position) if at < len(schedule.actions[stage])]
    if stuck:
        waits = []
        for stage, at in stuck:
            action = schedule.actions[stage][at]
            missing = " and ".join(str(need) for need in needs[action] if need not in done)
            waits.append(f"stage {stage} waits at {action} for {missing}")
        raise _error(schedule, f"deadlock: {'; '.join(waits)}", stuck)


def _places(schedule: Schedule) -> Iterator[tuple[tuple[int, int], Action]]:
    """Every action with its (stage, position in the row)."""
    for stage, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            yield (stage, position), action


def _error(schedule: Schedule, what: str, marks: list[tuple[int, int]]) -> ScheduleError:
    cells = [Cell(stage, at, at + 1, str(action), (stage, at) in marks) for (stage, at), action in _places(schedule)]
    grid = render(cells, [f"stage {stage}  " for stage in range(schedule.num_stages)])
    return ScheduleError(f"schedule {schedule.name}: {what}\n{grid}")
