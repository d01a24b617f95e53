"""Replicas that go on without a lost one: scripted workers, virtual clock, the real coordinator."""

import math
from dataclasses import dataclass, field, replace

import pytest
from coordinator.conftest import ScriptedWorker, make_prepare
from hypothesis import given, settings
from hypothesis import strategies as st

from tahq.comm.control import messages as say
from tahq.coordinator.journal import Journal

pytestmark = pytest.mark.ci

STAGES = 2
ALL = [0, 1]
OPTIONS = {"num_stages": 4, "replicas": 2, "steps": 12, "checkpoint_every": 3, "eval_every": 4}


@dataclass
class ReplicaWorker(ScriptedWorker):
    """One of two replicas of two stages; it has a loss only while its replica computes."""

    computing: list = field(default_factory=lambda: ALL)

    def react(self, message):
        if isinstance(message, say.Start | say.Commit) and message.computing:
            self.computing = message.computing
        super().react(message)

    def begin(self, step):
        stage, replica = self.stage % STAGES, self.stage // STAGES
        prepare = replace(make_prepare(step, stage, STAGES), stage=self.stage, links=[])
        if replica not in self.computing:
            prepare = replace(prepare, loss_sum=None, tokens=None, batch_digest="")
        self.say[step] = self.say.get(step, [prepare])
        super().begin(step)

    def report(self, commit):
        if commit.evaluate and self.stage == STAGES * self.computing[0] + STAGES - 1:
            self.send(say.Evaluated(commit.step, [10], [30.0], [25.0]))
        super().report(replace(commit, evaluate=False))


def replicated(scene, journal=None, **options):
    scene.options = replace(scene.options, num_stages=4, replicas=2)
    scene.workers(ReplicaWorker)
    scene.build(journal, **(OPTIONS | {"replicas_wait_s": 0.0} | options))
    hear_those_that_are_back_first(scene)


def hear_those_that_are_back_first(scene):
    """One message per turn; a worker that only takes sums is faster than the others."""
    original = scene.server.poll

    def poll(timeout_s):
        if not scene.server.inbox:
            return original(timeout_s)
        scene.clock.now_s += 0.11
        back = (index for index, (who, _) in enumerate(scene.server.inbox) if who.endswith(b"-again"))
        return [scene.server.inbox.pop(next(back, 0))]

    scene.server.poll = poll


def come_back(scene, stage, num_steps):
    """Start a stage's next worker once so many steps are committed."""
    scene.after(num_steps, lambda: scene.restart(stage, say={}, computing=ALL))


def test_step_is_skipped_and_the_others_share_the_batch_until_the_worker_is_back(scene):
    replicated(scene)
    scene.after(4, lambda: scene.kill(3))
    come_back(scene, 3, 8)
    assert scene.run() == 0, scene.end.message
    records = scene.observer.of("step_committed")
    assert [record.step for record in records if record.abandoned] == [5]
    absent = [record.step for record in records if record.computing == (0,)]
    assert absent[:3] == [6, 7, 8]
    assert records[-1].computing == (0, 1)
    assert math.isnan(records[4].loss)
    assert all(record.loss > 0 for record in records if not record.abandoned)
    orders = {who: order for who, order in scene.server.sent if isinstance(order, say.Abandon)}
    assert {who: order.links for who, order in orders.items()} == {
        b"worker-0": [], b"worker-1": [3], b"worker-2": [1]
    }  # fmt: skip
    assert "stage 3 lost for 0 s: step 5 is skipped, and replicas without lost workers go on" in scene.warnings()


def test_others_wait_as_long_as_they_are_told(scene):
    replicated(scene, replicas_wait_s=30.0)
    scene.after(4, lambda: scene.kill(1))
    killed_s = []
    scene.after(4, lambda: killed_s.append(scene.clock.now_s))
    scene.when(lambda: killed_s and scene.clock.now_s > killed_s[0] + 20, lambda: scene.restart(1, say={}))
    assert scene.run() == 0, scene.end.message
    assert not any(record.abandoned for record in scene.observer.of("step_committed"))


def test_evaluations_move_to_a_replica_that_computes(scene):
    replicated(scene)
    scene.after(4, lambda: scene.kill(0))
    come_back(scene, 0, 10)
    assert scene.run() == 0, scene.end.message
    assert [each.step for each in scene.observer.of("validated")] == [4, 8, 12]


