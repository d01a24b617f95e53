"""Stages that are lost and come back: scripted workers, virtual clock, the coordinator as it is."""

import json
from dataclasses import replace
from random import Random

import pytest
from coordinator.conftest import VERSION, Recorder
from hypothesis import given, settings
from hypothesis import strategies as st
from support.at_once import Sooner

from tahq.comm.control.messages import (
    Abort,
    Commit,
    Join,
    Plan,
    Published,
    Refuse,
    Relink,
    Relinked,
    Snapshotted,
    Start,
    StartOver,
    Widen,
)
from tahq.coordinator.journal import Journal
from tahq.coordinator.observer import RunObserver
from tahq.coordinator.seats import RestorePoint
from tahq.coordinator.training import SnapshotParts, publish_to_folder
from tahq.errors import PeerLostError
from tahq.observe.metrics import MetricsFile
from tahq.pipeline.checkpoint.manifest import latest_folder


class Stage:
    """Worker after worker of one stage, each killed before it says something of a certain step."""

    def __init__(self, scene, stage):
        self.scene = scene
        self.worker = scene.server.workers[f"worker-{stage}".encode()]

    def kill(self):
        """Nothing that it has not said yet is ever heard."""
        if self.worker.left:
            return
        self.worker.left = True
        del self.scene.server.workers[self.worker.identity]
        self.scene.coordinator.worker_exited(self.worker.stage, -9)

    def restart(self):
        before = self.worker
        self.worker = replace(before, generation=before.generation + 1, left=False, silent=False, step=-1)
        self.worker.start()


def one_at_a_time(scene):
    """One message a turn, so that a worker can be killed between any two."""
    original = scene.server.poll

    def poll(timeout_s):
        if scene.server.inbox:
            scene.clock.now_s += 0.11
            return [scene.server.inbox.pop(0)]
        return original(timeout_s)

    return poll


def led(scene, kills, after_steps=0, **options):
    """Lead a run to its end; `kills` are (tick, stage), counted once so many steps are done; returns the stages."""
    scene.workers()
    scene.build(**({"steps": 8, "snapshot_every": 3, "eval_every": 2} | options))
    stages = [Stage(scene, stage) for stage in range(3)]
    scene.coordinator.restart = lambda stage: stages[stage].restart() is None
    plan = sorted(kills)
    ticks = 0

    def tick():
        nonlocal ticks
        ticks += len(scene.losses()) >= after_steps
        while plan and plan[0][0] <= ticks:
            stages[plan.pop(0)[1]].kill()

    scene.server.poll = one_at_a_time(scene)
    assert scene.run(tick) == 0, scene.end.message
    return stages


def test_killed_stage_begins_at_the_snapshot_and_hears_what_was_decided(scene):
    stages = led(scene, [(2, 1)], after_steps=5)
    again = stages[1].worker.identity
    assert scene.losses() == [2.0] * 8
    (plan,) = scene.server.told(again, Plan)
    (start,) = scene.server.told(again, Start)
    assert plan.live_step > 3
    assert (plan.start_step, plan.next_sample, start.step) == (3, 8 * 3, 3)
    assert plan.epoch == 2
    decided = {commit.step: commit for commit in scene.server.told(b"worker-0", Commit)}
    for commit in scene.server.told(again, Commit):
        assert (commit.apply, commit.clip_factor) == (decided[commit.step].apply, decided[commit.step].clip_factor)
    assert "stage 1 (host1, pid 101) is back after" in scene.warnings()


