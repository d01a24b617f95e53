"""A fork server and its workers: their environment, their end, and that none outlives the launcher."""

import os
import signal
import sys
import time
from importlib.metadata import version

import pytest
import torch
from support.processes import children, name, wait_until

from tahq.errors import PeerLostError
from tahq_launch import cli
from tahq_launch.start.worker_command import WorkerCommand
from tahq_launch.start.worker_lifetime import die_with_launcher
from tahq_launch.start.worker_processes import ForkServer

from .conftest import wait_until_gone


def report_and_end():
    """Replaces `tahq`: prints its environment, and does what its arguments say."""
    end, number = sys.argv[1], int(sys.argv[2])
    seen = [os.environ["GREETING"], torch.get_num_threads(), os.getsid(0) == os.getpid(), "wave" in sys.modules]
    os.write(1, f"{' '.join(map(str, seen))}\n".encode())  # pytest's capture is forked too
    os.write(2, b"on stderr\n")
    if end == "watch":
        die_with_launcher()
    if end != "leave":
        time.sleep(60)
    return number


def start(forks, folder, *arguments, stage=3):
    command = WorkerCommand(stage, arguments, {"GREETING": "hello"}, forked_threads=3)
    return forks.start(command, folder / "log")


def pid_of(forks):
    (pid,) = [pid for pid in children(os.getpid()) if name(pid) == "tahq forks"]
    return pid


def wait_for_reports(folder, count):
    log = folder / "log"
    wait_until(lambda: log.exists() and log.read_text().count("on stderr") == count, 30, f"{count} workers report")


@pytest.fixture
def forks(monkeypatch):
    """A fork server of this process, whose `tahq` is `report_and_end`."""
    monkeypatch.setattr(cli, "main", report_and_end)
    with ForkServer() as server:
        yield server
    assert not [pid for pid in children(os.getpid()) if name(pid) == "tahq forks"]


def test_worker_has_its_environment_threads_session_log_and_modules(forks, tmp_path):
    assert "wave" not in sys.modules  # an unused module of the standard library
    (tmp_path / "log").write_text("of an earlier start\n")
    forks.import_modules(("wave", "no_such_module"))
    pid = start(forks, tmp_path, "leave", "7")
    assert forks.status_of(pid, 30) == 7
    assert forks.status_of(pid) == 7
    assert (tmp_path / "log").read_text().splitlines() == ["of an earlier start", "hello 3 True True", "on stderr"]


def test_workers_are_spawned_once_an_import_has_asked_for_cuda(forks, tmp_path):
    forks.import_modules(("support.asks_for_cuda",))
    assert forks.status_of(start(forks, tmp_path, "--version"), 60) == 0
    # a fork's `tahq` would be `report_and_end`
    assert (tmp_path / "log").read_text() == f"tahq {version('tahq')}\n"


def test_each_worker_has_its_own_status_and_name(forks, tmp_path):
    left, asleep = (start(forks, tmp_path, end, "5", stage=stage) for stage, end in enumerate(("leave", "sleep")))
    assert forks.status_of(left, 30) == 5
    wait_for_reports(tmp_path, 2)
    assert (forks.status_of(asleep), name(asleep)) == (None, "tahq stage 1")
    os.kill(asleep, signal.SIGTERM)
    assert forks.status_of(asleep, 30) == -signal.SIGTERM
    assert forks.status_of(left) == 5


def test_server_outlives_terminal_signals_and_its_context_ends_it_with_its_workers(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "main", report_and_end)
    with ForkServer() as forks:
        first = start(forks, tmp_path, "watch", "0")
        server = pid_of(forks)
        assert os.getsid(server) == server
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(server, number)
        second = start(forks, tmp_path, "watch", "0")
        wait_for_reports(tmp_path, 2)
    wait_until_gone([server, first, second])


def test_killed_server_takes_its_workers_along_and_starts_no_more(forks, tmp_path):
    pid = start(forks, tmp_path, "watch", "0")
    wait_for_reports(tmp_path, 1)
    os.kill(pid_of(forks), signal.SIGKILL)
    assert forks.status_of(pid, 30) == -signal.SIGKILL
    wait_until_gone([pid])
    message = r"was killed by signal 9, so the worker of stage 3 cannot be started; .*--resume"
    with pytest.raises(PeerLostError, match=message):
        start(forks, tmp_path, "leave", "0")
    forks.import_modules(("wave",))
