"""Real launchers and real workers: however a run ends, no process is left and the user learns the reason."""

import os
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest
from support.cluster_files import EXAMPLES
from support.processes import children, is_alive, name, wait_until, workers
from support.runs import write_config

from tahq.config.file import load_config
from tahq.errors import UserError
from tahq_launch.start import worker_processes
from tahq_launch.start.launcher import _signals_to
from tahq_launch.start.worker_command import WorkerCommand, local_peer, modules_of_workers
from tahq_launch.start.worker_processes import Fleet, StartedProgram

from .conftest import ENDLESS, TWO_STAGES, wait_for_steps, wait_until_gone

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
)
SLEEPING = "import time; time.sleep(60)"


def python(program: str, stage: int = 0) -> WorkerCommand:
    return WorkerCommand(stage, (sys.executable, "-c", program), env={})


def test_local_workers_dial_loopback_if_every_address_is_bound():
    assert local_peer("0.0.0.0:0", "myhost:4711") == "127.0.0.1:4711"
    assert local_peer("10.0.0.1:0", "203.0.113.9:4711") == "10.0.0.1:4711"


@pytest.mark.parametrize(
    ("changes", "is_imported"),
    [
        ((), True),
        (("wire.backend=reference",), False),
        (("wire.activations=raw", "wire.gradients=raw"), False),
    ],
)
def test_numba_is_loaded_ahead_for_workers_that_need_it(changes, is_imported):
    imported = modules_of_workers(load_config(EXAMPLES / "demo.yaml", changes))
    assert any(name.endswith(":load_numba") for name in imported) == is_imported


def test_killing_a_child_kills_its_own_children(tmp_path):
    grandparent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPING!r}])"
    process = StartedProgram(python(grandparent), tmp_path / "log")
    wait_until(lambda: bool(children(process.pid)), 30, "a grandchild")
    grandchildren = children(process.pid)
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    wait_until_gone(grandchildren)


@pytest.mark.parametrize(("program", "end"), [("print('no\\n\\nluck\\n');", "ends with: luck"), ("", "is empty")])
def test_fleet_reports_each_exit_once_with_status_and_last_line_of_this_start(tmp_path, program, end):
    exited, log = Mock(), tmp_path / "stage-1.log"
    log.write_text("the end of an earlier start\n")
    with Fleet(exited) as fleet:
        fleet.start(python(f"{program}raise SystemExit(7)", stage=1), log)
        wait_until(lambda: fleet.tick() or exited.called, 30, "an exit")
        fleet.tick()
    exited.assert_called_once_with(1, 7, f"its log {log} {end}")
    assert log.read_text().startswith("the end of an earlier start\n")


def test_fleet_of_a_launcher_that_fails_kills_even_workers_that_ignore_sigterm(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_processes, "TERMINATE_S", 0.2)
    monkeypatch.setattr(worker_processes, "LEAVE_S", 0.0)
    before = set(children(os.getpid()))
    failed = pytest.raises(RuntimeError, match="launcher failed")
    with failed, Fleet(Mock()) as fleet:
        fleet.start(python(STUBBORN), tmp_path / "deaf.log")
        fleet.start(python(SLEEPING), tmp_path / "asleep.log")
        wait_until(lambda: (tmp_path / "deaf.log").read_text() == "deaf\n", 30, "SIGTERM is ignored")
        raise RuntimeError("launcher failed")
    assert set(children(os.getpid())) <= before


def test_missing_program_is_a_mistake_of_the_user(tmp_path):
    with Fleet(Mock()) as fleet, pytest.raises(UserError, match="cannot start no-such-ssh for stage 2"):
        fleet.start(WorkerCommand(2, ("no-such-ssh",), {}), tmp_path / "log")


