"""Snapshots become complete on disk."""

import hashlib
from dataclasses import replace

import pytest
import torch

from tahq.comm.control.messages import Snapshotted
from tahq.coordinator.publisher import SnapshotPublisher
from tahq.coordinator.reports import SnapshotParts
from tahq.errors import SnapshotError
from tahq.pipeline.checkpoint.snapshot import StageMeta, latest_folder, read_manifest, snapshot_folder, write_stage


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
    return SnapshotPublisher(replace(scene.options, keep_snapshots=2))


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
