"""Traced steps: every stage's spans, brought to the coordinator's clock.

Pure: clock offsets and times are arguments. A traced step is complete once every stage has sent all of its parts; of
steps that never get so far (a stage sent none) the oldest are forgotten. Parts come a step late, perhaps, so those of a
step that a coordinator before this one has committed are nothing to complain of, and are dropped.
"""

import math
from collections.abc import Sequence

from tahq.comm.control.clock_offset import ClockOffset
from tahq.comm.control.messages import Traced
from tahq.coordinator.observer import StageTrace, StepTrace, TracedSpan
from tahq.errors import RemoteProtocolError

MAX_PART = 2048
"""Spans in one message."""
MAX_PARTS = 256
"""Messages of one stage about one step; half a million spans."""
KEPT_STEPS = 16
"""Steps whose times, or whose parts, are remembered."""

_Parts = dict[int, Traced]


class TraceCollector:
    """Parts of traced steps, until all of a step are there.

    Args:
        names: how messages and pictures call the stages; there are as many stages as names.
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
            part: of the stage that it says, which the caller has made sure of.
            offsets: each stage's clock minus the coordinator's, as far as known.

        Raises:
            RemoteProtocolError: a step that was not committed, a part that is there already, impossible numbers.
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


def _forget_oldest(by_step: dict[int, object] | dict[int, tuple[float, float]] | dict[int, list[_Parts]]) -> None:
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
        raise RemoteProtocolError(f"{name} sent a trace of step {part.step} that makes no sense")


def _stage_trace(stage: int, name: str, parts: _Parts, offset: ClockOffset | None) -> StageTrace:
    offset_s, error_s = (offset.offset_s, offset.error_s) if offset is not None else (0.0, math.nan)
    spans = [span for number in sorted(parts) for span in _spans(parts[number], offset_s)]
    return StageTrace(stage, name, offset_s, error_s, tuple(sorted(spans, key=lambda span: span.begin_s)))


def _spans(part: Traced, offset_s: float) -> list[TracedSpan]:
    rows = zip(
        part.lanes,
        part.categories,
        part.names,
        part.begins_s,
        part.ends_s,
        part.frames,
        part.nbytes,
        part.queued_s,
        strict=True,
    )
    return [
        TracedSpan(lane, category, name, begin_s - offset_s, end_s - offset_s, frame, nbytes, queued_s)
        for lane, category, name, begin_s, end_s, frame, nbytes, queued_s in rows
    ]