def test_neighbours_make_ready_before_the_new_worker_is_told_whom_to_dial(scene):
    stages = led(scene, [(2, 0)], after_steps=5)
    again = stages[0].worker.identity
    sent = [(who, type(message)) for who, message in scene.server.sent if isinstance(message, Relink | Plan)]
    assert sent[-2:] == [(b"worker-1", Relink), (again, Plan)]
    (relink,) = scene.server.told(b"worker-1", Relink)
    (plan,) = scene.server.told(again, Plan)
    assert [row[0] for row in relink.links] == [0]
    assert relink.epoch == plan.epoch == 2
    ((link, since, _, _),) = relink.wanted
    assert (link, since) == (0, plan.start_step)
    ((_, wanted_since, _, through),) = plan.wanted
    assert through == -1
    assert wanted_since >= plan.live_step
    widened = scene.server.told(b"worker-1", Widen)
    assert [w.link for w in widened] == [0] * (plan.live_step - plan.start_step)
    if widened:
        assert widened[-1].through == -1


def test_a_stage_that_has_not_kept_its_frames_sends_all_back(scene):
    scene.workers(stage2={"lacking": [1]})
    scene.build(steps=6, snapshot_every=2)
    stages = [Stage(scene, stage) for stage in range(3)]
    scene.coordinator.restart = lambda stage: stages[stage].restart() is None
    killed = []

    def tick():
        if not killed and len(scene.losses()) >= 3:
            killed.append(1)
            stages[1].kill()
        for stage in stages:
            if scene.server.told(stage.worker.identity, StartOver):
                stage.worker.lacking = []
                del scene.server.workers[stage.worker.identity]
                stage.restart()

    scene.server.poll = one_at_a_time(scene)
    assert scene.run(tick) == 0, scene.end.message
    assert "stage 2 has not kept all that it sent on link 1: all stages go back to step 2" in scene.warnings()
    assert scene.losses() == [2.0] * 6
    assert [stage.worker.generation for stage in stages] == [1, 2, 1]


def test_stages_that_go_back_say_again_what_they_had_said_of_the_step(scene):
    """Of a step that only the killed worker has not prepared; the second time theirs took another time."""
    scene.workers(stage1={"say": {3: []}}, stage2={"lacking": [1]})
    scene.build(steps=6, snapshot_every=2)
    stages = [Stage(scene, stage) for stage in range(3)]
    scene.coordinator.restart = lambda stage: stages[stage].restart() is None
    killed = []

    def tick():
        if not killed and len(scene.losses()) == 3 and not scene.server.inbox:
            killed.append(1)
            stages[1].worker.say = {}
            stages[1].kill()
        for stage in stages:
            if scene.server.told(stage.worker.identity, StartOver):
                stage.worker.lacking = []
                stage.worker.prepare = {"timing": {"forward": 2.0}}
                del scene.server.workers[stage.worker.identity]
                stage.restart()

    assert scene.run(tick) == 0, scene.end.message
    assert "all stages go back to step 2" in scene.warnings()
    assert scene.losses() == [2.0] * 6


def test_a_stage_that_computes_otherwise_is_named_once_and_the_run_goes_on(scene):
    scene.workers()
    scene.build(steps=6, snapshot_every=50)
    stages = [Stage(scene, stage) for stage in range(3)]

    def restart(stage):
        stages[stage].worker = replace(stages[stage].worker, prepare={"norm2": [0.25, 0.75]})
        stages[stage].restart()
        return True

    scene.coordinator.restart = restart
    done = []

    def tick():
        if not done and len(scene.losses()) >= 2:
            done.append(1)
            stages[1].kill()

    scene.server.poll = one_at_a_time(scene)
    assert scene.run(tick) == 0
    assert scene.warnings().count("not to the bit as before") == 1


def test_too_many_restarts_end_the_run(scene):
    scene.workers()
    scene.build(steps=6)

    def restart(stage):
        raise PeerLostError(f"the worker of stage {stage} was killed, and was started again 0 times before")

    scene.coordinator.restart = restart
    scene.server.poll = one_at_a_time(scene)
    assert scene.run(lambda: scene.coordinator.worker_exited(1, -9)) == 3
    assert "started again 0 times" in scene.end.message


