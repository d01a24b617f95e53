"""Checkpoints of real runs: background writes equal those that training waits for; a full disk costs one checkpoint."""

import os
import re
import shutil
import signal
import subprocess

import pytest
import torch
from support.disks import can_mount, small_disk
from support.processes import is_alive, wait_until, workers
from support.runs import Run, launch, start, tiny, train, write_config

from tahq.fault_points import FAULTS
from tahq.pipeline.checkpoint.manifest import latest_folder, read_manifest, snapshot_folders
from tahq.pipeline.checkpoint.stage_file import SnapshotReader

pytestmark = pytest.mark.ci


def config(**sections) -> dict:
    """A run with AQ-SGD, whose state changes with every step and is part of checkpoints."""
    return tiny(
        run={"checkpoint_every": 1, "keep_checkpoints": 10} | sections.pop("run", {}),
        pipeline={"stages": 2},
        training={"steps": 5, "eval_every": 2, "eval_batches": 1} | sections.pop("training", {}),
        wire={"activations": "aqsgd", "gradients": "tah"} | sections.pop("wire", {}),
    )


def all_tensors(run: Run) -> dict[str, torch.Tensor]:
    """The tensors of every checkpoint, by step and name."""
    tensors = {}
    for step, folder in snapshot_folders(run.folder / "snapshots").items():
        reader = SnapshotReader(folder, read_manifest(folder).sha256)
        tensors |= {f"{step}/{name}": reader.tensor(name) for name in reader.names()}
    return tensors


@pytest.mark.acceptance
@pytest.mark.parametrize("cache", ["memory", "file"])
def test_background_checkpoints_equal_those_that_training_waits_for(tmp_path, cache):
    runs = []
    for num_buffers in (0, 2):
        sections = config(run={"checkpoint_buffers": num_buffers}, wire={"activations": f"aqsgd:cache={cache}"})
        runs.append(train(tmp_path / str(num_buffers), sections))
    waiting, beside = runs
    assert beside.losses == waiting.losses
    ours, theirs = all_tensors(beside), all_tensors(waiting)
    assert ours.keys() == theirs.keys()
    assert {name.partition("/")[0] for name in ours} == {"1", "2", "3", "4", "5"}
    assert any("/codec/" in name for name in ours)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    was_beside = [
        any(stage["beside_s"].get("snapshot") for row in run.metrics for stage in row["stages"]) for run in runs
    ]
    assert was_beside == [False, cache == "memory"]


@pytest.fixture
def disk(tmp_path):
    """A file system of its own for a run: its folder, and a function that makes it smaller or larger."""
    if not can_mount():
        pytest.skip("needs to mount a file system, and so root")
    folder = tmp_path / "runs" / "tiny"

    def resize(nbytes: int) -> None:
        """Resize the disk, as soon as no more than that is in use."""
        command = ["mount", "-o", f"remount,size={nbytes}", str(folder)]
        wait_until(lambda: subprocess.run(command, capture_output=True).returncode == 0, 30, "a disk of another size")

    with small_disk(folder, 1 << 30):
        yield folder, resize


def test_full_disk_costs_one_checkpoint_and_the_next_that_fits_is_written(tmp_path, disk):
    folder, resize = disk
    snapshots = folder / "snapshots"
    sections = config(
        run={"checkpoint_every": 4, "keep_checkpoints": 1, "checkpoint_buffers": 2},
        training={"steps": 1_000_000, "eval_every": None},
        wire={"activations": "fixed", "gradients": "fixed"},
    )
    write_config(tmp_path, sections)
    launcher = start(tmp_path, "tahq-launch", "cluster.yaml")
    try:
        lines = iter(launcher.stdout.readline, "")
        *_, megabytes, unit = next(line for line in lines if line.startswith("checkpoint after step")).split()
        assert unit == "MB"
        # room for one stage of the next and not for both: stages of this model are of about equal size
        resize(int(1.7e6 * float(megabytes)))
        warning = next(line for line in lines if line.startswith("warning: no checkpoint"))
        good = latest_folder(snapshots).name
        assert "No space left on device" in warning
        assert "/snapshots/step-" in warning
        assert warning.rstrip().endswith("the previous checkpoint stays valid")
        resize(64 * 1024 * 1024)
        next(line for line in lines if line.startswith("checkpoint after step"))
        assert latest_folder(snapshots).name > good
        launcher.send_signal(signal.SIGINT)
        _, stderr = launcher.communicate(timeout=60)
        assert launcher.returncode == 130, stderr
    finally:
        launcher.kill()
        launcher.communicate()
    assert not list(snapshots.rglob("*.tmp"))
    steps = [row["step"] for row in Run(folder, 0, "", "").metrics]
    assert steps == list(range(1, len(steps) + 1))
    newest = latest_folder(snapshots)
    SnapshotReader(newest, read_manifest(newest).sha256).verify()


