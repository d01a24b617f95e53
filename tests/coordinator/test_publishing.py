"""Checkpoints are published beside the training, and by the end of the run."""

import hashlib
import threading
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch
from coordinator.test_returning import led
from support.at_once import Sooner

from tahq.comm.control.messages import Commit, Plan, Published, Snapshotted
from tahq.coordinator.joining.seats import RestorePoint
from tahq.coordinator.training import SnapshotParts, publish_to_folder
from tahq.errors import SnapshotError, UserError
from tahq.pipeline.checkpoint.manifest import StageMeta, latest_folder, read_manifest, snapshot_folder
from tahq.pipeline.checkpoint.snapshot import best_step, turn_back
from tahq.pipeline.checkpoint.stage_file import write_stage

LONG_S = 30.0


@pytest.fixture
def late(scene):
    """A scene whose checkpoints are published only when something waits for them."""
    scene.executor = Sooner(Random(1), chance=0.0)
    return scene


def test_steps_are_committed_while_a_checkpoint_is_published(scene):
    """Publishing ends only when three more steps are committed; were they to wait for it, the run would not end."""
    gate, committed = threading.Event(), []

    def publish(part):
        if part.step == 2:
            assert gate.wait(LONG_S)
            committed.append(len(scene.losses()))
        scene.published.append(part)

    send = scene.server.send

    def send_and_watch(identity, message):
        send(identity, message)
        if isinstance(message, Commit) and message.step == 4:
            gate.set()

    scene.server.send = send_and_watch
    scene.executor = None
    scene.publish = publish
    scene.workers()
    assert scene.run(steps=8, checkpoint_every=2) == 0
    assert committed[0] >= 4
    assert [part.step for part in scene.published] == [2, 4, 6, 8]
    assert scene.end.last_snapshot == 8
    assert [message.step for message in scene.server.told(b"worker-1", Published)] == [2, 4, 6, 8]


def test_run_that_breaks_off_names_the_checkpoint_that_was_being_published(late):
    late.workers(stage1={"silent_from_step": 3})
    assert late.run(steps=8, checkpoint_every=2, give_up_s=20.0) == 3
    assert [part.step for part in late.published] == [2]
    assert late.end.last_snapshot == 2
    assert [record.error for record in late.observer.of("snapshot_written")] == [""]


def test_lost_stage_begins_at_a_checkpoint_that_was_being_published(late):
    """Were it to begin at the one before, its neighbours would free what it needs while it computes."""
    led(late, [(2, 1)], after_steps=5)
    (plan,) = late.server.told(late.stages[1].identity, Plan)
    assert plan.start_step == 3
    assert late.losses() == [2.0] * 8
    assert [part.step for part in late.published] == [3, 6, 8]


@pytest.mark.parametrize(
    ("failure", "part_error", "told"),
    [
        (SnapshotError("no space left"), "", "coordinator: no space left"),
        (OSError("disk on fire"), "", "coordinator: disk on fire"),
        (SnapshotError("no space left"), "cannot write", "; ".join(f"stage {n}: cannot write" for n in range(3))),
    ],
)
def test_checkpoint_that_fails_names_the_stages_or_else_the_coordinator(scene, failure, part_error, told):
    scene.publish_error = failure
    scene.workers(**{f"stage{stage}": {"snapshot_error": part_error} for stage in range(3)})
    assert scene.run() == 1
    assert [record.error for record in scene.observer.of("snapshot_written")] == [told]
    assert "the last checkpoint could not be written" in scene.end.message


def test_programming_error_while_publishing_is_raised(scene):
    scene.publish_error = ZeroDivisionError("a mistake of ours")
    scene.workers()
    with pytest.raises(ZeroDivisionError, match="of ours"):
        scene.run()


def test_run_whose_folder_is_found_removed_while_it_breaks_off_ends_with_one_line(late):
    late.publish_error = UserError("the run's folder is gone")
    workers = late.workers(stage1={"silent_from_step": 3})
    assert (
        late.run(lambda: workers[1].silent and late.coordinator.worker_exited(1, 4), steps=8, checkpoint_every=2) == 4
    )
    assert "the run's folder is gone" in late.warnings()


