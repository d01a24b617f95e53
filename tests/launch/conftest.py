"""tahq's commands, inside this process or started in a folder with a small cluster.yaml."""

import logging
import os
import shutil
import socket
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


SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
PRIVILEGE_SEPARATION = Path("/run/sshd")
needs_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None, reason="no OpenSSH: apt-get install openssh-server openssh-client"
)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    """ssh arguments that reach a temporary sshd with temporary keys."""
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    if os.geteuid() == 0:
        PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host_key\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
    )
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=log)

    def accepts() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(accepts, 20, f"sshd listens: {(folder / 'log').read_text()}")
        known = ["-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={folder}/known_hosts"]
        yield ["-p", str(port), "-i", str(folder / "user_key"), "-F", "none", "-o", "LogLevel=ERROR", *known]
    finally:
        server.terminate()
        server.wait(20)


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
