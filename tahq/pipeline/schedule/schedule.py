"""A pipeline schedule as data: the actions of each stage, in order.

An action in torch's notation is `2F0`: chunk 2, forward, micro-batch 0. `B` is a whole backward; a split one is `I`
(gradient of the input) and then `W` (gradient of the weights). Chunk c feeds chunk c + 1; a stage holds one chunk, or
several under interleaved schedules.

A run executes no schedules but those of `generators.py`. Engine and simulator rely on these invariants of theirs:
- each micro-batch passes each chunk exactly once forward and once backward, on the stage that holds it, but for the
  first `num_frozen` chunks, which have a forward only;
- weight gradients of a chunk (B, W) come in ascending order of micro-batch under every schedule, so that sums do not
  depend on it;
- executed in the order given, with frames arriving at any time, no stage waits forever.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


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

    `actions[stage]` is a stage's row; `placement[chunk]` is the stage that holds a chunk; the first `num_frozen` chunks
    have no backward, since nothing in them is trained, so no gradient is sent to them.
    """

    name: str
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    num_frozen: int = 0

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
        min(m, P − r). Chunks without a backward hold none.
        """
        return max(in_flight(self.actions[stage], self.num_frozen), default=0)


def in_flight(row: tuple[Action, ...], num_frozen: int = 0) -> Iterator[int]:
    """Activations held during each action of a row, including those that it makes or frees."""
    held = 0
    for action in row:
        held += action.kind is ActionKind.F and action.chunk >= num_frozen
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
