"""Whole runs: scripted workers, virtual clock, the real coordinator."""

import math
import re
import signal
from dataclasses import replace
from random import Random

import pytest
from coordinator.conftest import ScriptedWorker, make_hello, make_prepare
from hypothesis import given, settings
from hypothesis import strategies as st

from tahq.comm.control import messages as say
from tahq.coordinator.link_codecs import CodecOptions, FollowRules
from tahq.coordinator.observer import RunObserver
from tahq.errors import ConfigError, SnapshotError
from tahq.quant.ladder import Ladder

STAGE_1 = "stage 1 (host1, pid 101)"


def test_run_reaches_its_last_step(scene):
    scene.workers()
    assert scene.run(lr=0.4, warmup_steps=1, lr_schedule="linear") == 0
    assert scene.steps() == [1, 2, 3, 4]
    assert scene.losses() == [2.0] * 4
    assert [record.lr for record in scene.observer.of("step_committed")] == pytest.approx([0.2, 0.4, 0.8 / 3, 0.4 / 3])
    assert scene.end.message == ""
    assert (scene.end.steps_done, scene.end.total_steps, scene.end.last_snapshot) == (4, 4, 4)
    assert [scene.server.told(worker.identity, say.Bye) for worker in scene.stages] == [[say.Bye(0)]] * 3
    phases = list(dict.fromkeys(phase for phase, _ in scene.observer.of("phase_changed")))
    assert phases == ["joining", "connecting", "training", "finishing", "over"]


def test_commit_has_left_before_its_step_is_shown(scene):
    server, left = scene.server, []

    class Watcher(RunObserver):
        def step_committed(self, record):
            commits = [message for _, message in server.sent[: server.num_left] if isinstance(message, say.Commit)]
            left.append([commit.step + 1 for commit in commits[-3:]] == [record.step] * 3)

    scene.observer.other = Watcher()
    scene.workers()
    assert scene.run() == 0
    assert left == [True] * 4


def test_assign_and_plan_have_the_options(scene):
    scene.workers()
    scene.run(start_step=2, snapshot="snapshots/step-2", snapshot_files={"a": "b"}, epoch=9)
    assert scene.server.told(b"worker-1", say.Assign) == [
        say.Assign(1, 7, '{"a": 1}', "c0ffee", "snapshots/step-2", {"a": "b"}, 2)
    ]
    links = [[0, 0, "host0", "10.0.0.0:9000", "zmq", ""], [1, 2, "host2", "", "zmq", ""]]
    assert scene.server.told(b"worker-1", say.Plan) == [
        say.Plan(9, 2, 4, links, num_train_samples=100, next_sample=0, live_step=2)
    ]
    assert scene.server.told(b"worker-1", say.Start) == [say.Start(2)]
    assert [commit.step for commit in scene.server.told(b"worker-1", say.Commit)] == [2, 3]


@pytest.mark.parametrize(
    ("phases", "reason"),
    [
        ({}, ""),
        ({"warmup_steps": 7}, "warmup_steps 7 do not fit"),
        ({"warmup_steps": 3, "decay_steps": 4, "lr_schedule": "wsd"}, "warmup_steps 3 and decay_steps 4 do not fit"),
        ({"seq_len_schedule": [[8, 7]]}, "seq_len_schedule ends with step 7, which does not fit"),
    ],
)
def test_epochs_become_steps_with_room_for_warm_up_and_decay_or_are_refused(scene, phases, reason):
    """⌊0.5 · 100 / 8⌋ steps."""
    scene.workers()
    assert scene.run(steps=None, epochs=0.5, **phases) == (2 if reason else 0)
    assert scene.end.total_steps == 6
    assert scene.end.message == (f"training: {reason} into the 6 steps of 0.5 epochs" if reason else "")
    assert bool(scene.server.told(b"worker-0", say.Plan)) == (not reason)


def test_nothing_left_to_do_ends_at_once_with_status_0(scene):
    scene.workers()
    assert scene.run(start_step=4, snapshot="s") == 0
    assert "nothing to do" in scene.end.message
    assert scene.server.told(b"worker-0", say.Bye) == [say.Bye(0)]


