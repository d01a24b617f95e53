"""A hand-started worker's parent: real processes that are killed, end, and are orphaned."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.processes import is_alive, wait_until

HEAD = (
    "import os, signal, sys, time\nfrom pathlib import Path\nfrom tahq_launch.start.worker_lifetime import supervise\n"
)


def start(folder: Path, serve: str, max_restarts: int = 3) -> subprocess.Popen[str]:
    """`serve` is the body of a function of `name` and `is_first`; `seen` counts the children before."""
    body = textwrap.indent(
        "seen = len(log.read_text().splitlines()) if log.exists() else 0\n"
        "log.open('a').write(f'{os.getpid()} {name} {is_first}\\n')\n" + textwrap.dedent(serve),
        "    ",
    )
    log = folder / "children"
    function = f"def serve(name, is_first):\n{body}"
    program = f"{HEAD}log = Path({str(log)!r})\n{function}\nsys.exit(supervise(serve, {max_restarts}))"
    return subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)


def children(folder: Path) -> list[list[str]]:
    path = folder / "children"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_killed_child_is_followed_by_one_with_its_name(tmp_path):
    serve = "if seen < 2: os.kill(os.getpid(), signal.SIGKILL)\nreturn 7"
    process = start(tmp_path, serve)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 7
    pids, names, firsts = zip(*children(tmp_path), strict=True)
    assert len(set(pids)) == 3
    assert len(set(names)) == 1
    assert firsts == ("True", "False", "False")
    assert stderr.count("killed by SIGKILL") == 2


@pytest.mark.parametrize("status", [0, 2, 3])
def test_child_that_ends_by_itself_ends_it_all(tmp_path, status):
    process = start(tmp_path, f"return {status}")
    process.communicate(timeout=60)
    assert process.returncode == status
    assert len(children(tmp_path)) == 1


def test_child_that_is_killed_too_often_is_the_last(tmp_path):
    process = start(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)", max_restarts=1)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGSEGV
    assert len(children(tmp_path)) == 2
    assert "too often" in stderr


def test_signals_go_to_the_child(tmp_path):
    serve = (
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(143))\nlog.open('a').write('ready . .\\n')\ntime.sleep(60)"
    )
    process = start(tmp_path, serve)
    wait_until(lambda: len(children(tmp_path)) == 2, 30, "the child listens")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_signal_that_kills_the_child_before_it_listens_ends_the_parent(tmp_path):
    process = start(tmp_path, "time.sleep(60)")
    wait_until(lambda: len(children(tmp_path)) == 1, 30, "the child runs")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert len(children(tmp_path)) == 1


def test_child_dies_with_its_parent(tmp_path):
    process = start(tmp_path, "time.sleep(60)")
    wait_until(lambda: len(children(tmp_path)) == 1, 30, "the child runs")
    child = int(children(tmp_path)[0][0])
    process.kill()
    wait_until(lambda: not is_alive(child), 30, "the child is gone")
    process.communicate()
    assert os.getpid() != child
