"""Run folders with made-up figures, written by the observers that write those of real runs."""

import math
import os
from dataclasses import replace
from pathlib import Path

from tahq.coordinator.observer import (
    CodecChange,
    LinkRecord,
    RunEnd,
    RunHeader,
    StageRecord,
    StageSplit,
    StageStatus,
    StepRecord,
    ValidationRecord,
)
from tahq.observe.events import EventsFile
from tahq.observe.metrics import MetricsFile
from tahq.observe.run_view import Observers

STEP_S = 0.5
CHANGE = CodecChange(0, "activations", "wf:bits=4", "wf:bits=3", "bottleneck", "71 % of the step")


def made_step(step: int, num_stages: int = 2) -> StepRecord:
    """A step whose loss falls from 5, every 10th with a validation loss and every 50th with another codec."""
    stages = [
        StageRecord(
            stage=number,
            timing={},
            split=StageSplit(forward_s=0.1, backward_s=0.2, wait_s={(number + 1) % num_stages: 0.1}, commit_s=0.1),
            memory_bytes=8_000_000_000,
            peak_bytes=1_000_000_000 * (number + 1),
        )
        for number in range(num_stages)
    ]
    links = []
    for cut in range(num_stages - 1):
        there = LinkRecord(cut, cut, cut + 1, "activations", 8, 441_000, 442_000, 800_000, 0.2, 0.18, 0.15, 0.3)
        back = replace(there, sender=cut + 1, receiver=cut, direction="gradients", payload_bytes=300_000)
        links += [replace(there, codec="wf:bits=4"), replace(back, codec="eden:bits=3")]
    return StepRecord(
        step=step,
        loss=1.0 + 4.0 * math.exp(-step / 300) + 0.05 * math.sin(step),
        tokens=1000 + step % 7,
        step_time_s=STEP_S,
        grad_norm=1.25,
        clip_factor=0.8,
        skipped=False,
        evaluating=step % 10 == 0,
        stages=stages,
        links=links,
        codec_changes=(CHANGE,) * (step % 50 == 0),
        lr=3e-4,
        schedule="1f1b",
    )


class MadeRun:
    """A run that has begun, and that this process seems to train, as it holds the folder's lock until `end`."""

    def __init__(self, folder: Path, num_stages: int = 2, total_steps: int = 60) -> None:
        folder.mkdir(parents=True)
        self._lock = (folder / ".lock").open("w")
        print(1, os.getpid(), end="", file=self._lock, flush=True)
        self.folder = folder
        self._num_stages, self._total_steps = num_stages, total_steps
        self.tell = Observers([MetricsFile(folder / "metrics.jsonl"), EventsFile(folder / "events.jsonl")])
        self.tell.opened(RunHeader(folder.name, folder, num_stages, "127.0.0.1:5555", 0))
        for stage in range(num_stages):
            self.join(stage)
        self.tell.planned(0, total_steps)
        self.tell.phase_changed("training", "")

    def join(self, stage: int, pid: int = 40) -> None:
        """A worker takes a stage."""
        self.tell.stage_changed(StageStatus(stage, f"host{stage}", pid + stage, "cpu", 12345, "F0", 0))

    def train(self, first: int, last: int) -> None:
        """Commit these steps."""
        for step in range(first, last + 1):
            record = made_step(step, self._num_stages)
            self.tell.step_committed(record)
            if record.evaluating:
                self.tell.validated(ValidationRecord(step, 500, record.loss + 0.1, record.loss))

    def end(self, status: int = 0, message: str = "") -> None:
        """End the run."""
        self.tell.phase_changed("over", "")
        self.tell.ended(RunEnd(status, message, self._total_steps, self._total_steps))
        self._lock.close()


def finished_run(folder: Path, num_stages: int = 2, num_steps: int = 60) -> Path:
    """The folder of a run that has done all its steps."""
    run = MadeRun(folder, num_stages, num_steps)
    run.train(1, num_steps)
    run.end()
    return folder
