"""Whole runs: scripted workers, virtual clock, the coordinator as it is."""

import signal
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tahq.comm.control.messages import (
    Abort,
    Assign,
    Bye,
    Commit,
    Failed,
    Heartbeat,
    Hello,
    Join,
    LinkState,
    NotKept,
    Plan,
    Refuse,
    Start,
    StopRequest,
)
from tahq.coordinator.link_codecs import CodecOptions
from tahq.coordinator.link_policy import FollowRules
from tahq.errors import ConfigError, SnapshotError
from tahq.quant.ladder import Ladder


def test_run_reaches_its_last_step(scene):
    scene.workers()
    assert scene.run() == 0
    assert [record.step for record in scene.observer.of("step_committed")] == [1, 2, 3, 4]
    assert scene.losses() == [2.0] * 4
    assert scene.end.message == ""
    assert (scene.end.steps_done, scene.end.total_steps, scene.end.last_snapshot) == (4, 4, 4)
    for stage in range(3):
        assert scene.server.told(f"worker-{stage}".encode(), Bye) == [Bye(0)]


def test_phases_come_in_order(scene):
    scene.workers()
    scene.run()
    phases = list(dict.fromkeys(phase for phase, _ in scene.observer.of("phase_changed")))
    assert phases == ["joining", "connecting", "training", "finishing", "over"]


def test_assign_and_plan_say_what_the_options_say(scene):
    scene.workers()
    scene.run(start_step=2, snapshot="snapshots/step-2", snapshot_files={"a": "b"}, epoch=9)
    assert scene.server.told(b"worker-1", Assign) == [
        Assign(1, 7, '{"a": 1}', "c0ffee", "snapshots/step-2", {"a": "b"}, 2)
    ]
    assert scene.server.told(b"worker-1", Plan) == [
        Plan(
            9,
            2,
            4,
            [[0, 0, "host0", "10.0.0.0:9000", "zmq", ""], [1, 2, "host2", "", "zmq", ""]],
            num_train_samples=100,
            next_sample=0,
            live_step=2,
        )
    ]
    assert scene.server.told(b"worker-1", Start) == [Start(2)]
    assert [commit.step for commit in scene.server.told(b"worker-1", Commit)] == [2, 3]


def test_epochs_become_steps_once_the_samples_are_known(scene):
    scene.workers()
    assert scene.run(steps=None, epochs=0.5) == 0
    assert scene.end.total_steps == 6  # ⌊0.5 · 100 / 8⌋


@pytest.mark.parametrize(
    ("phases", "reason"),
    [
        ({"warmup_steps": 7}, "warmup_steps 7 do not fit into the 6 steps of 0.5 epochs"),
        (
            {"warmup_steps": 3, "decay_steps": 4, "lr_schedule": "wsd"},
            "warmup_steps 3 and decay_steps 4 do not fit into the 6 steps of 0.5 epochs",
        ),
    ],
    ids=["warm-up", "decay"],
)
def test_epochs_without_room_for_warm_up_and_decay_are_refused_before_training(scene, phases, reason):
    scene.workers()
    assert scene.run(steps=None, epochs=0.5, **phases) == 2
    assert scene.end.message == f"training: {reason}"
    assert scene.server.told(b"worker-0", Plan) == []


def test_steps_say_the_learning_rate_that_they_were_taken_with(scene):
    scene.workers()
    assert scene.run(steps=4, lr=0.4, warmup_steps=1, lr_schedule="linear") == 0
    assert [record.lr for record in scene.observer.of("step_committed")] == pytest.approx([0.2, 0.4, 0.8 / 3, 0.4 / 3])


def test_nothing_left_to_do_ends_at_once_with_status_0(scene):
    scene.workers()
    assert scene.run(start_step=4, snapshot="s") == 0
    assert "nothing to do" in scene.end.message
    assert scene.server.told(b"worker-0", Bye) == [Bye(0)]


