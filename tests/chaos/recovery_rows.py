"""Processes that are killed, most of them at named points (tahq/fault_points.py); stage and step are drawn."""

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from support.processes import children, workers

from chaos.program import Program, warm
from chaos.row import Attempt, Figures, Row
from chaos.scene import Scene
from chaos.starting import by_hand, faults, launched, shaped_network, small_run, start_coordinator
from chaos.worker_rows import STAGES, usual_worker
from tahq import fault_points

PEER_TIMEOUT_S = 10.0
NUM_STEPS = 10
FREED_BY_TIMEOUT_S = 1.0
"""Beyond the timeout, until a death must have been noticed."""
COORDINATOR_BACK_S = 5.0
"""Beyond the timeout, until training must go on after the coordinator has come back."""
GIVE_UP_S = 15.0
_LOST_SOON = {"peer_timeout": "5s", "give_up": "20s"}
"""A worker that is silent for 10 s is lost; in the short form 5 s, as that is most of the row's time."""
_OF_SNAPSHOTS = (fault_points.SNAPSHOT, fault_points.PUBLISHING, fault_points.PUBLISHED)


def _plan(attempt: Attempt, *faults: str) -> dict[str, str]:
    folder = attempt.folder / "faults"
    folder.mkdir()
    return {fault_points.FAULTS: ",".join(faults), fault_points.FOLDER: str(folder)}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _happened_s(attempt: Attempt) -> list[float]:
    """When each fault happened, as `time.time`."""
    return sorted(float(path.read_text().split()[0]) for path in (attempt.folder / "faults").iterdir())


def _where(attempt: Attempt, point: str, stage: int) -> str:
    if point == fault_points.HANDSHAKE:
        return f"kill@{point}:stage={stage}"
    return f"kill@{point}:stage={stage}:step={_step_of(attempt, point)}"


def _step_of(attempt: Attempt, point: str) -> int:
    """A snapshot is called by the steps behind it."""
    return attempt.dice.choice((4, 8)) if point in _OF_SNAPSHOTS else attempt.dice.randint(1, NUM_STEPS - 3)


def _killed(attempt: Attempt, *plan: str) -> Figures:
    """A launcher's workers are killed at named points, and only they are started again."""
    config = small_run(NUM_STEPS)
    with launched(attempt.folder, config, extra=_plan(attempt, *plan)) as scene:
        outcome = scene.finish(240)
        times = _happened_s(attempt)
        assert len(times) == len(plan), f"{len(times)} of {plan} happened"
        measured = attempt.compare(scene, outcome, config, times[0], times[-1])
    assert measured["restarts"] == len(plan), f"{measured['restarts']} workers were started again"
    detected_s = measured["detected_s"]
    assert isinstance(detected_s, float), f"nobody spoke of it:\n{outcome.text}"
    assert detected_s <= PEER_TIMEOUT_S + FREED_BY_TIMEOUT_S
    return measured


def killed_at(point: str) -> Callable[[Attempt], Figures]:
    def attempt(attempt: Attempt) -> Figures:
        return _killed(attempt, _where(attempt, point, attempt.dice.randrange(STAGES)))

    return attempt


def killed_over_gloo(attempt: Attempt) -> Figures:
    """A worker is killed that process groups join to its neighbours, who have kept nothing of what they sent."""
    config, stage, point = (
        small_run(NUM_STEPS, links={"inside": "gloo"}),
        attempt.dice.randrange(STAGES),
        _drawn(attempt),
    )
    with launched(attempt.folder, config, extra=_plan(attempt, _where(attempt, point, stage))) as scene:
        outcome = scene.finish(240)
        (killed_s,) = _happened_s(attempt)
        measured = attempt.compare(scene, outcome, config, killed_s, killed_s)
    assert measured["restarts"] == 1, f"{measured['restarts']} workers were started again"
    return {"point": point, **measured}


def _drawn(attempt: Attempt) -> str:
    return attempt.dice.choice([point for point in _POINTS if point != fault_points.HANDSHAKE])


