"""Processes are killed, mostly at named points (tahq/fault_points.py); stage and step are drawn at random."""

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from support.processes import children, workers

from chaos.program import Program, warm
from chaos.row import Attempt, Figures, Row
from chaos.scene import Scene
from chaos.starting import (
    STAGES,
    by_hand,
    faults,
    launched,
    shaped_network,
    small_run,
    start_coordinator,
    usual_worker,
)
from tahq import fault_points

PEER_TIMEOUT_S = 10.0
NUM_STEPS = 10
FREED_BY_TIMEOUT_S = 1.0
"""Beyond the timeout, until a death must have been noticed."""
COORDINATOR_BACK_S = 5.0
"""Beyond the timeout, until training must go on after the coordinator has come back."""
GIVE_UP_S = 15.0
_POINTS = {
    fault_points.HANDSHAKE: "in the handshake",
    fault_points.FORWARD: "in forward",
    fault_points.BACKWARD: "in backward",
    fault_points.BEFORE_PREPARE: "before PREPARE",
    fault_points.PREPARED: "when it is prepared",
    fault_points.COMMITTING: "while it commits",
    fault_points.SNAPSHOT: "while it writes a checkpoint",
}
_COORDINATOR_POINTS = {
    fault_points.COMMIT_DECIDED: "with a commit decided",
    fault_points.COMMIT_JOURNALLED: "with a commit decided and journalled",
    fault_points.COMMIT_SENT: "with a commit decided and sent to the first worker",
    fault_points.PUBLISHING: "with all parts of a checkpoint, before its manifest",
    fault_points.PUBLISHED: "with a complete checkpoint, before any worker is told",
}


def _plan(attempt: Attempt, *faults: str) -> dict[str, str]:
    """Environment of processes in which these faults happen."""
    folder = attempt.folder / "faults"
    folder.mkdir()
    return {fault_points.FAULTS: ",".join(faults), fault_points.FOLDER: str(folder)}


def _happened_s(attempt: Attempt) -> list[float]:
    """When each fault happened, as `time.time`."""
    return sorted(float(path.read_text().split()[0]) for path in (attempt.folder / "faults").iterdir())


def _where(attempt: Attempt, point: str, stage: int) -> str:
    if point == fault_points.HANDSHAKE:
        return f"kill@{point}:stage={stage}"
    return f"kill@{point}:stage={stage}:step={_step_of(attempt, point)}"


def _step_of(attempt: Attempt, point: str) -> int:
    """A checkpoint has the number of the steps before it."""
    of_checkpoints = (fault_points.SNAPSHOT, fault_points.PUBLISHING, fault_points.PUBLISHED)
    return attempt.dice.choice((4, 8)) if point in of_checkpoints else attempt.dice.randint(1, NUM_STEPS - 3)


def _killed(attempt: Attempt, *plan: str, inside: str = "zmq") -> Figures:
    """A launcher's workers are killed at named points, and only they are started again."""
    config = small_run(NUM_STEPS, **({} if inside == "zmq" else {"links": {"inside": inside}}))
    with launched(attempt.folder, config, extra=_plan(attempt, *plan)) as scene:
        scene.wait_for_end(240)
        times = _happened_s(attempt)
        assert len(times) == len(plan), f"{len(times)} of {plan} happened"
        measured = attempt.finish(scene, config, times[0], times[-1])
    assert measured["restarts"] == len(plan), f"{measured['restarts']} workers were started again"
    if inside == "zmq":
        _check_detection(measured, scene)
    return measured


def _check_detection(measured: Figures, scene: Scene) -> None:
    assert measured["detected_s"] is not None, f"no line mentions it:\n{scene.text}"
    assert measured["detected_s"] <= PEER_TIMEOUT_S + FREED_BY_TIMEOUT_S


def killed_at(attempt: Attempt, point: str) -> Figures:
    return _killed(attempt, _where(attempt, point, attempt.dice.randrange(STAGES)))


def killed_over_gloo(attempt: Attempt) -> Figures:
    """Process groups join the worker to its neighbours, which keep no logs of sent frames."""
    stage = attempt.dice.randrange(STAGES)
    point = attempt.dice.choice([point for point in _POINTS if point != fault_points.HANDSHAKE])
    return {"point": point, **_killed(attempt, _where(attempt, point, stage), inside="gloo")}


def two_neighbours(attempt: Attempt) -> Figures:
    first, step = attempt.dice.randrange(STAGES - 1), attempt.dice.randint(1, NUM_STEPS - 3)
    point = attempt.dice.choice((fault_points.FORWARD, fault_points.PREPARED))
    return _killed(attempt, *(f"kill@{point}:stage={stage}:step={step}" for stage in (first, first + 1)))


def all_workers(attempt: Attempt) -> Figures:
    step = attempt.dice.randint(1, NUM_STEPS - 3)
    return _killed(attempt, *(f"kill@backward:stage={stage}:step={step}" for stage in range(STAGES)))


