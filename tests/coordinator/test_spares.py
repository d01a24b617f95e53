"""Hosts that are lost with their disks, and spares that take their stages: scripted workers, virtual clock."""

from dataclasses import dataclass, replace

import pytest
from coordinator.conftest import ScriptedWorker, make_hello
from coordinator.test_returning import one_at_a_time

from tahq.comm.control.messages import (
    Abort,
    Admit,
    Assign,
    Bye,
    Copy,
    Failed,
    Hold,
    Join,
    Plan,
    Published,
    Refuse,
    StandBy,
    Start,
    StartOver,
)
from tahq.coordinator.journal import Journal
from tahq.errors import PeerLostError


@dataclass
class SpareWorker(ScriptedWorker):
    """Waits; begins where the coordinator has a copy for it, as a host without any files must."""

    who: bytes = b"spare"
    begun: int = -1
    """The snapshot that it has fetched."""

    @property
    def identity(self):
        return self.who

    def start(self):
        self.server.workers[self.identity] = self
        self.send(Join(-1, self.version, "elsewhere", 900, spare=True))

    def react(self, message):
        if isinstance(message, Assign):
            self.stage = message.stage
            steps = [step for step, *_ in message.sources]
            has_newest = message.start_step in (*steps, self.begun) or not message.snapshot
            step = self.begun = message.start_step if has_newest else message.copied_step
            data = {"tokenizer_hash": "t", "data_hash": "d", "num_train_samples": 100} if self.stage in (0, 2) else {}
            self.send(make_hello(self.stage, start_step=step, files_address="spare:7", **data))
        else:
            super().react(message)


def served(scene, **changes):
    """Workers whose files can be had, on hosts of their own; one message a turn."""
    scene.server.poll = one_at_a_time(scene)
    names = [f"stage{stage}" for stage in range(3)]
    return scene.workers(
        **{n: {"hello": {"files_address": f"{n}:7"}} | changes.get(n, {}) for n in names},
    )


def lose_after(scene, workers, stage, num_steps):
    """Nothing is heard of a stage's worker once so many steps are done."""

    def tick():
        if len(scene.losses()) >= num_steps:
            workers[stage].silent = True

    return tick


COPIED_ONCE = {f"stage{stage}": {"copies_through": 4} for stage in range(3)}
"""The second snapshot, after 8 steps, is not copied."""
OPTIONS = {"steps": 12, "snapshot_every": 4, "copies": 1, "give_up_s": 40.0}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_spare_takes_the_stage_of_a_silent_host_from_the_copy(scene, stage):
    spare = SpareWorker(scene.server, -1)
    spare.start()
    workers = served(scene)
    scene.build(**OPTIONS)
    assert scene.run(lose_after(scene, workers, stage, 6)) == 0, scene.end.message
    assert scene.losses() == [2.0] * 12
    assert scene.server.told(b"spare", StandBy) == [StandBy(10.0, 40.0)]
    (assign,) = scene.server.told(b"spare", Assign)
    holder = 1 if stage != 1 else 2
    assert (assign.stage, assign.sources[0]) == (stage, [4, f"stage{holder}:7", ""])
    assert scene.server.told(b"spare", Start)[0].step == scene.server.told(b"spare", Plan)[0].start_step == 4
    neighbours = {number for number in (stage - 1, stage + 1) if 0 <= number < 3}
    assert {who for who, message in scene.server.sent if isinstance(message, Hold)} == {
        f"worker-{number}".encode() for number in neighbours
    }
    assert "1 spare" in scene.warnings()
    assert f"stage {stage} is given to the spare worker elsewhere, pid 900; 0 spares" in scene.warnings()
    assert f"stage {stage} (elsewhere, pid 900) is back after" in scene.warnings()


def test_who_asks_for_a_file_knows_whose_it_is_and_is_known_there(scene):
    """Under CURVE, of copies and of what a spare fetches; the spare's key is not that of the host in its stead."""
    keys = {f"worker-{stage}".encode(): f"key-{stage}" for stage in range(3)} | {b"spare": "key-spare"}
    scene.server.keys = keys
    SpareWorker(scene.server, -1).start()
    workers = served(scene)
    scene.build(**OPTIONS, host_keys=("key-0", "key-1", "key-2"))
    assert scene.run(lose_after(scene, workers, 0, 6)) == 0, scene.end.message
    asked = [(who, message) for who, message in scene.server.sent if isinstance(message, Copy) and message.address]
    owners = {f"stage{number}:7": f"worker-{number}".encode() for number in range(3)} | {"spare:7": b"spare"}
    assert len(asked) > 3
    for who, order in asked:
        assert order.public_key == keys[owners[order.address]]
        assert [keys[who]] in [admit.public_keys for admit in scene.server.told(owners[order.address], Admit)]
    (assign,) = scene.server.told(b"spare", Assign)
    assert assign.sources[0] == [4, "stage1:7", "key-1"]
    assert Admit(["key-spare"]) in scene.server.told(b"worker-1", Admit)


