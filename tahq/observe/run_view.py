"""What a launcher shows and keeps of a run: metrics.jsonl, events.jsonl, traces, the summary, and a table or lines."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import getmembers, isfunction
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tahq.coordinator.joining.seats import stage_list
from tahq.coordinator.observer import (
    RunEnd,
    RunHeader,
    RunObserver,
    SamplesRecord,
    SnapshotRecord,
    StageRecord,
    StageSplit,
    StageStatus,
    StepRecord,
    ValidationRecord,
)
from tahq.errors import brief, file_errors
from tahq.observe import figures
from tahq.observe.bottleneck import Advise
from tahq.observe.events import EventsFile
from tahq.observe.metrics import MetricsFile
from tahq.observe.run_history import RunHistory, sample_lines, summary_text, validation_text
from tahq.observe.trace_file import TraceFiles
from tahq.units import format_size

REDRAW_S = 0.2
"""Shortest time between two drawings of the table."""
QUIET_S = 0.5
"""Of steps that are faster than this only every `EVERY`-th is printed."""
EVERY = 10
PATIENCE_S = 2.0
"""Shortest time between two lines about what a phase waits for."""


def watch_run(
    metrics: Path,
    start_step: int,
    *,
    program: str = "tahq-launch",
    resume_command: str = "",
    export_command: str = "",
    advise: Advise | None = None,
    traces: Path | None = None,
    start: int = 1,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> RunObserver:
    """The observer that a launcher gives to its coordinator.

    Args:
        metrics: the run's metrics.jsonl; its folder exists, and gets events.jsonl, too.
        start_step: committed steps in the run's checkpoint; lines of later steps are removed from the file.
        program: prefix of the last line on `err`.
        resume_command: for the summary.
        export_command: for the summary.
        advise: for the summary.
        traces: folder for files of traced steps; None: none are written.
        start: number of this start of the run, from 1, for those files.
        out: for table, lines and summary; None: stdout.
        err: for one line that says why the run ended early; None: stderr.

    Raises:
        UserError: metrics.jsonl cannot be written.
    """
    out, err = out or sys.stdout, err or sys.stderr
    history = RunHistory(advise)
    with file_errors("write", metrics):
        files = [MetricsFile(metrics, start_step), EventsFile(metrics.with_name("events.jsonl"))]
    summary = partial(summary_text, history, resume_command=resume_command, export_command=export_command)
    pictures = [TraceFiles(traces, start)] if traces is not None else []
    return Observers([history, *files, *pictures, screen(out, history), LastWords(out, err, program, summary)])


@dataclass(frozen=True, slots=True)
class LastWords(RunObserver):
    """Prints the summary on `out`, and why the run ended on `err`, in one line that begins with the program's name."""

    out: TextIO
    err: TextIO
    program: str
    summary: Callable[[RunEnd], str]

    def ended(self, end: RunEnd) -> None:
        """Print the summary."""
        text = self.summary(end)
        if text:
            print(text, file=self.out, flush=True)
        if end.message:
            print(f"{self.program}: {' '.join(end.message.split())}", file=self.err, flush=True)


class Observers(RunObserver):
    """Passes every call on to several observers, in order; an observer that cannot write any more is dropped.

    Later ones may read what earlier ones keep.
    """

    def __init__(self, observers: Sequence[RunObserver]) -> None:
        self._observers = list(observers)
        for method, _ in getmembers(RunObserver, isfunction):
            if not method.startswith("_"):
                setattr(self, method, partial(self._tell, method))

    def _tell(self, method: str, *arguments: object) -> None:
        for observer in tuple(self._observers):
            try:
                getattr(observer, method)(*arguments)
            except OSError as error:
                self._observers.remove(observer)
                self.warned(f"{type(observer).__name__} cannot write any more and is left out: {error}")


# -- on the screen -------------------------------------------------------------------------------


def screen(out: TextIO, history: RunHistory) -> RunObserver:
    """A live table if `out` is a terminal that can show it, else plain lines."""
    if out.isatty() and os.environ.get("TERM") != "dumb":
        return LiveTable(Console(file=out), history)
    return PlainLines(out, history)


