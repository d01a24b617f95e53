"""Hosts that are lost with their disks, and spares that take their stages: scripted workers, virtual clock."""

from dataclasses import dataclass, replace

import pytest
from coordinator.conftest import VERSION, ScriptedWorker, make_hello

from tahq.comm.control import messages as say
from tahq.coordinator.journal import Journal
from tahq.errors import PeerLostError

COPIED_ONCE = {f"stage{stage}": {"copies_through": 4} for stage in range(3)}
"""The second checkpoint, after 8 steps, is not copied."""
OPTIONS = {"steps": 12, "checkpoint_every": 4, "copies": 1, "give_up_s": 40.0}


@dataclass
class SpareWorker(ScriptedWorker):
    """Waits; begins where the coordinator has a copy for it, as a host without any files must."""

    who: bytes = b"spare"
    failure: str = ""
    begun: int = -1
    """The checkpoint that it has fetched."""

    @property
    def identity(self):
        return self.who

    def start(self):
        self.server.workers[self.identity] = self
        self.send(say.Join(-1, self.version, "elsewhere", 900, spare=True))

    def react(self, message):
        if isinstance(message, say.Assign) and self.failure:
            self.send(say.Failed(message.stage, self.failure, 2))
        elif isinstance(message, say.Assign):
            self.stage = message.stage
            steps = [step for step, *_ in message.sources]
            has_newest = message.start_step in (*steps, self.begun) or not message.snapshot
            step = self.begun = message.start_step if has_newest else message.copied_step
            data = {"tokenizer_hash": "t", "data_hash": "d", "num_train_samples": 100} if self.stage in (0, 2) else {}
            self.send(make_hello(self.stage, start_step=step, address="spare:7", **data))
        else:
            super().react(message)


@pytest.fixture
def spare(scene):
    spare = SpareWorker(scene.server, -1)
    spare.start()
    return spare


def serve(scene, journal=None, changes=None, **options):
    """Workers whose files can be had, on hosts of their own; one message per turn."""
    scene.one_message_a_turn()
    names = [f"stage{stage}" for stage in range(3)]
    own = {name: {"hello": {"address": f"{name}:7"}} | (changes or {}).get(name, {}) for name in names}
    workers = scene.workers(**own)
    scene.build(journal, **(OPTIONS | options))
    return workers


def silence(scene, stage, num_steps):
    """Nothing is heard from a stage's worker once so many steps are done."""

    def fall_silent():
        scene.stages[stage].silent = True

    scene.after(num_steps, fall_silent)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_spare_takes_the_stage_of_a_silent_host_from_the_copy(scene, spare, stage):
    serve(scene)
    silence(scene, stage, 6)
    assert scene.run() == 0, scene.end.message
    assert scene.losses() == [2.0] * 12
    assert scene.server.told(b"spare", say.StandBy) == [say.StandBy(10.0, 40.0)]
    (assign,) = scene.server.told(b"spare", say.Assign)
    holder = 1 if stage != 1 else 2
    assert (assign.stage, assign.sources[0]) == (stage, [4, f"stage{holder}:7", ""])
    assert scene.server.told(b"spare", say.Start)[0].step == scene.server.told(b"spare", say.Plan)[0].start_step == 4
    neighbours = {number for number in (stage - 1, stage + 1) if 0 <= number < 3}
    assert {who for who, message in scene.server.sent if isinstance(message, say.Hold)} == {
        f"worker-{number}".encode() for number in neighbours
    }
    assert "1 spare" in scene.warnings()
    assert f"stage {stage} is given to the spare worker elsewhere, pid 900; 0 spares" in scene.warnings()
    assert f"stage {stage} (elsewhere, pid 900) is back after" in scene.warnings()


def test_both_ends_of_a_copy_know_the_others_key(scene, spare):
    """Under CURVE, of copies and of what a spare fetches; the spare's key is not that of the lost host."""
    keys = {f"worker-{stage}".encode(): f"key-{stage}" for stage in range(3)} | {b"spare": "key-spare"}
    scene.server.keys = keys
    serve(scene, host_keys=("key-0", "key-1", "key-2"))
    silence(scene, 0, 6)
    assert scene.run() == 0, scene.end.message
    asked = [(who, message) for who, message in scene.server.sent if isinstance(message, say.Copy) and message.address]
    owners = {f"stage{number}:7": f"worker-{number}".encode() for number in range(3)} | {"spare:7": b"spare"}
    assert len(asked) > 3
    for who, order in asked:
        assert order.public_key == keys[owners[order.address]]
        assert say.Admit([keys[who]]) in scene.server.told(owners[order.address], say.Admit)
    (assign,) = scene.server.told(b"spare", say.Assign)
    assert assign.sources[0] == [4, "stage1:7", "key-1"]
    assert say.Admit(["key-spare"]) in scene.server.told(b"worker-1", say.Admit)


def test_lost_worker_that_comes_back_is_told_that_its_stage_is_taken_and_stands_by(scene, spare):
    _, lost, _ = serve(scene)
    silence(scene, 1, 6)

    def come_back():
        lost.silent = False
        lost.beat()

    again = (b"worker-1-again", say.Join(1, VERSION, "host1", 101, spare=True))
    scene.after(8, come_back)
    scene.when(lambda: scene.server.told(b"worker-1", say.StartOver), lambda: scene.server.inbox.append(again))
    assert scene.run() == 0, scene.end.message
    assert len(scene.server.told(b"worker-1-again", say.StandBy)) == 1
    assert scene.server.told(b"worker-1-again", say.Bye) == [say.Bye(0)]
    assert scene.server.told(b"worker-1", say.Refuse) == []