def test_evaluations_and_checkpoints_follow_their_schedules(scene):
    scene.workers()
    assert scene.run(steps=5, eval_every=2, checkpoint_every=3, start_step=1, snapshot="snapshots/step-1") == 0
    commits = scene.server.told(b"worker-0", say.Commit)
    assert [c.step + 1 for c in commits if c.evaluate] == [2, 4, 5]
    assert [c.step + 1 for c in commits if c.snapshot] == [parts.step for parts in scene.published] == [3, 5]
    assert [(c.step + 1, c.complete_snapshot) for c in commits] == [(2, 1), (3, 1), (4, 3), (5, 3)]
    validated = scene.observer.of("validated")
    assert [(v.step, v.loss, v.loss_raw) for v in validated] == [(2, 3.0, 2.5), (4, 3.0, 2.5), (5, 3.0, 2.5)]


def test_checkpoints_follow_the_clock(scene):
    scene.workers()
    scene.one_message_a_turn()
    assert scene.run(steps=9, checkpoint_every=1.0) == 0
    due, passed_s = [], 0.0
    for record in scene.observer.of("step_committed"):
        passed_s += record.step_time_s
        if passed_s >= 1.0 or record.step == 9:
            due.append(record.step)
            passed_s = 0.0
    assert [parts.step for parts in scene.published] == due
    assert 3 <= len(due) < 9


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_any_order_of_arrival_gives_the_same_run(new_scene, seed):
    runs = []
    for luck in (None, Random(seed)):
        scene = new_scene()
        scene.server.random = luck
        scene.workers(stage1={"prepare": {"norm2": [1e16, 1.0, 1e-16]}})
        assert scene.run(steps=5, eval_every=2, checkpoint_every=2) == 0
        records = [replace(record, step_time_s=0.0) for record in scene.observer.of("step_committed")]
        told = [scene.server.told(f"worker-{stage}".encode(), say.Commit | say.Plan | say.Bye) for stage in range(3)]
        # when a checkpoint is known to be complete may differ
        told = [[replace(m, complete_snapshot=0) if isinstance(m, say.Commit) else m for m in told_] for told_ in told]
        runs.append((records, told, [parts.step for parts in scene.published]))
    assert runs[0] == runs[1]


# -- joining ---------------------------------------------------------------------------------------


HELD = f"stage 1 already has a worker: {STAGE_1}; if you know that it is gone, start this one with --takeover"


@pytest.mark.parametrize(
    ("join", "reason"),
    [
        ({"stage": 1}, HELD),
        ({"stage": 1, "worker_id": "other"}, HELD),
        ({"stage": -1}, "all 3 stages have a worker"),
        ({"stage": 7}, "there is no stage 7: this run has stages 0 to 2; start with one of those"),
        ({"stage": 1, "pid": 2**63}, "expected one below"),
        ({"stage": 1, "host": "x" * 1_000_000}, "got a host name of 1000000 characters, expected at most 255"),
        ({"stage": 1, "version": "9" * 1_000_000}, "another version"),
    ],
)
def test_worker_without_a_free_stage_is_refused_and_the_run_goes_on(scene, join, reason):
    scene.workers()
    scene.server.inbox.append((b"late", say.Join(**({"version": "0.1.0", "host": "other", "pid": 5} | join))))
    assert scene.run() == 0
    (refusal,) = scene.server.told(b"late", say.Refuse)
    assert reason in refusal.reason
    assert max(map(len, (*scene.observer.of("warned"), str(refusal)))) < 500


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [("tokenizer_hash", "other", "t"), ("data_hash", "other", "d"), ("num_train_samples", 99, "100")],
)
def test_differing_worker_is_refused_and_a_correct_one_takes_its_stage(scene, field, value, expected):
    _, _, last = scene.workers(stage2={"hello": {field: value}})
    scene.when(lambda: last.left and scene.clock.now_s > 1000.5, lambda: scene.restart(2, hello={}))
    assert scene.run() == 0
    (refusal,) = scene.server.told(b"worker-2", say.Refuse)
    assert refusal.differences == [[field, str(value), f"{expected} (stage 0 (host0, pid 100))"]]
    assert scene.observer.of("stage_left") == [2]