def test_signals_become_requests_until_the_run_ends():
    requests = []
    before = signal.getsignal(signal.SIGTERM)
    with _signals_to(requests.append):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.raise_signal(number)
    assert requests == [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def test_process_exits_when_its_stdin_ends_even_if_it_ignores_sigterm():
    program = (
        "import signal, time; from tahq_launch.start import worker_lifetime\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "worker_lifetime.GRACE_S = 0.2\n"
        "worker_lifetime.exit_with_stdin(); print('watching', flush=True); time.sleep(60)"
    )
    argv = [sys.executable, "-c", program]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "watching\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(30) == -signal.SIGKILL


def test_listed_hosts_that_are_this_machine_complete_a_run(tmp_path, start):
    write_config(tmp_path, TWO_STAGES | {"host_defaults": {"device": "cpu"}, "hosts": [{"local": True}] * 2})
    launcher = start("tahq-launch", "cluster.yaml")
    stdout, stderr = launcher.communicate(timeout=120)
    assert (launcher.returncode, stderr) == (0, ""), stdout
    assert "run tiny done: 2 of 2 steps" in stdout


def test_killed_worker_is_started_again_alone(training):
    stages = workers(training.pid)
    assert len(stages) == 2
    victim, other = sorted(stages, key=lambda pid: name(pid) != "tahq stage 1")
    os.kill(victim, signal.SIGKILL)
    wait_until_gone([victim])
    wait_until(lambda: len(workers(training.pid)) == 2, 30, "another worker")
    (replacement,) = set(workers(training.pid)) - {other}
    assert name(replacement) == "tahq stage 1"
    training.send_signal(signal.SIGINT)
    stdout, _ = training.communicate(timeout=60)
    assert training.returncode == 130
    assert "its worker exited with status -9 (SIGKILL)" in stdout
    assert "runs/tiny/logs/stage-1.log" in stdout


def test_killed_launcher_leaves_no_orphans(training):
    stages = workers(training.pid)
    training.kill()
    wait_until_gone(stages)


def test_ctrl_c_stops_in_order_with_a_checkpoint_that_resumes_until_all_steps_are_done(training, tmp_path, start):
    stages, folder = workers(training.pid), tmp_path / "runs" / "tiny"
    training.send_signal(signal.SIGINT)
    _, stderr = training.communicate(timeout=60)
    assert training.returncode == 130
    assert stderr.count("\n") == 1, stderr
    assert "SIGINT" in stderr
    assert "--resume" in stderr
    assert not any(map(is_alive, stages))

    done = len((folder / "metrics.jsonl").read_text().splitlines())
    resumed = start("tahq-launch", "cluster.yaml", "--resume", "--set", f"training.steps={done + 1}")
    stdout, stderr = resumed.communicate(timeout=120)
    assert (resumed.returncode, stderr) == (0, "")
    assert "training.steps" in stdout
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == done + 1
    assert (folder / f"config-until-step-{done}.yaml").exists()

    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    finished = start("tahq-launch", "cluster.yaml", "--resume", "--set", f"training.steps={done}")
    assert finished.communicate(timeout=120) == (
        "importing libraries\n",
        f"tahq-launch: nothing to do: training.steps is {done}, and the run is already after step {done + 1}; to train "
        "on, set it to more\n",
    )
    assert finished.returncode == 0
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("receiver", ["the launcher", "a worker"])
def test_sigterm_ends_the_run_within_its_grace_however_long_a_step_is(tmp_path, start, receiver):
    slow = {"forward": "200ms", "backward": "200ms"}  # of four micro-batches: more than 1.6 s per step
    run = {"grace": "200ms", "checkpoint_every": 1}
    write_config(tmp_path, {**ENDLESS, "run": ENDLESS["run"] | run, "emulate": {"sleep": slow}})
    launcher = start("tahq-launch", "cluster.yaml")
    wait_for_steps(launcher, tmp_path / "runs" / "tiny", 1)
    stages = workers(launcher.pid)
    victim = launcher.pid if receiver == "the launcher" else next(pid for pid in stages if name(pid) == "tahq stage 1")
    begin_s = time.monotonic()
    os.kill(victim, signal.SIGTERM)
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 143, stderr
    assert stderr.count("\n") == 1, stderr
    assert "run.grace (0.2 s)" in stderr
    assert "--resume` (checkpoint after step 1)" in stderr
    assert time.monotonic() - begin_s < 20
    assert not any(map(is_alive, stages))
    assert (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize("balance", ["counted", pytest.param("measured", marks=pytest.mark.ci)])
def test_workers_started_by_hand_complete_a_run(balance, tmp_path, start):
    """Workers that have measured join the run by themselves."""
    write_config(tmp_path, {**TWO_STAGES, "pipeline": {"stages": 2, "balance": balance}})
    coordinator = start("tahq", "coordinator", "cluster.yaml", "--bind", "127.0.0.1:0")
    peer = coordinator.stdout.readline().split()[-1]
    first = start("tahq-worker", "--stage", "0", "--peer", peer)
    beyond = start("tahq-worker", "--stage", "2", "--peer", peer)
    _, stderr = beyond.communicate(timeout=120)
    assert beyond.returncode == 2
    dialling, refused = stderr.splitlines()
    assert dialling.endswith(f"dialling {peer} …")
    assert refused.startswith("tahq-worker: ")
    second = start("tahq-worker", "--peer", peer)
    for process in (first, second, coordinator):
        stdout, stderr = process.communicate(timeout=120)
        assert (process.returncode, stderr.count("Traceback")) == (0, 0), stderr
    assert ("planned for" in stdout) == (balance == "measured")
    assert "start stage" not in stdout.partition("planned for")[2]
    assert (tmp_path / "runs" / "tiny" / "snapshots" / "latest").exists()