def test_disk_too_small_for_a_checkpoint_is_refused_before_the_first_step(tmp_path, disk):
    folder, resize = disk
    resize(1 << 20)
    run = launch(tmp_path, config())
    assert run.returncode == 2, run.stderr
    assert re.search(r"a checkpoint of this run takes [\d,]+ bytes \(.* MB\), but \S+/snapshots has", run.stderr)
    assert "free; free space there, or set run.dir to another disk" in run.stderr
    assert not (folder / "metrics.jsonl").exists() or not run.metrics


def test_full_disk_after_the_last_step_is_waited_for(tmp_path, disk):
    folder, resize = disk
    resize(16 << 20)
    steps = {"steps": 10, "eval_every": None}
    write_config(tmp_path, config(run={"checkpoint_every": "never"}, training=steps, emulate={"delay": "40ms"}))
    launcher, filler = start(tmp_path, "tahq-launch", "cluster.yaml"), folder / "filler"

    def is_waiting():
        return any("waiting for room" in path.read_text() for path in folder.rglob("stage-*.log"))

    try:
        wait_until(lambda: (folder / "metrics.jsonl").exists() and Run(folder, 0, "", "").metrics, 60, "a step")
        filler.write_bytes(bytes(shutil.disk_usage(folder).free - (1 << 20)))  # room for sent frames and journal only
        wait_until(is_waiting, 30, "the last checkpoint finds no room")
        filler.unlink()
        stdout, stderr = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
        launcher.communicate()
    assert launcher.returncode == 0, stdout + stderr
    newest = latest_folder(folder / "snapshots")
    assert newest.name == "step-00000010"
    SnapshotReader(newest, read_manifest(newest).sha256).verify()


@pytest.mark.acceptance
def test_incomplete_checkpoint_of_a_killed_worker_is_ignored(tmp_path):
    """All processes are killed while a worker writes: the run resumes from the previous checkpoint, to the bit."""
    plan = config(
        run={"checkpoint_every": 2},
        training={"steps": 6, "lr_schedule": "constant", "eval_every": None},
        wire={"activations": "raw:dtype=fp32", "gradients": "raw:dtype=fp32"},
    )
    whole = train(tmp_path / "whole", plan)
    (tmp_path / "killed").mkdir()
    folder = tmp_path / "killed" / "runs" / "tiny"
    unfinished = folder / "snapshots" / "step-00000004"
    write_config(tmp_path / "killed", plan)
    in_the_midst = {FAULTS: "sleep=60s@snapshot:stage=1:step=4"}
    launcher = start(tmp_path / "killed", "tahq-launch", "cluster.yaml", extra=in_the_midst)
    try:
        lines = iter(launcher.stdout.readline, "")
        next(line for line in lines if line.startswith("checkpoint after step 2"))
        stages = workers(launcher.pid)
        wait_until(lambda: any(unfinished.glob("stage-001*.tmp")), 60, "a file is being written")
        for pid in (*stages, launcher.pid):
            os.kill(pid, signal.SIGKILL)
    finally:
        launcher.kill()
        launcher.communicate()
    wait_until(lambda: not any(map(is_alive, stages)), 15, "the workers are gone")
    assert list(unfinished.glob("*.tmp"))
    assert not (unfinished / "manifest.json").exists()
    resumed = train(tmp_path / "killed", plan, "--resume")
    assert resumed.losses == whole.losses
    ours, theirs = all_tensors(resumed), all_tensors(whole)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert not list(folder.rglob("*.tmp"))
