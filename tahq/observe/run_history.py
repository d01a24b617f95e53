"""The state of a run so far, from which table and lines are made, and its summary.

Keeps totals, one number per step and the last few records, never the records of all steps.
"""

import json
from collections import Counter, deque
from dataclasses import replace
from statistics import fmean, median
from typing import get_args

from tahq.coordinator.observer import (
    LinkRecord,
    RunEnd,
    RunHeader,
    RunObserver,
    SamplesRecord,
    SnapshotRecord,
    StageStatus,
    StepRecord,
    Traffic,
    ValidationRecord,
)
from tahq.observe import figures
from tahq.observe.bottleneck import Advise, Diagnosis, diagnose, limit_and_advice
from tahq.observe.metrics import perplexity
from tahq.observe.metrics_reader import LINK_COUNTS, LINK_SECONDS, RECENT_STEPS, median_step
from tahq.units import format_size

AVERAGED_STEPS = 10
"""Steps whose mean loss stands for the start and the end of a run."""


class RunHistory(RunObserver):
    """Keeps what the run has reported; None of `advise`: the summary has no advice."""

    def __init__(self, advise: Advise | None = None) -> None:
        self._advise = advise
        self._recent: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        self.header: RunHeader | None = None
        self.phase = self.missing = ""
        self.total_steps = 0
        self.stages: dict[int, StageStatus] = {}
        self.last: StepRecord | None = None
        self.losses: dict[int, float] = {}
        """By step; those that are computed again replace the first ones."""
        self.skipped: dict[int, str] = {}
        """Why, by step."""
        self.step_times_s: list[float] = []
        self.tokens_per_s: list[float] = []
        self.links: dict[tuple[int, int, int], LinkRecord] = {}
        """By link, sender and receiver: sums over all steps of this start of the run."""
        self.validation: ValidationRecord | None = None
        self.best_step = 0
        """Steps behind the best checkpoint; 0: this start of the run has written none."""

    def opened(self, header: RunHeader) -> None:
        """Keep the header."""
        self.header = header

    def phase_changed(self, phase: str, detail: str) -> None:
        """Keep the phase and what it waits for."""
        self.phase, self.missing = phase, detail

    def stage_changed(self, status: StageStatus) -> None:
        """Keep a stage's activity."""
        self.stages[status.stage] = status

    def stage_left(self, stage: int) -> None:
        """Forget a stage's worker."""
        self.stages.pop(stage, None)

    def planned(self, start_step: int, total_steps: int) -> None:
        """Keep the length of the run."""
        self.total_steps = total_steps

    def step_committed(self, record: StepRecord) -> None:
        """Add a step to the totals."""
        self.last = record
        self._recent.append(record)
        self.losses[record.step] = record.loss
        self.step_times_s.append(record.step_time_s)
        self.tokens_per_s.append(record.tokens_per_s)
        if record.skipped:
            self.skipped[record.step] = record.skipped_for
        for link in record.links:
            key = (link.link, link.sender, link.receiver)
            self.links[key] = _sum(self.links[key], link) if key in self.links else link

    def turned_back(self, step: int) -> None:
        """Forget the losses of later steps; their time and bytes still count."""
        self.losses = {each: loss for each, loss in self.losses.items() if each <= step}
        self.skipped = {each: why for each, why in self.skipped.items() if each <= step}

    def validated(self, record: ValidationRecord) -> None:
        """Keep the newest validation loss."""
        self.validation = record

    def snapshot_written(self, record: SnapshotRecord) -> None:
        """Keep which checkpoint is the best."""
        if record.is_best and not record.error:
            self.best_step = record.step

    def diagnosis(self) -> Diagnosis | None:
        """What recent steps waited for, by the medians of their parts; None: not known."""
        return diagnose(median_step(self._recent)) if self._recent else None

    def limit_and_advice(self) -> str:
        """The same in a sentence, with what would shorten the steps; empty: not known. Takes up to a few seconds."""
        return limit_and_advice(median_step(self._recent), self._advise) if self._recent else ""

    @property
    def remaining_s(self) -> float | None:
        """Time until the last step: steps left times the median of the recent ones; None: not known yet."""
        if self.last is None:
            return None
        return (self.total_steps - self.last.step) * median(self.step_times_s[-RECENT_STEPS:])

    def traffic(self, *directions: Traffic) -> LinkRecord:
        """Sum over all links that carry one of these; link, sender and receiver then mean nothing."""
        total = LinkRecord(-1, -1, -1, "activations", 0, 0, 0, 0, 0.0)
        for link in self.links.values():
            if link.direction in directions:
                total = _sum(total, link)
        return total


