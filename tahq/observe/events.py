"""events.jsonl: one JSON object per event of a run, over all its starts.

Every object has `time` (seconds since 1970), `step` (steps committed so far), `event` and a `text` for people; some
have more::

    started   stages                     planned    total_steps
    phase     phase, waits_for           joined     stage, host, device
    lost      stage                      returned   stage
    link      stage, link, reason        ended      exit_status
    checkpoint   of_step and is_best, if complete
    codec, schedule, sample, warning, turned back

A `link` event with a reason says that this stage's end of the link is degraded, one without that it works again.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tahq.coordinator.observer import RunEnd, RunHeader, SamplesRecord, SnapshotRecord, StageStatus, StepRecord
from tahq.observe import figures
from tahq.observe.metrics import LinesFile
from tahq.observe.run_history import sample_lines
from tahq.units import format_size


class EventsFile(LinesFile):
    """Writes events.jsonl."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        super().__init__(path)
        self._clock = clock
        self._step = 0
        self._phase = ("", "")
        self._workers: dict[int, tuple[str, int]] = {}

    def opened(self, header: RunHeader) -> None:
        """Write that the run begins, or continues."""
        self._step = header.start_step
        continued = f", continuing after step {header.start_step}" if header.start_step else ""
        self._event("started", f"{header.num_stages} stages{continued}", stages=header.num_stages)

    def phase_changed(self, phase: str, detail: str) -> None:
        """Write the phase and what it waits for, if they changed."""
        if (phase, detail) != self._phase:
            self._phase = (phase, detail)
            text = f"{phase}: waiting for {detail}" if detail else phase
            self._event("phase", text, phase=phase, waits_for=detail)

    def stage_changed(self, status: StageStatus) -> None:
        """Write a stage's worker once its device is known."""
        worker = (status.host, status.pid)
        if status.device and self._workers.get(status.stage) != worker:
            self._workers[status.stage] = worker
            text = f"stage {status.stage}: {status.host}, {status.device}"
            self._event("joined", text, stage=status.stage, host=status.host, device=status.device)

    def stage_left(self, stage: int) -> None:
        """Write that a stage is lost."""
        self._workers.pop(stage, None)
        self._event("lost", f"stage {stage} has lost its worker", stage=stage)

    def stage_returned(self, stage: int, lasted_s: float) -> None:
        """Write that a stage is back."""
        self._event("returned", f"stage {stage} is back after {figures.duration(lasted_s)}", stage=stage)

    def link_changed(self, stage: int, link: int, reason: str) -> None:
        """Write the state of a link."""
        text = f"link {link} of stage {stage} {f'is degraded: {reason}' if reason else 'works again'}"
        self._event("link", text, stage=stage, link=link, reason=reason)

    def planned(self, start_step: int, total_steps: int) -> None:
        """Write the length of the run."""
        self._event("planned", f"{total_steps} steps", total_steps=total_steps)

    def step_committed(self, record: StepRecord) -> None:
        """Write the codecs that change with a step, and the schedule."""
        self._step = record.step
        for change in record.codec_changes:
            self._event("codec", str(change))
        if record.schedule_change:
            self._event("schedule", record.schedule_change)

    def turned_back(self, step: int) -> None:
        """Write the step that all stages go back to."""
        self._step = step
        self._event("turned back", f"all stages go back to step {step}")

    def snapshot_written(self, record: SnapshotRecord) -> None:
        """Write that a checkpoint is complete, or has failed."""
        if record.error:
            self._event("checkpoint", f"failed: {record.error}")
        else:
            text = f"{format_size(record.nbytes)}{', the best so far' * record.is_best}"
            self._event("checkpoint", text, of_step=record.step, is_best=record.is_best)

    def sampled(self, record: SamplesRecord) -> None:
        """Write the samples."""
        for line in sample_lines(record):
            self._event("sample", line)

    def warned(self, text: str) -> None:
        """Write a warning."""
        self._event("warning", text)

    def ended(self, end: RunEnd) -> None:
        """Write how the run ended, and close the file."""
        with self._file:
            text = f"with status {end.exit_status}: {end.message}" if end.message else "all steps are done"
            self._event("ended", text, exit_status=end.exit_status)
            super().ended(end)

    def _event(self, event: str, text: str, **details: Any) -> None:
        self.append({"time": self._clock(), "step": self._step, "event": event, "text": text, **details})
