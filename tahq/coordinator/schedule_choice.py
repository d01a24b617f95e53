"""The schedule and the depths in force, which change between steps where `pipeline.schedule` is `auto`.

Neither changes the arithmetic: gradients are added in the same order under every schedule and depth. A run begins with
the configured ones. When a few steps have been measured, a search (`Choose`, in a thread, so that no COMMIT waits for
it) proposes others; from the next COMMIT on all stages use them. A change that makes steps longer is taken back.
The search is repeated when steps take another time than those it was made from, and ever more seldom besides.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from statistics import median
from typing import Any, NamedTuple

from tahq.comm.control.messages import Hello
from tahq.coordinator.observer import StepRecord
from tahq.pipeline.schedule.generators import GENERATORS

log = logging.getLogger(__name__)

SAVED = "schedule"
"""The key in a checkpoint's state of codecs and schedule."""
IGNORED_STEPS = 1
"""After a start or a change: kernels and TCP are cold, and the pipeline had other depths."""
MEASURED_STEPS = 3
"""Whose medians a search is given."""
SEARCH_AFTER, SEARCH_EVERY = 10, 100
"""Steps from the first search to the second, and from one to the next in the end: the pauses double, as the first
searches may have been given steps that something else on the machine had slowed down."""
OTHER_TIME = 0.1
"""Relative change of the steps' time that causes a search."""
LEAST_GAIN = 0.02
"""Predicted relative gain of a change."""
MEMORY_SHARE = 0.9
"""Of what is free; estimates leave out fragmentation."""
NO_GAIN = 0.02
"""Relative loss of measured time from which on a change is taken back."""


class ScheduleChoice(NamedTuple):
    """A schedule and, by stage, the most micro-batches in flight; none: the schedule's own."""

    schedule: str
    depths: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.schedule}, in flight {' '.join(map(str, self.depths)) or 'as usual'}"


class Proposal(NamedTuple):
    """The best schedule that a search has found, with the predicted seconds of a step under it and the present one."""

    choice: ScheduleChoice
    step_s: float
    present_s: float


Choose = Callable[[Sequence[StepRecord], ScheduleChoice, Sequence[int]], Proposal]
"""(steps, what is in force, bytes of memory by stage or 0: unknown) -> the best schedule and depths."""


