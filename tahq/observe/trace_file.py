"""A traced step as a file that ui.perfetto.dev and chrome://tracing open (Chrome's trace event format, JSON).

A process of the picture is a worker, a thread one of its lanes: computing, threads that code, each link and direction
that it sends on. Arrows follow a frame from its encoder over the wire to its decoder. Times are
microseconds from the commit before the step, on the coordinator's clock; how far each worker's clock was off, and how
well that is known, is in `otherData`. `trace_object` is pure; `TraceFiles` writes.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from tahq.coordinator.observer import RunObserver, StageTrace, StepTrace, TracedSpan
from tahq.errors import UserError
from tahq.observe.metrics_reader import WRONG

COORDINATOR_PID = 1
FIRST_STAGE_PID = 2
FLOW_ORDER = {"encode": 0, "send": 1, "decode": 2}
"""The spans that an arrow goes through; those of waiting for a frame are left out."""

Event = dict[str, Any]


class TraceFiles(RunObserver):
    """Writes ``step-000010.json`` into a folder, made with the first; `start` counts the run's starts from 1."""

    def __init__(self, folder: Path, start: int = 1) -> None:
        self._folder = folder
        self._start = start

    def step_traced(self, trace: StepTrace) -> None:
        """Write one step, whole or not at all; OSError if the disk does not take it.

        Not forced to the disk, for which the coordinator would wait: a power cut may still leave part of it.
        """
        self._folder.mkdir(exist_ok=True)
        path = trace_path(self._folder, trace.step)
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(trace_object(trace, self._start), allow_nan=False), encoding="utf-8")
            temporary.replace(path)
        finally:
            with suppress(OSError):  # the first error is the one to report
                temporary.unlink(missing_ok=True)


def trace_path(folder: Path, step: int) -> Path:
    """The file of a step, which counts from 1."""
    return folder / f"step-{step:06d}.json"


def trace_object(trace: StepTrace, start: int = 1) -> dict[str, Any]:
    """A traced step as one JSON object: `traceEvents`, and in `otherData` step, start, beginning, and the clocks."""
    tids = {stage.stage: _lane_tids(stage) for stage in trace.stages}
    events = [*_names(trace.stages, tids), *_step_events(trace, tids)]
    clocks = [
        {
            "stage": stage.stage,
            "offset_s": stage.offset_s,
            "error_s": stage.clock_error_s if math.isfinite(stage.clock_error_s) else None,
        }
        for stage in trace.stages
    ]
    return {
        "traceEvents": sorted(events, key=_place),
        "displayTimeUnit": "ms",
        "otherData": {"step": trace.step, "start": start, "begin_s": trace.begin_s, "clocks": clocks},
    }


def _place(event: Event) -> tuple[float, float]:
    """Names first, then by time; of spans that begin together the longer first."""
    return event.get("ts", -math.inf), -event.get("dur", 0.0)


def _lane_tids(stage: StageTrace) -> dict[str, int]:
    """Numbers of the lanes: computing first, links last, the others in between by name."""
    lanes = {span.lane: span.category == "send" for span in stage.spans}
    order = sorted(lanes, key=lambda lane: (lane != "compute", lanes[lane], lane))
    return {lane: tid for tid, lane in enumerate(order, start=1)}


def _names(stages: Iterable[StageTrace], tids: Mapping[int, Mapping[str, int]]) -> Iterator[Event]:
    """Names of processes and threads, and their places."""
    yield _metadata("process_name", COORDINATOR_PID, 0, name="coordinator")
    yield _metadata("thread_name", COORDINATOR_PID, 1, name="steps, commit to commit")
    for stage in stages:
        pid = FIRST_STAGE_PID + stage.stage
        yield _metadata("process_name", pid, 0, name=stage.name)
        yield _metadata("process_sort_index", pid, 0, sort_index=pid)
        for lane, tid in tids[stage.stage].items():
            yield _metadata("thread_name", pid, tid, name=lane)
            yield _metadata("thread_sort_index", pid, tid, sort_index=tid)


def _metadata(kind: str, pid: int, tid: int, **values: object) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": values}


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
    begin_us = _microseconds(span.begin_s - origin_s)
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.category,
        "pid": pid,
        "tid": tid,
        "ts": begin_us,
        "dur": max(0.0, _microseconds(span.end_s - origin_s) - begin_us),
        "args": args,
    }