@pytest.mark.parametrize("word", [{"worker_id": "w"}, {"takeover": True}])
def test_worker_that_takes_a_stage_over_goes_on_and_the_old_one_is_fenced(scene, word):
    scene.workers()
    scene.build(steps=8, snapshot_every=3)
    old = scene.server.workers[b"worker-1"]
    old_join = Join(1, VERSION, "host1", 101, worker_id="w")
    scene.server.inbox = [
        (who, old_join if isinstance(message, Join) and who == old.identity else message)
        for who, message in scene.server.inbox
    ]
    new = replace(old, generation=1)
    done = []

    def tick():
        if not done and len(scene.losses()) >= 4:
            done.append(1)
            scene.server.workers[new.identity] = new
            new.send(Join(1, VERSION, "host1", 202, **word))

    scene.server.poll = one_at_a_time(scene)
    assert scene.run(tick) == 0, scene.end.message
    assert scene.losses() == [2.0] * 8
    assert new.step == 7
    assert old.step < 7
    assert scene.server.told(old.identity, StartOver)


def test_frames_are_freed_when_a_snapshot_is_complete(scene):
    led(scene, [])
    assert [published.step for published in scene.server.told(b"worker-1", Published)] == [3, 6, 8]


@pytest.fixture
def write_checkpoint(scene):
    """Publish a checkpoint as the run's own coordinator would have; returns its files."""

    def write(step):
        parts = tuple(Snapshotted(step, stage, f"stage-{stage:03d}-ab", "ab", 100) for stage in range(3))
        publish_to_folder(scene.options, SnapshotParts(RestorePoint(step), parts))
        return {part.file: part.sha256 for part in parts}

    return write


def start_over_when_told(scene, stages):
    for stage in stages:
        if scene.server.told(stage.worker.identity, StartOver) and stage.worker.identity in scene.server.workers:
            del scene.server.workers[stage.worker.identity]
            stage.restart()


def lead_with_damage(scene, damaged, journal=None):
    """Kill stage 1 once 5 steps are done; of these checkpoints its host has no whole file."""
    scene.workers()
    scene.publish = lambda parts: publish_to_folder(scene.options, parts)
    # on other hosts, whose files the coordinator does not have
    scene.build(journal, steps=8, snapshot_every=2, eval_every=3, hosts=("a", "b", "c"))
    stages = [Stage(scene, stage) for stage in range(3)]
    scene.coordinator.restart = lambda stage: stages[stage].restart() is None
    killed = []

    def tick():
        if not killed and len(scene.losses()) >= 5:
            killed.append(1)
            stages[1].worker.damaged = damaged
            stages[1].kill()
        start_over_when_told(scene, stages)

    scene.server.poll = one_at_a_time(scene)
    return scene.run(tick)


def test_damaged_newest_checkpoint_sends_all_back_to_the_one_before(scene, tmp_path):
    scene.observer = Both(MetricsFile(tmp_path / "metrics.jsonl"))
    with Journal(tmp_path / "journal.sqlite") as journal:
        assert lead_with_damage(scene, (4,), journal) == 0, scene.end.message
        facts = journal.facts
    warning = next(text for text in scene.observer.of("warned") if "go back" in text)
    assert "stage 1 (b, pid 101): stage-001-ab is damaged: all stages go back to step 2" in warning
    assert scene.observer.of("turned_back") == [2]
    steps = [record.step for record in scene.observer.of("step_committed")]
    assert steps[steps.index(3, 3) :] == [3, 4, 5, 6, 7, 8]
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == list(
        range(1, 9)
    )
    assert latest_folder(tmp_path / "snapshots").name == "step-00000008"
    assert (facts.step, facts.num_steps) == (8, 8)
    starts = [message.step for _, message in scene.server.sent if isinstance(message, Start)]
    assert starts == [0, 0, 0, 2, 2, 2]