def killed_by_hand(attempt: Attempt, *, has_parent: bool) -> Figures:
    """A hand-started worker is killed.

    Its parent starts it again; or is told not to, and a person who knows that it is dead starts another when its
    silence has been noticed.
    """
    config, stage, point = small_run(NUM_STEPS), attempt.dice.randrange(STAGES), attempt.dice.choice(tuple(_POINTS))
    plan = _plan(attempt, _where(attempt, point, stage))
    alone = () if has_parent else ("--restarts", "0")

    def start(each: int, peer: str, *arguments: str) -> Program:
        return usual_worker(attempt.folder, each, peer, *alone, *arguments, extra=plan)

    with ExitStack() as stack, by_hand(attempt.folder, config, start_worker=start) as scene:
        back_s = None
        if not has_parent:
            victim = scene.workers[stage]
            victim.process.wait(60)
            assert victim.status == 128 + signal.SIGKILL, victim.text
            scene.leader.line_with("no sign of life", PEER_TIMEOUT_S + 10)
            scene.former.append(victim)
            scene.workers[stage] = stack.enter_context(start(stage, scene.peer, "--takeover"))
            back_s = time.time()
        scene.wait_for_end(240)
        (killed_s,) = _happened_s(attempt)
        measured = attempt.finish(scene, config, killed_s, back_s)
    if not has_parent:
        _check_detection(measured, scene)
    return {"point": point, **measured}


def rebooted(attempt: Attempt) -> Figures:
    """Launcher and workers are killed, all at once; the disk keeps its files, and a person starts the run again."""
    config, step = small_run(12), attempt.dice.randint(5, 8)
    with launched(attempt.folder, config) as scene:
        scene.wait_for_step(step)
        for pid in (scene.leader.pid, *workers(scene.leader.pid)):
            os.kill(pid, signal.SIGKILL)
    num_done, began_s = scene.num_steps, time.time()
    with launched(attempt.folder, config, "--resume") as scene:
        measured = attempt.finish(scene, config, began_s)
    counts = [done for _, done in scene.progress]
    kept = min(counts)
    first_s, _ = scene.progress[counts.index(kept) + 1]
    return {"steps_lost": measured["steps_lost"], "recovery_s": first_s - began_s, "steps_repeated": num_done - kept}


def _lose_with_disk(scene: Scene, worker: Program, folder: Path) -> None:
    scene.former.append(worker)
    worker.close()
    shutil.rmtree(folder)


