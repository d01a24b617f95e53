"""What a launcher shows and keeps of a run: history, metrics.jsonl, table or lines, traces, summary."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from inspect import getmembers, isfunction
from pathlib import Path
from statistics import fmean, median
from typing import TextIO, get_args

from rich.console import Console

from tahq.coordinator.observer import RunEnd, RunObserver, Traffic, ValidationRecord
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
        start_step: committed steps in the run's checkpoint; lines of later steps are removed from the file.
        program: prefix of the last line on `err`.
        resume_command: for the summary.
        export_command: for the summary.
        facts: codecs and shape of the run's links, to advise on them.
        traces: folder for files of traced steps; None: none are written.
        start: number of this start of the run, from 1, for those files.
        out: for table, lines and summary; None: stdout.
        err: for one line that says why the run ended early; None: stderr.

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
    """A live table if `out` is a terminal that can show it, else plain lines."""
    if out.isatty() and os.environ.get("TERM") != "dumb":
        return LiveTable(Console(file=out), history)
    return PlainLines(out, history)


@dataclass(frozen=True, slots=True)
class LastWords(RunObserver):
    """Prints the summary on `out`, and why the run ended on `err`, in one line that begins with the program's name."""

    out: TextIO
    err: TextIO
    history: RunHistory
    """Told before this observer is."""
    program: str
    resume_command: str
    export_command: str

    def ended(self, end: RunEnd) -> None:
        """Print the summary."""
        text = summary_text(self.history, end, resume_command=self.resume_command, export_command=self.export_command)
        if text:
            print(text, file=self.out, flush=True)
        if end.message:
            print(f"{self.program}: {' '.join(end.message.split())}", file=self.err, flush=True)


AVERAGED_STEPS = 10
"""Steps whose mean loss stands for the start and the end of a run."""


def summary_text(history: RunHistory, end: RunEnd, *, resume_command: str = "", export_command: str = "") -> str:
    """The summary of a run, with commands to continue and to export it; empty if it never made a step."""
    if history.header is None or not history.losses:
        return ""
    diagnosis, checkpoint = history.diagnosis(), end.last_snapshot
    how = "done" if end.exit_status == 0 else f"ended with status {end.exit_status}"
    took, now = figures.duration(sum(history.step_times_s)), len(history.losses)
    part = "" if now == end.steps_done else f" ({now} of them since it was resumed)"
    step_s, rate = figures.duration(median(history.step_times_s)), figures.tokens_rate(median(history.tokens_per_s))
    newest = "" if checkpoint is None else f" (checkpoint after step {checkpoint})"
    more = ", with training.steps or epochs set to more" if end.steps_done >= end.total_steps else ""
    rows = {
        "loss": _losses(history),
        "speed": f"{rate}, {step_s} per step (medians)",
        "its limit": diagnosis.sentence if diagnosis else "",
        "validation": _validation(history.validation) if history.validation else "",
        **_wire(history),
        "skipped": f"{history.num_skipped} of these steps, for NaN or infinity" if history.num_skipped else "",
        "written to": f"{history.header.run_folder}{newest}",
        "resume": f"{resume_command}{more}" if resume_command and checkpoint is not None else "",
        "export": export_command if checkpoint is not None else "",
    }
    head = f"run {history.header.name} {how}: {end.steps_done} of {end.total_steps} steps{part} in {took}"
    return "\n".join([head, *(f"  {name:<12}{text}" for name, text in rows.items() if text)])


def _losses(history: RunHistory) -> str:
    text = f"{figures.loss(history.losses[0])} → {figures.loss(history.losses[-1])} nats per token"
    if len(history.losses) <= AVERAGED_STEPS:
        return text
    first, last = (fmean(losses) for losses in (history.losses[:AVERAGED_STEPS], history.losses[-AVERAGED_STEPS:]))
    return f"{text}; mean of {AVERAGED_STEPS} steps {figures.loss(first)} → {figures.loss(last)}"


def _validation(record: ValidationRecord) -> str:
    return (
        f"{figures.loss(record.loss)} (perplexity {perplexity(record.loss):.4g}) after step {record.step}; "
        f"without the codec {figures.loss(record.loss_raw)} ({perplexity(record.loss_raw):.4g})"
    )


def _wire(history: RunHistory) -> dict[str, str]:
    """What was sent in all, and by direction; nothing where there is one stage."""
    total = history.traffic()
    sizes = (("fp32", 4 * total.elements), ("fp16", 2 * total.elements))
    plain = ", ".join(f"{name} {format_size(size)} ({size / max(total.wire_bytes, 1):.2f}×)" for name, size in sizes)
    rows = {"on the wire": f"{format_size(total.wire_bytes)}; {plain}"} if total.elements else {}
    for direction in get_args(Traffic):
        traffic = history.traffic(direction)
        if traffic.elements:
            bits = f"{traffic.bits_per_element:.2f} bits per element"
            rows[direction] = f"{format_size(traffic.payload_bytes)}, {bits}"
    return rows


class Observers(RunObserver):
    """Passes every call on to several observers, in order; an observer that cannot write any more is dropped.

    Args:
        observers: later ones may read what earlier ones keep.
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
