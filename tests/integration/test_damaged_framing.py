"""Bytes inserted below CURVE into the TCP connections of a run: links are made anew, and every bit stays the same."""

import ctypes
import os
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from support.processes import wait_until, workers
from support.runs import Run, assert_same_run, start, tiny, train, write_config

HUGE_FRAME, ONES = bytes.fromhex("020000000fffffffff"), b"\xff" * 30
PIDFD_GETFD = 438
CONFIG = tiny(
    run={"peer_timeout": "6s"},
    model={"num_layers": 2, "hidden_size": 32},
    pipeline={"stages": 2},
    training={"steps": 30},
    wire={"activations": "tah", "gradients": "fixed:bits=6"},
    emulate={"delay": "20ms"},
)


def connections(pid: int) -> Iterator[socket.socket]:
    """The TCP connections of another process, as sockets of this one."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    with closing(os.fdopen(process)):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            fd = libc.syscall(PIDFD_GETFD, process, int(entry.name), 0)
            if fd < 0:
                pytest.skip(f"no access to another process's sockets: {os.strerror(ctypes.get_errno())}")
            try:
                connection = socket.socket(fileno=fd)
            except OSError:  # no socket
                os.close(fd)
                continue
            with connection, suppress(OSError):  # not connected
                if connection.family != socket.AF_UNIX and connection.getpeername():
                    yield connection


@pytest.mark.acceptance
def test_damaged_framing_in_a_whole_run_changes_nothing(tmp_path):
    write_config(tmp_path, CONFIG)
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    launcher = start(tmp_path, "tahq-launch", "cluster.yaml")

    def has_steps(number: int) -> bool:
        return metrics.exists() and metrics.read_text().count("\n") >= number

    try:
        wait_until(lambda: has_steps(3), 60, "three steps")
        processes = (launcher.pid, *workers(launcher.pid))
        assert len(processes) == 3
        for pid, damage, step in zip(processes, (HUGE_FRAME, ONES, HUGE_FRAME), (6, 9, 12), strict=True):
            assert sum(connection.send(damage) for connection in connections(pid)) >= 2 * len(damage)
            wait_until(lambda step=step: has_steps(step), 60, f"step {step}")
        stdout, stderr = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    run = Run(metrics.parent, launcher.returncode, stdout, stderr)
    assert run.returncode == 0, stdout + stderr
    assert_same_run(run, train(tmp_path / "calm", CONFIG))