@pytest.mark.parametrize(("stage", "is_left_out"), [(3, True), (0, False)])
def test_only_the_replica_that_evaluates_is_waited_for_during_an_evaluation(scene, stage, is_left_out):
    replicated(scene)
    last = scene.stages[1]
    last.say = {4: []}  # it evaluates for 30 s, and only then begins step 5
    report = last.report
    last.report = lambda commit: report(replace(commit, evaluate=commit.evaluate and commit.step > 4))
    scene.after(4, lambda: scene.kill(stage))
    lost_s = []
    scene.after(4, lambda: lost_s.append(scene.clock.now_s))

    def evaluated():
        orders = [order for _, order in scene.server.sent if isinstance(order, say.Abandon)]
        assert bool(orders) == is_left_out
        last.send(say.Evaluated(3, [10], [30.0], [25.0]))
        last.say = {}
        last.begin(4)

    scene.when(lambda: lost_s and scene.clock.now_s > lost_s[0] + 30, evaluated)
    scene.when(lambda: lost_s and scene.clock.now_s > lost_s[0] + 40, lambda: scene.restart(stage, say={}))
    assert scene.run() == 0, scene.end.message
    assert [each.step for each in scene.observer.of("validated")] == [4, 8, 12]


def test_next_coordinator_knows_which_replicas_compute(scene, new_scene, tmp_path):
    with Journal(tmp_path / "journal.sqlite") as journal:
        replicated(scene, journal)
        scene.after(4, lambda: scene.kill(3))

        def die():
            raise KeyboardInterrupt

        scene.after(7, die)
        with pytest.raises(KeyboardInterrupt):
            scene.run()
        journal.note(is_over=False)  # a process that is killed writes no end
    with Journal(tmp_path / "journal.sqlite") as journal:
        facts = journal.facts
        origin = {"start_step": facts.step, "snapshot": facts.snapshot, "snapshot_files": facts.files}
        replicated(later := new_scene(), journal, **origin)
        later.server.workers.clear()
        later.server.inbox.clear()
        later.stages = scene.stages
        for worker in later.stages:
            worker.server, worker.left = later.server, worker.stage == 3
        for worker in later.stages[:3]:
            later.server.workers[worker.identity] = worker
            worker.send(say.Rejoin(worker.stage, 7, worker.step))
            worker.send(say.Snapshotted(6, worker.stage, f"stage-{worker.stage:03d}-ab", "ab", 100))  # not complete yet
            worker.begin(worker.step)
        come_back(later, 3, 5)
        assert later.run() == 0, later.end.message
    records = later.observer.of("step_committed")
    assert [record.step for record in records] == list(range(4, 13))
    assert [record.computing for record in records if 6 <= record.step <= 8] == [(0,)] * 3
    assert records[-1].computing == (0, 1)


def test_recorded_replicas_compute_again(scene):
    recorded = {4: (), 5: (1,), 6: (1,)}
    replicated(scene, replicas_wait_s=None, recorded_replicas=recorded)
    assert scene.run() == 0, scene.end.message
    records = scene.observer.of("step_committed")
    assert [record.abandoned for record in records] == [step == 4 for step in range(12)]
    assert [record.computing for record in records] == [(1,) if step in (5, 6) else (0, 1) for step in range(12)]


@settings(max_examples=150, deadline=None)
@given(kills=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 3)), max_size=6), late=st.integers(0, 40))
def test_any_stages_may_die_at_any_time_and_all_hear_the_same_decisions(new_scene, kills, late):
    scene = new_scene()
    replicated(scene)
    plan, ticks, due = sorted(kills), 0, []
    scene.coordinator.restart = lambda stage: due.append((ticks + late, stage)) or True

    def tick():
        nonlocal ticks
        ticks += 1
        while plan and plan[0][0] <= ticks:
            scene.kill(plan.pop(0)[1])
        while due and due[0][0] <= ticks:
            scene.restart(due.pop(0)[1], say={}, computing=ALL)

    assert scene.run(tick) == 0, scene.end.message
    assert scene.steps() == list(range(1, 13))
    assert [point.step for point in scene.published] == [3, 6, 9, 12]
    told = {}
    for _, commit in scene.server.sent:
        if isinstance(commit, say.Commit):
            told.setdefault(commit.step, set()).add((commit.apply, tuple(commit.computing), commit.abandoned))
    assert all(len(decisions) == 1 for decisions in told.values())
    assert "different result" not in scene.warnings()