def test_spare_that_cannot_take_the_stage_leaves_it_to_the_next(scene):
    SpareWorker(scene.server, -1, who=b"without data", failure="data/corpus.txt does not exist").start()
    SpareWorker(scene.server, -1).start()
    serve(scene)
    silence(scene, 0, 6)
    assert scene.run() == 0, scene.end.message
    assert "data/corpus.txt does not exist" in scene.warnings()
    assert scene.server.told(b"spare", say.Start)[0].step == 4


def test_host_that_only_dials_out_is_named_once(scene):
    serve(scene, changes={"stage1": {"hello": {"address": ""}}})
    assert scene.run() == 0
    assert scene.warnings() == (
        "stage 1 (host1, pid 101) only dials out, so no other host can copy its checkpoints: if its host is lost with "
        "its disk, so is the run"
    )
    assert {order.stage for _, order in scene.server.sent if isinstance(order, say.Copy)} == {0, 2}


def test_unneeded_spare_leaves_with_the_run_and_one_of_another_version_is_refused(scene, spare):
    SpareWorker(scene.server, -1, version="0.0.9", who=b"old").start()
    serve(scene)
    assert scene.run() == 0
    assert scene.server.told(b"spare", say.Bye) == [say.Bye(0)]
    assert scene.server.told(b"spare", say.Assign) == []
    assert scene.server.told(b"old", say.Refuse)[0].differences == [["version", "0.0.9", "0.1.0 (coordinator)"]]


def test_lost_stage_without_a_copy_ends_the_run_and_names_the_file(scene, spare):
    # copies of the checkpoint that the run continues from cannot be made either
    files = {f"stage-{stage:03d}-ab": "ab" for stage in range(3)}
    resumed = {"start_step": 4, "snapshot": "snapshots/step-00000004", "snapshot_files": files}
    serve(scene, changes={f"stage{stage}": {"copies_through": 0} for stage in range(3)}, **resumed)
    silence(scene, 1, 2)
    assert scene.run() == PeerLostError.exit_status
    assert "no other host has a copy of stage-001-ab" in scene.end.message
    assert "has no copy of stage 0's checkpoint: no room" in scene.warnings()
    assert len(scene.server.told(b"spare", say.Abort)) == 1


def test_without_a_checkpoint_a_spare_begins_at_the_beginning(scene, spare):
    serve(scene, checkpoint_every=50)
    silence(scene, 1, 5)
    assert scene.run() == 0, scene.end.message
    assert scene.server.told(b"spare", say.Start)[0].step == 0
    assert scene.losses() == [2.0] * 12


def test_killed_worker_that_cannot_be_started_again_is_replaced_by_a_spare_and_its_process_ignored(scene, spare):
    serve(scene)

    def restart(stage):
        raise PeerLostError(f"the worker of stage {stage} was killed too often")

    scene.coordinator.restart = restart
    scene.after(6, lambda: scene.kill(1))
    scene.after(9, lambda: scene.coordinator.worker_exited(1, 2, "refused"))
    assert scene.run() == 0, scene.end.message
    assert "was killed too often" in scene.warnings()
    assert scene.server.told(b"spare", say.Start)[0].step == 4


def test_neighbours_that_come_back_at_different_checkpoints_go_back_with_all_others(scene, spare):
    serve(scene, changes=COPIED_ONCE)
    scene.start_over_when_told()
    scene.coordinator.restart = lambda stage: stage == 2 and scene.restart(stage)
    scene.after(10, lambda: [scene.kill(stage) for stage in (1, 2)])

    def join_again():
        scene.server.workers.pop(b"spare")
        spare.who = b"spare again"
        scene.server.workers[spare.who] = spare
        spare.send(say.Join(1, VERSION, "elsewhere", 900, spare=True))

    scene.when(lambda: scene.server.told(b"spare", say.StartOver), join_again)
    assert scene.run() == 0, scene.end.message
    assert "neighbours come back at different checkpoints: all stages go back to step 4" in scene.warnings()
    assert scene.losses() == [2.0] * 12
    assert {start.step for start in scene.server.told(b"spare again", say.Start)} == {4}


def test_base_moves_with_the_copies_and_the_next_coordinator_goes_on_from_it(scene, tmp_path, new_scene):
    def die():
        raise KeyboardInterrupt

    with Journal(tmp_path / "journal.sqlite") as journal:
        serve(scene, journal, COPIED_ONCE)
        scene.after(10, die)
        with pytest.raises(KeyboardInterrupt):
            scene.run()
        facts = journal.facts
        assert (facts.step, facts.newest["step"]) == (4, 8)
        assert next(journal.steps()).commit.step == 4
        pairs = [(message.step, message.base) for message in scene.server.told(b"worker-0", say.Published)]
        assert pairs == [(4, 0), (4, 4), (8, 4)]
        assert [order.step for order in scene.server.told(b"worker-1", say.Copy)][:2] == [4, 4]

        after = new_scene()
        resumed = {"start_step": 4, "snapshot": facts.snapshot, "snapshot_files": facts.files}
        after.options = replace(scene.options, epoch=9, next_sample=32, **resumed)
        SpareWorker(after.server, -1).start()
        serve(after, journal, COPIED_ONCE)
        assert after.run() == 0, after.end.message
    assert after.end.last_snapshot == 12
    assert after.losses() == [2.0] * 8
    assert {start.step for worker in after.stages for start in after.server.told(worker.identity, say.Start)} == {4}