def test_evaluations_and_snapshots_follow_their_schedules(scene):
    scene.workers()
    assert scene.run(steps=5, eval_every=2, snapshot_every=3) == 0
    commits = scene.server.told(b"worker-0", Commit)
    assert [c.step + 1 for c in commits if c.evaluate] == [2, 4, 5]
    assert [c.step + 1 for c in commits if c.snapshot] == [3, 5]
    assert [parts.step for parts in scene.published] == [3, 5]
    validated = scene.observer.of("validated")
    assert [(v.step, v.loss, v.loss_raw) for v in validated] == [(2, 3.0, 2.5), (4, 3.0, 2.5), (5, 3.0, 2.5)]


def test_commits_say_which_snapshot_is_complete(scene):
    scene.workers()
    assert scene.run(steps=6, snapshot_every=2, start_step=1, snapshot="snapshots/step-1") == 0
    commits = scene.server.told(b"worker-0", Commit)
    assert [(c.step + 1, c.complete_snapshot) for c in commits] == [(2, 1), (3, 2), (4, 2), (5, 4), (6, 4)]


def test_last_snapshot_that_fails_is_status_1_and_the_one_before_stands(scene):
    workers = scene.workers()
    scene.build(snapshot_every=2)
    original = workers[1].report

    def report(commit):
        workers[1].snapshot_error = "no space left" if commit.stop else ""
        original(commit)

    workers[1].report = report
    assert scene.run() == 1
    assert scene.end.last_snapshot == 2
    assert "could not be written" in scene.end.message
    assert [r.error for r in scene.observer.of("snapshot_written")] == ["", "stage 1: no space left"]


def test_snapshot_that_cannot_be_published_does_not_stop_training(scene):
    scene.workers()
    scene.publish_error = OSError("disk on fire")
    assert scene.run(snapshot_every=2) == 1
    assert len(scene.losses()) == 4
    assert [r.error for r in scene.observer.of("snapshot_written")] == ["coordinator: disk on fire"] * 2


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_any_order_of_arrival_gives_the_same_run(new_scene, seed):
    runs = []
    for luck in (None, Random(seed)):
        scene = new_scene()
        scene.server.random = luck
        scene.workers(stage1={"prepare": {"norm2": [1e16, 1.0, 1e-16]}})
        assert scene.run(steps=5, eval_every=2, snapshot_every=2) == 0
        records = [replace(record, step_time_s=0.0) for record in scene.observer.of("step_committed")]
        told = [scene.server.told(f"worker-{stage}".encode(), Commit | Plan | Bye) for stage in range(3)]
        # how early it is known that a snapshot is complete is no part of the run
        told = [[replace(m, complete_snapshot=0) if isinstance(m, Commit) else m for m in told_] for told_ in told]
        runs.append((records, told, [parts.step for parts in scene.published]))
    assert runs[0] == runs[1]


# -- joining ---------------------------------------------------------------------------------------


def test_second_worker_for_a_stage_is_refused_and_the_run_goes_on(scene):
    scene.workers()
    scene.server.inbox.append((b"late", Join(1, "0.1.0", "other", 5)))
    assert scene.run() == 0
    (refusal,) = scene.server.told(b"late", Refuse)
    assert "stage 1 already has a worker: stage 1 (host1, pid 101)" in refusal.reason
    assert "--takeover" in refusal.reason


def test_stage_out_of_range_is_refused_with_the_range(scene):
    scene.server.inbox.append((b"lost", Join(7, "0.1.0", "other", 5)))
    scene.workers()
    assert scene.run() == 0
    (refusal,) = scene.server.told(b"lost", Refuse)
    assert "no stage 7" in refusal.reason
    assert "0 to 2" in refusal.reason


def test_differing_worker_is_refused_and_a_correct_one_takes_its_stage(scene, scripted_worker):
    _, _, last = scene.workers(stage2={"hello": {"data_hash": "other"}})
    ticks = []

    def tick():
        ticks.append(scene.clock.now_s)
        if last.left and len(ticks) > 5 and scene.server.workers[last.identity] is last:
            scripted_worker(scene.server, 2).start()

    assert scene.run(tick) == 0
    (refusal,) = scene.server.told(b"worker-2", Refuse)
    assert refusal.differences == [["data_hash", "other", "d (stage 0 (host0, pid 100))"]]
    assert scene.observer.of("stage_left") == [2]


