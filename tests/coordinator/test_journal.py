"""The journal on a real disk: all or nothing is written; on a full disk, or while another program has it locked, the
run waits."""

import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from coordinator.conftest import make_hello, make_prepare
from support.disks import can_mount, fill, small_disk

from tahq.comm.control.messages import Abort, Bye, Commit, Evaluated
from tahq.coordinator.journal import Journal, JournalFacts, JournalledHolder
from tahq.errors import SnapshotError

FACTS = JournalFacts(7, "c0ffee", 1, num_steps=10, global_batch=8)
FULL_AFTER = 2
"""Steps."""


def commit(step):
    return Commit(step, True, 0.5, False, False, False)


def decide(journal, *steps):
    for step in steps:
        journal.decided(commit(step), [make_prepare(step, stage) for stage in range(3)], 0.25)


def decided(journal):
    return [step.commit.step for step in journal.steps()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.sqlite"


def test_everything_written_is_read_again(path):
    holder = JournalledHolder(1, b"who", make_hello(1), "host1", 101, "w")
    with Journal(path) as journal:
        journal.begin(FACTS)
        decide(journal, 0, 1)
        journal.evaluated(Evaluated(1, [10], [30.0], [25.0]))
        journal.held(holder)
        journal.note(epoch=4)
    with Journal(path) as journal:
        assert journal.has_run
        assert journal.facts.epoch == 4
        steps = list(journal.steps())
        assert [step.commit for step in steps] == [commit(0), commit(1)]
        assert steps[1].prepares == tuple(make_prepare(1, stage) for stage in range(3))
        assert steps[1].step_time_s == 0.25
        assert journal.evaluations() == {1: Evaluated(1, [10], [30.0], [25.0])}
        assert journal.holders() == {1: holder}


def test_checkpoint_frees_decisions_before_it_and_a_run_that_ended_or_never_began_is_not_continued(path):
    with Journal(path) as journal:
        assert not journal.has_run
        journal.begin(FACTS)
        assert journal.has_run
        decide(journal, *range(5))
        journal.published(3, "snapshots/step-00000003", {"f": "ab"}, {"links": []})
        assert decided(journal) == [3, 4]
        assert (journal.facts.step, journal.facts.files) == (3, {"f": "ab"})
        journal.note(is_over=True)
        assert not journal.has_run
        journal.begin(FACTS)
        assert journal.has_run
        assert decided(journal) == []


def test_decisions_survive_a_kill(path):
    program = (
        "import os, signal, sys; sys.path.insert(0, 'tests')\n"
        "from pathlib import Path\n"
        "from coordinator.test_journal import FACTS, Journal, decide\n"
        f"journal = Journal(Path({str(path)!r})); journal.begin(FACTS); decide(journal, 0, 1, 2)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    with Journal(path) as journal:
        assert decided(journal) == [0, 1, 2]


def test_file_that_is_no_journal_and_damaged_rows_are_named(path):
    path.write_bytes(b"no database at all, but long enough to be looked at" * 40)
    with pytest.raises(SnapshotError, match=r"journal\.sqlite is not the journal"):
        Journal(path)
    path.unlink()
    with Journal(path) as journal:
        journal.begin(FACTS)
        decide(journal, 0)
        with sqlite3.connect(path) as database:
            database.execute("UPDATE steps SET decision = x'0102030405060708'")
        with pytest.raises(SnapshotError, match=r"journal\.sqlite.*remove it"):
            list(journal.steps())


# -- a journal that cannot be written for now ------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    if not can_mount():
        pytest.skip("needs to mount a file system, and so root")
    folder = tmp_path / "disk"
    with small_disk(folder, 4 << 20):
        yield folder


@dataclass
class Blocked:
    """A run of scripted workers whose journal cannot be written once `FULL_AFTER` steps are decided."""

    scene: object
    path: object
    release: object
    """Makes room, or releases the lock."""
    wanted: str
    circumstances: str

    def after(self, wait_s, action):
        """Have something happen once the coordinator has waited this long; no step is committed meanwhile."""
        began_s = []

        def is_due():
            if "training waits for" not in self.scene.warnings():
                return False
            began_s.append(self.scene.clock())
            assert len(self.scene.server.told(b"worker-0", Commit)) == FULL_AFTER
            return self.scene.clock() >= began_s[0] + wait_s

        self.scene.when(is_due, action)


@contextmanager
def blocked_by(scene, path, block):
    """A run whose journal is blocked after two steps."""
    with Journal(path) as journal:
        scene.build(journal)
        first = scene.workers()[0]
        report = first.report

        def report_and_block(commit):
            if commit.step == FULL_AFTER - 1:
                block()
            report(commit)

        first.report = report_and_block
        yield


@pytest.fixture
def locked(scene, path):
    other = sqlite3.connect(path, isolation_level=None)
    with blocked_by(scene, path, lambda: other.execute("BEGIN IMMEDIATE")):
        words = "database is locked; another program has it locked"
        yield Blocked(scene, path, lambda: other.execute("ROLLBACK"), "the lock to be released", words)
    other.close()


@pytest.fixture
def filled(scene, disk):
    filler, path = disk / "filler", disk / "journal.sqlite"
    with blocked_by(scene, path, lambda: fill(filler)):
        yield Blocked(scene, path, filler.unlink, "room", f"free in {disk}")


@pytest.fixture(params=["filled", "locked"])
def blocked(request):
    return request.getfixturevalue(request.param)


def test_step_waits_and_goes_on_by_itself(blocked):
    scene = blocked.scene
    blocked.after(60.0, blocked.release)
    assert scene.run() == 0
    assert scene.steps() == [1, 2, 3, 4]
    waits, goes_on = scene.observer.of("warned")
    assert waits.startswith(f"cannot write {blocked.path}: ")
    assert blocked.circumstances in waits
    assert waits.endswith(f"training waits for {blocked.wanted}, for 120 s (run.give_up)")
    assert 60.0 <= float(goes_on.split(" s:")[0].split()[-1]) <= 66.0  # it tries every 5 s at least
    assert not scene.coordinator._ctx.journal.has_run  # it has ended in order


def test_run_ends_in_order_if_the_journal_stays_blocked(blocked):
    scene = blocked.scene
    assert scene.run() == 2
    assert f"waited 120 s for {blocked.wanted} (run.give_up)" in scene.end.message
    assert str(blocked.path) in scene.end.message
    assert scene.steps() == [1, 2]
    assert scene.end.steps_done == len(scene.server.told(b"worker-0", Commit)) == FULL_AFTER
    assert [scene.server.told(worker.identity, Abort)[0].exit_status for worker in scene.stages] == [2, 2, 2]
    blocked.release()
    with Journal(blocked.path) as after:
        assert after.has_run  # that it ended could not be written: going on with it is as good
        assert decided(after) == list(range(FULL_AFTER))


@pytest.mark.parametrize(
    ("signals", "status", "words"),
    [([signal.SIGINT] * 2, 130, "second SIGINT"), ([signal.SIGTERM], 143, "longer than run.grace")],
)
def test_signals_and_their_grace_count_while_it_waits(locked, signals, status, words):
    scene = locked.scene
    locked.after(1.0, lambda: [scene.coordinator.request_stop(number) for number in signals])
    assert scene.run() == status
    assert words in scene.end.message
    assert scene.clock() < 1000.0 + 30.0


def test_worker_that_ends_meanwhile_is_noticed_afterwards(locked):
    scene, started = locked.scene, []
    scene.coordinator.restart = lambda stage: started.append(stage) or scene.restart(stage)
    locked.after(10.0, lambda: [scene.kill(1), locked.release()])
    assert scene.run() == 0
    assert started == [1]
    assert scene.steps() == [1, 2, 3, 4]
    assert scene.server.told(b"worker-0", Bye) == [Bye(0)]


def test_run_whose_folder_is_removed_ends_with_one_line_that_names_it(scene, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with blocked_by(scene, folder / "journal.sqlite", lambda: shutil.rmtree(folder)):
        assert scene.run() == 2
    assert f"the run's folder {folder} or a file in it was removed" in scene.end.message
    assert scene.end.steps_done == FULL_AFTER


def test_journal_alone_says_that_the_disk_is_full_and_forgets_nothing(disk):
    with Journal(disk / "journal.sqlite") as journal:
        journal.begin(FACTS)
        decide(journal, 0)
        fill(disk / "filler")
        with pytest.raises(SnapshotError, match=r"cannot write .*journal\.sqlite: database or disk is full; .* free"):
            decide(journal, *range(1, 50))
        written = decided(journal)
        assert written == list(range(len(written)))
        with pytest.raises(SnapshotError, match=r"cannot open .*other\.sqlite: .*disk.*; .* free in"):
            Journal(disk / "other.sqlite")
        (disk / "filler").unlink()
        decide(journal, len(written))
        assert decided(journal) == [*written, len(written)]