def two_neighbours(attempt: Attempt) -> Figures:
    first, step = attempt.dice.randrange(STAGES - 1), attempt.dice.randint(1, NUM_STEPS - 3)
    point = attempt.dice.choice((fault_points.FORWARD, fault_points.PREPARED))
    return _killed(attempt, *(f"kill@{point}:stage={stage}:step={step}" for stage in (first, first + 1)))


def all_workers(attempt: Attempt) -> Figures:
    step = attempt.dice.randint(1, NUM_STEPS - 3)
    return _killed(attempt, *(f"kill@backward:stage={stage}:step={step}" for stage in range(STAGES)))


def killed_by_hand(attempt: Attempt) -> Figures:
    """Nobody sees the worker die: its silence tells, and a person who knows that it is dead starts another.

    Its parent would start another at once, and is told not to.
    """
    config, stage, point = small_run(NUM_STEPS), attempt.dice.randrange(STAGES), attempt.dice.choice(tuple(_POINTS))
    plan = _plan(attempt, _where(attempt, point, stage))

    def start(each: int, peer: str, *arguments: str) -> Program:
        return usual_worker(attempt.folder, each, peer, "--restarts", "0", *arguments, extra=plan)

    with ExitStack() as stack, by_hand(attempt.folder, config, start_worker=start) as scene:
        victim = scene.workers[stage]
        victim.process.wait(60)
        assert victim.status == 128 + signal.SIGKILL, victim.text
        scene.leader.line_with("no sign of life", PEER_TIMEOUT_S + 10)
        scene.former.append(victim)
        scene.workers[stage] = stack.enter_context(start(stage, scene.peer, "--takeover"))
        back_s = time.time()
        outcome = scene.finish(240)
        (killed_s,) = _happened_s(attempt)
        measured = attempt.compare(scene, outcome, config, killed_s, back_s)
    detected_s = measured["detected_s"]
    assert isinstance(detected_s, float)
    assert detected_s <= PEER_TIMEOUT_S + FREED_BY_TIMEOUT_S, f"noticed after {detected_s:.1f} s"
    return {"point": point, **measured}


def killed_under_its_parent(attempt: Attempt) -> Figures:
    """A worker that was started by hand is killed, and its parent starts it again: nobody has to do anything."""
    config, stage, point = small_run(NUM_STEPS), attempt.dice.randrange(STAGES), attempt.dice.choice(tuple(_POINTS))
    plan = _plan(attempt, _where(attempt, point, stage))

    def start(each: int, peer: str) -> Program:
        return usual_worker(attempt.folder, each, peer, extra=plan)

    with by_hand(attempt.folder, config, start_worker=start) as scene:
        outcome = scene.finish(240)
        (killed_s,) = _happened_s(attempt)
        measured = attempt.compare(scene, outcome, config, killed_s, killed_s)
        assert all(worker.status in (None, 0) for worker in scene.workers)
    return {"point": point, **measured}


def rebooted(attempt: Attempt) -> Figures:
    """Launcher and workers are killed, all at once; what is on the disk stays, and a person starts the run again."""
    config, step = small_run(12), attempt.dice.randint(5, 8)
    with launched(attempt.folder, config) as scene:
        scene.wait_for_step(step)
        for pid in (scene.leader.pid, *workers(scene.leader.pid)):
            os.kill(pid, signal.SIGKILL)
    num_done = scene.num_steps
    began_s = time.time()
    with launched(attempt.folder, config, "--resume") as scene:
        outcome = scene.finish(120)
        measured = attempt.compare(scene, outcome, config, began_s, began_s)
    counts = [done for _, done in scene.progress]
    kept = min(counts)
    first_s, _ = scene.progress[counts.index(kept) + 1]
    return {"steps_lost": measured["steps_lost"], "recovery_s": first_s - began_s, "steps_repeated": num_done - kept}