def test_config_hash_and_version_are_compared_with_the_coordinators(scene):
    scene.workers(stage0={"version": "9.9"}, stage1={"hello": {"config_hash": "bad", "version": "8"}})
    assert scene.run(join_timeout_s=5.0) == 2
    assert scene.server.told(b"worker-0", Refuse)[0].differences == [["version", "9.9", "0.1.0 (coordinator)"]]
    assert scene.server.told(b"worker-1", Refuse)[0].differences == [
        ["version", "8", "0.1.0 (coordinator)"],
        ["config_hash", "bad", "c0ffee (coordinator)"],
    ]


def test_waiting_too_long_names_the_missing_stages_and_the_command(scene, scripted_worker):
    scripted_worker(scene.server, 0).start()
    assert scene.run(join_timeout_s=30.0) == 2
    assert "stages 1, 2" in scene.end.message
    assert "tahq-worker --stage 1 --peer 127.0.0.1:5555" in scene.end.message
    assert scene.server.told(b"worker-0", Abort)[0].exit_status == 2
    assert 30.0 < scene.clock.now_s - 1000.0 < 32.0


def test_late_worker_is_waited_for_and_shown_as_missing(scene, scripted_worker):
    for stage in (0, 2):
        scripted_worker(scene.server, stage).start()

    def tick():
        if scene.clock.now_s > 1040.0 and b"worker-1" not in scene.server.workers:
            scripted_worker(scene.server, 1).start()

    assert scene.run(tick) == 0
    details = [detail for phase, detail in scene.observer.of("phase_changed") if phase == "joining"]
    assert "stage 1 (tahq-worker --stage 1 --peer 127.0.0.1:5555)" in details


def test_worker_that_dies_while_joining_frees_its_stage(scene, scripted_worker):
    scripted_worker(scene.server, 0).start()
    dead = scripted_worker(scene.server, 1, answers=False)
    dead.start()
    dead.silent = True

    def tick():
        if scene.clock.now_s > 1020.0 and len(scene.server.workers) == 2:
            del scene.server.workers[dead.identity]
            for stage in (1, 2):
                scripted_worker(scene.server, stage).start()

    assert scene.run(tick) == 0
    assert any("stage 1 (host1, pid 101) has given no sign of life" in text for text in scene.observer.of("warned"))


def test_two_neighbours_that_only_dial_out_end_the_run_with_both_named(scene):
    scene.workers(stage0={"hello": {"address": ""}}, stage1={"hello": {"address": ""}})
    assert scene.run() == 2
    assert "stage 0 (host0)" in scene.end.message
    assert "stage 1 (host1)" in scene.end.message
    assert {stage for stage in range(3) if scene.server.told(f"worker-{stage}".encode(), Abort)} == {0, 1, 2}


def test_stages_that_do_not_connect_in_time_are_named(scene):
    workers = scene.workers()
    for worker in workers[1:]:
        react = worker.react
        worker.react = lambda message, react=react: None if isinstance(message, Plan) else react(message)
    assert scene.run(join_timeout_s=20.0) == 3
    assert "stages 1, 2 did not connect" in scene.end.message


def test_stage_that_is_continued_by_other_arithmetic_is_warned_about(scene):
    scene.workers(stage1={"hello": {"arithmetic_changes": ["device: A -> B", "threads: 1 -> 2"]}})
    assert scene.run() == 0
    (warning,) = scene.observer.of("warned")
    assert warning.startswith("stage 1 (host1, pid 101): the continuation is no longer exact")
    assert warning.endswith("device: A -> B; threads: 1 -> 2")


def test_other_torch_version_is_warned_about_but_allowed(scene):
    scene.workers(stage1={"hello": {"torch_version": "2.6.0"}})
    assert scene.run() == 0
    assert any("stage 1 has torch 2.6.0, stage 0" in text for text in scene.observer.of("warned"))


def test_stranger_is_turned_away_and_harms_nobody(scene, prepare):
    scene.server.inbox += [(b"ghost", prepare(0, 1)), (b"ghost", Heartbeat(1, 3, "F0")), (b"ghost", Failed(1, "x", 4))]
    scene.workers()
    assert scene.run() == 0
    assert len(scene.server.told(b"ghost", Refuse)) == 1