def _sum(a: LinkRecord, b: LinkRecord) -> LinkRecord:
    return replace(a, **{name: getattr(a, name) + getattr(b, name) for name in (*LINK_COUNTS, *LINK_SECONDS)})


def summary_text(history: RunHistory, end: RunEnd, *, resume_command: str = "", export_command: str = "") -> str:
    """The summary of a run, with commands to continue and to export it; empty if it never made a step."""
    if history.header is None or not history.losses:
        return ""
    checkpoint = end.last_snapshot
    how = "done" if end.exit_status == 0 else f"ended with status {end.exit_status}"
    took, now = figures.duration(sum(history.step_times_s)), len(history.losses)
    part = "" if now == end.steps_done else f" ({now} of them since it was resumed)"
    step_s, rate = figures.duration(median(history.step_times_s)), figures.tokens_rate(median(history.tokens_per_s))
    best = f", the best after step {history.best_step}" if history.best_step else ""
    newest = "" if checkpoint is None else f" (checkpoint after step {checkpoint}{best})"
    more = ", with training.steps or epochs set to more" if end.steps_done >= end.total_steps else ""
    rows = {
        "loss": _losses(list(history.losses.values()), "" if history.last is None else history.last.loss_unit),
        "rewards": "" if history.last is None else figures.rewards(history.last.rewards),
        "speed": f"{rate}, {step_s} per step (medians)",
        "its limit": history.limit_and_advice(),
        "validation": validation_text(history.validation) if history.validation else "",
        **_wire(history),
        "skipped": ", ".join(
            f"{count} of these steps: {why}" for why, count in Counter(history.skipped.values()).items()
        ),
        "written to": f"{history.header.run_folder}{newest}",
        "resume": f"{resume_command}{more}" if resume_command and checkpoint is not None else "",
        "export": f"{export_command}{' --best' * bool(history.best_step)}" if checkpoint is not None else "",
    }
    head = f"run {history.header.name} {how}: {end.steps_done} of {end.total_steps} steps{part} in {took}"
    return "\n".join([head, *(f"  {name:<12}{text}" for name, text in rows.items() if text)])


def _losses(losses: list[float], unit: str) -> str:
    text = f"{figures.loss(losses[0])} → {figures.loss(losses[-1])} {unit}"
    if len(losses) <= AVERAGED_STEPS:
        return text
    first, last = (figures.loss(fmean(few)) for few in (losses[:AVERAGED_STEPS], losses[-AVERAGED_STEPS:]))
    return f"{text}; mean of {AVERAGED_STEPS} steps {first} → {last}"


def validation_text(record: ValidationRecord) -> str:
    """``after step 2: loss 2.5000 (perplexity 12.18), without the codec 2.0000 (7.389)``; of each set, by name.

    Of DPO: ``after step 2: loss 0.6800, without the codec 0.6750 (accuracy 61 %)``.
    """
    return f"after step {record.step}: " + "; ".join(
        f"{each.name}{': ' * bool(each.name)}loss {figures.loss(each.loss)}{coded}, "
        f"without the codec {figures.loss(each.loss_raw)}{raw}"
        for each in record.sets
        for coded, raw in [_beside_losses(each)]
    )


def _beside_losses(record: ValidationRecord) -> tuple[str, str]:
    if record.accuracy is not None:
        return "", f" (accuracy {figures.share(record.accuracy)})"
    return f" (perplexity {perplexity(record.loss):.4g})", f" ({perplexity(record.loss_raw):.4g})"


def sample_lines(record: SamplesRecord) -> list[str]:
    """``after step 2: "Once upon a" → " time\\n"``, for each prompt."""
    texts = ((json.dumps(each, ensure_ascii=False) for each in pair) for pair in record.texts)
    return [f"after step {record.step}: {prompt} → {text}" for prompt, text in texts]


def _wire(history: RunHistory) -> dict[str, str]:
    """What was sent in all, and by direction; nothing if there is one stage."""
    total = history.traffic(*get_args(Traffic))
    if not total.elements:
        return {}
    sizes = (("fp32", 4 * total.elements), ("fp16", 2 * total.elements))
    plain = ", ".join(f"{name} {format_size(size)} ({size / max(total.wire_bytes, 1):.2f}×)" for name, size in sizes)
    rows = {"on the wire": f"{format_size(total.wire_bytes)}; {plain}"}
    for direction in get_args(Traffic):
        traffic = history.traffic(direction)
        if traffic.elements:
            bits = f"{traffic.bits_per_element:.2f} bits per element"
            rows[direction] = f"{format_size(traffic.payload_bytes)}, {bits}"
    return rows
