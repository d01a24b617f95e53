"""A traced step as a file that ui.perfetto.dev and chrome://tracing open (Chrome's trace event format, JSON).

A process of the picture is a worker, a thread one of its lanes: computing, threads that code, each link and direction
that it sends on. Arrows follow a frame from where it was encoded over its way to where it was decoded. Times are
microseconds from the commit before the step, on the coordinator's clock; how far each worker's clock was off, and how
well that is known, is in `otherData`. `trace_object` is pure; `TraceFiles` writes.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from tahq.coordinator.observer import RunObserver, StageTrace, StepTrace, TracedSpan

COORDINATOR_PID = 1
FIRST_STAGE_PID = 2
FLOW_ORDER = {"encode": 0, "send": 1, "decode": 2}
"""Which spans an arrow goes through; a worker that waits for a frame is not on its way."""

Event = dict[str, Any]


class TraceFiles(RunObserver):
    """Writes ``step-000010.json`` into a folder, which is made with the first.

    Args:
        folder: where.
        start: number of this start of the run, from 1.
    """

    def __init__(self, folder: Path, start: int = 1) -> None:
        self._folder = folder
        self._start = start

    def step_traced(self, trace: StepTrace) -> None:
        """Write one step; OSError if the disk does not take it."""
        self._folder.mkdir(exist_ok=True)
        text = json.dumps(trace_object(trace, self._start), allow_nan=False)
        _write_whole(trace_path(self._folder, trace.step), text)


def _write_whole(path: Path, text: str) -> None:
    """A file that is there whole or not at all, whatever becomes of this process.

    Not forced to the disk, for which the coordinator would wait: a power cut may still leave part of it.
    """
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        with suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)


def trace_path(folder: Path, step: int) -> Path:
    """The file of a step, which counts from 1."""
    return folder / f"step-{step:06d}.json"


def trace_object(trace: StepTrace, start: int = 1) -> dict[str, Any]:
    """A traced step as one JSON object: `traceEvents`, and in `otherData` start, when it began, and the clocks.

    Args:
        trace: the step.
        start: number of the start of the run that it is of, from 1.
    """
    tids = {stage.stage: _lane_tids(stage) for stage in trace.stages}
    events = [*_names(trace.stages, tids), *_step_events(trace, tids)]
    return {
        "traceEvents": sorted(events, key=place),
        "displayTimeUnit": "ms",
        "otherData": {
            "step": trace.step,
            "start": start,
            "begin_s": trace.begin_s,
            "clocks": [_clock(stage) for stage in trace.stages],
        },
    }


def place(event: Event) -> tuple[float, float]:
    """Names first, then by time, what encloses before what it encloses."""
    return event.get("ts", -math.inf), -event.get("dur", 0.0)


def _clock(stage: StageTrace) -> dict[str, Any]:
    error_s = stage.clock_error_s
    return {
        "stage": stage.stage,
        "offset_s": stage.offset_s,
        "error_s": error_s if math.isfinite(error_s) else None,
    }


def _lane_tids(stage: StageTrace) -> dict[str, int]:
    """Numbers of the lanes: computing first, what is sent last, in between by name."""
    lanes = {span.lane: span.category == "send" for span in stage.spans}
    order = sorted(lanes, key=lambda lane: (lane != "compute", lanes[lane], lane))
    return {lane: tid for tid, lane in enumerate(order, start=1)}


def _names(stages: Iterable[StageTrace], tids: Mapping[int, Mapping[str, int]]) -> Iterator[Event]:
    yield _name_event("process_name", COORDINATOR_PID, 0, "coordinator")
    yield _name_event("thread_name", COORDINATOR_PID, 1, "steps, commit to commit")
    for stage in stages:
        pid = FIRST_STAGE_PID + stage.stage
        yield _name_event("process_name", pid, 0, stage.name)
        yield {**_name_event("process_sort_index", pid, 0, ""), "args": {"sort_index": pid}}
        for lane, tid in tids[stage.stage].items():
            yield _name_event("thread_name", pid, tid, lane)
            yield {**_name_event("thread_sort_index", pid, tid, ""), "args": {"sort_index": tid}}


def _name_event(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _step_events(trace: StepTrace, tids: Mapping[int, Mapping[str, int]]) -> Iterator[Event]:
    step = TracedSpan("", "step", f"step {trace.step}", trace.begin_s, trace.end_s)
    yield _span_event(step, COORDINATOR_PID, 1, trace.begin_s)
    by_frame: dict[str, list[tuple[int, Event]]] = {}
    for stage in trace.stages:
        for span in stage.spans:
            event = _span_event(span, FIRST_STAGE_PID + stage.stage, tids[stage.stage][span.lane], trace.begin_s)
            yield event
            if span.frame and span.category in FLOW_ORDER:
                by_frame.setdefault(span.frame, []).append((FLOW_ORDER[span.category], event))
    yield from _flows(by_frame, trace.step)


def _span_event(span: TracedSpan, pid: int, tid: int, origin_s: float) -> Event:
    args: dict[str, Any] = {"frame": span.frame} if span.frame else {}
    if span.category == "send":
        args |= {"bytes": span.nbytes, "queued_ms": 1000 * span.queued_s}
    begin_us = microseconds(span.begin_s - origin_s)
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.category,
        "pid": pid,
        "tid": tid,
        "ts": begin_us,
        "dur": max(0.0, microseconds(span.end_s - origin_s) - begin_us),
        "args": args,
    }


def _flows(by_frame: Mapping[str, list[tuple[int, Event]]], step: int) -> Iterator[Event]:
    """Arrows from span to span of one frame, for frames that were seen more than once."""
    numbers = count(1)
    for frame in sorted(by_frame):
        seen = [event for _, event in sorted(by_frame[frame], key=lambda item: (item[0], item[1]["ts"]))]
        if len(seen) < 2:
            continue
        identity = f"{step}.{next(numbers)}"
        for index, event in enumerate(seen):
            phase = "s" if index == 0 else "f" if index == len(seen) - 1 else "t"
            arrow = {"ph": phase, "id": identity, "name": "frame", "cat": "frame"}
            yield {
                **arrow,
                **{key: event[key] for key in ("pid", "tid", "ts")},
                **({"bp": "e"} if phase != "s" else {}),
            }


def microseconds(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(1e6 * seconds, 3)
