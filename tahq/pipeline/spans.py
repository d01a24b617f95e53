"""What a stage's time was spent on: seconds by activity in every step, single spans in a step that is traced.

Both come from the same measurements, so they agree. Each thread that measures has a lane of its own; the lane of the
thread that takes the totals is the one that computes, the others run beside it.

Activities: `data`, `forward`, `backward` (or `input_gradient` and `weight_gradient`), `encode`, `decode`,
`wait:N` (for a frame from stage N), `wait:codec` (for a lane beside to have coded), `wait:memory`, `norms`,
`optimizer`, `commit` (for the coordinator's decision), `snapshot`, `guard` (measuring a codec's error). In totals, what
ran on other lanes is called `beside:encode` and so on.
Activities do not overlap on one lane. What the compute lane does in none of them is other work.

On a GPU the host only queues the work of computing and coding, so their times are taken by marks in the device's queue
(`DeviceMarks`), which are read when the totals are: nothing inside the step waits for the device. There,
forward and backward overlap with what the host does meanwhile, and the totals may add up to more than the step.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

BESIDE = "beside:"
"""Begins the name of a total of other lanes than the one that computes."""
COMPUTE_LANE = "compute"
MAX_SPANS = 100_000
"""Of one lane in one step; more are not kept."""
DEVICE_ACTIVITIES = frozenset({"forward", "backward", "input_gradient", "weight_gradient", "encode", "decode"})
"""What only queues work where there is a device."""


@dataclass(frozen=True, slots=True)
class Span:
    """One activity, once: seconds of `time.monotonic`. `detail` is an action or a logical id."""

    activity: str
    lane: str
    begin_s: float
    end_s: float
    detail: Any = None


class DeviceMarks(Protocol):
    """Points in the work that a device has been given."""

    def mark(self) -> Any:
        """A point behind everything queued so far; returns at once."""

    def times_s(self, marks: Sequence[Any]) -> list[float]:
        """When each of a thread's, in the order of marking, was reached, by `time.monotonic`; waits for the last."""


class HostMarks:
    """For a device that has done what it was given when the call returns: the CPU."""

    def mark(self) -> float:
        """Now."""
        return time.monotonic()

    def times_s(self, marks: Sequence[float]) -> list[float]:
        """The marks themselves."""
        return list(marks)


