"""How a stage spends its time: seconds per activity in every step, single spans in traced steps.

Both come from the same measurements, so they agree. Each thread that measures has a lane; the thread that takes the
totals is the compute lane, the others run beside it. Activities on one lane do not overlap.

Activities: `data`, `forward`, `backward` (or `input_gradient` and `weight_gradient`), `encode`, `decode`,
`wait:N` (for a frame from stage N), `wait:codec` (for encoding or decoding beside), `wait:memory`, `norms`,
`optimizer`, `commit` (for the coordinator's decision), `snapshot`, `guard` (measuring a codec's error). In totals, time
on other lanes is called `beside:encode` and so on.

On a GPU the host only queues work, so computing and coding are timed by events in the device's queue, which are read
when totals are taken: nothing inside a step waits for the device. Forward and backward then overlap with the host's
work, and totals may add up to more than the step.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

BESIDE = "beside:"
"""Prefix of totals of other lanes than the compute lane."""
COMPUTE_LANE = "compute"
MAX_SPANS = 100_000
"""Spans kept per lane and step."""
DEVICE_ACTIVITIES = frozenset({"forward", "backward", "input_gradient", "weight_gradient", "encode", "decode"})
"""Activities that only queue work if there is a device."""


@dataclass(frozen=True, slots=True)
class Span:
    """One activity, once: seconds of `time.monotonic`. `detail` is an action or a logical id."""

    activity: str
    lane: str
    begin_s: float
    end_s: float
    detail: Any = None


class CudaMarks:
    """Events in the current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        """An event behind everything queued so far; returns at once."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def times_s(self, marks: Sequence[Any]) -> list[float]:
        """When each of a thread's events, in order, was reached, by `time.monotonic`; waits for the last.

        Counted back from an event that has just been waited for, the only moment that both clocks know; on a stream of
        its own, so that it does not wait for what was queued after the marks.
        """
        marks[-1].synchronize()  # earlier ones are on the same stream, so they are done
        anchor = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        anchor.record(self._beside)
        anchor.synchronize()
        now_s = time.monotonic()
        return [now_s - mark.elapsed_time(anchor) / 1000 for mark in marks]


class ActivityTimer:
    """Adds up the time spent inside it. A plain class: entering a generator's context costs ten times as much."""

    __slots__ = ("_activity", "_begin_s", "_lane", "detail", "seconds", "taken_s")

    def __init__(self, lane: "_Lane", activity: str) -> None:
        self._lane = lane
        self._activity = activity
        self.seconds = 0.0
        self.taken_s = 0.0
        self.detail: Any = None

    def __enter__(self) -> None:
        self._begin_s = time.monotonic()

    def __exit__(self, *exc_info: object) -> None:
        self.add(self._begin_s, time.monotonic(), self.detail)

    def add(self, begin_s: float, end_s: float, detail: Any) -> None:
        """Count a measured span."""
        self.seconds += end_s - begin_s
        if self._lane.stopwatch.is_recording and end_s > begin_s and len(self._lane.spans) < MAX_SPANS:
            self._lane.spans.append((self._activity, begin_s, end_s, detail))

    def read_marks(self) -> None:
        """Nothing is to be read: the host's clock has measured it."""

    def take(self) -> float:
        """Seconds since the last call; time that is added meanwhile is not lost."""
        before_s, self.taken_s = self.taken_s, self.seconds
        return self.taken_s - before_s


class MarkedTimer(ActivityTimer):
    """A timer for work that a device does later; its time is known once the marks are read."""

    __slots__ = ("_begin", "_marks", "_waiting")

    def __init__(self, lane: "_Lane", activity: str, marks: CudaMarks) -> None:
        super().__init__(lane, activity)
        self._marks = marks
        self._waiting: list[tuple[Any, Any, Any]] = []

    def __enter__(self) -> None:
        self._begin = self._marks.mark()

    def __exit__(self, *exc_info: object) -> None:
        self._waiting.append((self._begin, self._marks.mark(), self.detail))

    def read_marks(self) -> None:
        """Wait for the device, and count its times."""
        waiting = self._waiting[:]
        del self._waiting[: len(waiting)]  # its thread may have appended meanwhile
        if waiting:
            times = self._marks.times_s([mark for begin, end, _ in waiting for mark in (begin, end)])
            for (_, _, detail), begin_s, end_s in zip(waiting, times[::2], times[1::2], strict=True):
                self.add(begin_s, end_s, detail)


class _Lane:
    """One thread's timers and spans; only that thread writes them."""

    def __init__(self, stopwatch: "Stopwatch", name: str) -> None:
        self.stopwatch = stopwatch
        self.name = name
        self.timers: dict[str, ActivityTimer] = {}
        self.spans: list[tuple[str, float, float, Any]] = []

    def timer(self, activity: str) -> ActivityTimer:
        timer = self.timers.get(activity)
        if timer is None:
            marks = self.stopwatch.marks if activity in DEVICE_ACTIVITIES else None
            timer = MarkedTimer(self, activity, marks) if marks is not None else ActivityTimer(self, activity)
            self.timers[activity] = timer
        return timer


class Stopwatch:
    """Measures the threads of a stage; `marks` time the device's work, None: work is done when the call returns."""

    def __init__(self, marks: CudaMarks | None = None) -> None:
        self.marks = marks
        self.is_recording = False
        """Whether single spans are kept; totals always are."""
        self._lanes: list[_Lane] = []
        self._own = threading.local()

    def measure(self, activity: str, detail: Any = None) -> ActivityTimer:
        """A context that adds its duration to `activity`; must not be entered within itself.

        `detail` is an action or a logical id; it becomes text only when a trace is written.
        """
        timer = self._lane().timer(activity)
        timer.detail = detail
        return timer

    def add(self, activity: str, begin_s: float, end_s: float, detail: Any = None) -> None:
        """Count a span that was measured elsewhere, by `time.monotonic`, on the calling thread's lane."""
        self._lane().timer(activity).add(begin_s, end_s, detail)

    def read_marks(self) -> None:
        """Wait for the device's marks so far, and count their times; called by the compute thread."""
        for lane in list(self._lanes):
            for timer in list(lane.timers.values()):
                timer.read_marks()

    def take(self) -> dict[str, float]:
        """Seconds per activity since the last call; called by the compute thread. Waits for the device."""
        self.read_marks()
        mine, totals = self._lane(), dict[str, float]()
        for lane in [mine, *(lane for lane in self._lanes if lane is not mine)]:
            prefix = "" if lane is mine else BESIDE
            for activity, timer in list(lane.timers.items()):
                seconds = timer.take()
                if seconds > 0:
                    totals[prefix + activity] = totals.get(prefix + activity, 0.0) + seconds
        return totals

    def take_spans(self) -> list[Span]:
        """Spans kept since the last call, lane by lane; called by the compute thread, after `take`."""
        mine, result = self._lane(), []
        for lane in list(self._lanes):
            name = COMPUTE_LANE if lane is mine else lane.name
            spans = lane.spans[:]
            del lane.spans[: len(spans)]
            result += [Span(activity, name, begin_s, end_s, detail) for activity, begin_s, end_s, detail in spans]
        return result

    def _lane(self) -> _Lane:
        lane: _Lane | None = getattr(self._own, "lane", None)
        if lane is None:
            lane = self._own.lane = _Lane(self, threading.current_thread().name.removeprefix("tahq-"))
            self._lanes.append(lane)
        return lane