def test_member_that_breaks_the_protocol_while_joining_is_refused_alone(scene, scripted_worker, prepare):
    bad = scripted_worker(scene.server, 1, answers=False)
    bad.start()
    bad.send(prepare(0, 1))

    def tick():
        if bad.left and scene.server.workers.get(bad.identity) is bad:
            for stage in range(3):
                scripted_worker(scene.server, stage).start()

    assert scene.run(tick) == 0
    assert "while the run was joining" in scene.server.told(bad.identity, Refuse)[0].reason


# -- training goes wrong ---------------------------------------------------------------------------


def test_killed_worker_that_nobody_starts_again_is_waited_for_and_then_given_up(scene):
    workers = scene.workers(stage2={"silent_from_step": 2})
    exits = [-9]

    def tick():
        if workers[2].silent and exits:
            scene.coordinator.worker_exited(2, exits.pop())

    scene.build(snapshot_every=1, give_up_s=30.0)
    assert scene.run(tick) == 3
    assert "stage 2 (host2, pid 102): its worker exited with status -9 (SIGKILL) at step 3" in scene.warnings()
    assert "stage 2 did not come back within 30 s (run.give_up)" in scene.end.message
    assert "tahq-launch c.yaml --resume" in scene.end.message
    assert "checkpoint after step 2" in scene.end.message
    assert 30.0 < scene.clock.now_s - 1000.0 < 33.0
    assert scene.server.told(b"worker-0", Abort)[0].exit_status == 3


@pytest.mark.parametrize(("status", "expected"), [(2, 2), (4, 4), (5, 5), (1, 3), (0, 3)])
def test_exit_status_of_a_worker_becomes_that_of_the_run(scene, status, expected):
    scene.workers(stage1={"silent_from_step": 0})
    scene.build()
    assert scene.run(lambda: scene.coordinator.worker_exited(1, status)) == expected


def test_last_words_of_a_worker_count_more_than_its_exit(scene):
    workers = scene.workers(stage1={"say": {1: []}})
    failed = []

    def tick():
        if workers[1].step == 1 and not failed:
            scene.coordinator.worker_exited(1, 4)
            failed.append(True)
            workers[1].send(Failed(1, "out of memory", 4))

    scene.build()
    assert scene.run(tick) == 4
    assert scene.end.message.startswith("stage 1 (host1, pid 101): out of memory")
    assert scene.server.told(b"worker-1", Abort) == []


def test_silent_worker_is_told_of_after_the_timeout_and_given_up_later(scene, prepare):
    said = [LinkState(0, 0, 1, "nothing is heard of the peer"), LinkState(0, 2, 1, "nothing is heard of the peer")]
    said += [LinkState(0, 2, 1, "", 3.0, 0), prepare(1, 0)]
    scene.workers(stage0={"say": {1: said}}, stage1={"silent_from_step": 1})
    assert scene.run(peer_timeout_s=10.0, give_up_s=40.0) == 3
    assert "stage 1 (host1, pid 101) has given no sign of life for 10.0 s at step 2" in scene.warnings()
    assert "has given no sign of life for 20.0 s at step 2; its next worker begins again" in scene.warnings()
    assert "stage 1 did not come back within 40 s" in scene.end.message
    assert "start the run anew" in scene.end.message
    assert "(run.give_up); stage 0 (host0, pid 100): link 0 to stage 1 is silent; " in scene.end.message
    assert 40.0 <= scene.clock.now_s - 1000.0 < 42.0


def test_worker_that_was_silent_for_a_while_goes_on(scene):
    workers = scene.workers(stage1={"silent_from_step": 1})

    def tick():
        if scene.clock.now_s > 1015.0 and workers[1].silent:
            workers[1].silent = False
            workers[1].begin(1)
            workers[1].silent_from_step = None
            workers[1].silent = False
            workers[1].begin(1)

    assert scene.run(tick, peer_timeout_s=10.0) == 0
    assert "gives signs of life again" in scene.warnings()
    assert scene.losses() == [2.0] * 4


def test_coordinator_that_was_held_up_does_not_blame_its_workers(scene):
    workers = scene.workers()

    def publish(parts):
        scene.clock.now_s += 60.0
        for worker in workers:
            worker.beat()

    scene.publish = publish
    assert scene.run(snapshot_every=2) == 0