class CudaMarks:
    """Events in the current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """An event behind everything queued so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def times_s(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Counted back from an event that has just been waited for, the one moment that both clocks know."""
        marks[-1].synchronize()  # of another stream, maybe; those before are of the same one, and over
        anchor = self.mark()
        anchor.synchronize()
        now_s = time.monotonic()
        return [now_s - mark.elapsed_time(anchor) / 1000 for mark in marks]


def marks_of(device: torch.device | None) -> DeviceMarks | None:
    """What times the work of this device; None: the host's clock does."""
    return CudaMarks(device) if device is not None and device.type == "cuda" else None


class Timer:
    """Adds up the time spent inside it. A plain class: entering a generator's context costs ten times as much."""

    __slots__ = ("_activity", "_begin_s", "_lane", "detail", "seconds")

    def __init__(self, lane: "_Lane", activity: str) -> None:
        self._lane = lane
        self._activity = activity
        self.seconds = 0.0
        self.detail: Any = None

    def __enter__(self) -> None:
        self._begin_s = time.monotonic()

    def __exit__(self, *exc_info: object) -> None:
        end_s = time.monotonic()
        self.seconds += end_s - self._begin_s
        if self._lane.stopwatch.is_recording:
            self._lane.keep(self._activity, self._begin_s, end_s, self.detail)


class MarkedTimer(Timer):
    """As `Timer`, for work that a device does later; `seconds` is known once the marks are read."""

    __slots__ = ("_begin", "_marks", "_waiting")

    def __init__(self, lane: "_Lane", activity: str, marks: DeviceMarks) -> None:
        super().__init__(lane, activity)
        self._marks = marks
        self._waiting: list[tuple[Any, Any, Any]] = []

    def __enter__(self) -> None:
        self._begin = self._marks.mark()

    def __exit__(self, *exc_info: object) -> None:
        self._waiting.append((self._begin, self._marks.mark(), self.detail))

    def read(self) -> None:
        """Wait for the device, and add what it took."""
        waiting = self._waiting[:]
        del self._waiting[: len(waiting)]  # its thread may have added to it meanwhile
        if not waiting:
            return
        times = self._marks.times_s([mark for begin, end, _ in waiting for mark in (begin, end)])
        for (_, _, detail), begin_s, end_s in zip(waiting, times[::2], times[1::2], strict=True):
            self.seconds += end_s - begin_s
            if self._lane.stopwatch.is_recording:
                self._lane.keep(self._activity, begin_s, end_s, detail)


class _Lane:
    """One thread's timers and spans; it alone writes them."""

    def __init__(self, stopwatch: "Stopwatch", name: str) -> None:
        self.stopwatch = stopwatch
        self.name = name
        self.timers: dict[str, Timer] = {}
        self.spans: list[tuple[str, float, float, Any]] = []
        self.taken: dict[str, float] = {}

    def keep(self, activity: str, begin_s: float, end_s: float, detail: Any) -> None:
        if len(self.spans) < MAX_SPANS:
            self.spans.append((activity, begin_s, end_s, detail))

    def timer(self, activity: str) -> Timer:
        timer = self.timers.get(activity)
        if timer is None:
            marks = self.stopwatch.marks if activity in DEVICE_ACTIVITIES else None
            timer = MarkedTimer(self, activity, marks) if marks is not None else Timer(self, activity)
            self.timers[activity] = timer
        return timer

    def take(self) -> dict[str, float]:
        """Seconds since the last call; a timer that runs on meanwhile loses nothing."""
        seconds: dict[str, float] = {}
        for activity, timer in list(self.timers.items()):
            if isinstance(timer, MarkedTimer):
                timer.read()
            total_s = timer.seconds
            seconds[activity] = total_s - self.taken.get(activity, 0.0)
            self.taken[activity] = total_s
        return {activity: spent_s for activity, spent_s in seconds.items() if spent_s > 0}


class Stopwatch:
    """Measures what the threads of a stage do.

    Args:
        marks: what times the work of the device; None: work is done when the call returns.
    """

    def __init__(self, marks: DeviceMarks | None = None) -> None:
        self.marks = marks
        self.is_recording = False
        """Whether single spans are kept; totals always are."""
        self._lanes: list[_Lane] = []
        self._own = threading.local()

    def measure(self, activity: str, detail: Any = None) -> Timer:
        """A context that adds the time it takes to `activity`; not to be entered within itself.

        Args:
            activity: one of those above.
            detail: what was computed or moved: an action, a logical id; made text only when a trace is written.
        """
        timer = self._lane().timer(activity)
        timer.detail = detail
        return timer

    def add(self, activity: str, begin_s: float, end_s: float, detail: Any = None) -> None:
        """Count what was measured otherwise, by `time.monotonic`, for the lane of the calling thread."""
        lane = self._lane()
        lane.timer(activity).seconds += end_s - begin_s
        if self.is_recording and end_s > begin_s:
            lane.keep(activity, begin_s, end_s, detail)

    def take(self) -> dict[str, float]:
        """Seconds by activity since the last call; called by the thread that computes.

        Reads the device's marks, and so waits for it.
        """
        mine = self._lane()
        totals = mine.take()
        for lane in list(self._lanes):
            if lane is not mine:
                for activity, seconds in lane.take().items():
                    totals[BESIDE + activity] = totals.get(BESIDE + activity, 0.0) + seconds
        return totals

    def take_spans(self) -> list[Span]:
        """Spans kept since the last call, lane by lane; called by the thread that computes, after `take`."""
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