def host_lost(attempt: Attempt) -> Figures:
    """Every worker has a folder of its own; one is killed and its folder removed, and a spare has its stage."""

    def lose(scene: Scene, worker: Program, folder: Path) -> None:
        scene.former.append(worker)
        worker.close()
        shutil.rmtree(folder)

    return _replaced(attempt, lose)


def stage_taken(attempt: Attempt) -> Figures:
    """A worker is stopped, as a machine that sleeps, until a spare has its stage; then it goes on, and stands by."""

    def lose(scene: Scene, worker: Program, folder: Path) -> None:
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

    return _replaced(attempt, lose)


def _replaced(attempt: Attempt, lose: Callable[[Scene, Program, Path], None]) -> Figures:
    """A run of workers that share no disk, of which one is lost when all snapshots have been copied once."""
    stage, step = attempt.dice.randrange(STAGES), attempt.dice.randint(5, 7)
    soon = _LOST_SOON if attempt.scale == 1 else {"peer_timeout": "3s", "give_up": "10s"}
    config = small_run(40, run={**soon, "copies_within_host": True, "copy_rate": "100mbit"})
    folders = {each: attempt.folder / f"host{each}" for each in (*range(STAGES), STAGES)}
    for folder in folders.values():
        folder.mkdir()

    def start(each: int, peer: str) -> Program:
        return usual_worker(folders[each], each, peer)

    with ExitStack() as stack, by_hand(attempt.folder, config, start_worker=start) as scene:
        spare = warm("spare", folders[STAGES], "tahq-worker", "--spare", "--peer", scene.peer)
        stack.enter_context(spare)
        scene.wait_for_step(step)
        copies = "host*/runs/run/copies/stage-*/step-*/*.safetensors"
        scene.wait(lambda: len(list(attempt.folder.glob(copies))) >= STAGES, 30, "copies on other hosts")
        began_s = time.time()
        lost, scene.workers[stage] = scene.workers[stage], spare
        lose(scene, lost, folders[stage])
        _gather_snapshots(scene, folders.values())
        outcome = scene.finish(240)
        figures = attempt.compare(scene, outcome, config, began_s, began_s)
    assert f"fetching stage-{stage:03d}-" in outcome.text, "the spare has not begun at a copy"
    return figures


def _gather_snapshots(scene: Scene, folders: Iterable[Path]) -> None:
    """At the end of a run, bring to one place what every host has of its last snapshot."""
    programs = (scene.leader, *scene.workers)
    scene.wait(lambda: all(each.status is not None for each in programs), 240, "the end of the run")
    last = (scene.run / "snapshots" / "latest").read_text().strip()
    for folder in folders:
        for path in folder.glob(f"runs/run/snapshots/{last}/*.safetensors"):
            shutil.copy(path, scene.run / "snapshots" / last)


def coordinator_killed_at(point: str) -> Callable[[Attempt], Figures]:
    """The coordinator is killed while it commits, and started again with the same command and --resume."""

    def attempt(attempt: Attempt) -> Figures:
        config, port = small_run(NUM_STEPS), _free_port()
        plan = _plan(attempt, f"kill@{point}:step={_step_of(attempt, point)}")
        with ExitStack() as stack, by_hand(attempt.folder, config, port=port, extra=plan) as scene:
            pids = [worker.pid for worker in scene.workers]
            scene.leader.process.wait(120)
            assert scene.leader.status == -signal.SIGKILL, scene.leader.text
            time.sleep(attempt.dice.uniform(0.5, 3.0))
            scene.former.append(scene.leader)
            back_s = time.time()
            scene.leader = stack.enter_context(
                start_coordinator(attempt.folder, None, "--resume", port=port, extra=plan)
            )
            outcome = scene.finish(180)
            (killed_s,) = _happened_s(attempt)
            measured = attempt.compare(scene, outcome, config, killed_s, back_s)
            assert [worker.pid for worker in scene.workers] == pids
        recovery_s = measured["recovery_s"]
        assert isinstance(recovery_s, float)
        assert recovery_s <= PEER_TIMEOUT_S + COORDINATOR_BACK_S, (
            f"training went on {recovery_s:.1f} s after its return"
        )
        return measured

    return attempt


