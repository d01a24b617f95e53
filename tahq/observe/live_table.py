"""A live table of a run, for a terminal.

`render` is a function of the history alone; `LiveTable` only decides when to draw. It has no thread:
it draws on events, of which every heartbeat is one.
"""

import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tahq.coordinator.observer import (
    LinkRecord,
    RunEnd,
    RunHeader,
    StageRecord,
    StageSplit,
    StageStatus,
    StepRecord,
)
from tahq.observe import figures
from tahq.observe.plain_lines import Announcer
from tahq.observe.run_history import RunHistory
from tahq.units import format_size

REDRAW_S = 0.2
"""Shortest time between two drawings."""


class LiveTable(Announcer):
    """Draws the run's history on a terminal.

    Args:
        console: the terminal.
        history: told before this observer is.
        clock: seconds, monotonic.
    """

    def __init__(self, console: Console, history: RunHistory, clock: Callable[[], float] = time.monotonic) -> None:
        self._history = history
        self._clock = clock
        self._live = Live(console=console, auto_refresh=False)
        self._drawn_s: float | None = None

    def opened(self, header: RunHeader) -> None:
        """Begin to draw."""
        self._live.start()
        self._draw(now=True)

    def phase_changed(self, phase: str, detail: str) -> None:
        """Draw the phase."""
        self._draw(now=True)

    def stage_changed(self, status: StageStatus) -> None:
        """Draw a stage's activity."""
        self._draw()

    def step_committed(self, record: StepRecord) -> None:
        """Draw a step; leave a line above the table for each codec that changes."""
        for change in record.codec_changes:
            self._live.console.print(Text(f"after step {record.step}: {change}"))
        self._draw()

    def ended(self, end: RunEnd) -> None:
        """Draw for the last time and release the terminal."""
        self._draw(now=True)
        self._live.stop()

    def announce(self, line: str) -> None:
        """Leave a line above the table."""
        self._live.console.print(Text(line))
        self._draw(now=True)

    def _draw(self, *, now: bool = False) -> None:
        time_s = self._clock()
        if now or self._drawn_s is None or time_s - self._drawn_s >= REDRAW_S:
            self._drawn_s = time_s
            self._live.update(render(self._history), refresh=True)


def render(history: RunHistory) -> RenderableType:
    """Header, stages, links and state of a run."""
    parts: list[RenderableType] = [Text(headline(history), style="bold")]
    if history.stages:
        parts += [Text(), _stage_table(history)]
    if history.last is not None and history.last.links:
        parts += [Text(), _link_table(history, history.last)]
    diagnosis = history.diagnosis()
    if diagnosis is not None:
        parts += [Text(), Text(f"limited by {diagnosis.brief} of the step")]
    if history.missing:
        parts += [Text(), Text(f"{history.phase}: waiting for {history.missing}", style="yellow")]
    return Group(*parts)


def headline(history: RunHistory) -> str:
    """``demo  training  step 12/60  loss 3.2140  4,812 tokens/s  1:22 left``."""
    parts = [history.header.name if history.header else "", history.phase]
    last, remaining_s = history.last, history.remaining_s
    if last is not None:
        parts += [f"step {last.step}/{history.total_steps}", f"loss {figures.loss(last.loss)}"]
        parts += [figures.tokens_rate(last.tokens_per_s)]
    if remaining_s:
        parts += [f"{figures.duration(remaining_s)} left"]
    return "  ".join(parts)


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
    sender = max(split.wait_s, key=lambda stage: split.wait_s[stage], default=None)
    waiting = figures.share((split.frames_s + split.wait_codec_s + split.wait_memory_s) / step_time_s)
    return (
        figures.share(split.compute_s / step_time_s),
        figures.share(split.codec_s / step_time_s),
        waiting if sender is None else f"{waiting} ({sender})",
        figures.share(split.commit_s / step_time_s),
    )


def _link_table(history: RunHistory, last: StepRecord) -> Table:
    table = Table("link", "carries", box=None, pad_edge=False)
    for heading in ("sent", "bits/element", "goodput", "sending", "queued"):
        table.add_column(heading, justify="right")
    for link in last.links:
        total = history.links.get((link.link, link.sender, link.receiver), link)
        table.add_row(*_link_cells(link, total, last.step_time_s))
    return table


def _link_cells(link: LinkRecord, total: LinkRecord, step_time_s: float) -> tuple[str, ...]:
    """What was sent since the start; bits per element, goodput and shares of the step of the last step."""
    bits = f"{link.bits_per_element:.2f}"
    ends = f"{link.sender} → {link.receiver}"
    shares = [figures.share(s / step_time_s) if step_time_s > 0 else "–" for s in (link.sending_s, link.queued_s)]
    return ends, link.direction, format_size(total.wire_bytes), bits, figures.goodput(link), *shares
