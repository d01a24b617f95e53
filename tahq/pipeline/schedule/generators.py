"""Schedules by name: each stage's row for P stages, m micro-batches and an in-flight depth.

The depth of a stage is the number of activations that it may hold at once, each from its forward to the end of its
backward (B, or W where that is split). It is also the length of the warm-up: a stage computes that many forwards
before its first backward, then a backward and a forward in turn. The deeper, the longer a gradient may travel without
a stage waiting for it; 1F1B's default depth, P − r, hides no latency at all.

Depths are lowered to the limits that neighbours set, so that no two stages wait for each other:

    d_r ≤ d_{r−1}              stage r gets no more forwards than the stage before it computes
    d_0 ≤ d_{P−1} + 2g         interleaved: stage P − 1 feeds stage 0, in groups of at least g micro-batches

Chunks in which nothing is trained, the first ones, compute all forwards and nothing else. They hold no activations,
so depths are those of the stages behind them; `_frozen` gives their rows.

Sources: GPipe (Huang et al. 2019); 1F1B (PipeDream, Narayanan et al. 2019); interleaved 1F1B (Narayanan et al.
2021, §2.2); zero bubble, ZB-H1 (Qi et al. 2023, §3), whose weight gradients fill the gaps that 1F1B leaves.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from tahq.errors import ScheduleError
from tahq.pipeline.schedule.schedule import Action, ActionKind, Schedule


@dataclass(frozen=True, slots=True)
class Request:
    """The size of a schedule: P stages, m micro-batches, depths if given, v chunks per stage."""

    num_stages: int
    num_micro_batches: int
    depths: Sequence[int] | None
    chunks_per_stage: int


Rows = tuple[tuple[Action, ...], ...]


def generate(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    *,
    depths: Sequence[int] | None = None,
    chunks_per_stage: int = 1,
    num_frozen: int = 0,
) -> Schedule:
    """The schedule with this name.

    Args:
        name: gpipe, 1f1b, zero-bubble or interleaved.
        num_stages: P.
        num_micro_batches: m.
        depths: activations in flight allowed, by stage; lowered where neighbours could not keep up. None: the default
            of the schedule: 1F1B min(m, P − r), zero bubble min(m, P), interleaved 2(P − r − 1) + (v − 1)·P + 1.
        chunks_per_stage: v, above 1 for interleaved only; chunk c is on stage c mod P.
        num_frozen: chunks, from the first on, that have no backward; fewer than all.

    Raises:
        ScheduleError: an unknown name, no stage or micro-batch, or unsuitable depths or chunks.
    """
    if name not in GENERATORS:
        raise ScheduleError(f"unknown schedule {name!r}; known: {', '.join(GENERATORS)}")
    if num_stages < 1 or num_micro_batches < 1:
        raise ScheduleError(
            f"schedule {name} needs at least 1 stage and 1 micro-batch; got {num_stages} and {num_micro_batches}"
        )
    request = Request(num_stages, num_micro_batches, depths, chunks_per_stage)
    _check(name, request)
    num_chunks = num_stages * chunks_per_stage
    placement = tuple(chunk % num_stages for chunk in range(num_chunks))
    rows = GENERATORS[name](request) if num_frozen == 0 else _frozen(name, request, num_frozen)
    return Schedule(name, num_micro_batches, rows, placement, num_frozen)


def _check(name: str, request: Request) -> None:
    depths, chunks = request.depths, request.chunks_per_stage
    if (chunks > 1) != (name == INTERLEAVED):
        raise ScheduleError(
            f"schedule {name} with {chunks} chunks per stage: {INTERLEAVED} needs 2 or more, all others have 1"
        )
    if name == INTERLEAVED and request.num_stages < 2:
        raise ScheduleError(f"schedule {name} needs at least 2 stages; got 1")
    if depths is None:
        return
    if len(depths) != request.num_stages:
        raise ScheduleError(f"got {len(depths)} in-flight depths for {request.num_stages} stages")
    if min(depths) < chunks:
        raise ScheduleError(
            f"an in-flight depth of {min(depths)} is too small: {name} with {chunks} chunks per stage needs {chunks}"
        )


def _frozen(name: str, request: Request, num_frozen: int) -> Rows:
    """The rows where the first chunks have no backward.

    With one chunk per stage the others are a pipeline of their own. With several, theirs keep their places in the whole
    schedule: without what nothing depends on, no stage waits longer.
    """
    if request.chunks_per_stage > 1:
        rows = GENERATORS[name](request)
        return tuple(tuple(a for a in row if a.kind is ActionKind.F or a.chunk >= num_frozen) for row in rows)
    depths = None if request.depths is None else request.depths[num_frozen:]
    behind = replace(request, num_stages=request.num_stages - num_frozen, depths=depths)
    shifted = (
        tuple(replace(action, chunk=action.chunk + num_frozen) for action in row) for row in GENERATORS[name](behind)
    )
    return (*(tuple(_pass(c, ActionKind.F, request.num_micro_batches)) for c in range(num_frozen)), *shifted)


def _gpipe(request: Request) -> Rows:
    """All forwards, then all backwards, both ascending."""
    count = request.num_micro_batches
    if request.depths is not None and min(request.depths) < count:
        raise ScheduleError(
            f"gpipe holds all {count} micro-batches of a step, more than the in-flight depth of {min(request.depths)}; "
            "use 1f1b"
        )
    return _alternating([count] * request.num_stages, count)


def _one_f_one_b(request: Request) -> Rows:
    own = range(request.num_stages, 0, -1)
    return _alternating(_reachable(request.depths or own, request.num_micro_batches), request.num_micro_batches)


def _alternating(warm_ups: Sequence[int], count: int) -> Rows:
    return tuple(
        tuple(_in_turn(_pass(stage, ActionKind.F, count), _pass(stage, ActionKind.B, count), warm_up))
        for stage, warm_up in enumerate(warm_ups)
    )


def _pass(chunk: int, kind: ActionKind, count: int) -> list[Action]:
    return [Action(chunk, kind, micro_batch) for micro_batch in range(count)]


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> Iterator[Action]:
    """`warm_up` forwards, then a backward and a forward in turn until the forwards run out."""
    yield from forwards[:warm_up]
    for index, backward in enumerate(backwards):
        yield backward
        yield from forwards[warm_up + index : warm_up + index + 1]


def _reachable(depths: Sequence[int], count: int) -> list[int]:
    """d_r = min(m, d_0 … d_r)."""
    return [min(count, depth) for depth in accumulate(depths, min)]


def _zero_bubble(request: Request) -> Rows:
    """Weight gradients lag behind input gradients: by r micro-batches on stage r, as far as the depth allows.

    Stage r computes I(k), W(k − lag) and the next forward in turn. It holds warm-up + lag activations, so the warm-up
    is its depth minus the lag. The last weight gradients fill the time in which 1F1B waits for gradients.
    """
    stages, count = request.num_stages, request.num_micro_batches
    given = list(accumulate(request.depths or [stages] * stages, min))
    lags = [min(stage, depth - 1) for stage, depth in enumerate(given)]
    warm_ups = _reachable([depth - lag for depth, lag in zip(given, lags, strict=True)], count)
    return tuple(_lagging_row(stage, count, *each) for stage, each in enumerate(zip(warm_ups, lags, strict=True)))


def _lagging_row(stage: int, count: int, warm_up: int, lag: int) -> tuple[Action, ...]:
    inputs, weights = _pass(stage, ActionKind.I, count), _pass(stage, ActionKind.W, count)
    forwards = _pass(stage, ActionKind.F, count)
    row = forwards[:warm_up]
    for index in range(count):
        row.append(inputs[index])
        row += weights[index - lag : index - lag + 1] if index >= lag else []
        row += forwards[warm_up + index : warm_up + index + 1]
    return (*row, *weights[count - min(lag, count) :])


def _interleaved(request: Request) -> Rows:
    """Stage r holds chunks r, P + r, 2P + r …; groups of g micro-batches pass all of a stage's chunks in turn.

    Forwards go through the chunks from the first to the last, backwards from the last to the first. The first backward
    comes after (v − 1)·g + 1 forwards, which every depth has to allow. Groups have at most P micro-batches, and sizes
    as equal as possible.
    """
    stages, count, chunks = request.num_stages, request.num_micro_batches, request.chunks_per_stage
    lowest = min(request.depths) if request.depths is not None else stages * chunks
    groups = _even_groups(count, max(1, min(stages, (lowest - 1) // (chunks - 1))))
    smallest, largest = min(map(len, groups)), max(map(len, groups))
    own = [2 * (stages - stage - 1) + (chunks - 1) * largest + 1 for stage in range(stages)]
    depths = _reachable(request.depths or own, count * chunks)
    depths = _reachable([min(depth, depths[-1] + 2 * smallest) for depth in depths], count * chunks)
    held = [range(stage, stages * chunks, stages) for stage in range(stages)]
    return tuple(
        tuple(_in_turn(_grouped(ActionKind.F, groups, own), _grouped(ActionKind.B, groups, own[::-1]), depth))
        for own, depth in zip(held, depths, strict=True)
    )


def _even_groups(count: int, largest: int) -> list[range]:
    number = -(-count // largest)
    bounds = [count * index // number for index in range(number + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _grouped(kind: ActionKind, groups: Sequence[range], chunks: Sequence[int]) -> list[Action]:
    return [Action(chunk, kind, micro_batch) for group in groups for chunk in chunks for micro_batch in group]


INTERLEAVED = "interleaved"

GENERATORS: Mapping[str, Callable[[Request], Rows]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "zero-bubble": _zero_bubble,
    INTERLEAVED: _interleaved,
}
"""The rows of all stages by the schedule's name."""