class ScheduleChanges:
    """What is in force from step to step.

    Args:
        choose: None: nothing ever changes.
        configured: what a run begins with.
        saved: what `saved` has returned; {}: nothing.
        executor: runs `choose`.
        memory: bytes that each stage may use; 0: unknown.
        are_depths_set: whether the configured depths stay.
    """

    def __init__(
        self,
        choose: Choose | None,
        configured: ScheduleChoice,
        saved: Mapping[str, Any],
        executor: Executor,
        memory: Sequence[int],
        *,
        are_depths_set: bool = False,
    ) -> None:
        self._choose, self._executor, self._memory = choose, executor, memory
        self._may_change = choose is not None
        self.present = configured
        if self._may_change:
            fixed = configured.depths if are_depths_set else ()
            self.present = _restored(saved, len(memory), fixed) or configured
        self._search: Future[Proposal] | None = None
        self._steps: list[StepRecord] = []
        self._ignored = IGNORED_STEPS
        self._searched_s: float | None = None
        """Seconds of the steps that the last search was made from; None: there was none."""
        self._since_search = 0
        self._pause = SEARCH_AFTER
        self._before: tuple[ScheduleChoice, float] | None = None
        """What was in force before the last change, and its seconds, until the change has proved right."""
        self._failed: set[ScheduleChoice] = set()

    @property
    def told(self) -> ScheduleChoice | None:
        """What START says; None: nothing, since what is configured stays."""
        return self.present if self._may_change else None

    def saved(self) -> dict[str, Any]:
        """What is in force, in plain values, for a checkpoint."""
        return {SAVED: [self.present.schedule, *self.present.depths]} if self._may_change else {}

    def decide(self, record: StepRecord) -> str:
        """Take a step that is about to be committed; why there is a change from the next one on, "": there is none."""
        if self._choose is None or record.step_time_s <= 0:
            return ""
        if self._ignored > 0:
            self._ignored -= 1
            return ""
        self._steps = [*self._steps, record][-MEASURED_STEPS:]
        self._since_search += 1
        if len(self._steps) < MEASURED_STEPS:
            return ""
        usual_s = median(step.step_time_s for step in self._steps)
        if self._before is not None:
            (former, before_s), self._before = self._before, None
            if usual_s > (1 + NO_GAIN) * before_s:
                self._failed.add(self.present)
                return self._change(former, f"steps took {usual_s:.3g} s, {before_s:.3g} s before")
        if self._search is not None:
            return self._take(usual_s)
        if self._is_due(usual_s):
            if self._searched_s is not None:
                self._pause = min(2 * self._pause, SEARCH_EVERY)
            self._since_search, self._searched_s = 0, usual_s
            self._search = self._executor.submit(self._choose, tuple(self._steps), self.present, self._memory)
        return ""

    def _is_due(self, usual_s: float) -> bool:
        if self._searched_s is None or self._since_search >= self._pause:
            return True
        is_other = abs(usual_s - self._searched_s) > OTHER_TIME * self._searched_s
        if is_other:
            self._failed.clear()
        return is_other

    def _take(self, usual_s: float) -> str:
        assert self._search is not None, "the caller checked"
        if not self._search.done():
            return ""
        search, self._search = self._search, None
        if (error := search.exception()) is not None:  # no reason to end a run
            log.warning("the search for a faster schedule failed; the present one stays", exc_info=error)
            self._choose = None
            return ""
        choice, step_s, present_s = search.result()
        if choice == self.present or choice in self._failed or step_s > (1 - LEAST_GAIN) * present_s:
            return ""
        former = self.present
        why = self._change(choice, f"steps of {step_s:.3g} s predicted, {present_s:.3g} s as before")
        self._before = former, usual_s
        return why

    def _change(self, choice: ScheduleChoice, why: str) -> str:
        log.info("%s -> %s: %s", self.present, choice, why)
        self.present, self._steps, self._ignored = choice, [], IGNORED_STEPS
        return f"{choice} ({why})"


def share_gpu(hellos: Sequence[tuple[str, Hello | None]]) -> bool:
    """Whether stages share a GPU, so that their times tell how they waited for it, and no search can use them."""
    places = [place for place in _places(hellos) if place[1].startswith("cuda")]
    return len(set(places)) < len(places)


def _places(hellos: Sequence[tuple[str, Hello | None]]) -> list[tuple[str, str]]:
    """Host and device by stage."""
    return [(host, hello.device if hello is not None else "") for host, hello in hellos]


def memory_by_stage(hellos: Sequence[tuple[str, Hello | None]]) -> list[int]:
    """Bytes that each stage may use, from (host, HELLO) by stage; 0: unknown.

    Stages on one device have equal shares of it. Each worker counts what it uses itself and what is free, so the least
    is taken.
    """
    places = _places(hellos)
    least = dict[tuple[str, str], int]()
    for place, (_, hello) in zip(places, hellos, strict=True):
        nbytes = hello.memory_nbytes if hello is not None else 0
        least[place] = min(least.get(place, nbytes), nbytes)
    return [int(MEMORY_SHARE * least[place]) // places.count(place) for place in places]


def _restored(saved: Mapping[str, Any], num_stages: int, fixed_depths: tuple[int, ...]) -> ScheduleChoice | None:
    """What a checkpoint keeps, if it fits this run, whose depths may be set; None: it does not."""
    match saved.get(SAVED):
        case [str(name), *depths] if name in GENERATORS and len(depths) in (0, num_stages):
            is_valid = all(isinstance(depth, int) and depth >= 1 for depth in depths)
            if is_valid and fixed_depths in ((), tuple(depths)):
                return ScheduleChoice(name, tuple(depths))
    return None