def test_run_whose_checkpoints_are_all_damaged_ends_and_says_so(scene):
    assert lead_with_damage(scene, (2, 4)) == 2
    assert "there is no other undamaged checkpoint" in scene.end.message
    assert any(abort.exit_status == 2 for _, abort in scene.server.sent if isinstance(abort, Abort))


@pytest.mark.parametrize("phase", ["ready", "connecting"])
def test_worker_with_another_key_cannot_take_a_stage_over(scene, phase):
    """The holder keeps its seat, whether it trains or connects."""
    scene.server.keys = {f"worker-{stage}".encode(): f"key-{stage}" for stage in range(3)} | {b"thief": "key-x"}
    scene.build(host_keys=("key-0", "key-1", "key-2"), steps=8)
    workers = scene.workers()
    tries, held = [], []
    if phase == "connecting":
        react = workers[1].react
        workers[1].react = lambda m: held.append(m) if isinstance(m, Plan) and len(tries) < 5 else react(m)

    def tick():
        if len(tries) < 5 and (held if phase == "connecting" else len(scene.losses()) >= 2):
            tries.append(1)
            scene.server.inbox.append((b"thief", Join(1, VERSION, "elsewhere", 900, takeover=True)))
        elif held and len(tries) == 5:
            react(held.pop())

    scene.server.poll = one_at_a_time(scene)
    assert scene.run(tick) == 0, scene.end.message
    assert len(tries) == 5
    assert {refusal.differences[0][1] for refusal in scene.server.told(b"thief", Refuse)} == {"key-x"}
    assert scene.observer.of("stage_left") == []
    assert scene.server.told(b"worker-1", StartOver) == []


def test_stage_that_comes_back_and_never_connects_ends_the_run_within_its_deadline(scene):
    """As after a dial that is lost: its worker lives, and says nothing of its links."""
    scene.workers()
    scene.build(steps=8, join_timeout_s=200.0, give_up_s=50.0, snapshot_every=2)
    stages = [Stage(scene, stage) for stage in range(3)]

    def restart(stage):
        stages[stage].restart()
        worker = stages[stage].worker
        worker.react = lambda m, react=worker.react: None if isinstance(m, Plan) else react(m)
        return True

    scene.coordinator.restart = restart
    killed = []

    def tick():
        if not killed and len(scene.losses()) >= 3:
            killed.append(scene.clock())
            stages[1].kill()

    scene.server.poll = one_at_a_time(scene)
    assert scene.run(tick) == 3
    assert "stage 1 did not connect to the neighbours within 200 s (run.join_timeout)" in scene.end.message
    assert "resumed" in scene.end.message
    assert 200.0 <= scene.clock() - killed[0] < 210.0


def test_log_that_cannot_be_read_while_a_stage_comes_back_sends_all_back(scene):
    scene.workers()
    scene.build(steps=8, snapshot_every=2)
    stages = [Stage(scene, stage) for stage in range(3)]
    scene.coordinator.restart = lambda stage: stages[stage].restart() is None
    done = []

    def tick():
        if not done and len(scene.losses()) >= 5:
            done.append(1)
            stages[1].kill()
        if len(done) == 1 and scene.server.told(b"worker-1-again", Start):
            done.append(2)
            scene.server.inbox.append((b"worker-2", Relinked(2, 2, [1])))
        start_over_when_told(scene, stages)

    scene.server.poll = one_at_a_time(scene)
    assert scene.run(tick) == 0, scene.end.message
    assert "stage 2 has not kept all that it sent on link 1: all stages go back to step" in scene.warnings()
    assert [record.step for record in scene.observer.of("step_committed")] == list(range(1, 9))


