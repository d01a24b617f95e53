"""What a worker reports of its steps: what its links did, and in traced steps every span.

A step begins with the COMMIT before it (or START, or the end of an evaluation) and is prepared once; what the
links still send after that counts in the next step, where the one before has left the same.
"""

import time
from collections.abc import Callable, Iterable, Mapping

from tahq.comm.control import Traced
from tahq.comm.frame import Direction
from tahq.comm.transport import LinkStats
from tahq.comm.wire_time import Passage, PieceTimes, WireClock, busy_seconds
from tahq.pipeline.spans import Stopwatch
from tahq.pipeline.trace_parts import CARRIES, sending_rows, span_rows, trace_parts

_Key = tuple[int, Direction]


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
        self._passages: list[Passage] = []
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
        self._passages.clear()
        self._begin_s = self._clock()

    def note(self, stats: Iterable[LinkStats]) -> None:
        """Count what the links have done since the last call."""
        stats = list(stats)
        pieces: dict[int, list[PieceTimes]] = {}
        for entry in stats:
            pieces.setdefault(entry.link, []).extend(entry.pieces)
        heartbeats_s = {entry.link: entry.round_trip_s for entry in stats}
        passages = self._wire.passages({link: sorted(sent, key=_acked) for link, sent in pieces.items()}, heartbeats_s)
        wire_s = busy_seconds(passages)
        for entry in stats:
            row = self._rows.setdefault((entry.link, entry.direction), [0.0] * 7)
            figures = (entry.frames, entry.payload_bytes, entry.wire_bytes, entry.elements, entry.busy_s)
            times = (entry.sending_s, wire_s.get((entry.link, entry.direction), 0.0))
            self._rows[entry.link, entry.direction] = [a + b for a, b in zip(row, (*figures, *times), strict=True)]
        if self._stopwatch.is_recording:
            self._passages += passages

    def take_rows(self) -> list[list[float]]:
        """What was counted since the last call, as `Prepare.links` has it."""
        rows, self._rows = self._rows, {}
        return [[float(link), float(direction), *row] for (link, direction), row in rows.items() if row[0]]

    def trace(self, step: int) -> list[Traced]:
        """The messages that tell of this step, if it is traced; to be asked for when it is committed."""
        if not self._stopwatch.is_recording:
            return []
        passages = [passage for passage in self._passages if passage.end_s > self._begin_s]
        spans = [*span_rows(self._stopwatch.take_spans()), *sending_rows(passages, self._lanes)]
        self._passages.clear()
        return trace_parts(step, self._stage, spans)


def _acked(piece: PieceTimes) -> float:
    return piece.acked_s
