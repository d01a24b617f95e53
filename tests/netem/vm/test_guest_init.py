"""What the guest's first process does, as far as an ordinary process may do it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vm import guest_init


def run_task(argv, **changes):
    """In a process of its own: the first process waits for every child that it has."""
    task = {"argv": argv, "env": {"PATH": "/bin:/usr/bin"}, "cwd": "/", **changes}
    code = "import json, sys; from vm import guest_init; print(guest_init.run_task(json.loads(sys.argv[1])))"
    done = subprocess.run([sys.executable, "-c", code, json.dumps(task)], capture_output=True, text=True, check=True)
    return int(done.stdout), done.stderr


@pytest.mark.parametrize("status", [0, 1, 5])
def test_exit_status_is_the_commands(status):
    assert run_task(["/bin/sh", "-c", f"exit {status}"]) == (status, "")


def test_command_killed_by_a_signal_has_its_number_below_zero():
    assert run_task(["/bin/sh", "-c", "kill -KILL $$"]) == (-9, "")


def test_missing_program_ends_with_127():
    status, message = run_task(["/no/such/program"])
    assert status == 127
    assert message.startswith("cannot run /no/such/program: ")


def test_command_gets_folder_and_environment_of_the_task(tmp_path):
    out = tmp_path / "out"
    command = ["/bin/sh", "-c", f'echo "$PWD $TAHQ_IN_VM" > {out}']
    assert run_task(command, cwd=str(tmp_path), env={"TAHQ_IN_VM": "1"}) == (0, "")
    assert out.read_text() == f"{tmp_path} 1\n"


def test_failed_call_of_the_kernel_says_what_and_why():
    with pytest.raises(FileNotFoundError, match=r"/modules/absent\.ko"):
        guest_init.load_module("/modules/absent.ko")
    with pytest.raises(OSError, match=r"pyproject"):
        # Not a module; and without root, not permitted.
        guest_init.load_module(str(Path(__file__).parents[3] / "pyproject.toml"))


def test_attached_file_may_be_missing(tmp_path):
    assert guest_init.read_if_there(str(tmp_path / "absent")) is None
    (tmp_path / "there").write_text("<xml/>")
    assert guest_init.read_if_there(str(tmp_path / "there")) == "<xml/>"
