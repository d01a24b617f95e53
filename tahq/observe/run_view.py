"""All that watches a run, put together: history, metrics.jsonl, table or lines, and the last words."""

import os
import sys
from pathlib import Path
from typing import TextIO

from rich.console import Console

from tahq.coordinator.observer import RunEnd, RunObserver
from tahq.errors import UserError
from tahq.observe.codec_advice import WireFacts
from tahq.observe.fan_out import Observers
from tahq.observe.live_table import LiveTable
from tahq.observe.metrics import MetricsFile
from tahq.observe.plain_lines import PlainLines
from tahq.observe.run_history import RunHistory
from tahq.observe.summary import summary_text
from tahq.observe.trace_file import TraceFiles


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