class Announcer(RunObserver):
    """Shows the history, which observes first; announces other events in one line each."""

    def __init__(self, history: RunHistory, clock: Callable[[], float] = time.monotonic) -> None:
        self._history = history
        self._clock = clock
        self._shown_s: float | None = None

    def announce(self, line: str) -> None:
        """Show a line."""
        raise NotImplementedError

    def validated(self, record: ValidationRecord) -> None:
        """Announce a validation loss."""
        self.announce(f"validation {validation_text(record)}")

    def sampled(self, record: SamplesRecord) -> None:
        """Announce the samples."""
        for line in sample_lines(record):
            self.announce(f"sample {line}")

    def snapshot_written(self, record: SnapshotRecord) -> None:
        """Announce a checkpoint, or why it failed."""
        if record.error:
            kept = "the previous checkpoint stays valid"
            self.announce(f"warning: no checkpoint after step {record.step}: {record.error}; {kept}")
        else:
            best = ", the best so far" * record.is_best
            self.announce(f"checkpoint after step {record.step}: {format_size(record.nbytes)}{best}")

    def step_committed(self, record: StepRecord) -> None:
        """Announce the codecs that change with a step, and the schedule."""
        for change in record.codec_changes:
            self.announce(f"after step {record.step}: {change}")
        if record.schedule_change:
            self.announce(f"after step {record.step}: schedule {record.schedule_change}")

    def warned(self, text: str) -> None:
        """Announce a warning."""
        self.announce(f"warning: {text}")

    def _is_due(self, gap_s: float) -> bool:
        """Whether nothing was shown for this long; then now counts as shown."""
        now_s = self._clock()
        is_due = self._shown_s is None or now_s - self._shown_s >= gap_s
        if is_due:
            self._shown_s = now_s
        return is_due


