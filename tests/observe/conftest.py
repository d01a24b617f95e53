"""Records of a small run: two stages, one link."""

from dataclasses import replace
from pathlib import Path

import pytest

from tahq.coordinator.observer import (
    LinkRecord,
    RunEnd,
    RunHeader,
    SnapshotRecord,
    StageRecord,
    StageStatus,
    StepRecord,
    ValidationRecord,
)
from tahq.observe.run_history import RunHistory

STAGES = StageRecord(0, {"forward": 3.0, "wait": 1.0}), StageRecord(1, {"backward": 1.0, "wait": 1.0})
LINKS = (
    LinkRecord(0, 0, 1, "activations", 4, 441_000, 442_000, 800_000, 0.1, 0.08, 0.05, 0.4),
    LinkRecord(0, 1, 0, "gradients", 4, 800_000, 801_000, 800_000, 0.2, 0.2, 0.15, 0.3),
)


def make_record(step, **changes):
    record = StepRecord(step, 4.0 - 0.01 * step, 1000, 0.5, 1.25, 0.8, False, False, STAGES, LINKS, lr=3e-4)
    return replace(record, **changes)


def play(observer, num_steps=20, total_steps=20):
    """Tell an observer a run up to its last step, with a validation loss after step 2."""
    observer.opened(RunHeader("demo", Path("runs/demo"), 2, "127.0.0.1:5555", 0))
    observer.phase_changed("joining", "stage 1 (tahq-worker --stage 1 --peer 127.0.0.1:5555)")
    for stage in range(2):
        observer.stage_changed(StageStatus(stage, f"host{stage}", 40 + stage, "cpu", 12345, "F0", 0))
    observer.planned(0, total_steps)
    observer.phase_changed("training", "")
    for step in range(1, num_steps + 1):
        observer.step_committed(make_record(step, evaluating=step == 2))
        if step == 2:
            observer.validated(ValidationRecord(2, 500, 2.5, 2.0))
    observer.snapshot_written(SnapshotRecord(num_steps, 13_200_000))


@pytest.fixture(scope="session")
def record():
    return make_record


@pytest.fixture(scope="session")
def play_run():
    return play


@pytest.fixture
def history():
    history = RunHistory()
    play(history)
    return history


@pytest.fixture
def end():
    return RunEnd(0, "", 20, 20, 20)