# -- as files --------------------------------------------------------------------------------------


def write_parts(run_folder, step, num_stages=2):
    folder = snapshot_folder(run_folder / "snapshots", step)
    parts = []
    for stage in range(num_stages):
        meta = StageMeta(step, stage, num_stages, stage, stage + 1, {"step": step, "sample": 0}, "c0ffee")
        file = write_stage(folder, stage, {f"model/w{stage}": torch.full((2,), float(step))}, meta)
        parts.append(Snapshotted(step, stage, file.file, file.sha256, file.nbytes))
    return SnapshotParts(RestorePoint(step), tuple(parts))


@pytest.fixture
def publisher(scene):
    return partial(publish_to_folder, replace(scene.options, keep_checkpoints=2))


def test_published_checkpoint_is_the_latest_names_its_files_and_removes_old_ones(publisher, tmp_path):
    snapshots = tmp_path / "snapshots"
    for step in (1, 2, 5):
        parts = write_parts(tmp_path, step)
        publisher(parts)
    folder = latest_folder(snapshots)
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.run_id, manifest.config) == (5, 7, {"a": 1})
    assert manifest.sha256 == {part.file: part.sha256 for part in parts.parts}
    for part in parts.parts:
        assert hashlib.sha256((folder / part.file).read_bytes()).hexdigest() == part.sha256
    left = {path.name for path in snapshots.iterdir() if path.is_dir()}
    assert left == {snapshot_folder(snapshots, step).name for step in (2, 5)}


def test_best_checkpoint_stays_beside_the_newest_until_there_is_a_better_one(publisher, tmp_path):
    snapshots, kept = tmp_path / "snapshots", {}
    for step in range(1, 8):
        publisher(replace(write_parts(tmp_path, step), is_best=step in (2, 6)))
        kept[step] = [int(path.name.removeprefix("step-")) for path in sorted(snapshots.iterdir()) if path.is_dir()]
    assert (kept[5], kept[7]) == ([2, 4, 5], [6, 7])
    assert best_step(snapshots) == 6
    turn_back(snapshots, snapshot_folder(snapshots, 6))
    assert best_step(snapshots) == 6
    publisher(replace(write_parts(tmp_path, 8), is_best=True))
    turn_back(snapshots, snapshot_folder(snapshots, 6))
    assert best_step(snapshots) == 0


@pytest.mark.parametrize("complete_before", [False, True])
def test_failed_checkpoint_leaves_no_files(publisher, tmp_path, complete_before):
    publisher(write_parts(tmp_path, 1))
    snapshots = tmp_path / "snapshots"
    if complete_before:  # of an earlier start of the run, which was resumed from the one before it
        kept = write_parts(tmp_path, 2)
        publisher(kept)
        (snapshots / "latest").write_text("step-00000001\n")
    half = write_parts(tmp_path, 2, num_stages=1 if not complete_before else 3)
    failed = (*half.parts[:-1], replace(half.parts[-1], error="disk full")) if complete_before else half.parts
    failed = (*failed, Snapshotted(2, 1, "", "", 0, error="cannot write x: No space left on device"))
    with pytest.raises(SnapshotError, match="No space left"):
        publisher(SnapshotParts(RestorePoint(2), failed))
    assert latest_folder(snapshots).name == "step-00000001"
    folder = snapshot_folder(snapshots, 2)
    assert folder.is_dir() == complete_before
    if complete_before:
        assert {path.name for path in folder.iterdir()} == {"manifest.json", *(part.file for part in kept.parts)}


def test_removed_run_folder_is_named_and_not_created_again(scene, tmp_path):
    options = replace(scene.options, run_folder=tmp_path / "gone")
    with pytest.raises(UserError, match=r"the run's folder .*gone or a file in it was removed"):
        publish_to_folder(options, SnapshotParts(RestorePoint(5), (Snapshotted(5, 0, "file", "ab", 10),)))
    assert not options.run_folder.exists()
