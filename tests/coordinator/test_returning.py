"""Stages that are lost and come back: scripted workers, virtual clock, the real coordinator."""

import json
from dataclasses import replace
from functools import partial
from random import Random

import pytest
from coordinator.conftest import VERSION, make_prepare
from hypothesis import given, settings
from hypothesis import strategies as st
from support.at_once import Sooner

from tahq.comm.control import messages as say
from tahq.coordinator.joining.seats import RestorePoint
from tahq.coordinator.journal import Journal
from tahq.coordinator.training import SnapshotParts, publish_to_folder
from tahq.errors import PeerLostError
from tahq.observe.metrics import MetricsFile
from tahq.pipeline.checkpoint.manifest import latest_folder

AGAIN = b"worker-1-again"


def led(scene, kills, after_steps=0, **options):
    """Lead a run to its end; `kills` are (tick, stage), counted once so many steps are done."""
    scene.workers()
    scene.build(**({"steps": 8, "checkpoint_every": 3, "eval_every": 2} | options))
    scene.coordinator.restart = scene.restart
    plan, ticks = sorted(kills), 0

    def tick():
        nonlocal ticks
        ticks += len(scene.losses()) >= after_steps
        while plan and plan[0][0] <= ticks:
            scene.kill(plan.pop(0)[1])

    scene.one_message_a_turn()
    assert scene.run(tick) == 0, scene.end.message


def test_killed_stage_begins_at_the_checkpoint_and_is_sent_the_decisions(scene):
    led(scene, [(2, 1)], after_steps=5)
    assert scene.losses() == [2.0] * 8
    (plan,) = scene.server.told(AGAIN, say.Plan)
    (start,) = scene.server.told(AGAIN, say.Start)
    assert plan.live_step > 3
    assert (plan.start_step, plan.next_sample, start.step) == (3, 8 * 3, 3)
    assert plan.epoch == 2
    decided = {commit.step: commit for commit in scene.server.told(b"worker-0", say.Commit)}
    for commit in scene.server.told(AGAIN, say.Commit):
        assert (commit.apply, commit.clip_factor) == (decided[commit.step].apply, decided[commit.step].clip_factor)
    assert "stage 1 (host1, pid 101) is back after" in scene.warnings()
    assert [stage for stage, _ in scene.observer.of("stage_returned")] == [1]


def test_degraded_links_of_a_stage_that_is_back_work_again(scene):
    lost = say.LinkState(0, 0, 1, "the peer is lost")
    scene.workers(stage0={"say": {5: [lost, make_prepare(5, 0)]}})
    scene.build(steps=8)
    scene.coordinator.restart = scene.restart
    scene.one_message_a_turn()
    scene.when(lambda: scene.observer.of("link_changed"), lambda: scene.kill(1))
    assert scene.run() == 0
    assert scene.observer.of("link_changed") == [(0, 0, "the peer is lost"), (0, 0, "")]


def test_neighbours_make_ready_before_the_new_worker_is_sent_its_plan(scene):
    led(scene, [(2, 0)], after_steps=5)
    again = b"worker-0-again"
    sent = [(who, type(message)) for who, message in scene.server.sent if isinstance(message, say.Relink | say.Plan)]
    assert sent[-2:] == [(b"worker-1", say.Relink), (again, say.Plan)]
    (relink,) = scene.server.told(b"worker-1", say.Relink)
    (plan,) = scene.server.told(again, say.Plan)
    assert [row[0] for row in relink.links] == [0]
    assert relink.epoch == plan.epoch == 2
    ((link, since, _, _),) = relink.wanted
    assert (link, since) == (0, plan.start_step)
    ((_, wanted_since, _, through),) = plan.wanted
    assert through == -1
    assert wanted_since >= plan.live_step
    widened = scene.server.told(b"worker-1", say.Widen)
    assert [w.link for w in widened] == [0] * (plan.live_step - plan.start_step)
    assert not widened or widened[-1].through == -1


def test_stages_that_go_back_prepare_the_same_step_again(scene):
    """Only the killed worker had not prepared the step; the others' second PREPARE has another timing."""
    scene.workers(stage1={"say": {3: []}}, stage2={"lacking": [1]})
    scene.build(steps=6, checkpoint_every=2)
    scene.start_over_when_told(lacking=[], say={}, prepare={"timing": {"forward": 2.0}})
    scene.when(lambda: len(scene.losses()) == 3 and not scene.server.inbox, lambda: scene.kill(1))
    assert scene.run() == 0, scene.end.message
    assert "all stages go back to step 2" in scene.warnings()
    assert scene.losses() == [2.0] * 6


def test_stage_that_recomputes_a_different_result_is_named_once_and_the_run_goes_on(scene):
    scene.workers()
    scene.build(steps=6, checkpoint_every=50)
    scene.coordinator.restart = partial(scene.restart, prepare={"norm2": [0.25, 0.75]})
    scene.after(2, lambda: scene.kill(1))
    scene.one_message_a_turn()
    assert scene.run() == 0
    assert scene.warnings().count("recomputed step") == 1


