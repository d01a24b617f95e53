"""The parent of a worker started by hand: real processes that are killed, end, and are orphaned."""

import signal
import subprocess
import sys
import textwrap

import pytest
from support.processes import is_alive, wait_until

PROGRAM = """\
import os, signal, sys, time
from pathlib import Path
from tahq_launch.start.worker_lifetime import supervise

log = Path("children")

def serve(name, is_first):
    seen = len(log.read_text().splitlines()) if log.exists() else 0
    log.open("a").write(f"{os.getpid()} {name} {is_first}\\n")
"""


@pytest.fixture
def start(tmp_path):
    """start(body) supervises `serve`, whose body may use `name`, `is_first` and `seen`, the number of earlier children;
    children() lists pid, name and is_first of each child."""

    def begin(body: str, max_restarts: int = 3) -> subprocess.Popen[str]:
        program = f"{PROGRAM}{textwrap.indent(body, '    ')}\nsys.exit(supervise(serve, {max_restarts}))"
        return subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, cwd=tmp_path)

    return begin


@pytest.fixture
def children(tmp_path):
    log = tmp_path / "children"
    return lambda: [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def test_killed_child_is_replaced_under_the_same_name(start, children):
    process = start("if seen < 2: os.kill(os.getpid(), signal.SIGKILL)\nreturn 7")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 7
    pids, names, firsts = zip(*children(), strict=True)
    assert (len(set(pids)), len(set(names))) == (3, 1)
    assert firsts == ("True", "False", "False")
    assert stderr.count("killed by SIGKILL") == 2


@pytest.mark.parametrize(
    ("body", "status"), [("return 3", 3), ("os.kill(os.getpid(), signal.SIGSEGV)", 128 + signal.SIGSEGV)]
)
def test_parent_ends_with_the_status_of_its_last_child(start, children, body, status):
    process = start(body, max_restarts=1)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == status
    assert len(children()) == (2 if status > 128 else 1)
    assert ("too often" in stderr) == (status > 128)


LISTENING = "signal.signal(signal.SIGTERM, lambda *_: os._exit(9))\nlog.open('a').write('ready . .\\n')\ntime.sleep(60)"


@pytest.mark.parametrize(("body", "lines", "status"), [(LISTENING, 2, 9), ("time.sleep(60)", 1, 128 + signal.SIGTERM)])
def test_sigterm_reaches_the_child_and_ends_the_parent(start, children, body, lines, status):
    process = start(body)
    wait_until(lambda: len(children()) == lines, 30, "the child runs")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == status
    assert len(children()) == lines


def test_child_dies_with_its_parent(start, children):
    process = start("time.sleep(60)")
    wait_until(lambda: len(children()) == 1, 30, "the child runs")
    child = int(children()[0][0])
    process.kill()
    wait_until(lambda: not is_alive(child), 30, "the child is gone")
    process.communicate()
