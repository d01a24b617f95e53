"""Strangers at every port of a run: they are refused, none of their bytes is read, training is undisturbed."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from support.processes import listening_ports, workers
from support.strangers import intruders, scan, silent_connections

from chaos.row import Attempt, Figures, Row
from chaos.starting import launched, small_run
from tahq.comm.keys import default_key_path, new_key_pair, read_key_file

NUM_STEPS = 24
NUM_SILENT = 1000
STALL_S = 5.0
Strangers = Callable[[list[int]], AbstractContextManager[object]]
"""A context in which they are at these ports."""


def _silent(ports: list[int]) -> AbstractContextManager[object]:
    """A thousand connections in all, over the run's ports."""
    return silent_connections(ports, NUM_SILENT // len(ports) + 1)


@contextmanager
def _scanners(ports: list[int]) -> Iterator[None]:
    for port in ports:
        scan(port)
    yield


def _unknown_keys(ports: list[int]) -> AbstractContextManager[None]:
    """They know the coordinator's key, but no member has theirs."""
    return _intruders(ports, [read_key_file(default_key_path()).public])


def _wrong_keys(ports: list[int]) -> AbstractContextManager[None]:
    return _intruders(ports, [new_key_pair().public])


def _without_curve(ports: list[int]) -> AbstractContextManager[None]:
    return _intruders(ports, [])


@contextmanager
def _intruders(ports: list[int], server_keys: list[str]) -> Iterator[None]:
    """ZMQ sockets that send what a member would, with these server keys and without CURVE."""
    with intruders(ports, server_keys) as sockets:
        yield
        assert not any(socket.poll(0) for socket in sockets), "a stranger was answered"


def disturbed_by(strangers: Strangers) -> Callable[[Attempt], Figures]:
    """A run that such strangers disturb from an early step to its end."""

    def attempt(attempt: Attempt) -> Figures:
        config = small_run(NUM_STEPS)
        with launched(attempt.folder, config) as scene:
            scene.wait_for_step(attempt.dice.randint(1, 4))
            processes, began_s = (scene.leader.pid, *workers(scene.leader.pid)), time.time()
            ports = [port for pid in processes for port in listening_ports(pid)]
            with strangers(ports):
                scene.wait_for_end(120)
            measured = attempt.finish(scene, config, began_s)
            logs = "".join(path.read_text() for path in (scene.run / "logs").iterdir())
        assert "stranger" not in logs, "a stranger's message was read"
        assert scene.restarts == 0
        stall_s = measured["stall_s"]
        assert stall_s <= STALL_S, f"a step took {stall_s:.1f} s longer than usual"
        return {"ports": len(ports), "restarts": 0, "steps_lost": measured["steps_lost"], "stall_s": stall_s}

    return attempt


_SHOWS = "refused; no application byte read or answered; BX, and no step much longer"
STRANGER_ROWS = (
    Row("key-unknown", "ZMQ sockets whose keys no member has, at every port", _SHOWS, disturbed_by(_unknown_keys), 8),
    Row("key-wrong", "ZMQ sockets with a wrong server key, at every port", _SHOWS, disturbed_by(_wrong_keys), 8),
    Row("no-curve", "ZMQ sockets without CURVE, at every port", _SHOWS, disturbed_by(_without_curve), 8),
    Row("tcp-scanner", "a scanner of plain TCP, at every port", _SHOWS, disturbed_by(_scanners), 8),
    Row("silent-1000", "1,000 connections that never speak, over all ports", _SHOWS, disturbed_by(_silent), 10),
)
