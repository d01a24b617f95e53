"""The lock of a run folder, and that nothing in it is overwritten."""

import os

import pytest

from tahq.errors import UserError
from tahq_launch.start.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "runs" / "demo")


@pytest.mark.parametrize(
    ("file", "resume", "message"),
    [
        ("metrics.jsonl", False, r"left no checkpoint.*run\.name"),
        ("snapshots/step-00000004/manifest.json", False, "--resume"),
        ("config.yaml", True, "no checkpoint to resume from"),
        ("journal.sqlite", True, r"needs config\.yaml, which is missing; start it again under another name"),
    ],
)
def test_start_that_would_overwrite_or_resume_nothing_is_refused(folder, file, resume, message):
    (folder.path / file).parent.mkdir(parents=True)
    (folder.path / file).write_text("content")
    with pytest.raises(UserError, match=message):
        folder.check_startable(resume=resume)


def test_lock_is_exclusive_names_its_holder_and_numbers_the_starts(folder):
    folder.logs.mkdir(parents=True)
    (folder.path / ".lock").write_bytes(b"\xff damaged")
    for expected in (1, 2, 3):
        with folder.locked() as start:
            assert start == expected
            refusal = rf"written by another run \(process {os.getpid()}\)"
            with pytest.raises(UserError, match=refusal), RunFolder(folder.path).locked():
                pass


def test_folder_that_cannot_be_created_is_a_mistake_of_the_user(tmp_path):
    (tmp_path / "runs").write_text("a file, not a folder")
    refused = pytest.raises(UserError, match=r"cannot write the run folder.*run\.dir")
    with refused, RunFolder(tmp_path / "runs" / "demo").locked():
        pass