def _flows(by_frame: Mapping[str, list[tuple[int, Event]]], step: int) -> Iterator[Event]:
    """Arrows from span to span of one frame, for frames that were seen more than once."""
    frames = [found for _, found in sorted(by_frame.items()) if len(found) > 1]
    for number, found in enumerate(frames, start=1):
        seen = [event for _, event in sorted(found, key=lambda item: (item[0], item[1]["ts"]))]
        for phase, event in zip(("s", *"t" * (len(seen) - 2), "f"), seen, strict=True):
            arrow = {"ph": phase, "id": f"{step}.{number}", "name": "frame", "cat": "frame"}
            arrow |= {key: event[key] for key in ("pid", "tid", "ts")}
            yield arrow if phase == "s" else {**arrow, "bp": "e"}


def _microseconds(seconds: float) -> float:
    """Microseconds, rounded to the nanosecond."""
    return round(1e6 * seconds, 3)


Picture = Mapping[str, Any]
"""A traced step, as `trace_object` made it."""


def read_picture(path: Path) -> dict[str, Any]:
    """A step's picture, as `TraceFiles` wrote it; UserError if it cannot be read, or is incomplete."""
    try:
        picture: dict[str, Any] = json.loads(path.read_bytes())
        int(picture["otherData"]["step"])
        merged([picture])  # reads all that is used of it
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except WRONG as error:
        raise UserError(f"{path} is not a complete picture of a step ({type(error).__name__}: {error})") from error
    return picture


def merged(pictures: Sequence[Picture]) -> dict[str, Any]:
    """Steps of a run as one picture; of several, `otherData.steps` has the `otherData` of each.

    `pictures` is not empty. Each start of the run has its own processes, after those of earlier starts, as its clock
    may be another. Within a start, steps keep their times, even if the run turned back and traced a step again.
    """
    starts = [list(drawn) for _, drawn in groupby(sorted(pictures, key=_start), key=_start)]
    events = _Events()
    for drawn in starts:
        prefix = f"start {_start(drawn[0])}: " if len(starts) > 1 else ""
        begin_us, origin_s = events.end_us, min(picture["otherData"]["begin_s"] for picture in drawn)
        for picture in drawn:
            events.add(picture, prefix, begin_us + _microseconds(picture["otherData"]["begin_s"] - origin_s))
    steps = [picture["otherData"] for drawn in starts for picture in drawn]
    other = steps[0] if len(steps) == 1 else {"steps": steps}
    in_order = sorted([*events.names.values(), *events.timed], key=_place)
    return {**pictures[-1], "traceEvents": in_order, "otherData": other}


def _start(picture: Picture) -> int:
    return int(picture["otherData"]["start"])


@dataclass(slots=True)
class _Events:
    """The events of one picture, while it grows by step after step.

    names: of processes and threads, which every step has: once is enough. pids: by start, number in the file, and
    name. tids: by process, and name of the lane.
    """

    names: dict[tuple[str, int, int], Event] = field(default_factory=dict)
    timed: list[Event] = field(default_factory=list)
    pids: dict[tuple[int, int, str], int] = field(default_factory=dict)
    tids: dict[tuple[int, str], int] = field(default_factory=dict)
    end_us: float = 0.0

    def add(self, picture: Picture, prefix: str, shift_us: float) -> None:
        """Add a step, `shift_us` later than its own times; `prefix` goes before the names of its processes."""
        events = picture["traceEvents"]
        processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        for event in events:
            process = (_start(picture), event["pid"], processes.get(event["pid"], ""))
            pid, tid = self.pids.setdefault(process, len(self.pids) + 1), event["tid"]
            if (event["pid"], tid) in lanes:
                tid = self.tids.setdefault((pid, lanes[event["pid"], tid]), len(self.tids) + 1)
            placed = {**event, "pid": pid, "tid": tid}
            if "ts" in event:
                placed["ts"] = round(event["ts"] + shift_us, 3)
                self.timed.append(placed)
                self.end_us = max(self.end_us, placed["ts"] + event.get("dur", 0.0))
                continue
            if event["name"] == "process_name":
                placed["args"] = {"name": prefix + event["args"]["name"]}
            elif event["name"] == "process_sort_index":
                placed["args"] = {"sort_index": pid}
            self.names.setdefault((event["name"], pid, tid), placed)
