"""Every damaged checkpoint is skipped with a warning that names it."""

import json
import os
import re

import pytest
from pipeline.test_snapshot import write_snapshot

from tahq.errors import SnapshotError
from tahq.pipeline.checkpoint.manifest import latest_folder, snapshot_folder
from tahq.pipeline.checkpoint.snapshot import choose_snapshot, turn_back


@pytest.fixture
def snapshots(tmp_path):
    """Three checkpoints of two stages, after 10, 20 and 30 steps."""
    for step in (10, 20, 30):
        write_snapshot(tmp_path, step)
    return tmp_path


def choose(snapshots, *, all_files_here=True):
    """(step, warnings)"""
    chosen = choose_snapshot(snapshots, all_files_here=all_files_here)
    assert chosen.folder == snapshot_folder(snapshots, chosen.manifest.step)
    return chosen.manifest.step, chosen.warnings


def stage_file(snapshots, step, stage=1):
    return next(snapshot_folder(snapshots, step).glob(f"stage-{stage:03d}-*"))


def flip(path, at=-5):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-20])


DAMAGE = {
    "a bit in the data": (lambda folder: flip(next(folder.glob("stage-001-*"))), "stage-001-.* is damaged: its SHA"),
    "a bit in the header": (lambda folder: flip(next(folder.glob("stage-000-*")), 20), "stage-000-.* is damaged"),
    "a file cut short": (lambda folder: truncate(next(folder.glob("stage-000-*"))), "stage-000-.* bytes, expected"),
    "a missing file": (lambda folder: next(folder.glob("stage-001-*")).unlink(), r"stage-001-.* is missing"),
    "a manifest cut short": (lambda folder: truncate(folder / "manifest.json"), r"manifest\.json is not a usable"),
    "an empty manifest": (lambda folder: (folder / "manifest.json").write_text(""), r"manifest\.json is not a usable"),
    "a missing manifest": (
        lambda folder: (folder / "manifest.json").unlink(),
        "latest names 'step-00000030', which is",
    ),
    "a missing folder": (lambda folder: folder.rename(folder.with_name("gone")), "latest names 'step-00000030'"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_one_before_is_taken_with_a_warning_that_names_the_damage(snapshots, damage):
    assert choose(snapshots) == (30, ())
    do, reason = DAMAGE[damage]
    do(snapshot_folder(snapshots, 30))
    step, (warning,) = choose(snapshots)
    assert step == 20
    assert re.search(reason, warning)
    assert warning.endswith("; resuming from step-00000020 instead")
    assert "\n" not in warning


def test_every_bit_of_a_manifest_counts(snapshots):
    path = snapshot_folder(snapshots, 30) / "manifest.json"
    whole = path.read_bytes()
    for at in range(0, len(whole), 3):
        content = bytearray(whole)
        content[at] ^= 1 << (at % 8)
        path.write_bytes(content)
        step, warnings = choose(snapshots)
        same = _as_json(content) == json.loads(whole)  # blanks between values mean nothing
        assert (step, len(warnings)) == ((30, 0) if same else (20, 1)), at


def _as_json(content):
    try:
        return json.loads(content.decode())
    except ValueError:
        return None


def test_manifest_of_an_earlier_version_is_read(snapshots):
    path = snapshot_folder(snapshots, 30) / "manifest.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    path.write_text(json.dumps(content))
    assert choose(snapshots) == (30, ())


def test_each_damaged_checkpoint_has_a_warning(snapshots):
    flip(stage_file(snapshots, 30))
    stage_file(snapshots, 20, 0).unlink()
    step, warnings = choose(snapshots)
    assert step == 10
    assert ["step-00000030" in warnings[0], "step-00000020" in warnings[1]] == [True, True]
    flip(stage_file(snapshots, 10))
    with pytest.raises(SnapshotError) as caught:
        choose(snapshots)
    assert all(stage_file(snapshots, step).name in str(caught.value) for step in (10, 30))
    assert str(caught.value).endswith("there is no other undamaged checkpoint")


LATEST = {
    "not there": lambda path: path.unlink(),
    "another name": lambda path: path.write_text("step-00000099\n"),
    "empty": lambda path: path.write_text(""),
    "another folder": lambda path: path.write_text("../elsewhere"),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe"),
    "FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "1 GiB": lambda path: os.truncate(path, 1 << 30),
}


@pytest.mark.parametrize("damage", LATEST.values(), ids=LATEST)
@pytest.mark.timeout(20)
def test_unusable_latest_is_replaced_by_the_newest_complete_checkpoint(snapshots, damage):
    damage(snapshots / "latest")
    step, (warning,) = choose(snapshots)
    assert step == 30
    assert "resuming from step-00000030 instead" in warning


def test_checkpoints_newer_than_latest_are_never_taken(snapshots):
    (snapshots / "latest").write_text("step-00000020\n")
    flip(stage_file(snapshots, 20))
    assert choose(snapshots)[0] == 10


def test_files_of_other_hosts_need_not_be_here_but_those_that_are_must_be_whole(snapshots):
    stage_file(snapshots, 30, 1).unlink()
    assert choose(snapshots, all_files_here=False) == (30, ())
    flip(stage_file(snapshots, 30, 0))
    assert choose(snapshots, all_files_here=False)[0] == 20


def test_turning_back_disables_newer_checkpoints_of_the_other_history(snapshots):
    flip(stage_file(snapshots, 30))
    chosen = choose_snapshot(snapshots, all_files_here=True)
    turn_back(snapshots, chosen.folder)
    assert latest_folder(snapshots) == chosen.folder
    assert choose(snapshots) == (20, ())
    write_snapshot(snapshots, 40)  # the history that was turned back from had another after 30 steps
    flip(stage_file(snapshots, 40))
    assert choose(snapshots)[0] == 20


def test_turning_back_to_the_latest_changes_nothing(snapshots):
    before = {path: path.stat().st_mtime_ns for path in snapshots.rglob("*")}
    turn_back(snapshots, snapshot_folder(snapshots, 30))
    assert {path: path.stat().st_mtime_ns for path in snapshots.rglob("*")} == before
