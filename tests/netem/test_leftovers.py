"""What stays behind when a process with namespaces ends: nothing, or nothing after the next start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import is_alive as runs
from support.processes import wait_until

from tahq_netem.backends.namespace_group import STATE_FOLDER, is_alive, note_process, sweep_leftovers
from tahq_netem.backends.namespaces import create_namespace, list_namespaces, owner_pid, remove_namespace

netns = pytest.mark.netns

OWNER = """
import os, signal, subprocess, sys, time
from tahq_netem.backends.namespace_group import NamespaceGroup
from tahq_netem.backends.namespaces import entered
{before}
group = NamespaceGroup(["a", "b"])
with entered(group["a"]):
    child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
{after}
"""


def namespaces_of(pid: int) -> list[str]:
    return [name for name in list_namespaces() if owner_pid(name) == pid]


@pytest.fixture
def owner():
    """owner(after, before): a process that makes namespaces, starts a child in one, says so, and runs `after`."""
    started = []

    def begin(after: str = "time.sleep(60)", before: str = "") -> tuple[subprocess.Popen, int]:
        program = OWNER.format(before=before, after=after)
        argv = [sys.executable, "-c", program]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        return started[-1], int(started[-1].stdout.readline())

    yield begin
    for process in started:
        process.kill()
        process.wait()
    sweep_leftovers()  # also the processes that still hold the other ends of the pipes
    for process in started:
        process.communicate()


def assert_gone(process: subprocess.Popen, child: int) -> None:
    assert namespaces_of(process.pid) == []
    assert not (STATE_FOLDER / f"{process.pid}.json").exists()
    wait_until(lambda: not runs(child), 10, "the process on the host ends")


@netns
@pytest.mark.parametrize(
    ("after", "status"), [("sys.exit(3)", 3), ("1 / 0", 1), ("group.close()", 0)], ids=["exit", "exception", "close"]
)
def test_nothing_is_left_after_an_exit(owner, after, status):
    process, child = owner(after)
    assert process.wait(60) == status
    assert_gone(process, child)


@netns
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_nothing_is_left_of_two_networks_after_a_signal_and_the_status_tells_it(owner, number):
    process, child = owner("second = NamespaceGroup(['a']); print(flush=True); time.sleep(60)")
    process.stdout.readline()
    assert len(namespaces_of(process.pid)) == 3
    process.send_signal(number)
    assert process.wait(60) == -number
    assert_gone(process, child)


HANDLER = """
def leave(*_):
    print(os.path.exists("/run/netns/" + group["a"]), flush=True)
    sys.exit(7)

signal.signal(signal.SIGTERM, leave)
"""


@netns
def test_handler_of_the_program_stays_in_charge(owner):
    process, child = owner(before=HANDLER)
    process.terminate()
    assert process.stdout.readline() == "True\n"
    assert process.wait(60) == 7
    assert_gone(process, child)


@netns
def test_namespaces_outlive_a_forked_child_and_a_sweep_but_not_a_sweep_after_kill_9(owner):
    process, child = owner("os.fork() or sys.exit(); os.wait(); print(flush=True); time.sleep(60)")
    process.stdout.readline()
    assert not {*namespaces_of(process.pid)} & {*sweep_leftovers()}
    assert len(namespaces_of(process.pid)) == 2
    assert runs(child)
    process.kill()
    process.wait()
    sweep_leftovers()  # or another test's start of a network, a moment earlier
    assert_gone(process, child)


def dead_pid() -> int:
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    return process.pid


@netns
def test_half_made_namespace_of_a_killed_process_is_swept_and_those_of_others_are_not():
    path = Path(f"/run/netns/tahq-{dead_pid()}-host0")
    path.parent.mkdir(exist_ok=True)
    path.touch()
    other = f"other-{os.getpid()}"
    create_namespace(other)
    try:
        assert other not in sweep_leftovers()
        assert other in list_namespaces()
        assert not path.exists()
    finally:
        remove_namespace(other)


@netns
@pytest.mark.parametrize(
    ("note", "alive"),
    [(None, True), ('{"pid": 1, "start_ticks": 1}', False), *((text, True) for text in ("", "{", "[]", "{}", "null"))],
)
def test_later_process_with_the_pid_is_not_the_owner_and_an_unreadable_note_counts_as_alive(note, alive):
    path = STATE_FOLDER / f"{os.getpid()}.json"
    note_process()
    try:
        if note is not None:
            path.write_text(note)
        assert is_alive(os.getpid()) is alive
    finally:
        path.unlink(missing_ok=True)  # a sweep of another test may have seen it


HIDING = """
import os, subprocess, sys
from tahq_netem.backends.namespace_group import sweep_leftovers
from tahq_netem.backends.namespaces import NAMESPACE_FOLDER, create_namespace, list_namespaces, remove_namespace
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
create_namespace("other-before")
# What `ip netns add` does.
subprocess.run(["mount", "--rbind", NAMESPACE_FOLDER, NAMESPACE_FOLDER], check=True)
subprocess.run(["mount", "--make-rshared", NAMESPACE_FOLDER], check=True)
create_namespace("other-after")
child.kill()
child.wait()
removed = sweep_leftovers()
print(sorted(name.rpartition("-")[2] for name in removed if f"-{child.pid}-" in name))
print([name for name in list_namespaces() if f"-{child.pid}-" in name])
others = [f"{NAMESPACE_FOLDER}/{name}" for name in ("other-before", "other-after")]
print([os.stat(path).st_dev == os.stat("/proc/self/ns/net").st_dev for path in others])
print([remove_namespace(name) for name in ("other-after", "other-before")])
"""


@netns
@pytest.mark.serial
def test_leftovers_hidden_by_another_programs_mounts_are_removed_and_its_namespaces_stay():
    """In a private mount namespace, so that the mounts affect no other process."""
    program = OWNER.format(before="", after="time.sleep(60)")
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", HIDING, program]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.stdout.splitlines() == ["['a', 'b']", "[]", "[True, True]", "[True, True]"], process.stderr
    assert process.stderr == ""
