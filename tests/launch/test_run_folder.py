"""Who may write a run folder, and that nothing in it is overwritten."""

import os
import subprocess
import sys

import pytest

from tahq.errors import UserError
from tahq_launch.start.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "runs" / "demo")


def test_check_startable_passes_for_a_new_name(folder):
    folder.check_startable(resume=False)
    assert not folder.path.exists()


def test_check_startable_passes_after_a_start_that_took_no_step(folder):
    folder.logs.mkdir(parents=True)
    folder.config.write_text("run: {}\n")
    folder.metrics.touch()
    folder.check_startable(resume=False)


def test_check_startable_refuses_to_overwrite_metrics(folder):
    folder.path.mkdir(parents=True)
    folder.metrics.write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"left no checkpoint.*run\.name"):
        folder.check_startable(resume=False)


@pytest.mark.parametrize("trace", ["latest", "step-00000004/manifest.json"])
def test_check_startable_offers_resume_where_there_is_a_snapshot(folder, trace):
    (folder.snapshots / trace).parent.mkdir(parents=True)
    (folder.snapshots / trace).write_text("step-4")
    with pytest.raises(UserError, match="--resume"):
        folder.check_startable(resume=False)


def test_check_startable_refuses_to_resume_nothing(folder):
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        folder.check_startable(resume=True)


def test_resumption_by_the_journal_alone_needs_the_configuration(folder):
    folder.path.mkdir(parents=True)
    folder.journal.touch()
    with pytest.raises(UserError, match=r"needs config\.yaml, which is missing; start it again under another name"):
        folder.check_startable(resume=True)


def test_lock_is_exclusive_between_processes_and_names_the_holder(folder):
    program = (
        "import pathlib, sys\n"
        "from tahq.errors import UserError\n"
        "from tahq_launch.start.run_folder import RunFolder\n"
        "try:\n"
        "    with RunFolder(pathlib.Path(sys.argv[1])).locked(): print('got it')\n"
        "except UserError as error: print(error)\n"
    )
    command = [sys.executable, "-c", program, str(folder.path)]
    with folder.locked():
        refused = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert f"process {os.getpid()}" in refused.stdout
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout == "got it\n"


def test_lock_numbers_the_starts_of_a_run(folder):
    for expected in (1, 2, 3):
        with folder.locked() as start:
            assert start == expected


def test_lock_reports_a_folder_that_cannot_be_made_as_the_users_mistake(tmp_path):
    (tmp_path / "runs").write_text("a file, not a folder")
    with (
        pytest.raises(UserError, match=r"cannot write the run folder.*run\.dir"),
        RunFolder(tmp_path / "runs" / "demo").locked(),
    ):
        pass
