"""Checkpoints by the clock (`run.checkpoint_every`): their cadence, the worker that begins at the last, equal bits."""

import os
import signal
from itertools import islice

import pytest
from support.processes import workers
from support.runs import Run, assert_same_run, start, tiny, train, write_config

from tahq import fault_points

pytestmark = pytest.mark.acceptance

NUM_STEPS = 16


def config(**run) -> dict:
    """With lossy codecs, of which one remembers samples, a lost or repeated tensor changes the losses."""
    return tiny(
        run=run,
        training={"steps": NUM_STEPS},
        pipeline={"stages": 2},
        wire={"activations": "aqsgd", "gradients": "fixed:bits=6"},
        emulate={"delay": "50ms"},
    )


@pytest.fixture(scope="module")
def default(tmp_path_factory) -> Run:
    return train(tmp_path_factory.mktemp("default"), config())


def announced(run: Run) -> list[int]:
    """The steps behind each checkpoint, in order."""
    lines = [line for line in run.stdout.splitlines() if line.startswith("checkpoint after step")]
    return [int(line.split()[3].rstrip(":")) for line in lines]


def due(step_times_s: list[float], every_s: float) -> list[int]:
    """The steps at whose ends that time has passed since the last checkpoint or the start, and the last step."""
    steps, passed_s = [], 0.0
    for step, step_s in enumerate(step_times_s, start=1):
        passed_s += step_s
        if passed_s >= every_s or step == len(step_times_s):
            steps.append(step)
            passed_s = 0.0
    return steps


def test_default_interval_gives_a_short_run_only_its_last_checkpoint(default):
    assert "checkpoint_every: 600s" in (default.folder / "config.yaml").read_text()
    assert announced(default) == [NUM_STEPS]


def test_checkpoints_follow_the_clock_and_change_no_bit(tmp_path, default):
    run = train(tmp_path, config(checkpoint_every="1s"))
    steps = announced(run)
    assert 3 <= len(steps) < NUM_STEPS
    assert steps == due([row["step_time_s"] for row in run.metrics], 1.0)
    kept = sorted(path.name for path in (run.folder / "snapshots").glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in steps[-2:]]
    assert_same_run(run, default)


def test_killed_worker_begins_at_the_last_checkpoint_of_the_clock(tmp_path, default):
    """Faults without an effect record the steps at which workers of stage 1 begin."""
    write_config(tmp_path, config(checkpoint_every="1s"))
    marks = tmp_path / "marks"
    marks.mkdir()
    begins = (f"sleep=0s@handshake:stage=1:step={step}" for step in range(NUM_STEPS))
    faults = {fault_points.FAULTS: ",".join(begins), fault_points.FOLDER: str(marks)}
    launcher = start(tmp_path, "tahq-launch", "cluster.yaml", extra=faults)
    try:
        lines = (line for line in iter(launcher.stdout.readline, "") if line.startswith("checkpoint after step"))
        seen = list(islice(lines, 2))
        os.kill(workers(launcher.pid)[1], signal.SIGKILL)
        stdout, stderr = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
        launcher.communicate()
    run = Run(tmp_path / "runs" / "tiny", launcher.returncode, "".join(seen) + stdout, stderr)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "is back after" in run.stdout
    first, again = sorted(step for step in range(NUM_STEPS) if list(marks.glob(f"{step}-*")))
    assert first == 0
    assert again in announced(run)[1:]
    assert_same_run(run, default)