def test_lost_worker_that_comes_back_hears_that_its_stage_is_taken_and_stands_by(scene):
    spare = SpareWorker(scene.server, -1)
    spare.start()
    workers = served(scene)
    scene.build(**OPTIONS)
    lose = lose_after(scene, workers, 1, 6)
    again = []

    def tick():
        if len(scene.losses()) < 8:
            lose()
        elif not again:
            workers[1].silent = False
            workers[1].beat()
            again.append(1)
        if scene.server.told(b"worker-1", StartOver) and len(again) == 1:
            again.append(2)
            scene.server.inbox.append((b"worker-1-again", Join(1, "0.1.0", "host1", 101, spare=True)))

    assert scene.run(tick) == 0, scene.end.message
    assert len(scene.server.told(b"worker-1-again", StandBy)) == 1
    assert scene.server.told(b"worker-1-again", Bye) == [Bye(0)]
    assert scene.server.told(b"worker-1", Refuse) == []


def test_spare_that_cannot_take_the_stage_leaves_it_to_the_next(scene):
    class WithoutData(SpareWorker):
        def react(self, message):
            if isinstance(message, Assign):
                self.send(Failed(message.stage, "data/corpus.txt does not exist", 2))
            else:
                super().react(message)

    WithoutData(scene.server, -1, who=b"without data").start()
    SpareWorker(scene.server, -1).start()
    workers = served(scene)
    scene.build(**OPTIONS)
    assert scene.run(lose_after(scene, workers, 0, 6)) == 0, scene.end.message
    assert "data/corpus.txt does not exist" in scene.warnings()
    assert scene.server.told(b"spare", Start)[0].step == 4


def test_host_that_only_dials_out_is_named_once(scene):
    served(scene, stage1={"hello": {}})
    assert scene.run(**OPTIONS) == 0
    assert scene.warnings() == (
        "stage 1 (host1, pid 101) only dials out, so no other host can copy its checkpoints: if its host is lost with "
        "its disk, so is the run"
    )
    assert {order.stage for who, order in scene.server.sent if isinstance(order, Copy)} == {0, 2}


def test_unneeded_spare_leaves_with_the_run_and_one_of_another_version_is_refused(scene):
    SpareWorker(scene.server, -1).start()
    SpareWorker(scene.server, -1, version="0.0.9", who=b"old").start()
    served(scene)
    assert scene.run(**OPTIONS) == 0
    assert scene.server.told(b"spare", Bye) == [Bye(0)]
    assert scene.server.told(b"spare", Assign) == []
    assert scene.server.told(b"old", Refuse)[0].differences == [["version", "0.0.9", "0.1.0 (coordinator)"]]


def test_nobody_with_a_copy_ends_the_run_and_names_the_file(scene):
    SpareWorker(scene.server, -1).start()
    workers = served(scene, **{f"stage{stage}": {"copies_through": 0} for stage in range(3)})
    # copies of the snapshot that the run goes on from cannot be had either
    files = {f"stage-{stage:03d}-ab": "ab" for stage in range(3)}
    scene.build(**OPTIONS, start_step=4, snapshot="snapshots/step-00000004", snapshot_files=files)
    assert scene.run(lose_after(scene, workers, 1, 2)) == PeerLostError.exit_status
    assert "no other host has a copy of stage-001-ab" in scene.end.message
    assert "has no copy of stage 0's checkpoint: no room" in scene.warnings()
    assert len(scene.server.told(b"spare", Abort)) == 1


def test_without_a_snapshot_a_spare_begins_at_the_beginning(scene):
    SpareWorker(scene.server, -1).start()
    workers = served(scene)
    scene.build(**(OPTIONS | {"snapshot_every": 50}))
    assert scene.run(lose_after(scene, workers, 1, 5)) == 0, scene.end.message
    assert scene.server.told(b"spare", Start)[0].step == 0
    assert scene.losses() == [2.0] * 12


