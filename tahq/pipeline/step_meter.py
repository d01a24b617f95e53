"""Measures each step for the worker's reports: the traffic of its links and, in traced steps, every span.

A step begins at the COMMIT before it (or at START, or after an evaluation) and is reported once. Later
traffic counts in the next step. Frames of evaluations occupy the wire but belong to no step. The trace of a step has
all of its frames that are acknowledged by the end of the next step.

A frame has the same name at both ends (`frame_name`), so that a trace can draw an arrow from its encoding over its time
on the wire to its decoding.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tahq.comm.control.messages import Traced
from tahq.comm.link.frame import Direction, LogicalId, Purpose
from tahq.comm.link.wire_time import Passage, PieceTimes, WireClock, busy_seconds
from tahq.comm.transport import LinkStats
from tahq.pipeline.boundary import CARRIED
from tahq.pipeline.spans import Span, Stopwatch

PART = 2048
"""Spans per message, some 200 kB, so that no heartbeat waits long behind one."""
_OTHERS = {Purpose.TIE: "tied gradient", Purpose.SUM: "summed gradients", Purpose.WEIGHTS: "lent weights"}
_WAITS = {"memory": "room", "codec": "the codec"}


class TraceRow(NamedTuple):
    """One span of a trace, with the columns of `Traced`."""

    lane: str
    category: str
    name: str
    frame: str
    begin_s: float
    end_s: float
    nbytes: int = 0
    queued_s: float = 0.0


@dataclass(slots=True)
class _TracedStep:
    """The records of a traced step; it has no spans until it is committed."""

    spans: list[TraceRow] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)
    sent_nbytes: int = 0


class StepMeter:
    """Measures one worker's steps.

    `peers` are the stages at the other end of each link; `is_traced` says whether the spans of a step, from 0, are
    kept; `clock` is that of the stopwatch and the links.
    """

    def __init__(
        self,
        stopwatch: Stopwatch,
        stage: int,
        peers: Mapping[int, int],
        is_traced: Callable[[int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stopwatch = stopwatch
        self._stage = stage
        self._is_traced = is_traced
        self._clock = clock
        self._wire = WireClock()
        self._lanes = {
            (link, direction): f"link {stage}→{peer} {CARRIED[direction]}"
            for link, peer in peers.items()
            for direction in Direction
        }
        self._rows: dict[tuple[int, Direction], list[float]] = {}
        self._round_trip_s: dict[int, float] = {}
        """The shortest that a heartbeat took there and its answer back, by link."""
        self._step = -1
        self._traced: dict[int, _TracedStep] = {}
        """Traced steps that have not been reported."""
        self._begin_s = clock()

    @property
    def active_s(self) -> float:
        """Seconds since the step began."""
        return self._clock() - self._begin_s

    def begin(self, step: int) -> None:
        """The step begins now; measurements since the last report are dropped."""
        self._stopwatch.take()
        self._stopwatch.is_recording = self._is_traced(step)
        self._stopwatch.take_spans()
        self._step = step
        if self._stopwatch.is_recording:
            self._traced[step] = _TracedStep()
        self._begin_s = self._clock()

    def note(self, stats: Sequence[LinkStats]) -> None:
        """Count the links' traffic since the last call."""
        pieces: dict[int, list[PieceTimes]] = {}
        for entry in stats:
            pieces.setdefault(entry.link, []).extend(entry.pieces)
            for beat in entry.heartbeats:
                known_s = self._round_trip_s.get(entry.link, math.inf)
                self._round_trip_s[entry.link] = min(known_s, beat.answered_s - beat.left_s)
        passed = self._wire.passages(pieces, {entry.link: entry.heartbeats for entry in stats})
        passages = [passage for passage in passed if not passage.piece.id.is_evaluation]
        wire_s = busy_seconds(passages)
        for entry in stats:
            key = (entry.link, entry.direction)
            counts = (entry.frames, entry.payload_bytes, entry.wire_bytes, entry.elements, entry.busy_s)
            figures = (*counts, entry.sending_s, wire_s.get(key, 0.0))
            row = self._rows.setdefault(key, [0.0] * len(figures))
            self._rows[key] = [a + b for a, b in zip(row, figures, strict=True)]
        for passage in passages:
            if passage.piece.id.step in self._traced:
                self._traced[passage.piece.id.step].passages.append(passage)
        if self._step in self._traced:
            self._traced[self._step].sent_nbytes += sum(entry.payload_bytes for entry in stats)

    def take_rows(self) -> list[list[float]]:
        """Traffic counted since the last call, in the form of `Prepare.links`."""
        rows, self._rows = self._rows, {}
        return [
            [float(link), float(direction), *row, self._round_trip_s.get(link, 0.0)]
            for (link, direction), row in rows.items()
            if row[0]
        ]

    def trace(self, committed: int | None) -> list[Traced]:
        """The messages for traced steps when a step is committed: for all before it, and for it if it is complete.

        A step is complete when everything that it sent is acknowledged, so that its time on the wire is known. None:
        for all that are left, after the last step.
        """
        if committed is not None and committed in self._traced:
            self._traced[committed].spans = list(_span_rows(self._stopwatch.take_spans()))
        parts: list[Traced] = []
        for step, traced in list(self._traced.items()):
            known_nbytes = sum(passage.piece.nbytes for passage in traced.passages)
            if committed is None or step < committed or known_nbytes >= traced.sent_nbytes:
                del self._traced[step]
                rows = [*traced.spans, *_sending_rows(traced.passages, self._lanes)]
                parts += trace_parts(step, self._stage, rows)
        return parts


