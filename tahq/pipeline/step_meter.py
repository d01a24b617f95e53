"""What a worker reports of its steps: what its links did, and in traced steps every span.

A step begins with the COMMIT before it (or START, or the end of an evaluation) and is prepared once; what the
links still send after that counts in the next step, where the one before has left the same. Frames of evaluations have
the wire, which others wait for meanwhile, and are in no step. A picture has the frames of its step, whenever they are
acknowledged, but is not waited for longer than until the end of the next step.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tahq.comm.control.messages import Traced
from tahq.comm.link.frame import Direction
from tahq.comm.link.wire_time import Passage, PieceTimes, WireClock, busy_seconds
from tahq.comm.transport import LinkStats
from tahq.pipeline.spans import Stopwatch
from tahq.pipeline.trace_parts import CARRIES, Row, sending_rows, span_rows, trace_parts

_Key = tuple[int, Direction]


@dataclass(slots=True)
class _Picture:
    """What is kept of a traced step; `spans` are None until it is committed."""

    spans: list[Row] | None = None
    passages: list[Passage] = field(default_factory=list)
    sent_nbytes: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether it is known of all that was sent when it had the wire."""
        return sum(passage.piece.nbytes for passage in self.passages) >= self.sent_nbytes


class StepMeter:
    """One worker's, step after step.

    Args:
        stopwatch: that the stage measures with.
        stage: whose.
        peers: stage at the other end of each link.
        is_traced: whether every span of a step, from 0, is to be kept.
        clock: seconds; that of the stopwatch and of the links.
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
            (link, direction): f"link {stage}→{peer} {CARRIES[direction]}"
            for link, peer in peers.items()
            for direction in Direction
        }
        self._rows: dict[_Key, list[float]] = {}
        self._step = -1
        self._pictures: dict[int, _Picture] = {}
        """Of traced steps of which nobody was told yet."""
        self._begin_s = clock()

    @property
    def active_s(self) -> float:
        """Since the step began."""
        return self._clock() - self._begin_s

    def begin(self, step: int) -> None:
        """The step begins now; what was measured since the last one was prepared is forgotten."""
        self._stopwatch.take()
        self._stopwatch.is_recording = self._is_traced(step)
        self._stopwatch.take_spans()
        self._step = step
        if self._stopwatch.is_recording:
            self._pictures[step] = _Picture()
        self._begin_s = self._clock()

    def note(self, stats: Iterable[LinkStats]) -> None:
        """Count what the links have done since the last call."""
        stats = list(stats)
        pieces: dict[int, list[PieceTimes]] = {}
        for entry in stats:
            pieces.setdefault(entry.link, []).extend(entry.pieces)
        passed = self._wire.passages(pieces, {entry.link: entry.heartbeats for entry in stats})
        passages = [passage for passage in passed if not passage.piece.id.is_evaluation]
        wire_s = busy_seconds(passages)
        for entry in stats:
            row = self._rows.setdefault((entry.link, entry.direction), [0.0] * 7)
            figures = (entry.frames, entry.payload_bytes, entry.wire_bytes, entry.elements, entry.busy_s)
            times = (entry.sending_s, wire_s.get((entry.link, entry.direction), 0.0))
            self._rows[entry.link, entry.direction] = [a + b for a, b in zip(row, (*figures, *times), strict=True)]
        self._draw(passages, sum(entry.payload_bytes for entry in stats))

    def take_rows(self) -> list[list[float]]:
        """What was counted since the last call, as `Prepare.links` has it."""
        rows, self._rows = self._rows, {}
        return [[float(link), float(direction), *row] for (link, direction), row in rows.items() if row[0]]

    def _draw(self, passages: Iterable[Passage], sent_nbytes: int) -> None:
        for passage in passages:
            if passage.piece.id.step in self._pictures:
                self._pictures[passage.piece.id.step].passages.append(passage)
        if self._step in self._pictures:
            self._pictures[self._step].sent_nbytes += sent_nbytes

    def trace(self, step: int) -> list[Traced]:
        """The messages that tell of traced steps, this one being committed now.

        They tell of it if all that it sent has been acknowledged, and of the steps before it in any case.
        """
        if step in self._pictures:
            self._pictures[step].spans = list(span_rows(self._stopwatch.take_spans()))
        ready = [n for n, picture in self._pictures.items() if n < step or picture.is_whole]
        return [part for n in ready for part in self._parts(n)]

    def trace_rest(self) -> list[Traced]:
        """The messages that tell of the rest, as far as it is known: after the last step nothing more will be noted."""
        return [part for step in list(self._pictures) for part in self._parts(step)]

    def _parts(self, step: int) -> list[Traced]:
        picture = self._pictures.pop(step)
        rows = [*(picture.spans or ()), *sending_rows(picture.passages, self._lanes)]
        return trace_parts(step, self._stage, rows)