def cut_for_ever(attempt: Attempt) -> Figures:
    """A worker's host never comes back: the run ends with status 3, and goes on elsewhere from its snapshot."""
    host, step = attempt.dice.randrange(STAGES), attempt.dice.randint(5, 7)
    config = small_run(12, run={"give_up": f"{GIVE_UP_S:.0f}s"})
    with shaped_network(STAGES, rate=20e6) as network, by_hand(attempt.folder, config, network) as scene:
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
        outcome = scene.finish(120)
        measured = attempt.compare(scene, outcome, config, began_s, time.time())
    return {"gave_up_after_s": took_s, "steps_lost": measured["steps_lost"]}


_ALONE = "BX; no step lost; only that stage restarted; detected within timeout + 1 s"
_WAITS = "BX; no worker restarts; training goes on within timeout + 5 s of its return"
_POINTS = {
    fault_points.HANDSHAKE: "in the handshake",
    fault_points.FORWARD: "in forward",
    fault_points.BACKWARD: "in backward",
    fault_points.BEFORE_PREPARE: "before PREPARE",
    fault_points.PREPARED: "when it is prepared",
    fault_points.COMMITTING: "while it commits",
    fault_points.SNAPSHOT: "while it writes a snapshot",
}
_COORDINATOR_POINTS = {
    fault_points.COMMIT_DECIDED: "with a commit decided",
    fault_points.COMMIT_JOURNALLED: "with a commit decided and written down",
    fault_points.COMMIT_SENT: "with a commit decided and told to the first worker",
    fault_points.PUBLISHING: "with all parts of a snapshot, which is not complete yet",
    fault_points.PUBLISHED: "with a snapshot complete, of which nobody knows",
}

_QUICK = fault_points.PREPARED

RECOVERY_ROWS = (
    *(
        Row(
            f"kill-{point}",
            f"a worker killed (SIGKILL) {where}",
            _ALONE,
            killed_at(point),
            5,
            point == fault_points.PREPARED,
        )
        for point, where in _POINTS.items()
    ),
    Row(
        "kill-supervised",
        "a worker killed that was started by hand: its parent starts it again",
        "BX; no step lost; nobody has to do anything",
        killed_under_its_parent,
        10,
    ),
    Row(
        "kill-by-hand",
        "a worker killed that was started by hand, and is started again with --takeover",
        _ALONE,
        killed_by_hand,
        20,
    ),
    Row(
        "kill-over-gloo",
        "a worker killed whose links are process groups",
        "BX; no step lost; only that process restarted; all stages go back to the snapshot",
        killed_over_gloo,
        10,
    ),
    Row("kill-two-neighbours", "two neighbouring workers killed at once", "BX", two_neighbours, 6),
    Row("kill-all-workers", "all workers killed at once", "BX", all_workers, 7, is_quick=True),
    Row(
        "rebooted",
        "launcher and workers killed at once, disks kept; started again with --resume",
        "BX",
        rebooted,
        8,
        is_quick=True,
    ),
    Row(
        "host-lost",
        "a host lost with its disk; a spare joins",
        "BX; goes on from the off-host copy",
        host_lost,
        30,
        is_quick=True,
    ),
    Row(
        "stage-taken",
        "a worker stopped until a spare has its stage, then going on",
        "BX; it is told, and stands by itself",
        stage_taken,
        30,
    ),
    *(
        Row(
            f"coordinator-{point}",
            f"the coordinator killed {how}",
            _WAITS,
            coordinator_killed_at(point),
            10,
            point == fault_points.COMMIT_SENT,
        )
        for point, how in _COORDINATOR_POINTS.items()
    ),
    Row(
        "cut-for-ever",
        "a host's link cut for ever",
        "status 3 within the give-up time; the message names the link; resumed elsewhere: BX",
        cut_for_ever,
        30,
        needs=("namespaces",),
    ),
)
