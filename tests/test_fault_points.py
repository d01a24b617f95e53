"""Faults at named points: real processes that kill, stop and delay themselves, once."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tahq import fault_points
from tahq.errors import ConfigError
from tahq.fault_points import NAMES, parse_faults

PROGRAM = """
import sys, time
from tahq.fault_points import reached
for step in range(3):
    for stage in range(2):
        began = time.monotonic()
        reached("forward", stage=stage, step=step)
        print(stage, step, round(time.monotonic() - began, 1), flush=True)
"""


def run(faults, folder=None):
    """The program's status, stdout lines and stderr under these faults."""
    environment = os.environ | {"TAHQ_FAULTS": faults} | ({"TAHQ_FAULTS_FOLDER": str(folder)} if folder else {})
    argv = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_list_of_faults_is_parsed():
    kill, stop = parse_faults("kill@prepared:stage=1:step=3, stop=20s@forward")
    assert (kill.action, kill.point, kill.stage, kill.step) == ("kill", "prepared", 1, 3)
    assert (stop.action, stop.duration_s, stop.point, stop.stage, stop.step) == ("stop", 20.0, "forward", -1, -1)
    assert [kill.matches(1, 2), kill.matches(0, 3), stop.matches(5, 7)] == [False, False, True]


def test_constants_name_every_point():
    constants = {value for key, value in vars(fault_points).items() if key.isupper() and isinstance(value, str)}
    assert constants - {fault_points.FAULTS, fault_points.FOLDER} == set(NAMES)


@pytest.mark.parametrize(
    "text",
    [
        *("kill", "burn@forward", "kill@foward", "kill=1s@forward", "sleep@forward", "sleep=1@forward"),
        *("kill@forward:host=1", "kill@forward:step=-1", "kill@forward:step"),
    ],
)
def test_malformed_fault_is_refused(text):
    with pytest.raises(ConfigError, match=r"TAHQ_FAULTS: cannot read .*: expected "):
        parse_faults(f"kill@forward,{text}")


def test_kill_happens_at_its_point_and_not_to_the_next_process(tmp_path):
    status, lines, _ = run("kill@forward:stage=1:step=1", tmp_path)
    assert status == -signal.SIGKILL
    assert lines == ["0 0 0.0", "1 0 0.0", "0 1 0.0"]
    (marker,) = tmp_path.iterdir()
    assert marker.name == "0-kill@forward:stage=1:step=1"
    assert abs(time.time() - float(marker.read_text().split()[0])) < 30
    status, lines, _ = run("kill@forward:stage=1:step=1", tmp_path)
    assert (status, len(lines)) == (0, 6)


def test_fault_listed_twice_happens_twice_and_a_raised_one_names_its_entry(tmp_path):
    statuses = [run("kill@forward,kill@forward", tmp_path)[0] for _ in range(3)]
    assert statuses == [-signal.SIGKILL, -signal.SIGKILL, 0]
    status, lines, errors = run("raise@forward:step=2")
    assert (status, len(lines)) == (1, 4)
    assert "InjectedFault: raise@forward:step=2 of TAHQ_FAULTS" in errors


def test_stopped_process_continues_after_its_time(tmp_path):
    status, lines, _ = run("stop=1s@forward:step=1,sleep=300ms@forward:stage=1:step=2", tmp_path)
    assert status == 0
    waits = [float(line.split()[2]) for line in lines]
    assert waits[2] >= 0.9
    assert waits[5] >= 0.3
    assert sum(waits) < 10


def test_without_a_folder_each_process_counts_for_itself():
    assert run("")[:2] == (0, [f"{stage} {step} 0.0" for step in range(3) for stage in range(2)])
    for _ in range(2):
        status, lines, _ = run("sleep=200ms@forward")
        assert status == 0
        assert [float(line.split()[2]) >= 0.2 for line in lines] == [True] + [False] * 5
