"""What stays behind when a process with a network ends: nothing, or nothing after the next start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import is_alive as runs
from support.processes import wait_until

from tahq_netem.backends.leftovers import STATE_FOLDER, is_alive, note_process, start_ticks, sweep_leftovers
from tahq_netem.backends.namespaces import create_namespace, list_namespaces, owner_pid, remove_namespace

OWNER = """
import os, signal, subprocess, sys, time
from tahq_netem.backends.namespace_group import NamespaceGroup
from tahq_netem.backends.namespaces import popen
{before}
group = NamespaceGroup(["a", "b"])
child = popen(group["a"], [sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
{after}
"""


def namespaces_of(pid: int) -> list[str]:
    return [name for name in list_namespaces() if owner_pid(name) == pid]


@pytest.fixture
def owner():
    """owner(after, before): a process that makes a network, starts a child in it, says so, and runs `after`."""
    started = []

    def begin(after: str = "time.sleep(60)", before: str = "") -> tuple[subprocess.Popen, int]:
        program = OWNER.format(before=before, after=after)
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        started.append(process)
        return process, int(process.stdout.readline())

    yield begin
    for process in started:
        process.kill()
        process.wait()
    sweep_leftovers()  # also what still holds the other ends of the pipes
    for process in started:
        process.communicate()


def assert_gone(process: subprocess.Popen, child: int) -> None:
    assert namespaces_of(process.pid) == []
    assert not (STATE_FOLDER / f"{process.pid}.json").exists()
    wait_until(lambda: not runs(child), 10, "what ran on the host ends")


@pytest.mark.netns
@pytest.mark.parametrize(
    ("after", "status"),
    [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1), ("group.close()", 0), ("group.close(); group.close()", 0)],
    ids=["end", "exit", "exception", "close", "close-twice"],
)
def test_nothing_is_left_after_an_exit(owner, after, status):
    process, child = owner(after)
    assert process.wait(60) == status
    assert_gone(process, child)


@pytest.mark.netns
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_nothing_is_left_after_a_signal_and_the_status_tells_it(owner, number):
    process, child = owner()
    assert len(namespaces_of(process.pid)) == 2
    process.send_signal(number)
    assert process.wait(60) == -number
    assert_gone(process, child)


@pytest.mark.netns
def test_nothing_is_left_of_two_networks_after_a_signal(owner):
    process, child = owner("second = NamespaceGroup(['a']); print(flush=True); time.sleep(60)")
    process.stdout.readline()
    assert len(namespaces_of(process.pid)) == 3
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
    assert_gone(process, child)


@pytest.mark.netns
def test_signal_after_closing_in_another_order_still_ends_the_process(owner):
    process, child = owner(
        "second = NamespaceGroup(['a']); group.close(); second.close(); print(flush=True); time.sleep(60)"
    )
    process.stdout.readline()
    assert_gone(process, child)
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM


GUARDED = """
import sys, time
from tahq_netem.backends.leftovers import Guard
older = Guard(lambda: print("older", flush=True))
younger = Guard(lambda: {failure})
print(flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("failure", "told"), [("1 / 0", "ZeroDivisionError"), ("sys.exit(3)", "")])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_removal_that_fails_holds_up_neither_other_removals_nor_the_end(number, failure, told):
    program = GUARDED.format(failure=failure)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        process.send_signal(number)
        said, words = process.communicate(timeout=60)
    assert (process.returncode, said) == (-number, "older\n")
    assert told in words


HANDLER = """
def leave(*_):
    print(os.path.exists("/run/netns/" + group["a"]), flush=True)
    sys.exit(7)

signal.signal(signal.SIGTERM, leave)
"""


@pytest.mark.netns
def test_handler_of_the_program_stays_in_charge(owner):
    process, child = owner(before=HANDLER)
    process.terminate()
    assert process.stdout.readline() == "True\n"
    assert process.wait(60) == 7
    assert_gone(process, child)


@pytest.mark.netns
def test_forked_child_takes_nothing_with_it(owner):
    process, _ = owner("os.fork() or sys.exit(); os.wait(); print(flush=True); time.sleep(60)")
    process.stdout.readline()
    assert len(namespaces_of(process.pid)) == 2


@pytest.mark.netns
def test_network_of_a_killed_process_is_swept_with_what_runs_in_it(owner):
    process, child = owner()
    assert len(namespaces_of(process.pid)) == 2
    process.kill()
    process.wait()
    sweep_leftovers()  # or another test's start of a network, a moment earlier
    assert_gone(process, child)


@pytest.mark.netns
def test_network_of_a_running_process_is_not_swept(owner):
    process, child = owner()
    assert not {*namespaces_of(process.pid)} & {*sweep_leftovers()}
    assert len(namespaces_of(process.pid)) == 2
    assert runs(child)


@pytest.mark.netns
def test_half_made_namespace_of_a_killed_process_is_swept():
    pid = dead_pid()
    path = Path(f"/run/netns/tahq-{pid}-host0")
    path.parent.mkdir(exist_ok=True)
    path.touch()
    sweep_leftovers()
    assert not path.exists()


@pytest.mark.netns
def test_namespaces_of_others_are_not_touched():
    name = f"other-{os.getpid()}"
    create_namespace(name)
    try:
        assert name not in sweep_leftovers()
        assert name in list_namespaces()
    finally:
        remove_namespace(name)


@pytest.mark.netns
def test_pid_that_another_process_got_later_is_not_its_first_owner():
    note_process()
    note = STATE_FOLDER / f"{os.getpid()}.json"
    try:
        assert is_alive(os.getpid())
        note.write_text(f'{{"pid": {os.getpid()}, "start_ticks": 1}}')
        assert not is_alive(os.getpid())
    finally:
        note.unlink(missing_ok=True)  # a sweep of another test may have seen it


@pytest.mark.netns
@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null"])
def test_process_with_an_unreadable_note_counts_as_alive(text):
    STATE_FOLDER.mkdir(exist_ok=True)
    note = STATE_FOLDER / f"{os.getpid()}.json"
    note.write_text(text)
    try:
        assert is_alive(os.getpid())
    finally:
        note.unlink()


def test_start_is_known_of_the_living_only():
    assert start_ticks(os.getpid()) > 0
    assert start_ticks(os.getpid()) == start_ticks(os.getpid())
    assert start_ticks(dead_pid()) is None


def test_zombie_is_not_alive():
    process = subprocess.Popen(["/bin/true"])
    wait_until(lambda: start_ticks(process.pid) is None, 10, "it ends")
    process.wait()


def test_name_of_a_process_may_hold_brackets_and_spaces(tmp_path):
    program = tmp_path / "a) R 1 (b"
    program.symlink_to(sys.executable)
    with subprocess.Popen([program, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert start_ticks(process.pid) >= start_ticks(os.getpid())
        process.communicate(b"\n")


def dead_pid() -> int:
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    return process.pid


HIDING = """
import os, subprocess, sys
from tahq_netem.backends.leftovers import sweep_leftovers
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


@pytest.mark.serial
def test_leftovers_hidden_by_another_programs_mounts_are_removed_and_its_namespaces_stay():
    """In a private mount namespace, so that the mounts are nobody else's."""
    program = OWNER.format(before="", after="time.sleep(60)")
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", HIDING, program]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.stdout.splitlines() == ["['a', 'b']", "[]", "[True, True]", "[True, True]"], process.stderr
    assert process.stderr == ""