def test_config_hash_and_version_are_compared_and_missing_stages_named_with_the_command(scene):
    scene.workers(stage0={"version": "9.9"}, stage1={"hello": {"config_hash": "bad", "version": "8"}})
    assert scene.run(join_timeout_s=30.0, by_hand=frozenset(range(3))) == 2
    assert scene.server.told(b"worker-0", say.Refuse)[0].differences == [["version", "9.9", "0.1.0 (coordinator)"]]
    assert scene.server.told(b"worker-1", say.Refuse)[0].differences == [
        ["version", "8", "0.1.0 (coordinator)"],
        ["config_hash", "bad", "c0ffee (coordinator)"],
    ]
    assert "stages 0, 1" in scene.end.message
    assert "tahq-worker --stage 0 --peer 127.0.0.1:5555" in scene.end.message
    assert scene.server.told(b"worker-2", say.Abort)[0].exit_status == 2
    assert 30.0 < scene.clock.now_s - 1000.0 < 32.0


def test_stages_that_the_launcher_starts_are_named_without_a_command(scene):
    scene.workers(only=[2])
    assert scene.run(join_timeout_s=30.0, by_hand=frozenset({2})) == 2
    details = [detail for phase, detail in scene.observer.of("phase_changed") if phase == "joining"]
    assert details[0] == "stages 0, 1, 2 (tahq-worker --stage 2 --peer 127.0.0.1:5555)"
    assert details[-1] == "stages 0, 1"
    assert re.search(
        r"stages 0, 1 did not join within 30 s; see \S+/logs, or raise run.join_timeout", scene.end.message
    )


def test_late_worker_and_the_next_one_of_a_stage_whose_worker_died_are_waited_for(scene):
    scene.build(by_hand=frozenset({2}))
    _, dead = scene.workers(only=[0, 1], stage1={"ignores": (say.Assign,)})
    dead.silent = True
    scene.when(lambda: scene.clock.now_s > 1020.0, lambda: scene.restart(1, ignores=()))
    scene.when(lambda: scene.clock.now_s > 1040.0, ScriptedWorker(scene.server, 2).start)
    assert scene.run() == 0
    assert f"{STAGE_1} has given no sign of life" in scene.warnings()
    details = [detail for phase, detail in scene.observer.of("phase_changed") if phase == "joining"]
    assert "stage 2 (tahq-worker --stage 2 --peer 127.0.0.1:5555)" in details


def test_two_neighbours_that_only_dial_out_end_a_run_without_a_relay_with_both_named(scene):
    scene.workers(stage0={"hello": {"address": ""}}, stage1={"hello": {"address": ""}})
    assert scene.run() == 2
    assert "link 0 between stage 0 (host0) and stage 1 (host1) cannot be made" in scene.end.message
    assert all(scene.server.told(worker.identity, say.Abort) for worker in scene.stages)


def test_stages_that_do_not_connect_in_time_are_named(scene):
    scene.workers(stage1={"ignores": (say.Plan,)}, stage2={"ignores": (say.Plan,)})
    assert scene.run(join_timeout_s=20.0) == 3
    assert "stages 1, 2 did not connect" in scene.end.message


def test_worker_that_makes_the_run_inexact_is_warned_about_but_allowed(scene):
    changes = {"arithmetic_changes": ["device: A -> B", "threads: 1 -> 2"], "torch_version": "2.6.0"}
    scene.workers(stage1={"hello": changes})
    assert scene.run() == 0
    assert scene.observer.of("warned")[:2] == [
        "stage 1 has torch 2.6.0, stage 0 (host0, pid 100) has 2.13.0: a run is bit-exact only with the same "
        "version everywhere",
        f"{STAGE_1}: the continuation is no longer exact: device: A -> B; threads: 1 -> 2",
    ]


def test_gpu_that_emulates_bf16_is_warned_about(scene):
    scene.workers(stage1={"hello": {"products": "bf16", "emulates_bf16": True}})
    assert scene.run() == 0
    told = f"{STAGE_1}: its GPU has no bf16 and emulates it; training.precision: fp16 is faster there"
    assert scene.observer.of("warned") == [told]


def test_all_stages_get_the_loss_scale_that_one_in_fp16_needs(scene):
    overflow = [make_prepare(1, 1, norm2=[math.inf])]
    workers = scene.workers(stage1={"hello": {"products": "fp16"}, "say": {1: overflow}})
    assert scene.run() == 0
    for worker in workers:
        (start,), commits = (scene.server.told(worker.identity, kind) for kind in (say.Start, say.Commit))
        assert [start.loss_scale, *(commit.loss_scale for commit in commits[:2])] == [2.0**16, 2.0**16, 2.0**15]
        assert [commit.apply for commit in commits[:3]] == [True, False, True]


