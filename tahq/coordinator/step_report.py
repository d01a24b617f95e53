"""What the stages report of a step, as records for observers: `StepRecord` from PREPAREs, `StepTrace` from TRACEDs.

Pure: clock offsets and times are arguments. A row of `Prepare.links` is (link, direction, frames, payload bytes, wire
bytes, elements, busy, sending and wire seconds), a row of `Prepare.codec_errors` (link, direction, relative error), for
the frames that the worker sent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tahq.comm.control.messages import Commit, Prepare, Traced
from tahq.comm.control.server import ClockOffset
from tahq.comm.link.frame import Direction
from tahq.coordinator.observer import (
    LinkRecord,
    StageRecord,
    StageSplit,
    StageTrace,
    StepRecord,
    StepTrace,
    TracedSpan,
    Traffic,
)
from tahq.errors import RemoteProtocolError

BACKWARD = ("backward", "input_gradient", "weight_gradient")
WAIT, BESIDE = "wait:", "beside:"
NUM_COUNTS, ROW_LENGTH = 6, 9
_MAX_NUMBER = 2.0**53
"""fp64 holds integers up to here exactly; and infinity could not be printed."""


def step_record(
    commit: Commit, prepares: Sequence[Prepare], norm: float, step_time_s: float, chunks_per_stage: int = 1
) -> StepRecord:
    """The record of a step that was just decided.

    Args:
        commit: the decision.
        prepares: every stage's, by stage; the last one's has the loss.
        norm: global gradient norm before clipping.
        step_time_s: seconds from the commit before to this one.
        chunks_per_stage: chunks of the model on each stage.

    Raises:
        RemoteProtocolError: a row about a link that its stage does not have.
    """
    loss_sum, tokens = prepares[-1].loss_sum, prepares[-1].tokens
    return StepRecord(
        step=commit.step + 1,
        loss=loss_sum / tokens if loss_sum is not None and tokens else math.nan,
        tokens=tokens or 0,
        step_time_s=step_time_s,
        grad_norm=norm,
        clip_factor=commit.clip_factor,
        skipped=not commit.apply,
        evaluating=commit.evaluate,
        stages=tuple(_stage_record(p, step_time_s) for p in prepares),
        links=tuple(
            _with_error(_link_record(p.stage, row, len(prepares), chunks_per_stage, step_time_s), row, p)
            for p in prepares
            for row in p.links
        ),
    )


def stage_split(timing: Mapping[str, float], active_s: float, step_time_s: float) -> StageSplit:
    """Split a stage's step.

    Args:
        timing: seconds by activity, as `Stopwatch.take` names them.
        active_s: from the COMMIT before to PREPARE, on the worker's clock.
        step_time_s: from commit to commit, on the coordinator's.
    """

    def take(*activities: str) -> float:
        return sum(timing.get(activity, 0.0) for activity in activities)

    senders = {name: name.removeprefix(WAIT) for name in timing if name.startswith(WAIT)}
    waits_s = {int(sender): timing[name] for name, sender in senders.items() if sender.isdecimal()}
    measured_s = sum(seconds for activity, seconds in timing.items() if not activity.startswith(BESIDE))
    return StageSplit(
        forward_s=take("forward"),
        backward_s=take(*BACKWARD),
        encode_s=take("encode"),
        decode_s=take("decode"),
        wait_s=waits_s,
        wait_codec_s=take("wait:codec"),
        wait_memory_s=take("wait:memory"),
        data_s=take("data"),
        optimizer_s=take("optimizer", "norms"),
        snapshot_s=take("snapshot"),
        other_s=max(0.0, active_s - measured_s),
        commit_s=max(0.0, step_time_s - max(active_s, 0.0)),
        beside_s={name.removeprefix(BESIDE): s for name, s in timing.items() if name.startswith(BESIDE)},
    )


def _with_error(record: LinkRecord, row: Sequence[float], prepare: Prepare) -> LinkRecord:
    """The record with the relative error that its sender measured: infinite perhaps, never negative."""
    rows = prepare.codec_errors
    if not all(len(error) == 3 and error[2] >= 0 for error in rows):
        raise RemoteProtocolError(
            f"stage {prepare.stage} reported impossible codec errors: expected rows of [link, direction, error >= 0]"
        )
    measured = {(link, direction): error for link, direction, error in rows}
    return replace(record, relative_error=measured.get((row[0], row[1])))


def _stage_record(prepare: Prepare, step_time_s: float) -> StageRecord:
    split = stage_split(prepare.timing, prepare.active_s, step_time_s)
    return StageRecord(prepare.stage, dict(prepare.timing), prepare.codec_state_bytes, split)


def _link_record(
    stage: int, row: Sequence[float], num_stages: int, chunks_per_stage: int, step_time_s: float
) -> LinkRecord:
    try:
        if len(row) != ROW_LENGTH or not all(0 <= number <= _MAX_NUMBER for number in row):
            raise ValueError
        link, direction, frames, payload_bytes, wire_bytes, elements = (int(number) for number in row[:NUM_COUNTS])
        receiver, traffic = _other_end(stage, link, Direction(direction), num_stages, chunks_per_stage)
    except (ValueError, OverflowError):
        raise RemoteProtocolError(f"stage {stage} reported impossible traffic: {list(row)[:ROW_LENGTH]}") from None
    busy_s, sending_s, wire_s = row[NUM_COUNTS:]
    idle_s = max(0.0, step_time_s - busy_s)
    counts = (frames, payload_bytes, wire_bytes, elements)
    return LinkRecord(link, stage, receiver, traffic, *counts, busy_s, sending_s, wire_s, idle_s)


def _other_end(
    stage: int, link: int, direction: Direction, num_stages: int, chunks_per_stage: int
) -> tuple[int, Traffic]:
    """The stage that receives what this stage sends on this link, and the kind of traffic.

    Both directions of the link of tied embeddings (the last number) carry gradients.
    """
    last = num_stages * chunks_per_stage - 1
    if link == last and stage in (0, num_stages - 1) and num_stages > 1:
        return num_stages - 1 - stage, "gradients"
    before, after = link % num_stages, (link + 1) % num_stages
    if stage == before and link < last and direction is Direction.FORWARD:
        return after, "activations"
    if stage == after and link < last and direction is Direction.BACKWARD:
        return before, "gradients"
    raise ValueError


MAX_PART = 2048
"""Spans in one message."""
MAX_PARTS = 256
"""Messages of one stage about one step: half a million spans."""
KEPT_STEPS = 16
"""Steps whose times and parts are kept."""

_Parts = dict[int, Traced]


class TraceCollector:
    """Collects the parts of traced steps, and brings their spans to the coordinator's clock.

    A step is complete once every stage has sent all of its parts; of incomplete steps the oldest are forgotten. Parts
    may come a step late, so those of a step that a coordinator before this one committed are dropped without an error.

    Args:
        names: of all stages, for messages and pictures.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._times: dict[int, tuple[float, float]] = {}
        self._parts: dict[int, list[_Parts]] = {}

    def committed(self, step: int, begin_s: float, end_s: float) -> None:
        """Note when a step (from 0) began and was committed."""
        self._times[step] = (begin_s, end_s)
        _forget_oldest(self._times)

    def take(self, part: Traced, offsets: Sequence[ClockOffset | None]) -> StepTrace | None:
        """Count a part; the whole step once it was the last one.

        Args:
            part: from the worker of its stage.
            offsets: each stage's clock minus the coordinator's; None: unknown.

        Raises:
            RemoteProtocolError: a step that was not committed, a repeated part, impossible numbers.
        """
        name = self._names[part.stage]
        if part.step > max(self._times, default=math.inf):
            raise RemoteProtocolError(f"{name} sent a trace of step {part.step}, which was not committed yet")
        if part.step not in self._times:
            return None
        _check(part, name)
        stages = self._parts.setdefault(part.step, [{} for _ in self._names])
        _forget_oldest(self._parts)
        if part.part in stages[part.stage]:
            raise RemoteProtocolError(f"{name} sent part {part.part} of its trace of step {part.step} twice")
        stages[part.stage][part.part] = part
        if not all(parts and len(parts) == next(iter(parts.values())).num_parts for parts in stages):
            return None
        del self._parts[part.step]
        traces = zip(self._names, stages, offsets, strict=True)
        return StepTrace(
            part.step + 1,
            *self._times[part.step],
            tuple(_stage_trace(stage, name, parts, offset) for stage, (name, parts, offset) in enumerate(traces)),
        )