@pytest.mark.parametrize("phase", ["joining", "connecting"])
def test_damaged_checkpoint_found_while_resuming_sends_all_back_to_the_one_before(scene, write_checkpoint, phase):
    """On a remote host, whose files the coordinator cannot check before the start."""
    files = [write_checkpoint(step) for step in (2, 4)]
    workers = scene.workers(stage1={"damaged": (4,)})
    if phase == "connecting":  # a worker is lost after the plan, and its next one finds the damage
        workers[1].damaged = ()
        react = workers[1].react
        workers[1].react = lambda message: None if isinstance(message, Plan) else react(message)
    start = {"start_step": 4, "snapshot": "snapshots/step-00000004", "snapshot_files": files[1]}
    scene.build(steps=8, hosts=("a", "b", "c"), next_sample=32, **start)
    stages = [Stage(scene, stage) for stage in range(3)]
    scene.coordinator.restart = lambda stage: stages[stage].restart() is None

    def tick():
        if scene.server.told(b"worker-1", Plan) and not workers[1].left:
            stages[1].worker.damaged = (4,)
            stages[1].kill()
        start_over_when_told(scene, stages)

    scene.server.poll = one_at_a_time(scene)
    assert scene.run(tick) == 0, scene.end.message
    assert "stage-001-ab is damaged: all stages go back to step 2, and go on from there" in scene.warnings()
    assert [record.step for record in scene.observer.of("step_committed")] == [3, 4, 5, 6, 7, 8]
    assert {plan.next_sample for plan in scene.server.told(stages[0].worker.identity, Plan)} == {16}


def test_resuming_without_an_undamaged_checkpoint_ends_the_run_and_names_the_file(scene, write_checkpoint):
    files = write_checkpoint(4)
    scene.workers(stage1={"damaged": (4,)})
    start = {"start_step": 4, "snapshot": "snapshots/step-00000004", "snapshot_files": files}
    assert scene.run(steps=8, hosts=("a", "b", "c"), **start) == 2
    assert "stage 1 (b, pid 101): stage-001-ab is damaged; " in scene.end.message
    assert "there is no other undamaged checkpoint" in scene.end.message


@pytest.mark.parametrize(("last", "owed"), [(False, "the checkpoint after step 4"), (True, "the validation loss")])
def test_worker_that_lives_and_never_reports_ends_the_run_within_its_deadline(scene, last, owed):
    workers = scene.workers()
    mute = workers[2 if last else 1]
    report = mute.report
    mute.report = lambda commit: None if commit.stop else report(commit)
    assert scene.run(eval_every=4 if last else None, snapshot_every=2, give_up_s=30.0, join_timeout_s=200.0) == 3
    assert f"stage {mute.stage} did not report {owed}" in scene.end.message
    assert "within 200 s (run.join_timeout); the run can be resumed" in scene.end.message
    assert "(checkpoint after step 2)" in scene.end.message
    assert 200.0 <= scene.clock() - 1000.0 < 210.0


class Both(Recorder):
    """A recorder, and a metrics file that hears the same."""

    def __init__(self, metrics):
        super().__init__()
        self.metrics = metrics

    def __getattribute__(self, name):
        if name in RunObserver.__dict__ and not name.startswith("_"):
            own, other = super().__getattribute__(name), getattr(self.metrics, name)
            return lambda *args: (own(*args), other(*args))
        return super().__getattribute__(name)


@settings(max_examples=150, deadline=None)
@given(kills=st.lists(st.tuples(st.integers(1, 160), st.integers(0, 2)), max_size=6), seed=st.integers(0, 2**32))
def test_any_stages_may_die_at_any_time(new_scene, kills, seed):
    undisturbed, scene = new_scene(), new_scene()
    led(undisturbed, [])
    scene.executor = Sooner(Random(seed))
    led(scene, kills)
    assert steps(scene) == steps(undisturbed)
    assert [v.step for v in scene.observer.of("validated")] == [v.step for v in undisturbed.observer.of("validated")]
    assert [p.step for p in scene.published] == [p.step for p in undisturbed.published]


def steps(scene):
    return [(r.step, r.loss, r.grad_norm, r.skipped) for r in scene.observer.of("step_committed")]
