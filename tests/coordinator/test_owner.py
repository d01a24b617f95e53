"""What the owner of a run may read: whole lines of a few files, from any byte on."""

import pytest

from tahq.comm.control.messages import ReadRun, RunLines
from tahq.coordinator.owner import run_lines


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "events.jsonl").write_text("one\ntwö\nthree")
    (tmp_path / "secret").write_text("secret\n")
    (run / "config.yaml").write_text("secret\n")
    return run


def test_whole_lines_are_sent_from_an_offset_or_near_the_end(folder):
    assert run_lines(folder, ReadRun("events.jsonl", 0)) == RunLines("events.jsonl", "one\ntwö\n", 9, 14)
    assert run_lines(folder, ReadRun("events.jsonl", 4)) == RunLines("events.jsonl", "twö\n", 9, 14)
    assert run_lines(folder, ReadRun("events.jsonl", 9)) == RunLines("events.jsonl", "", 9, 14)
    assert run_lines(folder, ReadRun("events.jsonl", -12)) == RunLines("events.jsonl", "twö\n", 9, 14)
    assert run_lines(folder, ReadRun("events.jsonl", -99)).text == "one\ntwö\n"


def test_offset_beyond_the_end_of_a_file_that_was_cut_begins_anew(folder):
    assert run_lines(folder, ReadRun("events.jsonl", 99)) == RunLines("events.jsonl", "one\ntwö\n", 9, 14)


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "../secret", "logs/../../secret", "/etc/passwd", "logs/stage-0.log", "logs", "events.jsonl\n"],
)
def test_other_and_missing_files_are_not_sent(folder, name):
    assert run_lines(folder, ReadRun(name, 0)) == RunLines(name, "", 0, -1)
