"""A folder with a small cluster.yaml, and tahq's commands started in it."""

import subprocess
from pathlib import Path

import pytest
from support.processes import is_alive, wait_until
from support.runs import start as start_program
from support.runs import tiny, write_config
from support.warm_process import WarmProcess

TWO_STAGES = tiny(pipeline={"stages": 2}, training={"steps": 2}, model={"num_layers": 2, "hidden_size": 32})
ENDLESS = tiny(pipeline={"stages": 2}, training={"steps": 1_000_000}, model={"num_layers": 2, "hidden_size": 32})


@pytest.fixture
def start(tmp_path):
    """start("tahq-launch", ...) runs a command in the test's folder; none outlives the test."""
    started = []

    def begin(program: str, *arguments: str) -> WarmProcess:
        process = start_program(tmp_path, program, *arguments)
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
        process.communicate()


@pytest.fixture
def training(tmp_path, start):
    """A launcher whose run of two stages has made a step, and would go on for ever."""
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