def _stop_until_replaced(scene: Scene, worker: Program, folder: Path) -> None:
    """As a machine that sleeps: the worker goes on once a spare has its stage, and stands by."""
    pids = [worker.pid, *children(worker.pid)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        scene.leader.line_with("is given to the spare worker", 60)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    worker.line_with("standing by, as a spare", 30)
    scene.workers.append(worker)  # which leaves with status 0, as all do


def replaced(attempt: Attempt, lose: Callable[[Scene, Program, Path], None]) -> Figures:
    """A run of workers that share no disk, of which one is lost when all checkpoints have been copied once."""
    stage, step = attempt.dice.randrange(STAGES), attempt.dice.randint(5, 7)
    # the time until a silent worker is lost is most of the row's
    timeout, give_up = ("5s", "20s") if attempt.scale == 1 else ("3s", "10s")
    soon = {"peer_timeout": timeout, "give_up": give_up}
    config = small_run(40, run={**soon, "copies_within_host": True, "copy_rate": "100mbit"})
    folders = [attempt.folder / f"host{each}" for each in range(STAGES + 1)]
    for folder in folders:
        folder.mkdir()

    def start(each: int, peer: str) -> Program:
        return usual_worker(folders[each], each, peer)

    with ExitStack() as stack, by_hand(attempt.folder, config, start_worker=start) as scene:
        spare = stack.enter_context(warm("spare", folders[-1], "tahq-worker", "--spare", "--peer", scene.peer))
        scene.wait_for_step(step)
        copies = "host*/runs/run/copies/stage-*/step-*/*.safetensors"
        scene.wait(lambda: len(list(attempt.folder.glob(copies))) >= STAGES, 30, "copies on other hosts")
        began_s = time.time()
        lost, scene.workers[stage] = scene.workers[stage], spare
        lose(scene, lost, folders[stage])
        scene.wait_for_end(240)
        last = (scene.run / "snapshots" / "latest").read_text().strip()
        for path in attempt.folder.glob(f"host*/runs/run/snapshots/{last}/*.safetensors"):
            shutil.copy(path, scene.run / "snapshots" / last)
        figures = attempt.finish(scene, config, began_s)
    assert f"fetching stage-{stage:03d}-" in scene.text, "the spare has not begun at a copy"
    return figures


def coordinator_killed_at(attempt: Attempt, point: str) -> Figures:
    """The coordinator is killed while it commits, and started again with the same command and --resume."""
    config = small_run(NUM_STEPS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    plan = _plan(attempt, f"kill@{point}:step={_step_of(attempt, point)}")
    with ExitStack() as stack, by_hand(attempt.folder, config, port=port, extra=plan) as scene:
        pids = [worker.pid for worker in scene.workers]
        scene.leader.process.wait(120)
        assert scene.leader.status == -signal.SIGKILL, scene.leader.text
        time.sleep(attempt.dice.uniform(0.5, 3.0))
        scene.former.append(scene.leader)
        back_s = time.time()
        leader = start_coordinator(attempt.folder, None, "--resume", port=port, extra=plan)
        scene.leader = stack.enter_context(leader)
        (killed_s,) = _happened_s(attempt)
        measured = attempt.finish(scene, config, killed_s, back_s)
        assert [worker.pid for worker in scene.workers] == pids
    recovery_s = measured["recovery_s"]
    assert recovery_s <= PEER_TIMEOUT_S + COORDINATOR_BACK_S, f"training went on {recovery_s:.1f} s after its return"
    return measured


def cut_for_ever(attempt: Attempt) -> Figures:
    """A worker's host never comes back: the run ends with status 3, and goes on elsewhere from its checkpoint."""
    host, step = attempt.dice.randrange(STAGES), attempt.dice.randint(5, 7)
    config = small_run(12, run={"give_up": f"{GIVE_UP_S:.0f}s"})
    with shaped_network(rate=20e6) as network, by_hand(attempt.folder, config, network) as scene:
        scene.wait_for_step(step)
        with faults(scene, network, f"- {{at: 0s, link: host{host}, what: down}}"):
            began_s = time.time()
            scene.leader.process.wait(GIVE_UP_S + PEER_TIMEOUT_S + 30)
            took_s = time.time() - began_s
        assert scene.leader.status == 3, scene.leader.text
        assert took_s <= GIVE_UP_S + COORDINATOR_BACK_S, f"gave up after {took_s:.1f} s"
        last = [line.text for line in scene.leader.lines if line.text.startswith("tahq coordinator: ")]
        assert last, scene.leader.text
        assert "link" in last[-1], last
        for worker in scene.workers:
            worker.process.wait(GIVE_UP_S + PEER_TIMEOUT_S + 30)
    with launched(attempt.folder, config, "--resume") as scene:
        measured = attempt.finish(scene, config, began_s)
    return {"gave_up_after_s": took_s, "steps_lost": measured["steps_lost"]}


_ALONE = "BX; no step lost; only that stage restarted; detected within timeout + 1 s"
_WAITS = "BX; no worker restarts; training goes on within timeout + 5 s of its return"
_BACK = "BX; no step lost; only that process restarted; all stages go back to the checkpoint"
_NO_PERSON = "BX; no step lost; no manual action"
_BY_HAND = "a hand-started worker killed"
_ELSEWHERE = "status 3 within the give-up time; the message names the link; resumed elsewhere: BX"
_REBOOTED = "launcher and workers killed at once, disks kept; started again with --resume"

RECOVERY_ROWS = (
    *(
        Row(
            f"kill-{point}",
            f"a worker killed (SIGKILL) {where}",
            _ALONE,
            partial(killed_at, point=point),
            5,
            is_quick=point == fault_points.PREPARED,
        )
        for point, where in _POINTS.items()
    ),
    Row(
        "kill-supervised",
        f"{_BY_HAND}: its parent starts it again",
        _NO_PERSON,
        partial(killed_by_hand, has_parent=True),
        10,
    ),
    Row(
        "kill-by-hand",
        f"{_BY_HAND}, and is started again with --takeover",
        _ALONE,
        partial(killed_by_hand, has_parent=False),
        20,
    ),
    Row("kill-over-gloo", "a worker killed, with process groups as links", _BACK, killed_over_gloo, 10),
    Row("kill-two-neighbours", "two neighbouring workers killed at once", "BX", two_neighbours, 6),
    Row("kill-all-workers", "all workers killed at once", "BX", all_workers, 7, is_quick=True),
    Row("rebooted", _REBOOTED, "BX", rebooted, 8, is_quick=True),
    Row(
        "host-lost",
        "a host lost with its disk; a spare joins",
        "BX; goes on from the off-host copy",
        partial(replaced, lose=_lose_with_disk),
        30,
        is_quick=True,
    ),
    Row(
        "stage-taken",
        "a worker stopped until a spare has its stage, then going on",
        "BX; it is told, and stands by",
        partial(replaced, lose=_stop_until_replaced),
        30,
    ),
    *(
        Row(
            f"coordinator-{point}",
            f"the coordinator killed {how}",
            _WAITS,
            partial(coordinator_killed_at, point=point),
            10,
            is_quick=point == fault_points.COMMIT_SENT,
        )
        for point, how in _COORDINATOR_POINTS.items()
    ),
    Row("cut-for-ever", "a host's link cut for ever", _ELSEWHERE, cut_for_ever, 30, needs=("namespaces",)),
)
