"""tahq's commands, inside this process or started in a folder with a small cluster.yaml."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import is_alive, wait_until
from support.runs import start as start_program
from support.runs import tiny, write_config
from support.warm_process import WarmProcess

from tahq_launch import cli

PROGRAMS = {
    "tahq": cli.main,
    "tahq-launch": cli.launch_main,
    "tahq-worker": cli.worker_main,
    "tahq-netem": cli.netem_main,
}
TWO_STAGES = tiny(pipeline={"stages": 2}, training={"steps": 2}, model={"num_layers": 2, "hidden_size": 32})
ENDLESS = tiny(pipeline={"stages": 2}, training={"steps": 1_000_000}, model={"num_layers": 2, "hidden_size": 32})


@pytest.fixture
def tahq(tmp_path, monkeypatch, capsys):
    """tahq("tahq-launch", ...) runs a program inside this process, in the test's folder: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("tahq"), "handlers", [])  # those that a program adds end with the test

    def run(program: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        status = PROGRAMS[program]()
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def assert_one_line(outcome: tuple[int, str, str], status: int, *parts: str) -> None:
    """The status, and one line on stderr with these parts."""
    got, _, stderr = outcome
    assert got == status, stderr
    assert stderr.endswith("\n")
    assert stderr.count("\n") == 1, stderr
    assert "Traceback" not in stderr
    for part in parts:
        assert part in stderr


@pytest.fixture
def start(tmp_path):
    """start("tahq-launch", ...) starts a command in the test's folder; none outlives the test."""
    started = []

    def begin(program: str, *arguments: str) -> WarmProcess:
        process = start_program(tmp_path, program, *arguments)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()


@pytest.fixture
def training(tmp_path, start):
    """A launcher whose endless run of two stages has made a step."""
    write_config(tmp_path, ENDLESS)
    launcher = start("tahq-launch", "cluster.yaml")
    wait_for_steps(launcher, tmp_path / "runs" / "tiny", 1)
    return launcher


def wait_for_steps(launcher: WarmProcess, run_folder: Path, num_steps: int) -> None:
    metrics = run_folder / "metrics.jsonl"

    def has_steps() -> bool:
        assert launcher.poll() is None, launcher.communicate()
        return metrics.exists() and metrics.read_text().count("\n") >= num_steps

    wait_until(has_steps, 120, f"{num_steps} steps")


def wait_until_gone(pids: list[int], timeout_s: float = 15) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), timeout_s, f"processes {pids} end")


def dashboard_address(process: WarmProcess) -> str:
    """The address that a command prints for its dashboard."""
    lines = iter(process.stdout.readline, "")
    line = next((line for line in lines if line.startswith("dashboard: ")), None)
    assert line is not None, process.communicate()
    return line.split()[1]