def test_too_many_restarts_end_the_run(scene):
    scene.workers()
    scene.build(steps=6)

    def restart(stage):
        raise PeerLostError(f"the worker of stage {stage} was killed, and was started again 0 times before")

    scene.coordinator.restart = restart
    scene.one_message_a_turn()
    assert scene.run(lambda: scene.coordinator.worker_exited(1, -9)) == 3
    assert "started again 0 times" in scene.end.message


@pytest.mark.parametrize("word", [{"worker_id": "w"}, {"takeover": True}])
def test_worker_that_takes_a_stage_over_goes_on_and_the_old_one_is_fenced(scene, word):
    _, old, _ = scene.workers()
    own = say.Join(1, VERSION, "host1", 101, worker_id="w")
    scene.server.inbox = [(who, own if who == old.identity else message) for who, message in scene.server.inbox]
    new = replace(old, generation=1)
    scene.server.workers[new.identity] = new
    scene.after(4, lambda: new.send(say.Join(1, VERSION, "host1", 202, **word)))
    scene.one_message_a_turn()
    assert scene.run(steps=8, checkpoint_every=3) == 0, scene.end.message
    assert scene.losses() == [2.0] * 8
    assert new.step == 7
    assert old.step < 7
    assert scene.server.told(old.identity, say.StartOver)


@pytest.mark.parametrize("phase", ["ready", "connecting"])
def test_worker_with_another_key_cannot_take_a_stage_over(scene, phase):
    """The holder keeps its seat, whether it trains or connects."""
    scene.server.keys = {f"worker-{stage}".encode(): f"key-{stage}" for stage in range(3)} | {b"thief": "key-x"}
    _, holder, _ = scene.workers()
    held, react = [], holder.react
    if phase == "connecting":
        holder.react = lambda m: held.append(m) if isinstance(m, say.Plan) and not held else react(m)
    attack = [(b"thief", say.Join(1, VERSION, "elsewhere", 900, takeover=True))] * 5
    scene.when(lambda: held or len(scene.losses()) >= 2, lambda: scene.server.inbox.extend(attack))
    scene.when(lambda: held and len(scene.server.told(b"thief", say.Refuse)) == 5, lambda: react(held[0]))
    scene.one_message_a_turn()
    assert scene.run(host_keys=("key-0", "key-1", "key-2"), steps=8) == 0, scene.end.message
    refusals = scene.server.told(b"thief", say.Refuse)
    assert len(refusals) == 5
    assert {refusal.differences[0][1] for refusal in refusals} == {"key-x"}
    assert scene.observer.of("stage_left") == []
    assert scene.server.told(b"worker-1", say.StartOver) == []


def test_log_that_cannot_be_read_while_a_stage_comes_back_sends_all_back(scene):
    scene.workers()
    scene.build(steps=8, checkpoint_every=2)
    scene.after(5, lambda: scene.kill(1))
    unread = (b"worker-2", say.Relinked(2, 2, [1]))
    scene.when(lambda: scene.server.told(AGAIN, say.Start), lambda: scene.server.inbox.append(unread))
    scene.start_over_when_told()
    scene.one_message_a_turn()
    assert scene.run() == 0, scene.end.message
    assert "stage 2 has not kept all that it sent on link 1: all stages go back to step" in scene.warnings()
    assert scene.steps() == list(range(1, 9))


# -- deadlines -------------------------------------------------------------------------------------


def test_stage_that_comes_back_and_never_connects_ends_the_run_within_its_deadline(scene):
    """As after a lost dial: its worker is alive, and reports nothing about its links."""
    scene.workers()
    scene.build(steps=8, join_timeout_s=200.0, give_up_s=50.0, checkpoint_every=2)
    scene.coordinator.restart = partial(scene.restart, ignores=(say.Plan,))
    scene.after(3, lambda: scene.kill(1))
    scene.one_message_a_turn()
    assert scene.run() == 3
    assert "stage 1 did not connect to the neighbours within 200 s (run.join_timeout)" in scene.end.message
    assert "resumed" in scene.end.message
    assert 200.0 <= scene.clock() - 1000.0 < 215.0


@pytest.mark.parametrize(
    ("stage", "options", "owed"),
    [(1, {}, "the checkpoint after step 4"), (2, {"eval_every": 4}, "the validation loss")],
)
def test_worker_that_lives_and_never_reports_ends_the_run_within_its_deadline(scene, stage, options, owed):
    mute = scene.workers()[stage]
    report = mute.report
    mute.report = lambda commit: None if commit.stop else report(commit)
    assert scene.run(checkpoint_every=2, give_up_s=30.0, join_timeout_s=200.0, **options) == 3
    assert f"stage {stage} did not report {owed}" in scene.end.message
    assert "within 200 s (run.join_timeout); the run can be resumed" in scene.end.message
    assert "(checkpoint after step 2)" in scene.end.message
    assert 200.0 <= scene.clock() - 1000.0 < 210.0


