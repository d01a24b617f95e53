"""The journal on a real disk: what is written is there after the process is gone, and nothing half."""

import sqlite3
import subprocess
import sys

import pytest
from coordinator.conftest import make_hello, make_prepare

from tahq.comm.control.messages import Commit, Evaluated
from tahq.coordinator.journal import Journal, JournalFacts, JournalledHolder
from tahq.errors import SnapshotError

FACTS = JournalFacts(7, "c0ffee", 1, num_steps=10, global_batch=8)


def commit(step, **changes):
    return Commit(
        step, **({"apply": True, "clip_factor": 0.5, "evaluate": False, "snapshot": False, "stop": False} | changes)
    )


def decide(journal, step):
    journal.decided(commit(step), [make_prepare(step, stage) for stage in range(3)], 0.25)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.sqlite"


def test_everything_written_is_read_again(path):
    holder = JournalledHolder(1, b"who", make_hello(1), "host1", 101, "w")
    with Journal(path) as journal:
        journal.begin(FACTS)
        decide(journal, 0)
        decide(journal, 1)
        journal.evaluated(Evaluated(1, 10, 30.0, 25.0))
        journal.held(holder)
        journal.note(epoch=4)
    with Journal(path) as journal:
        assert journal.has_run
        assert journal.facts.epoch == 4
        steps = list(journal.steps())
        assert [step.commit for step in steps] == [commit(0), commit(1)]
        assert steps[1].prepares == tuple(make_prepare(1, stage) for stage in range(3))
        assert steps[1].step_time_s == 0.25
        assert journal.evaluations() == {1: Evaluated(1, 10, 30.0, 25.0)}
        assert journal.holders() == {1: holder}


def test_snapshot_frees_what_came_before_it(path):
    with Journal(path) as journal:
        journal.begin(FACTS)
        for step in range(5):
            decide(journal, step)
        journal.published(3, "snapshots/step-00000003", {"f": "ab"}, {"links": []})
        assert [step.commit.step for step in journal.steps()] == [3, 4]
        assert (journal.facts.step, journal.facts.files) == (3, {"f": "ab"})


def test_run_that_ended_or_never_began_is_not_continued(path):
    with Journal(path) as journal:
        assert not journal.has_run
        journal.begin(FACTS)
        assert journal.has_run
        journal.note(is_over=True)
        assert not journal.has_run
        journal.begin(FACTS)
        assert journal.has_run
        assert list(journal.steps()) == []


def test_decisions_survive_a_kill(path):
    program = (
        "import os, signal, sys; sys.path.insert(0, 'tests')\n"
        "from pathlib import Path\n"
        "from coordinator.test_journal import FACTS, Journal, decide\n"
        f"journal = Journal(Path({str(path)!r})); journal.begin(FACTS)\n"
        "for step in range(3): decide(journal, step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    with Journal(path) as journal:
        assert [step.commit.step for step in journal.steps()] == [0, 1, 2]


def test_file_that_is_no_journal_is_named(path):
    path.write_bytes(b"no database at all, but long enough to be looked at" * 40)
    with pytest.raises(SnapshotError, match=r"journal\.sqlite is not the journal"):
        Journal(path)


def test_damaged_rows_are_named_and_not_believed(path):
    with Journal(path) as journal:
        journal.begin(FACTS)
        decide(journal, 0)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE steps SET decision = x'0102030405060708'")
    with Journal(path) as journal, pytest.raises(SnapshotError, match=r"journal\.sqlite.*remove it"):
        list(journal.steps())
