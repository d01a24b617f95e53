"""All that watches a run, put together: history, metrics.jsonl, table or lines, and the last words."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TextIO

from rich.console import Console

from tahq.coordinator.observer import (
    LinkRecord,
    RunEnd,
    RunHeader,
    RunObserver,
    SnapshotRecord,
    StageStatus,
    StepRecord,
    StepTrace,
    ValidationRecord,
)
from tahq.errors import UserError
from tahq.observe import figures
from tahq.observe.codec_advice import WireFacts
from tahq.observe.live_table import LiveTable
from tahq.observe.metrics import MetricsFile, perplexity
from tahq.observe.plain_lines import PlainLines
from tahq.observe.run_history import RunHistory
from tahq.observe.trace_file import TraceFiles
from tahq.units import format_size


def watch_run(
    metrics: Path,
    start_step: int,
    *,
    program: str = "tahq-launch",
    resume_command: str = "",
    export_command: str = "",
    facts: WireFacts | None = None,
    traces: Path | None = None,
    start: int = 1,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> RunObserver:
    """The observer that a launcher gives to its coordinator.

    Args:
        metrics: the run's metrics.jsonl; its folder exists.
        start_step: steps that the run's snapshot has behind it; later lines of the file are cut off.
        program: what the last line on `err` begins with.
        resume_command: for the summary.
        export_command: for the summary.
        facts: of the run's wire, for saying what would make it faster.
        traces: folder for pictures of traced steps; None: none are kept.
        start: number of this start of the run, from 1, for the pictures.
        out: table, lines and summary; None: stdout.
        err: why the run ended, if not simply at its end, in one line; None: stderr.

    Raises:
        UserError: metrics.jsonl cannot be written.
    """
    out, err = out or sys.stdout, err or sys.stderr
    history = RunHistory(facts)
    try:
        file = MetricsFile(metrics, start_step)
    except OSError as error:
        raise UserError(f"cannot write {metrics}: {error.strerror}") from error
    last_words = LastWords(out, err, history, program, resume_command, export_command)
    pictures = [TraceFiles(traces, start)] if traces is not None else []
    return Observers([history, file, *pictures, screen(out, history), last_words])


def screen(out: TextIO, history: RunHistory) -> RunObserver:
    """A table that renews itself where `out` is a terminal that can show it, plain lines elsewhere."""
    if out.isatty() and os.environ.get("TERM") != "dumb":
        return LiveTable(Console(file=out), history)
    return PlainLines(out, history)


class LastWords(RunObserver):
    """Prints the summary, and why the run ended if not simply at its end.

    Args:
        out: for the summary.
        err: for the reason, in one line.
        history: told before this observer is.
        program: what that line begins with.
        resume_command: for the summary.
        export_command: for the summary.
    """

    def __init__(
        self, out: TextIO, err: TextIO, history: RunHistory, program: str, resume_command: str, export_command: str
    ) -> None:
        self._out = out
        self._err = err
        self._history = history
        self._program = program
        self._commands = {"resume_command": resume_command, "export_command": export_command}

    def ended(self, end: RunEnd) -> None:
        """The run is over: say what it came to."""
        text = summary_text(self._history, end, **self._commands)
        if text:
            print(text, file=self._out, flush=True)
        if end.message:
            folded = " ".join(line.strip() for line in end.message.splitlines() if line.strip())
            print(f"{self._program}: {folded}", file=self._err, flush=True)


AVERAGED_STEPS = 10
"""Steps whose mean loss stands for the start and the end of a run."""
BYTES_FP32, BYTES_FP16 = 4, 2


def summary_text(history: RunHistory, end: RunEnd, *, resume_command: str = "", export_command: str = "") -> str:
    """The summary of a run; empty if it never made a step.

    Args:
        history: what it has said of itself.
        end: how it ended.
        resume_command: what continues it.
        export_command: what makes a Hugging Face folder of it.
    """
    if history.header is None or not history.losses:
        return ""
    rows = [
        ("loss", _losses(history)),
        ("speed", _speed(history)),
        *_bottleneck(history),
        *([("validation", _validation(history.validation))] if history.validation else []),
        *_wire(history),
        *([("skipped", f"{history.num_skipped} of these steps, for NaN or infinity")] if history.num_skipped else []),
        ("written to", f"{history.header.run_folder}{_newest_snapshot(end)}"),
        *([("resume", _resuming(resume_command, end))] if resume_command and end.last_snapshot is not None else []),
        *([("export", export_command)] if export_command and end.last_snapshot is not None else []),
    ]
    return "\n".join([_headline(history, end), *_aligned(rows)])


def _resuming(command: str, end: RunEnd) -> str:
    """How the run is continued; one that has all its steps takes no more of them unless told to."""
    return f"{command}, with training.steps or epochs set to more" if end.steps_done >= end.total_steps else command


def _headline(history: RunHistory, end: RunEnd) -> str:
    name = history.header.name if history.header else "run"
    how = "done" if end.exit_status == 0 else f"ended with status {end.exit_status}"
    took, now = figures.duration(sum(history.step_times_s)), len(history.losses)
    part = "" if now == end.steps_done else f" ({now} of them since it was resumed)"
    return f"run {name} {how}: {end.steps_done} of {end.total_steps} steps{part} in {took}"


def _losses(history: RunHistory) -> str:
    text = f"{figures.loss(history.losses[0])} → {figures.loss(history.losses[-1])} nats a token"
    if len(history.losses) <= AVERAGED_STEPS:
        return text
    first, last = (history.mean_loss(steps) for steps in (slice(AVERAGED_STEPS), slice(-AVERAGED_STEPS, None)))
    return f"{text}; mean of {AVERAGED_STEPS} steps {figures.loss(first)} → {figures.loss(last)}"


def _speed(history: RunHistory) -> str:
    step_s = figures.duration(median(history.step_times_s))
    return f"{figures.tokens_rate(median(history.tokens_per_s))}, {step_s} a step (medians)"


def _bottleneck(history: RunHistory) -> list[tuple[str, str]]:
    diagnosis = history.diagnosis()
    return [("its limit", diagnosis.sentence)] if diagnosis is not None else []


def _validation(record: ValidationRecord) -> str:
    return (
        f"{figures.loss(record.loss)} (perplexity {perplexity(record.loss):.4g}) after step {record.step}; "
        f"without the codec {figures.loss(record.loss_raw)} ({perplexity(record.loss_raw):.4g})"
    )


def _wire(history: RunHistory) -> list[tuple[str, str]]:
    total = history.traffic()
    if not total.elements:
        return []
    directions = [(d, history.traffic(d)) for d in ("activations", "gradients")]
    return [
        ("on the wire", f"{format_size(total.wire_bytes)}; {_against(total)}"),
        *((name, _direction(traffic)) for name, traffic in directions if traffic.elements),
    ]


def _against(total: LinkRecord) -> str:
    sizes = (("fp32", BYTES_FP32 * total.elements), ("fp16", BYTES_FP16 * total.elements))
    return ", ".join(f"{name} {format_size(size)} ({size / total.wire_bytes:.2f}×)" for name, size in sizes)


def _direction(traffic: LinkRecord) -> str:
    return f"{format_size(traffic.payload_bytes)}, {traffic.bits_per_element:.2f} bits an element"


def _newest_snapshot(end: RunEnd) -> str:
    return "" if end.last_snapshot is None else f" (snapshot after step {end.last_snapshot})"


def _aligned(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"  {name:<12}{text}" for name, text in rows]


class Observers(RunObserver):
    """Passes everything on, in order.

    Args:
        observers: earlier ones may be read by later ones.
    """

    def __init__(self, observers: Sequence[RunObserver]) -> None:
        self._observers = list(observers)

    def opened(self, header: RunHeader) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.opened(header))

    def phase_changed(self, phase: str, detail: str) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.phase_changed(phase, detail))

    def stage_changed(self, status: StageStatus) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.stage_changed(status))

    def stage_left(self, stage: int) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.stage_left(stage))

    def planned(self, start_step: int, total_steps: int) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.planned(start_step, total_steps))

    def step_committed(self, record: StepRecord) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.step_committed(record))

    def turned_back(self, step: int) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.turned_back(step))

    def step_traced(self, trace: StepTrace) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.step_traced(trace))

    def validated(self, record: ValidationRecord) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.validated(record))

    def snapshot_written(self, record: SnapshotRecord) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.snapshot_written(record))

    def warned(self, text: str) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.warned(text))

    def ended(self, end: RunEnd) -> None:
        """Pass it on."""
        self._tell(lambda observer: observer.ended(end))

    def _tell(self, say: Callable[[RunObserver], None]) -> None:
        for observer in tuple(self._observers):
            try:
                say(observer)
            except OSError as error:
                self._observers.remove(observer)
                self.warned(f"{type(observer).__name__} cannot write any more and is left out: {error}")