# -- damaged checkpoints ---------------------------------------------------------------------------

ON_HOSTS = {"hosts": ("a", "b", "c"), "steps": 8}
"""Other hosts, whose files the coordinator does not have."""


@pytest.fixture
def resumed_from(scene):
    """Publish checkpoints after these steps as an earlier coordinator would; returns options to go on with the last."""

    def write(*steps):
        for step in steps:
            parts = tuple(say.Snapshotted(step, stage, f"stage-{stage:03d}-ab", "ab", 100) for stage in range(3))
            publish_to_folder(scene.options, SnapshotParts(RestorePoint(step), parts))
        files = {part.file: part.sha256 for part in parts}
        return {"start_step": step, "snapshot": f"snapshots/step-{step:08d}", "snapshot_files": files, **ON_HOSTS}

    return write


def lead_with_damage(scene, damaged, journal=None):
    """Kill stage 1 once 5 steps are done; of these checkpoints its host has no whole file."""
    scene.workers()
    scene.publish = lambda parts: publish_to_folder(scene.options, parts)
    scene.build(journal, checkpoint_every=2, eval_every=3, **ON_HOSTS)
    scene.start_over_when_told(damaged=damaged)
    scene.after(5, lambda: scene.kill(1))
    scene.coordinator.restart = partial(scene.restart, damaged=damaged)
    scene.one_message_a_turn()
    return scene.run()


def test_damaged_newest_checkpoint_sends_all_back_to_the_one_before(scene, tmp_path):
    scene.observer.other = MetricsFile(tmp_path / "metrics.jsonl")
    with Journal(tmp_path / "journal.sqlite") as journal:
        assert lead_with_damage(scene, (4,), journal) == 0, scene.end.message
        facts = journal.facts
    assert "stage 1 (b, pid 101): stage-001-ab is damaged: all stages go back to step 2" in scene.warnings()
    assert scene.observer.of("turned_back") == [2]
    assert scene.steps()[scene.steps().index(3, 3) :] == [3, 4, 5, 6, 7, 8]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 9))
    assert latest_folder(tmp_path / "snapshots").name == "step-00000008"
    assert (facts.step, facts.num_steps) == (8, 8)
    starts = [message.step for _, message in scene.server.sent if isinstance(message, say.Start)]
    assert starts == [0, 0, 0, 2, 2, 2]


def test_run_whose_checkpoints_are_all_damaged_ends_and_says_so(scene):
    assert lead_with_damage(scene, (2, 4)) == 2
    assert "there is no other undamaged checkpoint" in scene.end.message
    assert any(abort.exit_status == 2 for _, abort in scene.server.sent if isinstance(abort, say.Abort))


@pytest.mark.parametrize("phase", ["joining", "connecting"])
def test_damaged_checkpoint_found_while_resuming_sends_all_back_to_the_one_before(scene, resumed_from, phase):
    scene.one_message_a_turn()
    if phase == "joining":
        scene.workers(stage1={"damaged": (4,)})
    else:  # a worker is lost after the plan, and its next one finds the damage
        scene.workers(stage1={"ignores": (say.Plan,)})
        scene.when(lambda: scene.server.told(b"worker-1", say.Plan), lambda: scene.kill(1))
    scene.build(next_sample=32, **resumed_from(2, 4))
    scene.start_over_when_told()
    scene.coordinator.restart = partial(scene.restart, damaged=(4,), ignores=())
    assert scene.run() == 0, scene.end.message
    assert "stage-001-ab is damaged: all stages go back to step 2, and go on from there" in scene.warnings()
    assert scene.steps() == [3, 4, 5, 6, 7, 8]
    assert {plan.next_sample for plan in scene.server.told(scene.stages[0].identity, say.Plan)} == {16}


def test_resuming_without_an_undamaged_checkpoint_ends_the_run_and_names_the_file(scene, resumed_from):
    scene.workers(stage1={"damaged": (4,)})
    assert scene.run(**resumed_from(4)) == 2
    assert "stage 1 (b, pid 101): stage-001-ab is damaged; " in scene.end.message
    assert "there is no other undamaged checkpoint" in scene.end.message


@settings(max_examples=150, deadline=None)
@given(kills=st.lists(st.tuples(st.integers(1, 160), st.integers(0, 2)), max_size=6), seed=st.integers(0, 2**32))
def test_any_stages_may_die_at_any_time(new_scene, kills, seed):
    undisturbed, scene = new_scene(), new_scene()
    led(undisturbed, [])
    scene.executor = Sooner(Random(seed))
    led(scene, kills)
    assert outcome(scene) == outcome(undisturbed)


def outcome(scene):
    steps = [(r.step, r.loss, r.grad_norm, r.skipped) for r in scene.observer.of("step_committed")]
    return steps, [v.step for v in scene.observer.of("validated")], [p.step for p in scene.published]
