"""A journal that cannot be written for now: a file system that is really full, a lock that another program holds."""

import shutil
import signal
import sqlite3
from dataclasses import dataclass

import pytest
from coordinator.test_journal import FACTS, commit, decide
from support.disks import can_mount, fill, small_disk

from tahq.comm.control.messages import Abort, Bye, Commit
from tahq.coordinator.journal import Journal
from tahq.errors import SnapshotError

FULL_AFTER = 2
"""Steps."""


@pytest.fixture
def disk(tmp_path):
    if not can_mount():
        pytest.skip("needs to mount a file system, and so root")
    folder = tmp_path / "disk"
    with small_disk(folder, 4 << 20):
        yield folder


@pytest.fixture
def journal(disk):
    with Journal(disk / "journal.sqlite") as journal:
        yield journal


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


def block_after_two_steps(scene, block):
    first = scene.workers()[0]
    report = first.report

    def report_and_block(commit):
        if commit.step == FULL_AFTER - 1:
            block()
        report(commit)

    first.report = report_and_block


@pytest.fixture
def filled(scene, disk, journal):
    scene.build(journal)
    block_after_two_steps(scene, lambda: fill(disk / "filler"))
    return Blocked(scene, disk / "journal.sqlite", (disk / "filler").unlink, "room", f"free in {disk}")


@pytest.fixture
def locked(scene, tmp_path):
    path = tmp_path / "journal.sqlite"
    other = sqlite3.connect(path, isolation_level=None)
    with Journal(path) as journal:
        scene.build(journal)
        block_after_two_steps(scene, lambda: other.execute("BEGIN IMMEDIATE"))
        words = "database is locked; another program has it locked"
        yield Blocked(scene, path, lambda: other.execute("ROLLBACK"), "the lock to be released", words)
    other.close()


@pytest.fixture(params=["filled", "locked"])
def blocked(request):
    return request.getfixturevalue(request.param)


def test_step_waits_and_goes_on_by_itself(blocked):
    scene = blocked.scene
    blocked.after(60.0, blocked.release)
    assert scene.run() == 0
    assert scene.steps() == [1, 2, 3, 4]
    (waits,) = [text for text in scene.observer.of("warned") if "waits for" in text]
    assert waits.startswith(f"cannot write {blocked.path}: ")
    assert blocked.circumstances in waits
    assert waits.endswith(f"training waits for {blocked.wanted}, for 120 s (run.give_up)")
    (goes_on,) = [text for text in scene.observer.of("warned") if "training goes on" in text]
    waited_s = float(goes_on.split(" s:")[0].split()[-1])
    assert 60.0 <= waited_s <= 66.0  # it tries every 5 s at least
    assert not scene.coordinator._ctx.journal.has_run  # it has ended in order


def test_run_ends_in_order_if_the_journal_stays_blocked(blocked):
    scene = blocked.scene
    assert scene.run() == 2
    assert f"waited 120 s for {blocked.wanted} (run.give_up)" in scene.end.message
    assert str(blocked.path) in scene.end.message
    assert scene.steps() == [1, 2]
    assert scene.end.steps_done == len(scene.server.told(b"worker-0", Commit)) == FULL_AFTER
    for stage in range(3):
        (abort,) = scene.server.told(f"worker-{stage}".encode(), Abort)
        assert abort.exit_status == 2
    blocked.release()
    with Journal(blocked.path) as after:
        assert after.has_run  # that it ended could not be written: going on with it is as good
        assert [step.commit.step for step in after.steps()] == list(range(FULL_AFTER))


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

    def kill_then_release():
        scene.kill(1)
        locked.release()

    locked.after(10.0, kill_then_release)
    assert scene.run() == 0
    assert started == [1]
    assert scene.steps() == [1, 2, 3, 4]
    assert scene.server.told(b"worker-0", Bye) == [Bye(0)]


def test_run_whose_folder_is_removed_ends_with_one_line_that_names_it(scene, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with Journal(folder / "journal.sqlite") as journal:
        scene.build(journal)
        block_after_two_steps(scene, lambda: shutil.rmtree(folder))
        assert scene.run() == 2
    assert f"the run's folder {folder} or a file in it was removed" in scene.end.message
    assert scene.end.steps_done == FULL_AFTER


def test_journal_alone_says_what_is_full_and_forgets_nothing(disk, journal):
    journal.begin(FACTS)
    decide(journal, 0)
    fill(disk / "filler")
    with pytest.raises(SnapshotError, match=r"cannot write .*journal\.sqlite: database or disk is full; .* free in"):
        any(decide(journal, step) for step in range(1, 50))
    written = [step.commit for step in journal.steps()]
    assert written == [commit(step) for step in range(len(written))]
    (disk / "filler").unlink()
    decide(journal, len(written))
    assert len(list(journal.steps())) == len(written) + 1


def test_journal_that_cannot_be_made_is_not_called_damaged(disk):
    fill(disk / "filler")
    with pytest.raises(SnapshotError, match=r"cannot open .*journal\.sqlite: .*disk.*; .* free in"):
        Journal(disk / "journal.sqlite")