def test_what_the_first_stage_says_of_the_data_is_told_once(scene):
    notes = {"data_notes": ["3 of 9 responses are cut at seq_len 32"]}
    scene.workers(stage0={"hello": notes}, stage2={"hello": notes})
    assert scene.run() == 0
    assert scene.observer.of("warned") == notes["data_notes"]


def test_strangers_and_members_that_break_the_protocol_while_joining_are_refused_alone(scene):
    ghost = [make_prepare(0, 1), say.Heartbeat(1, 3, "F0"), say.Failed(1, "x", 4)]
    scene.server.inbox += [(b"ghost", message) for message in ghost]
    _, bad, _ = scene.workers(stage1={"ignores": (say.Assign,)})
    bad.send(make_prepare(0, 1))
    scene.when(lambda: bad.left, lambda: scene.restart(1, ignores=()))
    assert scene.run() == 0
    assert len(scene.server.told(b"ghost", say.Refuse)) == 1
    assert "while the run was joining" in scene.server.told(bad.identity, say.Refuse)[0].reason


def test_stage_of_a_key_is_given_to_no_other(scene):
    scene.build(host_keys=("", "aa", ""))
    scene.server.keys = {b"worker-0": "cc", b"worker-1": "bb", b"worker-2": "dd", b"worker-1-again": "aa"}
    first, impostor, _ = scene.workers()
    scene.when(lambda: impostor.left, lambda: scene.restart(1))
    assert scene.run() == 0
    (refusal,) = scene.server.told(impostor.identity, say.Refuse)
    assert "stage 1 is for the worker with another key" in refusal.reason
    assert refusal.differences == [["public key", "bb", "aa (hosts.1.public_key)"]]
    (plan,) = scene.server.told(first.identity, say.Plan)
    assert plan.links == [[0, 1, "host1", "", "zmq", "aa"]]


# -- training goes wrong ---------------------------------------------------------------------------


def test_killed_worker_that_is_not_started_again_is_waited_for_and_then_given_up(scene):
    workers = scene.workers(stage2={"silent_from_step": 2})
    scene.when(lambda: workers[2].silent, lambda: scene.coordinator.worker_exited(2, -9))
    assert scene.run(checkpoint_every=1, give_up_s=30.0) == 3
    assert "stage 2 (host2, pid 102): its worker exited with status -9 (SIGKILL) at step 3" in scene.warnings()
    assert "stage 2 did not come back within 30 s (run.give_up)" in scene.end.message
    assert "resumed with `tahq-launch c.yaml --resume` (checkpoint after step 2)" in scene.end.message
    assert 30.0 < scene.clock.now_s - 1000.0 < 33.0
    assert scene.server.told(b"worker-0", say.Abort)[0].exit_status == 3


@pytest.mark.parametrize(("status", "expected"), [(2, 2), (4, 4), (5, 5), (1, 3), (0, 3)])
def test_exit_status_of_a_worker_becomes_that_of_the_run(scene, status, expected):
    scene.workers(stage1={"silent_from_step": 0})
    assert scene.run(lambda: scene.coordinator.worker_exited(1, status)) == expected


@pytest.mark.parametrize("status", [4, 7, 2**63])
def test_last_words_of_a_worker_count_more_than_its_exit(scene, status):
    _, worker, _ = scene.workers(stage1={"say": {1: []}})

    def fail():
        scene.coordinator.worker_exited(1, 4)
        worker.send(say.Failed(1, "out of memory" + " at last" * 1_000_000, status))

    scene.when(lambda: worker.step == 1, fail)
    assert scene.run() == (4 if status == 4 else 1)
    assert scene.end.message.startswith(f"{STAGE_1}: out of memory at last")
    assert scene.end.message.endswith("so start the run anew")
    assert len(scene.end.message) < 5000
    assert scene.server.told(b"worker-1", say.Abort) == []