def _forget_oldest(by_step: dict[int, Any]) -> None:
    while len(by_step) > KEPT_STEPS:
        del by_step[min(by_step)]


def _check(part: Traced, name: str) -> None:
    columns = (part.lanes, part.categories, part.names, part.frames, part.begins_s, part.ends_s)
    lengths = {len(column) for column in (*columns, part.nbytes, part.queued_s)}
    times = zip(part.begins_s, part.ends_s, strict=False)
    if (
        len(lengths) != 1
        or max(lengths) > MAX_PART
        or not 0 <= part.part < part.num_parts <= MAX_PARTS
        or not all(math.isfinite(begin_s) and begin_s <= end_s < math.inf for begin_s, end_s in times)
    ):
        raise RemoteProtocolError(f"{name} sent a malformed trace of step {part.step}")


def _stage_trace(stage: int, name: str, parts: _Parts, offset: ClockOffset | None) -> StageTrace:
    offset_s, error_s = (offset.offset_s, offset.error_s) if offset is not None else (0.0, math.nan)
    spans = [span for number in sorted(parts) for span in _spans(parts[number], offset_s)]
    return StageTrace(stage, name, offset_s, error_s, tuple(sorted(spans, key=lambda span: span.begin_s)))


def _spans(part: Traced, offset_s: float) -> list[TracedSpan]:
    times = ([time_s - offset_s for time_s in column] for column in (part.begins_s, part.ends_s))
    columns = (part.lanes, part.categories, part.names, *times, part.frames, part.nbytes, part.queued_s)
    return [TracedSpan(*row) for row in zip(*columns, strict=True)]
