"""A fork server and what is forked from it: where it runs, how it ends, and that it outlives nobody."""

import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version

import pytest
import torch
from support.processes import is_alive, name, wait_until

from tahq.errors import PeerLostError
from tahq_launch import cli
from tahq_launch.start import fork_server
from tahq_launch.start.fork_server import ForkedCommand, ForkServer
from tahq_launch.start.worker_lifetime import die_with_launcher

from .conftest import wait_until_gone


def tell_and_end():
    """Stands for `tahq`: says what it was given, and does what its arguments say."""
    end, number = sys.argv[1], int(sys.argv[2])
    words = [
        os.environ["GREETING"],
        torch.get_num_threads(),
        os.getsid(0) == os.getpid(),
        "wave" in sys.modules,
    ]
    os.write(1, f"{' '.join(map(str, words))}\n".encode())  # what pytest captures with is forked too
    os.write(2, b"on stderr\n")
    if end == "watch":
        die_with_launcher()
    if end == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if end != "leave":
        time.sleep(60)
    return number


def command(tmp_path, *arguments, **changes):
    fields = {"name": "tahq stage 3", "threads": 3, "environment": {"GREETING": "hello"}}
    return ForkedCommand(arguments=arguments, log_path=str(tmp_path / "log"), **(fields | changes))


def has_spoken(tmp_path):
    return lambda: (tmp_path / "log").exists() and "on stderr" in (tmp_path / "log").read_text()


@pytest.fixture
def forks(monkeypatch):
    """A fork server of this process, whose `tahq` is `tell_and_end`."""
    monkeypatch.setattr(cli, "main", tell_and_end)
    with ForkServer() as server:
        yield server
    assert not is_alive(server.pid)


def test_child_has_its_environment_threads_session_log_and_modules(forks, tmp_path):
    assert "wave" not in sys.modules  # of the standard library, and used by nobody
    (tmp_path / "log").write_text("of an earlier start\n")
    forks.import_modules(("wave", "no_such_module"))
    child = forks.start(command(tmp_path, "leave", "7"))
    assert child.wait(30)
    assert child.poll() == 7
    assert (tmp_path / "log").read_text().splitlines() == ["of an earlier start", "hello 3 True True", "on stderr"]


def test_children_are_no_forks_once_something_has_asked_for_cuda(forks, tmp_path):
    forks.import_modules(("support.asks_for_cuda",))
    child = forks.start(command(tmp_path, "--version"))
    assert child.wait(60)
    assert child.poll() == 0
    assert (tmp_path / "log").read_text() == f"tahq {version('tahq')}\n"  # a fork's `tahq` would be `tell_and_end`


def test_whether_something_has_asked_is_found_out_once_after_an_import(monkeypatch, tmp_path):
    """It takes a process, which a listing of the server's children would show."""
    monkeypatch.setattr(cli, "main", tell_and_end)
    asked = tmp_path / "asked"

    def ask() -> bool:
        with asked.open("a") as file:
            return file.write("?") != 1

    monkeypatch.setattr(fork_server, "_forks_lack_cuda", ask)
    with ForkServer() as forks:
        for _ in range(2):
            forks.import_modules(("wave",))
            for _ in range(2):
                assert forks.start(command(tmp_path, "leave", "0")).wait(30)
    assert asked.read_text() == "??"


def test_each_child_has_its_own_status_and_name(forks, tmp_path):
    children = [forks.start(command(tmp_path, end, "5", name=end)) for end in ("leave", "sleep", "deaf")]
    left, asleep, deaf = children
    assert left.wait(30)
    wait_until(lambda: (tmp_path / "log").read_text().count("on stderr") == 3, 30, "all three speak")
    assert [child.poll() for child in children] == [5, None, None]
    assert not deaf.wait(0.2)
    assert [name(asleep.pid), name(deaf.pid)] == ["sleep", "deaf"]
    for child in children:
        child.ask_to_leave()
    assert asleep.wait(30)
    assert asleep.poll() == -signal.SIGTERM
    assert not deaf.wait(0.2)
    os.kill(deaf.pid, signal.SIGKILL)
    assert deaf.wait(30)
    assert deaf.poll() == -signal.SIGKILL
    assert (left.poll(), asleep.poll()) == (5, -signal.SIGTERM)


def test_terminal_signals_leave_the_server_alone(forks, tmp_path):
    assert forks.start(command(tmp_path, "leave", "0")).wait(30)
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(forks.pid, number)
    assert os.getsid(forks.pid) == forks.pid
    assert forks.start(command(tmp_path, "leave", "0")).wait(30)


def test_nobody_is_left_when_the_context_ends(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "main", tell_and_end)
    with ForkServer() as forks:
        child = forks.start(command(tmp_path, "watch", "0"))
        wait_until(has_spoken(tmp_path), 30, "the child speaks")
    wait_until_gone([child.pid, forks.pid])


def test_server_that_dies_takes_its_children_along_and_starts_no_more(forks, tmp_path):
    child = forks.start(command(tmp_path, "watch", "0"))
    wait_until(has_spoken(tmp_path), 30, "the child speaks")
    os.kill(forks.pid, signal.SIGKILL)
    assert child.wait(30)
    assert child.poll() == -signal.SIGKILL
    wait_until_gone([child.pid])
    with pytest.raises(
        PeerLostError, match=r"was killed by signal 9, so that no tahq stage 3 can be started; .*--resume"
    ):
        forks.start(command(tmp_path, "leave", "0"))
    forks.import_modules(("wave",))


def test_killed_launcher_leaves_neither_server_nor_children(tmp_path):
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from launch.test_fork_server import cli, command, tell_and_end, ForkServer\n"
        "cli.main = tell_and_end\n"
        "forks = ForkServer()\n"
        "children = [forks.start(command(Path.cwd(), 'watch', '0')) for _ in range(3)]\n"
        "print(forks.pid, *(child.pid for child in children), flush=True)\n"
        "time.sleep(60)\n"
    )
    here = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    argv = [sys.executable, "-c", program]
    with subprocess.Popen(argv, cwd=tmp_path, env=os.environ | here, stdout=subprocess.PIPE, text=True) as launcher:
        pids = [int(word) for word in launcher.stdout.readline().split()]
        assert len(pids) == 4
        wait_until(lambda: (tmp_path / "log").read_text().count("on stderr") == 3, 30, "all three speak")
        launcher.kill()
    wait_until_gone(pids)
