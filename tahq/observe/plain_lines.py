"""Plain lines about a run, for output that is not a terminal: no colour, no cursor, one line per event."""

import time
from collections.abc import Callable
from typing import TextIO

from tahq.coordinator.observer import (
    RunHeader,
    RunObserver,
    SnapshotRecord,
    StageStatus,
    StepRecord,
    ValidationRecord,
)
from tahq.observe import figures
from tahq.observe.metrics import perplexity
from tahq.observe.run_history import RunHistory
from tahq.units import format_size

QUIET_S = 0.5
"""Of steps that are faster than this only every `EVERY`-th is printed."""
EVERY = 10
PATIENCE_S = 2.0
"""Shortest time between two lines about what a phase waits for."""


class Announcer(RunObserver):
    """Announces what is not part of the regular output, each in a line."""

    def announce(self, line: str) -> None:
        """Show a line."""
        raise NotImplementedError

    def validated(self, record: ValidationRecord) -> None:
        """Announce a validation loss."""
        self.announce(
            f"validation after step {record.step}: loss {figures.loss(record.loss)} "
            f"(perplexity {perplexity(record.loss):.4g}), without the codec {figures.loss(record.loss_raw)} "
            f"({perplexity(record.loss_raw):.4g})"
        )

    def snapshot_written(self, record: SnapshotRecord) -> None:
        """Announce a checkpoint, or why it failed."""
        if record.error:
            kept = "the previous checkpoint stays valid"
            self.announce(f"warning: no checkpoint after step {record.step}: {record.error}; {kept}")
        else:
            self.announce(f"checkpoint after step {record.step}: {format_size(record.nbytes)}")

    def warned(self, text: str) -> None:
        """Announce a warning."""
        self.announce(f"warning: {text}")


class PlainLines(Announcer):
    """Writes lines as things happen.

    Args:
        stream: output.
        history: told before this observer is.
        clock: seconds, monotonic.
    """

    def __init__(self, stream: TextIO, history: RunHistory, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._history = history
        self._clock = clock
        self._printed_s: float | None = None
        self._state = self._said = ("", "")
        self._said_s = 0.0
        self._devices: dict[int, str] = {}

    def opened(self, header: RunHeader) -> None:
        """Print the header."""
        continued = f", continuing after step {header.start_step}" if header.start_step else ""
        self.announce(f"run {header.name}: {header.num_stages} stages, coordinator at {header.address}{continued}")

    def phase_changed(self, phase: str, detail: str) -> None:
        """Print the phase if it changed."""
        self._state = (phase, detail)
        self._tell_state()

    def stage_changed(self, status: StageStatus) -> None:
        """Print a stage's worker once its device is known."""
        if status.device and self._devices.get(status.stage) != status.device:
            self._devices[status.stage] = status.device
            where = f"{status.host}, pid {status.pid}, {status.device}"
            self.announce(f"stage {status.stage}: {where}, {status.num_parameters:,} parameters")
        self._tell_state()

    def stage_left(self, stage: int) -> None:
        """Announce the next worker of this stage again."""
        self._devices.pop(stage, None)

    def step_committed(self, record: StepRecord) -> None:
        """Print a step, unless steps are fast."""
        now_s, last = self._clock(), self._history.total_steps
        rested = self._printed_s is None or now_s - self._printed_s >= QUIET_S
        if rested or record.skipped or record.step in (1, last) or record.step % EVERY == 0:
            self._printed_s = now_s
            self.announce(step_line(record, self._history))
        for change in record.codec_changes:
            self.announce(f"after step {record.step}: {change}")

    def _tell_state(self) -> None:
        (phase, detail), now_s = self._state, self._clock()
        if phase == "over" or self._state == self._said:
            return
        if phase != self._said[0] or (detail and now_s - self._said_s >= PATIENCE_S):
            self._said, self._said_s = self._state, now_s
            self.announce(f"{phase}: waiting for {detail}" if detail else phase)

    def announce(self, line: str) -> None:
        """Print a line."""
        print(line, file=self._stream, flush=True)


def step_line(record: StepRecord, history: RunHistory) -> str:
    """``step 12/60  loss 3.2140  4,812 tokens/s  1.7 s per step  3.42 MB sent  link 2→1 gradients 71 %  1:22 left``."""
    remaining_s, diagnosis = history.remaining_s, history.diagnosis()
    parts = [
        f"step {record.step}/{history.total_steps}",
        f"loss {figures.loss(record.loss)}",
        figures.tokens_rate(record.tokens_per_s),
        f"{figures.duration(record.step_time_s)} per step",
        f"{format_size(sum(link.wire_bytes for link in record.links))} sent",
        *([diagnosis.brief] if diagnosis is not None else []),
        *(["skipped: NaN or infinity"] if record.skipped else []),
        *([f"{figures.duration(remaining_s)} left"] if remaining_s else []),
    ]
    return "  ".join(parts)