def test_failed_ends_the_run_with_its_message_and_status(scene):
    scene.workers(stage1={"say": {2: [Failed(1, "lost stage 2", 3)]}})
    assert scene.run() == 3
    assert scene.end.message.startswith("stage 1 (host1, pid 101): lost stage 2")
    assert scene.end.steps_done == 2


def test_prepare_for_a_wrong_step_names_the_peer(scene, prepare):
    scene.workers(stage1={"say": {1: [prepare(5, 1)]}})
    assert scene.run() == 3
    assert "stage 1 (host1, pid 101) prepared step 5 while step 1 is due" in scene.end.message


def test_speaking_for_another_stage_names_the_peer(scene, prepare):
    scene.workers(stage1={"say": {1: [prepare(1, 0)]}})
    assert scene.run() == 3
    assert "stage 1 (host1, pid 101) spoke for stage 0" in scene.end.message


def test_message_of_a_coordinator_is_a_protocol_error(scene):
    scene.workers(stage1={"say": {1: [Bye(0)]}})
    assert scene.run() == 3
    assert "sent Bye, which only a coordinator sends" in scene.end.message


def test_hello_during_training_is_a_protocol_error(scene, hello):
    scene.workers(stage1={"say": {1: [hello(1)]}})
    assert scene.run() == 3
    assert f"said {Hello.__name__} while it was ready" in scene.end.message


def test_different_batches_end_the_run_naming_both_readers(scene):
    scene.workers(stage2={"prepare": {"batch_digest": "other"}})
    assert scene.run() == 2
    assert "stage 0 (host0, pid 100) and stage 2 (host2, pid 102) read different batches" in scene.end.message


def test_non_finite_halts_with_status_5(scene):
    scene.workers(stage1={"prepare": {"finite": False}})
    assert scene.run(non_finite="halt") == 5
    assert "stage 1 (host1, pid 101)" in scene.end.message
    assert scene.server.told(b"worker-0", Commit) == []


def test_non_finite_is_skipped_up_to_the_limit(scene):
    scene.workers(stage1={"prepare": {"finite": False}})
    assert scene.run(steps=10, max_skipped_in_a_row=3) == 5
    commits = scene.server.told(b"worker-0", Commit)
    assert [commit.apply for commit in commits] == [False] * 3
    assert [record.skipped for record in scene.observer.of("step_committed")] == [True] * 3


# -- signals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_finishes_the_step_writes_a_snapshot_and_says_bye(scene, number):
    workers = scene.workers(stage1={"say": {2: []}})
    asked = []

    def tick():
        if workers[1].step == 2 and not asked:
            asked.append(scene.coordinator.request_stop(number))
        elif asked and workers[1].say:
            workers[1].say = {}
            workers[1].begin(2)

    scene.build(steps=100)
    assert scene.run(tick) == 128 + number
    assert (scene.end.steps_done, scene.end.last_snapshot) == (3, 3)
    last = scene.server.told(b"worker-0", Commit)[-1]
    assert (last.step, last.apply, last.snapshot, last.stop) == (2, True, True, True)
    assert scene.server.told(b"worker-2", Bye) == [Bye(128 + number)]
    assert signal.Signals(number).name in scene.end.message


def test_second_signal_aborts_at_once(scene):
    workers = scene.workers(stage1={"say": {2: []}})

    def tick():
        if workers[1].step == 2:
            scene.coordinator.request_stop(signal.SIGINT)

    scene.build(steps=100, snapshot_every=1)
    assert scene.run(tick) == 130
    assert "second SIGINT" in scene.end.message
    assert scene.server.told(b"worker-0", Abort)[0].exit_status == 130
    assert scene.end.steps_done == 2