class PlainLines(Announcer):
    """Writes a line per event, and while there is none, lines with what the stages do: no colour, no cursor."""

    def __init__(self, stream: TextIO, history: RunHistory, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(history, clock)
        self._stream = stream
        self._state = self._printed = ("", "")
        self._printed_s = 0.0
        self._devices: dict[int, str] = {}
        self._silence = figures.Silence(clock)
        self._begun_s = clock()
        """When the step or the phase began."""

    def opened(self, header: RunHeader) -> None:
        """Print the header."""
        continued = f", continuing after step {header.start_step}" if header.start_step else ""
        stages = f"{header.num_stages} stage{'s' * (header.num_stages > 1)}"
        self.announce(f"run {header.name}: {stages}, coordinator at {header.address}{continued}")

    def phase_changed(self, phase: str, detail: str) -> None:
        """Print the phase if it changed."""
        if phase != self._state[0]:
            self._begun_s = self._clock()
        self._state = (phase, detail)
        self._print_state()

    def stage_changed(self, status: StageStatus) -> None:
        """Print a stage's worker once its device is known."""
        if status.device and self._devices.get(status.stage) != status.device:
            self._devices[status.stage] = status.device
            size = f", {status.num_parameters:,} parameters" if status.num_parameters else ""
            self.announce(f"stage {status.stage}: {status.host}, pid {status.pid}, {status.device}{size}")
        self._print_state()
        if self._silence.is_overdue():
            self._print(progress_line(self._history, self._clock() - self._begun_s))

    def stage_left(self, stage: int) -> None:
        """Announce the next worker of this stage again."""
        self._devices.pop(stage, None)

    def step_committed(self, record: StepRecord) -> None:
        """Print a step, unless steps are fast."""
        self._begun_s = self._clock()
        always = record.skipped or record.step in (1, self._history.total_steps) or record.step % EVERY == 0
        if self._is_due(0.0 if always else QUIET_S):
            self.announce(step_line(record, self._history))
        super().step_committed(record)

    def _print_state(self) -> None:
        (phase, detail), now_s = self._state, self._clock()
        if phase == "over" or self._state == self._printed:
            return
        if phase != self._printed[0] or (detail and now_s - self._printed_s >= PATIENCE_S):
            self._printed, self._printed_s = self._state, now_s
            self.announce(f"{phase}: waiting for {detail}" if detail else phase)

    def announce(self, line: str) -> None:
        """Print a line."""
        self._print(line)
        self._silence.end()

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def progress_line(history: RunHistory, lasts_s: float) -> str:
    """``step 3, 12 s so far: stage 0: searching subspaces, 40/224; stages 1, 2: micro-batch 5/16 forward``."""
    doing: dict[str, list[int]] = {}
    for number, stage in sorted(history.stages.items()):
        doing.setdefault(brief(stage.activity), []).append(number)
    step = 1 + max((stage.step for stage in history.stages.values()), default=-1)
    work = f"step {step}" if history.phase == "training" and step else history.phase
    stages = "; ".join(f"{stage_list(numbers)}: {activity}" for activity, numbers in doing.items())
    return f"{work}, {figures.duration(round(lasts_s))} so far: {stages}"


def step_line(record: StepRecord, history: RunHistory) -> str:
    """``step 12/60  loss 3.2140  4,812 tokens/s  1.7 s per step  3.42 MB sent  link 2→1 gradients 71 %  1:22 left``."""
    remaining_s, diagnosis = history.remaining_s, history.diagnosis()
    parts = [
        f"step {record.step}/{history.total_steps}",
        f"loss {figures.loss(record.loss)}",
        figures.rewards(record.rewards),
        figures.tokens_rate(record.tokens_per_s),
        f"{figures.duration(record.step_time_s)} per step",
        f"{format_size(sum(link.wire_bytes for link in record.links))} sent",
        diagnosis.brief if diagnosis is not None else "",
        f"skipped: {record.skipped_for}" if record.skipped else "",
        f"loss scale {record.loss_scale:,.0f}" if record.has_overflowed else "",
        f"{figures.duration(remaining_s)} left" if remaining_s else "",
    ]
    return "  ".join(filter(None, parts))


class LiveTable(Announcer):
    """Draws the run's history on a terminal, on events, of which every heartbeat is one."""

    def __init__(self, console: Console, history: RunHistory, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(history, clock)
        self._live = Live(console=console, auto_refresh=False)

    def opened(self, header: RunHeader) -> None:
        """Begin to draw."""
        self._live.start()
        self._draw(0.0)

    def phase_changed(self, phase: str, detail: str) -> None:
        """Draw the phase."""
        self._draw(0.0)

    def stage_changed(self, status: StageStatus) -> None:
        """Draw a stage's activity."""
        self._draw()

    def step_committed(self, record: StepRecord) -> None:
        """Draw a step."""
        super().step_committed(record)
        self._draw()

    def ended(self, end: RunEnd) -> None:
        """Draw for the last time and release the terminal."""
        self._draw(0.0)
        self._live.stop()

    def announce(self, line: str) -> None:
        """Leave a line above the table."""
        self._live.console.print(Text(line))
        self._draw(0.0)

    def _draw(self, gap_s: float = REDRAW_S) -> None:
        if self._is_due(gap_s):
            self._live.update(render(self._history), refresh=True)


def render(history: RunHistory) -> RenderableType:
    """Header, stages, links and state of a run."""
    last, diagnosis, remaining_s = history.last, history.diagnosis(), history.remaining_s
    headline = [history.header.name if history.header else "", history.phase]
    if last is not None:
        headline += [f"step {last.step}/{history.total_steps}", f"loss {figures.loss(last.loss)}"]
        headline += [*filter(None, [figures.rewards(last.rewards)]), figures.tokens_rate(last.tokens_per_s)]
    if remaining_s:
        headline += [f"{figures.duration(remaining_s)} left"]
    parts: list[RenderableType] = [Text("  ".join(headline), style="bold")]
    if history.stages:
        parts += [Text(), _stage_table(history)]
    if last is not None and last.links:
        parts += [Text(), _link_table(history, last)]
    if diagnosis is not None:
        parts += [Text(), Text(f"limited by {diagnosis.brief} of the step")]
    if history.missing:
        parts += [Text(), Text(f"{history.phase}: waiting for {history.missing}", style="yellow")]
    return Group(*parts)


def _stage_table(history: RunHistory) -> Table:
    table = Table("stage", "host", "device", "activity", box=None, pad_edge=False)
    for heading in ("computing", "coding", "waiting", "commit"):
        table.add_column(heading, justify="right")
    last = history.last
    shares = {record.stage: _shares(record, last.step_time_s) for record in last.stages} if last else {}
    for number in sorted(history.stages):
        stage = history.stages[number]
        cells = (str(number), stage.host, stage.device, stage.activity, *shares.get(number, ("–",) * 4))
        table.add_row(*map(escape, cells))
    return table


def _shares(record: StageRecord, step_time_s: float) -> tuple[str, str, str, str]:
    """Computing, coding, waiting for frames and for the commit, as shares of the step: ``31 % (1)`` for stage 1."""
    split = record.split
    if step_time_s <= 0 or split == StageSplit():
        return ("–", "–", figures.share(record.waiting_share), "–")
    sender = max(split.wait_s, key=split.wait_s.__getitem__, default=None)
    waiting = figures.share((split.frames_s + split.wait_codec_s + split.wait_memory_s) / step_time_s)
    return (
        figures.share(split.compute_s / step_time_s),
        figures.share(split.codec_s / step_time_s),
        waiting if sender is None else f"{waiting} ({sender})",
        figures.share(split.commit_s / step_time_s),
    )


def _link_table(history: RunHistory, last: StepRecord) -> Table:
    """What was sent since the start; bits per element, goodput and shares of the step of the last step."""
    table = Table("link", "carries", box=None, pad_edge=False)
    for heading in ("sent", "bits/element", "goodput", "sending", "queued"):
        table.add_column(heading, justify="right")
    for link in last.links:
        sent = format_size(history.links.get((link.link, link.sender, link.receiver), link).wire_bytes)
        bits, step_s = f"{link.bits_per_element:.2f}", last.step_time_s
        shares = [figures.share(s / step_s) if step_s > 0 else "–" for s in (link.sending_s, link.queued_s)]
        ends = f"{link.sender} → {link.receiver}{' (relayed)' * (link.relayed_bytes > 0)}"
        table.add_row(ends, link.direction, sent, bits, figures.goodput(link), *shares)
    return table
