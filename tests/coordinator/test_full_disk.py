"""A journal that cannot be written for now: a file system that is really full, a lock that another program holds."""

import shutil
import signal
import sqlite3

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


@pytest.fixture
def filled_scene(scene, disk, journal):
    """A run of scripted workers, whose disk is full once `FULL_AFTER` steps are decided."""
    scene.build(journal)
    workers = scene.workers()

    def report(commit, report=workers[0].report):
        if commit.step == FULL_AFTER - 1:
            fill(disk / "filler")
        report(commit)

    workers[0].report = report
    return scene


@pytest.fixture
def locked_scene(scene, tmp_path):
    """A run of scripted workers, whose journal another program locks once `FULL_AFTER` steps are decided."""
    other = sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)
    with Journal(tmp_path / "journal.sqlite") as journal:
        scene.build(journal, give_up_s=30.0)
        workers = scene.workers()

        def report(commit, report=workers[0].report):
            if commit.step == FULL_AFTER - 1:
                other.execute("BEGIN IMMEDIATE")
            report(commit)

        workers[0].report = report
        scene.release = lambda: other.execute("ROLLBACK")
        yield scene
    other.close()


def num_commits(scene):
    return len(scene.server.told(b"worker-0", Commit))


class Meanwhile:
    """Does something once the coordinator has waited this long; notes how many commits had left until then."""

    def __init__(self, scene, after_s, action):
        self.scene, self.after_s, self.action = scene, after_s, action
        self.full_since_s = None
        self.commits = []

    def __call__(self):
        if "training waits for" not in self.scene.warnings():
            return
        if self.full_since_s is None:
            self.full_since_s = self.scene.clock()
        if self.action is not None:
            self.commits.append(num_commits(self.scene))
            if self.scene.clock() >= self.full_since_s + self.after_s:
                action, self.action = self.action, None
                action()


def test_step_waits_for_room_and_goes_on_by_itself(filled_scene, disk, journal):
    scene = filled_scene
    meanwhile = Meanwhile(scene, 60.0, (disk / "filler").unlink)
    assert scene.run(meanwhile) == 0
    assert set(meanwhile.commits) == {FULL_AFTER}
    assert [record.step for record in scene.observer.of("step_committed")] == [1, 2, 3, 4]
    (waits,) = [text for text in scene.observer.of("warned") if "waits for room" in text]
    assert str(disk / "journal.sqlite") in waits
    assert f"free in {disk}" in waits
    (goes_on,) = [text for text in scene.observer.of("warned") if "training goes on" in text]
    waited_s = float(goes_on.split(" s:")[0].split()[-1])
    assert 60.0 <= waited_s <= 66.0  # it tries every 5 s at least
    assert not journal.has_run  # it has ended in order


def test_run_ends_in_order_where_nobody_makes_room(filled_scene, disk):
    scene = filled_scene
    assert scene.run() == 2
    assert "waited 120 s for room (run.give_up)" in scene.end.message
    assert str(disk / "journal.sqlite") in scene.end.message
    assert num_commits(scene) == FULL_AFTER
    assert [record.step for record in scene.observer.of("step_committed")] == [1, 2]
    assert scene.end.steps_done == FULL_AFTER
    for stage in range(3):
        (abort,) = scene.server.told(f"worker-{stage}".encode(), Abort)
        assert abort.exit_status == 2
    (disk / "filler").unlink()
    with Journal(disk / "journal.sqlite") as after:
        assert after.has_run  # that it ended could not be written: going on with it is as good
        assert [step.commit.step for step in after.steps()] == list(range(FULL_AFTER))


def test_signals_are_heard_while_it_waits(filled_scene):
    scene = filled_scene
    twice = Meanwhile(scene, 1.0, lambda: [scene.coordinator.request_stop(signal.SIGINT) for _ in range(2)])
    assert scene.run(twice) == 130
    assert scene.clock() < 1000.0 + 30.0


def test_grace_is_kept_while_it_waits(filled_scene):
    scene = filled_scene
    stop = Meanwhile(scene, 1.0, lambda: scene.coordinator.request_stop(signal.SIGTERM))
    assert scene.run(stop) == 143
    assert "run.grace" in scene.end.message


def test_worker_that_ends_meanwhile_is_noticed_afterwards(filled_scene, disk):
    scene = filled_scene
    started = []

    def restart(stage):
        started.append(stage)
        scene.server.workers.pop(b"worker-1")
        worker = type(workers[0])(scene.server, 1, generation=1)
        worker.start()
        return True

    workers = list(scene.server.workers.values())
    scene.coordinator.restart = restart

    def kill():
        workers[1].silent = True
        scene.coordinator.worker_exited(1, -9)

    def kill_then_make_room():
        kill()
        (disk / "filler").unlink()

    assert scene.run(Meanwhile(scene, 10.0, kill_then_make_room)) == 0
    assert started == [1]
    assert [record.step for record in scene.observer.of("step_committed")] == [1, 2, 3, 4]
    assert scene.server.told(b"worker-0", Bye) == [Bye(0)]


def decide_many(journal):
    for step in range(1, 50):
        decide(journal, step)


def test_journal_that_nobody_waits_for_says_what_is_full_and_forgets_nothing(disk, journal):
    journal.begin(FACTS)
    decide(journal, 0)
    fill(disk / "filler")
    with pytest.raises(SnapshotError, match=r"cannot write .*journal\.sqlite: database or disk is full; .* free in"):
        decide_many(journal)
    written = [step.commit for step in journal.steps()]
    assert written == [commit(step) for step in range(len(written))]
    (disk / "filler").unlink()
    decide(journal, len(written))
    assert len(list(journal.steps())) == len(written) + 1


def test_journal_that_cannot_be_made_is_not_called_damaged(disk):
    fill(disk / "filler")
    with pytest.raises(SnapshotError, match=r"cannot open .*journal\.sqlite: .*disk.*; .* free in"):
        Journal(disk / "journal.sqlite")


def test_locked_journal_is_waited_for_as_a_full_disk_is(locked_scene, tmp_path):
    scene = locked_scene
    meanwhile = Meanwhile(scene, 20.0, scene.release)
    assert scene.run(meanwhile) == 0
    assert set(meanwhile.commits) == {FULL_AFTER}
    assert [record.step for record in scene.observer.of("step_committed")] == [1, 2, 3, 4]
    (waits,) = [text for text in scene.observer.of("warned") if "training waits for" in text]
    assert f"cannot write {tmp_path / 'journal.sqlite'}: database is locked; another program has it locked" in waits
    assert waits.endswith("training waits for the lock to be released, for 30 s (run.give_up)")


def test_run_ends_in_order_if_the_journal_stays_locked(locked_scene, tmp_path):
    scene = locked_scene
    assert scene.run() == 2
    assert f"{tmp_path / 'journal.sqlite'}: database is locked" in scene.end.message
    assert "waited 30 s for the lock to be released (run.give_up)" in scene.end.message
    assert scene.end.steps_done == FULL_AFTER


def test_run_whose_folder_is_removed_ends_with_one_line_that_names_it(scene, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with Journal(folder / "journal.sqlite") as journal:
        scene.build(journal)
        workers = scene.workers()

        def report(commit, report=workers[0].report):
            if commit.step == FULL_AFTER - 1:
                shutil.rmtree(folder)
            report(commit)

        workers[0].report = report
        assert scene.run() == 2
    assert f"the run's folder {folder} or a file in it was removed" in scene.end.message
    assert scene.end.steps_done == FULL_AFTER