@pytest.mark.parametrize(("number", "ended_by_it"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_step_that_takes_longer_than_the_grace_after_sigterm_is_given_up(scene, number, ended_by_it):
    workers = scene.workers(stage1={"say": {2: []}})
    asked_s = []

    def tick():
        if workers[1].step == 2 and not asked_s:
            asked_s.append(scene.clock.now_s)
            scene.coordinator.request_stop(number)
        elif asked_s and scene.clock.now_s > asked_s[0] + 5.0 and workers[1].say:
            workers[1].say = {}
            workers[1].begin(2)

    scene.build(steps=100, snapshot_every=1, grace_s=3.0)
    assert scene.run(tick) == 128 + number
    assert (scene.end.steps_done, scene.end.last_snapshot) == ((2, 2) if ended_by_it else (3, 3))
    if ended_by_it:
        assert scene.clock.now_s == pytest.approx(asked_s[0] + 3.0, abs=1.5)  # and a second to leave in
        assert (
            "longer than run.grace (3 s), so they are given up after step 2; the run can be resumed"
            in scene.end.message
        )
        assert scene.server.told(b"worker-0", Abort)[0].exit_status == 143


def test_signal_is_noticed_within_two_tenths_of_a_second(scene):
    scene.build()
    scene.coordinator.request_stop(signal.SIGTERM)
    assert scene.run(leave_timeout_s=0.0) == 143
    assert scene.clock.now_s - 1000.0 <= 0.2
    assert "before the first step" in scene.end.message


def test_user_is_told_of_a_degraded_link_and_the_run_goes_on(scene, prepare):
    states = [LinkState(1, 1, 2, "nothing is heard of the peer"), LinkState(1, 1, 2, "", 31.25, 47)]
    scene.workers(stage1={"say": {1: [*states, prepare(1, 1)]}})
    assert scene.run() == 0
    told = [text for text in scene.observer.of("warned") if "link 1" in text]
    name = "stage 1 (host1, pid 101): link 1 to stage 2"
    assert told == [
        f"{name} is degraded: nothing is heard of the peer",
        f"{name} works again after 31.2 s; 47 messages were sent again so far",
    ]


def test_user_is_told_of_a_log_of_frames_that_is_given_up_and_the_run_goes_on(scene, prepare):
    scene.workers(stage1={"say": {1: [NotKept(1, 0, "runs/x/frames: No space left on device"), prepare(1, 1)]}})
    assert scene.run() == 0
    (told,) = [text for text in scene.observer.of("warned") if "link 0" in text]
    assert told.startswith("stage 1 (host1, pid 101): frames that it sends on link 0 are not kept until")
    assert "runs/x/frames: No space left on device; training goes on" in told


def test_worker_that_speaks_of_anothers_link_ends_the_run(scene):
    scene.workers(stage1={"say": {1: [LinkState(2, 1, 1, "nothing is heard of the peer")]}})
    assert scene.run() == 3
    assert "stage 1 (host1, pid 101) spoke for stage 2, which is not its own" in scene.end.message


@pytest.mark.parametrize("number", [-1, 0, 255, 2**64 - 1])
def test_stop_request_with_a_signal_that_is_none_breaks_the_protocol(scene, number):
    scene.workers(stage1={"say": {1: [StopRequest(1, number)]}})
    assert scene.run() == 3
    assert f"stage 1 (host1, pid 101) reported signal {number}, which does not exist" in scene.end.message


def test_stop_request_of_every_worker_is_one_request(scene):
    stop = {stage: {"say": {1: [StopRequest(stage, 2)]}} for stage in range(3)}
    workers = scene.workers(stage0=stop[0], stage1=stop[1], stage2=stop[2])

    def tick():
        if all(worker.step == 1 and worker.say for worker in workers):
            for worker in workers:
                worker.say = {}
                worker.begin(1)

    assert scene.run(tick, steps=50) == 130
    assert scene.end.steps_done == 2


def test_signal_after_the_last_commit_leaves_the_run_complete(scene):
    workers = scene.workers()
    report = workers[2].report

    def late(commit):
        if commit.stop:
            scene.coordinator.request_stop(signal.SIGINT)
        report(commit)

    workers[2].report = late
    scene.build()
    assert scene.run() == 0


# -- the loop itself -------------------------------------------------------------------------------


def test_tick_is_called_about_ten_times_a_second(scene):
    ticks = []
    scene.run(lambda: ticks.append(1), join_timeout_s=10.0, leave_timeout_s=0.0)
    assert 90 <= len(ticks) <= 110


def test_error_of_the_tick_ends_the_run_with_its_status(scene):
    scene.workers(stage0={"silent_from_step": 0})

    def tick():
        if scene.clock.now_s > 1001.0:
            raise ConfigError("no more")

    scene.build()
    with pytest.raises(ConfigError, match="no more"):
        # raised again while the workers leave: the launcher must see its own error
        scene.run(tick)
    assert scene.server.told(b"worker-1", Abort)[0] == Abort("no more", 2)


def test_failing_coordinator_tells_the_workers_before_it_dies(scene):
    scene.workers(stage0={"silent_from_step": 0})

    def tick():
        raise ZeroDivisionError("bug")

    with pytest.raises(ZeroDivisionError):
        scene.run(tick)
    assert scene.server.told(b"worker-1", Abort)[0].exit_status == 1
    assert scene.end.exit_status == 1


def test_coordinator_leaves_as_soon_as_all_processes_have_ended(scene):
    workers = scene.workers()

    def tick():
        for worker in workers:
            if worker.left:
                scene.coordinator.worker_exited(worker.stage, 0)

    scene.build(leave_timeout_s=60.0)
    assert scene.run(tick) == 0
    assert scene.clock.now_s - 1000.0 < 1.0


GRADIENTS = ("eden:bits=2,group=256", "eden:bits=3,group=256")


def follow_options(**changes):
    ladders = {"activations": Ladder(("raw:dtype=fp32",), (8000,)), "gradients": Ladder(GRADIENTS, (1000, 2000))}
    start = {"activations": "raw:dtype=fp32", "gradients": GRADIENTS[1]}
    return CodecOptions(start, FollowRules(ladders), **changes)


def test_codecs_that_change_are_told_to_all_with_the_commit_and_kept_in_the_snapshot(scene):
    """The scripted stages compute for a second and send for half of one, but one of them is slow."""
    rows = [[1, 0, 4, 1000, 1100, 2000, 0.5, 0.5, 0.1], [0, 1, 4, 2000, 2100, 2000, 3, 3, 3]]
    slow = {"links": [[float(number) for number in row] for row in rows]}
    scene.workers(stage1={"prepare": slow})
    assert scene.run(codecs=follow_options()) == 0
    for worker in scene.server.workers:
        told = [commit.codecs for commit in scene.server.told(worker, Commit)]
        assert told == [[], [[0, 1, 2]], [], []]  # raw, one for activations, then those for gradients
        assert [start.codecs for start in scene.server.told(worker, Start)] == [[]]
    records = scene.observer.of("step_committed")
    assert [record.links[1].codec for record in records] == ["raw:dtype=fp32"] * 4
    assert [record.links[2].codec for record in records] == [GRADIENTS[1]] * 2 + [GRADIENTS[0]] * 2
    assert [len(record.codec_changes) for record in records] == [0, 1, 0, 0]
    (parts,) = scene.published
    assert [row["rung"] for row in parts.point.saved_codecs["links"] if row["direction"] == "gradients"] == [*GRADIENTS]

    saved = dict(parts.point.saved_codecs)
    again = type(scene)(scene.clock, type(scene.server)(scene.clock), type(scene.observer)(), scene.options)
    again.workers()
    assert again.run(codecs=follow_options(saved=saved), start_step=2) == 0
    told = again.server.told(b"worker-0", Start)
    assert [start.codecs for start in told] == [[[0, 1, 2]]]


def test_a_snapshot_whose_codecs_make_no_sense_ends_the_run_before_its_first_step(scene):
    scene.workers()
    assert scene.run(codecs=follow_options(saved={"links": 3})) == SnapshotError.exit_status
    assert "cannot be read" in scene.end.message


def test_stage_of_a_key_is_given_to_nobody_else(scene, scripted_worker):
    scene.build(host_keys=("", "aa", ""))
    scene.server.keys = {b"worker-0": "cc", b"worker-1": "bb", b"worker-2": "dd"}
    first, impostor, _ = scene.workers()
    late = scripted_worker(scene.server, 1)

    def tick():
        if impostor.left and scene.server.workers[impostor.identity] is impostor:
            scene.server.keys[late.identity] = "aa"
            late.start()

    assert scene.run(tick) == 0
    (refusal,) = scene.server.told(impostor.identity, Refuse)
    assert "stage 1 is for the worker with another key" in refusal.reason
    assert refusal.differences == [["public key", "bb", "aa (hosts.1.public_key)"]]
    (plan,) = scene.server.told(first.identity, Plan)
    assert plan.links == [[0, 1, "host1", "", "zmq", "aa"]]
