"""Pictures of traced steps read again, and several as one.

In one picture of several steps a worker and a lane of it stay the same process and thread. Each start of a run has
processes of its own, because its workers are others; its steps have their true distances, and follow the start before
without the time between, since a start may be on another machine, whose clock says nothing about the one before.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from tahq.errors import UserError
from tahq.observe.trace_file import Event, microseconds, place

Picture = Mapping[str, Any]
"""What `trace_file.trace_object` made of a step."""


def read_picture(path: Path) -> dict[str, Any]:
    """A step's picture, as `TraceFiles` wrote it.

    Raises:
        UserError: it cannot be read, or is not whole.
    """
    try:
        picture: dict[str, Any] = json.loads(path.read_bytes())
        int(picture["otherData"]["step"])
        merged([picture])  # looks at everything that it is used for
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"{path} is not the whole picture of a step ({type(error).__name__}: {error})") from error
    return picture


def merged(pictures: Sequence[Picture]) -> dict[str, Any]:
    """Steps of a run as one picture; of several, `otherData.steps` has what each one's `otherData` had.

    Args:
        pictures: one at least, in the order of their steps.
    """
    starts = _starts(pictures)
    events = _Events()
    for number, start in enumerate(starts, start=1):
        name = f"start {_start(start[0]) or number}: " if len(starts) > 1 else ""
        events.add_start(start, name)
    steps = [picture["otherData"] for start in starts for picture in start]
    other = steps[0] if len(steps) == 1 else {"steps": steps}
    return {**pictures[-1], "traceEvents": events.in_order(), "otherData": other}


def _starts(pictures: Iterable[Picture]) -> list[list[Picture]]:
    """By the start of the run that drew them, the first one first."""
    starts: list[list[Picture]] = []
    for _, drawn in groupby(sorted(pictures, key=_start), key=_start):
        starts += _by_clock(list(drawn))
    return starts


def _start(picture: Picture) -> int:
    """The number of the start; 0 where an earlier version of tahq did not say."""
    return int(picture["otherData"].get("start", 0))


def _by_clock(pictures: Sequence[Picture]) -> list[list[Picture]]:
    """Where nobody said which start it was, a clock that went back is another's."""
    groups = [[pictures[0]]]
    for before, picture in pairwise(pictures):
        if picture["otherData"]["begin_s"] <= before["otherData"]["begin_s"]:
            groups.append([])
        groups[-1].append(picture)
    return groups


class _Events:
    """The events of one picture, while it grows by start after start."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, int, int], Event] = {}
        """Of processes and threads, which every step has: once is enough."""
        self._timed: list[Event] = []
        self._pids: dict[tuple[int, int, str], int] = {}
        """By start, number in the file, and name."""
        self._tids: dict[tuple[int, str], int] = {}
        """By process, and name of the lane."""
        self._num_starts = 0
        self._end_us = 0.0

    def add_start(self, pictures: Sequence[Picture], start: str) -> None:
        """Steps of one start after what there is; `start` goes before the names of its processes."""
        origin_s = pictures[0]["otherData"]["begin_s"]
        begin_us = self._end_us
        self._num_starts += 1
        for picture in pictures:
            self._add(picture, start, begin_us + microseconds(picture["otherData"]["begin_s"] - origin_s))

    def in_order(self) -> list[Event]:
        """All of them."""
        return sorted([*self._names.values(), *self._timed], key=place)

    def _add(self, picture: Picture, start: str, shift_us: float) -> None:
        events = picture["traceEvents"]
        processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        for event in events:
            process = (self._num_starts, event["pid"], processes.get(event["pid"], ""))
            pid, tid = self._pids.setdefault(process, len(self._pids) + 1), event["tid"]
            if (event["pid"], tid) in lanes:
                tid = self._tids.setdefault((pid, lanes[event["pid"], tid]), len(self._tids) + 1)
            placed = {**event, "pid": pid, "tid": tid}
            if "ts" in event:
                placed["ts"] = round(event["ts"] + shift_us, 3)
                self._timed.append(placed)
                self._end_us = max(self._end_us, placed["ts"] + event.get("dur", 0.0))
            else:
                self._names.setdefault((event["name"], pid, tid), _named(placed, start))


def _named(event: Event, start: str) -> Event:
    """The name of a process with its start, and its place by its number here."""
    if event["name"] == "process_name":
        return {**event, "args": {"name": start + event["args"]["name"]}}
    return {**event, "args": {"sort_index": event["pid"]}} if event["name"] == "process_sort_index" else event
