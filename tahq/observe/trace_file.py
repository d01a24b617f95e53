"""A traced step as a file that ui.perfetto.dev and chrome://tracing open (Chrome's trace event format, JSON).

A process of the picture is a worker, a thread one of its lanes: computing, threads that code, each link and direction
that it sends on. Arrows follow a frame from where it was encoded over its way to where it was decoded. Times are
microseconds from the commit before the step, on the coordinator's clock; how far each worker's clock was off, and how
well that is known, is in `otherData`. `trace_object` is pure; `TraceFiles` writes.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """Writes ``step-000010.json`` into a folder, which is made with the first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def step_traced(self, trace: StepTrace) -> None:
        """Write one step."""
        self._folder.mkdir(exist_ok=True)
        path = trace_path(self._folder, trace.step)
        path.write_text(json.dumps(trace_object(trace), allow_nan=False), encoding="utf-8")


def trace_path(folder: Path, step: int) -> Path:
    """The file of a step, which counts from 1."""
    return folder / f"step-{step:06d}.json"


def trace_object(trace: StepTrace) -> dict[str, Any]:
    """A traced step as one JSON object: `traceEvents`, and in `otherData` when it began and the clocks."""
    tids = {stage.stage: _lane_tids(stage) for stage in trace.stages}
    events = [*_names(trace.stages, tids), *_step_events(trace, tids)]
    return {
        "traceEvents": sorted(events, key=_place),
        "displayTimeUnit": "ms",
        "otherData": {
            "step": trace.step,
            "begin_s": trace.begin_s,
            "clocks": [_clock(stage) for stage in trace.stages],
        },
    }


def merged(objects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several steps of one start of a run as one picture, from what `trace_object` made of each."""
    origin_s = min(trace["otherData"]["begin_s"] for trace in objects)
    tids: dict[tuple[int, str], int] = {}
    events: dict[str, Event] = {}
    for trace in objects:
        shift_us = _us(trace["otherData"]["begin_s"] - origin_s)
        lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
        for event in trace["traceEvents"]:
            lane = lanes.get((event["pid"], event["tid"]))
            if lane is not None:
                event = {**event, "tid": tids.setdefault((event["pid"], lane), len(tids) + 1)}
            if "ts" in event:
                event = {**event, "ts": event["ts"] + shift_us}
            events[json.dumps(event)] = event  # names are in every step's file, and once is enough
    return {**objects[-1], "traceEvents": sorted(events.values(), key=_place)}


def _place(event: Event) -> tuple[float, float]:
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
    begin_us = _us(span.begin_s - origin_s)
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.category,
        "pid": pid,
        "tid": tid,
        "ts": begin_us,
        "dur": max(0.0, _us(span.end_s - origin_s) - begin_us),
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


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(1e6 * seconds, 3)