def test_silent_worker_is_warned_about_after_the_timeout_and_given_up_later(scene):
    silent = "nothing is heard of the peer"
    said = [say.LinkState(0, 0, 1, silent), say.LinkState(0, 2, 1, silent), say.LinkState(0, 2, 1, "", 3.0, 0)]
    scene.workers(stage0={"say": {1: [*said, make_prepare(1, 0)]}}, stage1={"silent_from_step": 1})
    assert scene.run(peer_timeout_s=10.0, give_up_s=40.0) == 3
    assert f"{STAGE_1} has given no sign of life for 10.0 s at step 2" in scene.warnings()
    assert "has given no sign of life for 20.0 s at step 2; its next worker begins again" in scene.warnings()
    assert "stage 1 did not come back within 40 s" in scene.end.message
    assert "start the run anew" in scene.end.message
    assert "(run.give_up); stage 0 (host0, pid 100): link 0 to stage 1 is silent; " in scene.end.message
    assert 40.0 <= scene.clock.now_s - 1000.0 < 42.0


def test_worker_that_was_silent_for_a_while_goes_on(scene):
    workers = scene.workers(stage1={"silent_from_step": 1})
    scene.when(lambda: scene.clock.now_s > 1015.0, workers[1].resume)
    assert scene.run(peer_timeout_s=10.0) == 0
    assert "is responding again" in scene.warnings()
    assert scene.losses() == [2.0] * 4


def test_coordinator_that_was_held_up_does_not_blame_its_workers(scene):
    workers = scene.workers()

    def publish(parts):
        scene.clock.now_s += 60.0
        for worker in workers:
            worker.beat()

    scene.publish = publish
    assert scene.run(checkpoint_every=2) == 0


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (say.Failed(1, "lost stage 2", 3), f"{STAGE_1}: lost stage 2"),
        (make_prepare(5, 1), f"{STAGE_1} prepared step 5 while step 1 is due"),
        (make_prepare(1, 0), f"{STAGE_1} sent a message for stage 0, which it does not hold"),
        (say.Bye(0), f"{STAGE_1} sent Bye, which only a coordinator sends"),
        (say.PathsMeasured(1, 1, [0.1], [1.0], [1.0]), f"{STAGE_1} sent PathsMeasured while the run was training"),
        (make_hello(1), f"{STAGE_1} sent Hello while it was ready"),
        *(
            (say.StopRequest(1, number), f"{STAGE_1} reported signal {number}; expected SIGINT or SIGTERM")
            for number in (-1, 7, 2**64 - 1)
        ),
    ],
)
def test_worker_that_fails_or_breaks_the_protocol_ends_the_run_and_is_named(scene, said, message):
    scene.workers(stage1={"say": {1: [said]}})
    assert scene.run() == 3
    assert scene.end.message.startswith(message)
    assert scene.end.steps_done == 1


def test_different_batches_end_the_run_naming_both_readers(scene):
    scene.workers(stage2={"prepare": {"batch_digest": "other"}})
    assert scene.run() == 2
    assert "stage 0 (host0, pid 100) and stage 2 (host2, pid 102) read different batches" in scene.end.message


@pytest.mark.parametrize(("options", "num_skipped"), [({"non_finite": "halt"}, 0), ({"max_skipped_in_a_row": 3}, 3)])
def test_non_finite_values_skip_the_step_up_to_the_limit_and_then_end_with_status_5(scene, options, num_skipped):
    bad = {"prepare": {"finite": False}}
    scene.workers(stage1=bad, stage2={"prepare": {"norm2": [float("nan")]}})
    assert scene.run(steps=10, **options) == 5
    assert f"{STAGE_1}, stage 2 (host2, pid 102) (" in scene.end.message
    assert [commit.apply for commit in scene.server.told(b"worker-0", say.Commit)] == [False] * num_skipped
    assert [record.skipped for record in scene.observer.of("step_committed")] == [True] * num_skipped


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (say.LinkState(1, 1, 2, "nothing is heard"), f"{STAGE_1}: link 1 to stage 2 is degraded: nothing is heard"),
        (
            say.LinkState(1, 1, 2, "", 31.25, 47),
            f"{STAGE_1}: link 1 to stage 2 works again after 31.2 s; 47 messages were sent again so far",
        ),
        (
            say.NotKept(1, 0, "runs/x/frames: No space left on device"),
            f"{STAGE_1}: frames that it sends on link 0 are not kept until the next checkpoint is complete: "
            "runs/x/frames: No space left on device; training goes on, and if a worker dies before that, all stages go "
            "back to the last checkpoint",
        ),
    ],
)
def test_worker_with_a_problem_is_named_and_the_run_goes_on(scene, said, told):
    scene.workers(stage1={"say": {1: [said, make_prepare(1, 1)]}})
    assert scene.run() == 0
    assert scene.observer.of("warned") == [told]
    links = [(1, 1, said.reason)] if isinstance(said, say.LinkState) else []
    assert scene.observer.of("link_changed") == links