def frame_name(id: LogicalId) -> str:
    """``train step 9 cut 1 forward 3``, with steps counted from 1."""
    purpose, direction = id.purpose.name.lower(), id.direction.name.lower()
    return f"{purpose} step {id.step + 1} cut {id.cut} {direction} {id.micro_batch}"


def _span_rows(spans: Iterable[Span]) -> Iterator[TraceRow]:
    """The rows of computing, coding and waiting."""
    for span in spans:
        category, _, sender = span.activity.partition(":")
        frame = frame_name(span.detail) if isinstance(span.detail, LogicalId) else ""
        yield TraceRow(span.lane, category, _name(category, sender, span.detail), frame, span.begin_s, span.end_s)


def _name(category: str, sender: str, detail: Any) -> str:
    if category == "wait":
        category = f"wait for stage {sender}" if sender.isdecimal() else f"wait for {_WAITS.get(sender, sender)}"
    if isinstance(detail, LogicalId):
        what = _OTHERS.get(detail.purpose, CARRIED[detail.direction])
        return f"{category}: {what} {detail.micro_batch}"
    return category if detail is None else str(detail)


def _sending_rows(passages: Iterable[Passage], lanes: Mapping[tuple[int, Direction], str]) -> list[TraceRow]:
    """When each frame was on the wire, one row per run of its pieces; `lanes` are names by link and direction."""
    rows: list[TraceRow] = []
    for passage in passages:
        piece, lane, frame = passage.piece, lanes[passage.key], frame_name(passage.piece.id)
        if rows and (rows[-1].frame, rows[-1].lane) == (frame, lane):
            rows[-1] = rows[-1]._replace(end_s=passage.end_s, nbytes=rows[-1].nbytes + piece.nbytes)
        else:
            name = f"{CARRIED[piece.id.direction]} {piece.id.micro_batch}"
            queued_s = max(0.0, passage.begin_s - piece.queued_s)
            rows.append(TraceRow(lane, "send", name, frame, passage.begin_s, passage.end_s, piece.nbytes, queued_s))
    return rows


def trace_parts(step: int, stage: int, rows: Sequence[TraceRow]) -> list[Traced]:
    """The messages that carry these rows; at least one, because the coordinator waits for it."""
    chunks = [rows[start : start + PART] for start in range(0, len(rows), PART)] or [[]]
    tables = [[list(column) for column in zip(*chunk, strict=True)] or [[]] * len(TraceRow._fields) for chunk in chunks]
    return [Traced(step, stage, part, len(tables), *columns) for part, columns in enumerate(tables)]