def test_killed_worker_that_cannot_be_started_again_is_replaced_by_a_spare(scene):
    SpareWorker(scene.server, -1).start()
    workers = served(scene)
    scene.build(**OPTIONS)

    def restart(stage):
        raise PeerLostError(f"the worker of stage {stage} was killed too often")

    scene.coordinator.restart = restart
    killed = []

    def tick():
        if len(scene.losses()) >= 6 and not killed:
            killed.append(1)
            workers[1].left = True
            scene.coordinator.worker_exited(1, -9)

    assert scene.run(tick) == 0, scene.end.message
    assert "was killed too often" in scene.warnings()
    assert scene.server.told(b"spare", Start)[0].step == 4


def test_exits_of_a_process_whose_stage_a_spare_has_are_nobodys_concern(scene):
    SpareWorker(scene.server, -1).start()
    workers = served(scene)
    scene.build(**OPTIONS)
    lose = lose_after(scene, workers, 1, 6)

    def tick():
        lose()
        if len(scene.losses()) == 9:
            scene.coordinator.worker_exited(1, 2, "refused")

    assert scene.run(tick) == 0, scene.end.message


def test_neighbours_that_come_back_at_different_snapshots_go_back_with_all_others(scene):
    spare = SpareWorker(scene.server, -1)
    spare.start()
    workers = served(scene, **COPIED_ONCE)
    scene.build(**OPTIONS)
    done = []

    def tick():
        if len(scene.losses()) >= 10 and not done:
            done.append(1)
            for stage in (1, 2):
                workers[stage].left = True
                del scene.server.workers[workers[stage].identity]
                scene.coordinator.worker_exited(stage, -9)
        for stage, worker in enumerate(workers):
            over = scene.server.told(worker.identity, StartOver)
            if over or (worker.left and worker.generation == 0 and stage == 2):
                scene.server.workers.pop(worker.identity, None)
                workers[stage] = replace(worker, generation=worker.generation + 1, left=False, step=-1)
                workers[stage].start()
        if scene.server.told(b"spare", StartOver) and spare.who == b"spare":
            scene.server.workers.pop(b"spare")
            spare.who = b"spare again"
            scene.server.workers[spare.who] = spare
            spare.send(Join(1, "0.1.0", "elsewhere", 900, spare=True))

    assert scene.run(tick) == 0, scene.end.message
    assert "neighbours come back at different checkpoints: all stages go back to step 4" in scene.warnings()
    assert scene.losses() == [2.0] * 12
    assert {start.step for who, start in scene.server.sent if who == b"spare again" and isinstance(start, Start)} == {4}


def test_base_moves_when_copies_are_there_and_the_coordinator_that_comes_back_knows(scene, tmp_path):
    served(scene, **COPIED_ONCE)
    with Journal(tmp_path / "journal.sqlite") as journal:
        scene.build(journal, **OPTIONS)

        def tick():
            if len(scene.losses()) >= 10:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            scene.run(tick)
        facts = journal.facts
        assert (facts.step, facts.newest["step"]) == (4, 8)
        assert next(journal.steps()).commit.step == 4
    pairs = [(message.step, message.base) for message in scene.server.told(b"worker-0", Published)]
    assert pairs == [(4, 0), (4, 4), (8, 4)]
    assert [order.step for order in scene.server.told(b"worker-1", Copy)][:2] == [4, 4]


def test_coordinator_that_comes_back_gives_out_the_newest_snapshot_and_the_base(scene, tmp_path, new_scene):
    served(scene, **COPIED_ONCE)

    def lead(scene, journal, tick=lambda: None, **options):
        scene.build(journal, **options)
        return scene.run(tick)

    def die():
        if len(scene.losses()) >= 10:
            raise KeyboardInterrupt

    with Journal(tmp_path / "journal.sqlite") as journal:
        with pytest.raises(KeyboardInterrupt):
            lead(scene, journal, die, **OPTIONS)
        facts = journal.facts
        after = new_scene()
        after.options = replace(
            scene.options, start_step=4, snapshot=facts.snapshot, snapshot_files=facts.files, epoch=9, next_sample=32
        )
        SpareWorker(after.server, -1).start()
        workers = served(after, **COPIED_ONCE)
        assert lead(after, journal) == 0, after.end.message
    assert after.end.last_snapshot == 12
    assert after.losses() == [2.0] * 8
    assert {start.step for worker in workers for start in after.server.told(worker.identity, Start)} == {4}