# -- signals ---------------------------------------------------------------------------------------


@pytest.fixture
def waiting(scene):
    """Have stage 1 of a run of 100 steps stop at the third, when the coordinator gets a signal; returns its worker."""

    def signalled(number, **options):
        _, worker, _ = scene.workers(stage1={"say": {2: []}})
        scene.build(steps=100, **options)
        scene.when(lambda: worker.step == 2, lambda: scene.coordinator.request_stop(number))
        return worker

    return signalled


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_finishes_the_step_writes_a_checkpoint_and_says_bye(scene, waiting, number):
    worker = waiting(number)
    scene.when(lambda: scene.clock.now_s > 1002, worker.resume)
    assert scene.run() == 128 + number
    assert (scene.end.steps_done, scene.end.last_snapshot) == (3, 3)
    last = scene.server.told(b"worker-0", say.Commit)[-1]
    assert (last.step, last.apply, last.snapshot, last.stop) == (2, True, True, True)
    assert scene.server.told(b"worker-2", say.Bye) == [say.Bye(128 + number)]
    assert signal.Signals(number).name in scene.end.message


def test_second_signal_aborts_at_once(scene, waiting):
    worker = waiting(signal.SIGINT, checkpoint_every=1)
    scene.when(lambda: worker.step == 2, lambda: scene.coordinator.request_stop(signal.SIGINT))
    assert scene.run() == 130
    assert "second SIGINT" in scene.end.message
    assert scene.server.told(b"worker-0", say.Abort)[0].exit_status == 130
    assert scene.end.steps_done == 2


