"""The state of a run so far, from which table, lines and summary are made.

Keeps totals, one number per step and the last few records, never the records of all steps.
"""

from collections import deque
from dataclasses import replace
from statistics import median

from tahq.coordinator.observer import (
    LinkRecord,
    RunEnd,
    RunHeader,
    RunObserver,
    SnapshotRecord,
    StageStatus,
    StepRecord,
    Traffic,
    ValidationRecord,
)
from tahq.observe.bottleneck import Diagnosis, diagnose
from tahq.observe.codec_advice import WireFacts
from tahq.observe.metrics_reader import LINK_COUNTS, LINK_SECONDS, median_step

RECENT_STEPS = 20
"""Steps that the remaining time, and what a step waits for, are estimated from."""

LinkKey = tuple[int, int, int]
"""Link, sender, receiver: one direction of one link."""


class RunHistory(RunObserver):
    """Keeps what the run has said of itself.

    Args:
        facts: of its wire, to say which codec would be fast enough; None: not known.
    """

    def __init__(self, facts: WireFacts | None = None) -> None:
        self._facts = facts
        self._recent: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        self.header: RunHeader | None = None
        self.phase = ""
        self.missing = ""
        self.total_steps = 0
        self.stages: dict[int, StageStatus] = {}
        self.last: StepRecord | None = None
        self.losses: list[float] = []
        self.step_times_s: list[float] = []
        self.tokens_per_s: list[float] = []
        self.num_skipped = 0
        self.links: dict[LinkKey, LinkRecord] = {}
        """Sums over all steps of this start of the run."""
        self.validation: ValidationRecord | None = None
        self.snapshot: SnapshotRecord | None = None
        self.end: RunEnd | None = None

    def opened(self, header: RunHeader) -> None:
        """Note the header."""
        self.header = header

    def phase_changed(self, phase: str, detail: str) -> None:
        """Note where the run stands."""
        self.phase, self.missing = phase, detail

    def stage_changed(self, status: StageStatus) -> None:
        """Note what a stage does."""
        self.stages[status.stage] = status

    def stage_left(self, stage: int) -> None:
        """Forget a stage's worker."""
        self.stages.pop(stage, None)

    def planned(self, start_step: int, total_steps: int) -> None:
        """Note how long the run is."""
        self.total_steps = total_steps

    def step_committed(self, record: StepRecord) -> None:
        """Add a step to the totals."""
        self.last = record
        self._recent.append(record)
        self.losses.append(record.loss)
        self.step_times_s.append(record.step_time_s)
        self.tokens_per_s.append(record.tokens_per_s)
        self.num_skipped += record.skipped
        for link in record.links:
            key = (link.link, link.sender, link.receiver)
            self.links[key] = _sum(self.links[key], link) if key in self.links else link

    def validated(self, record: ValidationRecord) -> None:
        """Note the newest validation loss."""
        self.validation = record

    def snapshot_written(self, record: SnapshotRecord) -> None:
        """Note the newest snapshot that is complete."""
        if not record.error:
            self.snapshot = record

    def ended(self, end: RunEnd) -> None:
        """Note how it ended."""
        self.end = end

    def diagnosis(self) -> Diagnosis | None:
        """What recent steps waited for, by the medians of their parts; None: not known."""
        return diagnose(median_step(self._recent), self._facts) if self._recent else None

    @property
    def remaining_s(self) -> float | None:
        """Time until the last step: steps left times the median of the recent ones; None: not known yet."""
        if self.last is None:
            return None
        return (self.total_steps - self.last.step) * median(self.step_times_s[-RECENT_STEPS:])

    def traffic(self, direction: Traffic | None = None) -> LinkRecord:
        """Sum over all links, of one direction or of both; link, sender and receiver then mean nothing."""
        total = LinkRecord(-1, -1, -1, direction or "activations", 0, 0, 0, 0, 0.0)
        for link in self.links.values():
            if direction in (None, link.direction):
                total = _sum(total, link)
        return total


def _sum(a: LinkRecord, b: LinkRecord) -> LinkRecord:
    return replace(a, **{name: getattr(a, name) + getattr(b, name) for name in (*LINK_COUNTS, *LINK_SECONDS)})
