"""A pipeline schedule as data: which action each stage computes, in which order.

An action in torch's notation is `2F0`: chunk 2, forward, micro-batch 0. `B` is a whole backward; split,
it is `I` (gradient of the input) and then `W` (gradient of the weights). Chunk c feeds chunk c + 1; a
stage holds one chunk, or several under interleaved schedules.

Invariants that `validate` checks, and engine and simulator rely on:
- each micro-batch passes each chunk exactly once forward and once backward, on the stage that holds it;
- weight gradients of a chunk (B, W) come in ascending order of micro-batch under every schedule, so
  that the sums do not depend on it;
- run in the order given, with frames arriving whenever they like, no stage waits for ever.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from tahq.errors import ScheduleError

_NOTATION = re.compile(r"(\d+)([FBIW])(\d+)")


class ActionKind(StrEnum):
    """What is computed: forward, backward, or backward split into input and weight gradients."""

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

    @classmethod
    def parse(cls, text: str) -> Self:
        """The action that `2F0` stands for.

        Raises:
            ScheduleError: not of the form chunk, one of F B I W, micro-batch.
        """
        match = _NOTATION.fullmatch(text)
        if match is None:
            raise ScheduleError(f"not an action: {text!r}; expected chunk, F, B, I or W, micro-batch, such as 2F0")
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every stage, in the order in which it computes them.

    `actions[stage]` is a stage's row; `placement[chunk]` the stage that holds a chunk.
    """

    name: str
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.actions)

    @classmethod
    def parse(cls, text: str, name: str = "custom") -> Self:
        """A schedule from its printed form: a line a stage, actions separated by blanks.

        A chunk is placed on the first stage that computes it; what is wrong with the whole is for
        `validate` to say.

        Raises:
            ScheduleError: a word that is no action, or a chunk number that nobody computes.
        """
        rows = tuple(tuple(map(Action.parse, line.split())) for line in text.strip().splitlines())
        holders: dict[int, int] = {}
        for stage, row in enumerate(rows):
            for action in row:
                holders.setdefault(action.chunk, stage)
        if sorted(holders) != list(range(len(holders))):
            raise ScheduleError(f"chunks must be 0, 1, 2 … without gaps; got {sorted(holders)}")
        num_micro_batches = 1 + max((action.micro_batch for row in rows for action in row), default=-1)
        return cls(name, num_micro_batches, rows, tuple(holders[chunk] for chunk in range(len(holders))))

    @property
    def num_stages(self) -> int:
        """Rows."""
        return len(self.actions)

    @property
    def num_chunks(self) -> int:
        """Pieces that the model is cut into."""
        return len(self.placement)

    def max_in_flight(self, stage: int) -> int:
        """Most (chunk, micro-batch) pairs whose activations the stage holds at once.

        One is held from its forward to the end of its backward: B, or W where it is split. GPipe:
        m; 1F1B: min(m, P − r).
        """
        return max(in_flight(self.actions[stage]), default=0)


def in_flight(row: tuple[Action, ...]) -> Iterator[int]:
    """Activations held during each action of a row, the one that it makes or frees included."""
    held = 0
    for action in row:
        held += action.kind is ActionKind.F
        yield held
        held -= action.kind in (ActionKind.B, ActionKind.W)


def dependencies(action: Action, num_chunks: int, split: Callable[[int, int], bool]) -> tuple[Action, ...]:
    """The actions whose results an action needs.

    F needs the forward of the chunk before it; B and I need their own forward and the gradient that the
    chunk after it sends (its B or I); W needs its own I.

    Args:
        action: whose needs are asked for.
        num_chunks: chunks of the schedule.
        split: whether the backward of (chunk, micro-batch) is split into I and W.
    """
    chunk, micro_batch = action.chunk, action.micro_batch
    if action.kind is ActionKind.F:
        return (Action(chunk - 1, ActionKind.F, micro_batch),) if chunk else ()
    if action.kind is ActionKind.W:
        return (Action(chunk, ActionKind.I, micro_batch),)
    forward = Action(chunk, ActionKind.F, micro_batch)
    if chunk == num_chunks - 1:
        return (forward,)
    kind = ActionKind.I if split(chunk + 1, micro_batch) else ActionKind.B
    return forward, Action(chunk + 1, kind, micro_batch)


def schedule_dependencies(schedule: Schedule) -> dict[Action, tuple[Action, ...]]:
    """`dependencies` of every action of a schedule."""
    every = [action for row in schedule.actions for action in row]
    splits = {(action.chunk, action.micro_batch) for action in every if action.kind is ActionKind.I}

    def split(chunk: int, micro_batch: int) -> bool:
        return (chunk, micro_batch) in splits

    return {action: dependencies(action, schedule.num_chunks, split) for action in every}