@pytest.mark.parametrize(("number", "ended_by_it"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_step_that_takes_longer_than_the_grace_after_sigterm_is_given_up(scene, waiting, number, ended_by_it):
    worker = waiting(number, checkpoint_every=1, grace_s=3.0)
    scene.when(lambda: scene.clock.now_s > 1006.0, worker.resume)
    assert scene.run() == 128 + number
    assert (scene.end.steps_done, scene.end.last_snapshot) == ((2, 2) if ended_by_it else (3, 3))
    if ended_by_it:
        assert scene.clock.now_s == pytest.approx(1003.0, abs=1.5)  # and a second to leave in
        assert "longer than run.grace (3 s), so they are given up after step 2; the run can be" in scene.end.message
        assert scene.server.told(b"worker-0", say.Abort)[0].exit_status == 143


def test_signal_before_the_first_step_is_noticed_within_two_tenths_of_a_second(scene):
    scene.build(leave_timeout_s=0.0)
    scene.coordinator.request_stop(signal.SIGTERM)
    assert scene.run() == 143
    assert scene.clock.now_s - 1000.0 <= 0.2
    assert "before the first step" in scene.end.message


def test_stop_request_of_every_worker_is_one_request(scene):
    workers = scene.workers(**{f"stage{stage}": {"say": {1: [say.StopRequest(stage, 2)]}} for stage in range(3)})
    scene.when(lambda: all(worker.step == 1 for worker in workers), lambda: [worker.resume() for worker in workers])
    assert scene.run(steps=50) == 130
    assert scene.end.steps_done == 2


def test_signal_after_the_last_commit_leaves_the_run_complete(scene):
    scene.workers(stage2={"ignores": (say.Bye,)})
    scene.build()
    scene.after(4, lambda: scene.coordinator.request_stop(signal.SIGINT))
    assert scene.run() == 0


@pytest.mark.parametrize(("is_interrupted", "num_turns"), [(False, 50), (True, 5)])
def test_workers_stay_until_their_files_are_collected_and_the_loss_of_one_ends_nothing(
    scene, is_interrupted, num_turns
):
    turns = []

    def collect(is_wanted):
        while is_wanted() and len(turns) < 50:
            turns.append(scene.server.told(b"worker-0", say.Bye))
            if len(turns) == 5 and is_interrupted:
                scene.coordinator.request_stop(signal.SIGINT)
            if len(turns) == 5:
                scene.kill(1)
            yield "files"

    scene.workers()
    scene.build(give_up_s=2.0, peer_timeout_s=1.0).collect = collect
    assert scene.run() == 0
    assert turns == [[]] * num_turns
    assert scene.server.told(b"worker-0", say.Bye) == [say.Bye(0)]


# -- the loop itself -------------------------------------------------------------------------------


def test_tick_is_called_about_ten_times_a_second(scene):
    ticks = []
    scene.run(lambda: ticks.append(1), join_timeout_s=10.0, leave_timeout_s=0.0)
    assert 90 <= len(ticks) <= 110


@pytest.mark.parametrize(("error", "status"), [(ConfigError("no more"), 2), (ZeroDivisionError("bug"), 1)])
def test_error_of_the_tick_is_raised_after_the_workers_are_told(scene, error, status):
    scene.workers(stage0={"silent_from_step": 0})

    def tick():
        raise error

    with pytest.raises(type(error), match=str(error)):
        # a user's mistake is raised again while the workers leave: the launcher must see its own error
        scene.run(tick)
    assert scene.server.told(b"worker-1", say.Abort)[0].exit_status == status
    assert scene.end.exit_status == status


def test_coordinator_leaves_as_soon_as_all_processes_have_ended(scene):
    workers = scene.workers()
    scene.when(
        lambda: all(worker.left for worker in workers),
        lambda: [scene.coordinator.worker_exited(stage, 0) for stage in range(3)],
    )
    assert scene.run(leave_timeout_s=60.0) == 0
    assert scene.clock.now_s - 1000.0 < 1.0


# -- codecs ----------------------------------------------------------------------------------------

GRADIENTS = ("eden:bits=2,group=256", "eden:bits=3,group=256")


def follow_options(**changes):
    ladders = {"activations": Ladder(("raw:dtype=fp32",), (8000,)), "gradients": Ladder(GRADIENTS, (1000, 2000))}
    start = {"activations": "raw:dtype=fp32", "gradients": GRADIENTS[1]}
    return CodecOptions(start, FollowRules(ladders), **changes)


def test_codecs_that_change_are_told_to_all_with_the_commit_and_kept_in_the_checkpoint(scene, new_scene):
    """The scripted stages compute for a second and send for half of one, but one of them is slow."""
    rows = [[1, 0, 4, 1000, 1100, 2000, 0.5, 0.5, 0.1, 0], [0, 1, 4, 2000, 2100, 2000, 3, 3, 3, 0]]
    scene.workers(stage1={"prepare": {"links": [[float(number) for number in row] for row in rows]}})
    assert scene.run(codecs=follow_options()) == 0
    for worker in scene.server.workers:
        told = [commit.codecs for commit in scene.server.told(worker, say.Commit)]
        assert told == [[], [[0, 1, 2]], [], []]  # raw, one for activations, then those for gradients
        assert [start.codecs for start in scene.server.told(worker, say.Start)] == [[]]
    records = scene.observer.of("step_committed")
    assert [record.links[1].codec for record in records] == ["raw:dtype=fp32"] * 4
    assert [record.links[2].codec for record in records] == [GRADIENTS[1]] * 2 + [GRADIENTS[0]] * 2
    assert [len(record.codec_changes) for record in records] == [0, 1, 0, 0]
    (parts,) = scene.published
    saved = dict(parts.point.saved_codecs)
    assert [row["rung"] for row in saved["links"] if row["direction"] == "gradients"] == [*GRADIENTS]

    again = new_scene()
    again.workers()
    assert again.run(codecs=follow_options(saved=saved), start_step=2) == 0
    assert [start.codecs for start in again.server.told(b"worker-0", say.Start)] == [[[0, 1, 2]]]


def test_checkpoint_with_malformed_codecs_ends_the_run_before_its_first_step(scene):
    scene.workers()
    assert scene.run(codecs=follow_options(saved={"links": 3})) == SnapshotError.exit_status
    assert "cannot be read" in scene.end.message
