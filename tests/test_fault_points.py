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
import time
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


def test_stage_and_step_come_in_any_order():
    assert [
        (fault.stage, fault.step) for fault in parse_faults("raise@forward:step=3:stage=1,raise@forward:step=3")
    ] == [
        (1, 3),
        (-1, 3),
    ]


def test_fault_happens_once_at_its_point_and_once_more_if_listed_twice(tmp_path):
    fault = "kill@forward:stage=1:step=1"
    status, lines, _ = run(f"{fault}, {fault}", tmp_path)
    assert (status, lines) == (-signal.SIGKILL, ["0 0 0.0", "1 0 0.0", "0 1 0.0"])
    (marker,) = tmp_path.iterdir()
    assert marker.name == f"0-{fault}"
    assert abs(time.time() - float(marker.read_text().split()[0])) < 30
    assert [run(f"{fault}, {fault}", tmp_path)[0] for _ in range(2)] == [-signal.SIGKILL, 0]


def test_process_is_stopped_delayed_and_ended_by_an_error_that_names_the_fault():
    status, lines, errors = run("stop=600ms@forward:step=1,sleep=300ms@forward:stage=1:step=1,raise@forward:step=2")
    waits = [float(line.split()[2]) for line in lines]
    assert [wait >= least for wait, least in zip(waits[2:], (0.5, 0.3), strict=True)] == [True, True]
    assert (status, sum(waits) < 10) == (1, True)
    assert "InjectedFault: raise@forward:step=2 of TAHQ_FAULTS" in errors
