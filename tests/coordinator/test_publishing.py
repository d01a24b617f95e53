"""Snapshots are published beside the training, and by the end of the run."""

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
from tahq.coordinator.publishing import Publishing, SnapshotParts, publish_to_folder
from tahq.errors import SnapshotError, UserError
from tahq.pipeline.checkpoint.manifest import StageMeta, latest_folder, read_manifest, snapshot_folder
from tahq.pipeline.checkpoint.stage_file import write_stage

LONG_S = 30.0


def parts(step, error=""):
    return SnapshotParts(step, (Snapshotted(step, 0, "file", "ab", 10, error=error),))


@pytest.fixture
def gate():
    event = threading.Event()
    yield event
    event.set()


def test_nothing_is_taken_before_it_is_published_and_then_in_order(gate):
    published = []

    def publish(part):
        assert gate.wait(LONG_S)
        published.append(part.step)

    publishing = Publishing(publish)
    publishing.begin(parts(5))
    publishing.begin(parts(10))
    assert publishing.take() == []
    assert publishing.outstanding == ("the checkpoint after step 5", "the checkpoint after step 10")
    gate.set()
    assert [(part.step, error) for part, error in publishing.take(wait=True)] == [(5, ""), (10, "")]
    assert published == [5, 10]
    assert publishing.outstanding == ()
    publishing.close()


def test_what_goes_wrong_is_said_of_the_stage_or_else_of_the_coordinator():
    def publish(part):
        raise SnapshotError("no space left")

    publishing = Publishing(publish)
    publishing.begin(parts(5))
    publishing.begin(parts(10, error="disk on fire"))
    assert [error for _, error in publishing.take(wait=True)] == ["coordinator: no space left", "stage 0: disk on fire"]
    publishing.close()


def test_what_no_disk_does_is_raised_where_it_is_taken():
    def publish(part):
        raise ZeroDivisionError("a mistake of ours")

    publishing = Publishing(publish)
    publishing.begin(parts(5))
    with pytest.raises(ZeroDivisionError, match="of ours"):
        publishing.take(wait=True)
    publishing.close()


def test_steps_are_committed_while_a_snapshot_is_published(scene, gate):
    """Publishing ends only when three more steps are committed; were they to wait for it, the run would not end."""
    committed = []

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
    assert scene.run(steps=8, snapshot_every=2) == 0
    assert committed[0] >= 4
    assert [part.step for part in scene.published] == [2, 4, 6, 8]
    assert scene.end.last_snapshot == 8
    assert [message.step for message in scene.server.told(b"worker-1", Published)] == [2, 4, 6, 8]


def test_run_ends_when_its_last_snapshot_is_published_however_late(scene):
    scene.executor = Sooner(Random(1), chance=0.0)
    scene.workers()
    assert scene.run(steps=5, snapshot_every=2) == 0
    assert [part.step for part in scene.published] == [2, 4, 5]
    assert scene.end.last_snapshot == 5


def test_run_that_breaks_off_names_the_snapshot_that_was_being_published(scene):
    scene.executor = Sooner(Random(1), chance=0.0)
    scene.workers(stage1={"silent_from_step": 3})
    assert scene.run(steps=8, snapshot_every=2, give_up_s=20.0) == 3
    assert [part.step for part in scene.published] == [2]
    assert scene.end.last_snapshot == 2
    assert [record.error for record in scene.observer.of("snapshot_written")] == [""]


def test_lost_stage_begins_at_a_snapshot_that_was_being_published(scene):
    """Were it to begin at the one before, its neighbours would free what it needs while it computes."""
    scene.executor = Sooner(Random(1), chance=0.0)
    stages = led(scene, [(2, 1)], after_steps=5)
    (plan,) = scene.server.told(stages[1].worker.identity, Plan)
    assert plan.start_step == 3
    assert scene.losses() == [2.0] * 8
    assert [part.step for part in scene.published] == [3, 6, 8]


# -- as files --------------------------------------------------------------------------------------


def write_parts(run_folder, step, num_stages=2):
    folder = snapshot_folder(run_folder / "snapshots", step)
    parts = []
    for stage in range(num_stages):
        meta = StageMeta(step, stage, num_stages, stage, stage + 1, {"step": step, "sample": 0}, "c0ffee")
        file = write_stage(folder, stage, {f"model/w{stage}": torch.full((2,), float(step))}, meta)
        parts.append(Snapshotted(step, stage, file.file, file.sha256, file.nbytes))
    return SnapshotParts(step, tuple(parts))


@pytest.fixture
def publisher(scene):
    return partial(publish_to_folder, replace(scene.options, keep_snapshots=2))


def test_published_snapshot_is_the_latest_and_names_its_files(publisher, tmp_path):
    parts = write_parts(tmp_path, 5)
    publisher(parts)
    folder = latest_folder(tmp_path / "snapshots")
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.run_id, manifest.config) == (5, 7, {"a": 1})
    assert manifest.sha256 == {part.file: part.sha256 for part in parts.parts}
    for part in parts.parts:
        assert hashlib.sha256((folder / part.file).read_bytes()).hexdigest() == part.sha256


def test_old_snapshots_are_removed(publisher, tmp_path):
    for step in (1, 2, 3):
        publisher(write_parts(tmp_path, step))
    left = {path.name for path in (tmp_path / "snapshots").iterdir() if path.is_dir()}
    assert left == {snapshot_folder(tmp_path / "snapshots", step).name for step in (2, 3)}


@pytest.mark.parametrize("complete_before", [False, True])
def test_of_a_snapshot_that_failed_nothing_takes_up_room(publisher, tmp_path, complete_before):
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
        publisher(SnapshotParts(2, failed))
    assert latest_folder(snapshots).name == "step-00000001"
    folder = snapshot_folder(snapshots, 2)
    assert folder.is_dir() == complete_before
    if complete_before:
        assert {path.name for path in folder.iterdir()} == {"manifest.json", *(part.file for part in kept.parts)}


def test_removed_run_folder_is_named_and_not_made_anew(scene, tmp_path):
    options = replace(scene.options, run_folder=tmp_path / "gone")
    publishing = Publishing(partial(publish_to_folder, options))
    publishing.begin(parts(5))
    with pytest.raises(UserError, match=r"the run's folder .*gone or a file in it was removed"):
        publishing.take(wait=True)
    publishing.close()
    assert not options.run_folder.exists()


def test_run_whose_folder_is_found_removed_while_it_breaks_off_ends_with_one_line(scene):
    scene.executor = Sooner(Random(1), chance=0.0)
    scene.publish_error = UserError("the run's folder is gone")
    workers = scene.workers(stage1={"silent_from_step": 3})
    assert (
        scene.run(lambda: workers[1].silent and scene.coordinator.worker_exited(1, 4), steps=8, snapshot_every=2) == 4
    )
    assert "the run's folder is gone" in scene.warnings()
