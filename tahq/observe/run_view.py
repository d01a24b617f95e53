"""What a launcher shows and keeps of a run: history, metrics.jsonl, table or lines, traces, summary."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from inspect import getmembers, isfunction
from pathlib import Path
from statistics import median
from typing import TextIO

from rich.console import Console

from tahq.coordinator.observer import (
    LinkRecord,
    RunEnd,
    RunObserver,
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


class LastWords(RunObserver):
    """Prints the summary, and why the run ended if it ended early.

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
        """Print the summary."""
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
        history: of the run.
        end: how it ended.
        resume_command: continues the run.
        export_command: exports the run.
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
    """How to continue the run; a finished one also needs more steps."""
    return f"{command}, with training.steps or epochs set to more" if end.steps_done >= end.total_steps else command


def _headline(history: RunHistory, end: RunEnd) -> str:
    name = history.header.name if history.header else "run"
    how = "done" if end.exit_status == 0 else f"ended with status {end.exit_status}"
    took, now = figures.duration(sum(history.step_times_s)), len(history.losses)
    part = "" if now == end.steps_done else f" ({now} of them since it was resumed)"
    return f"run {name} {how}: {end.steps_done} of {end.total_steps} steps{part} in {took}"


def _losses(history: RunHistory) -> str:
    text = f"{figures.loss(history.losses[0])} → {figures.loss(history.losses[-1])} nats per token"
    if len(history.losses) <= AVERAGED_STEPS:
        return text
    first, last = (history.mean_loss(steps) for steps in (slice(AVERAGED_STEPS), slice(-AVERAGED_STEPS, None)))
    return f"{text}; mean of {AVERAGED_STEPS} steps {figures.loss(first)} → {figures.loss(last)}"


def _speed(history: RunHistory) -> str:
    step_s = figures.duration(median(history.step_times_s))
    return f"{figures.tokens_rate(median(history.tokens_per_s))}, {step_s} per step (medians)"


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
    return f"{format_size(traffic.payload_bytes)}, {traffic.bits_per_element:.2f} bits per element"


def _newest_snapshot(end: RunEnd) -> str:
    return "" if end.last_snapshot is None else f" (checkpoint after step {end.last_snapshot})"


def _aligned(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"  {name:<12}{text}" for name, text in rows]


class Observers(RunObserver):
    """Passes every call on to several observers, in order; an observer that cannot write any more is dropped.

    Args:
        observers: later ones may read what earlier ones keep.
    """

    def __init__(self, observers: Sequence[RunObserver]) -> None:
        self._observers = list(observers)

    def _tell(self, method: str, arguments: Sequence[object]) -> None:
        for observer in tuple(self._observers):
            try:
                getattr(observer, method)(*arguments)
            except OSError as error:
                self._observers.remove(observer)
                self.warned(f"{type(observer).__name__} cannot write any more and is left out: {error}")


def _passing_on(method: str) -> Callable[..., None]:
    def pass_on(self: Observers, *arguments: object) -> None:
        self._tell(method, arguments)

    return pass_on


for _method, _ in getmembers(RunObserver, isfunction):
    if not _method.startswith("_"):
        setattr(Observers, _method, _passing_on(_method))
