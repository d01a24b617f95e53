"""Named points of a run at which tests inject faults into the process that reaches them.

Nothing happens unless ``TAHQ_FAULTS`` lists faults, separated by commas::

    kill@prepared:stage=1:step=3, stop=20s@forward:stage=2, sleep=1s@committing, raise@snapshot:step=4

action             effect
=================  =====================================================================================
``kill``           the process kills itself with SIGKILL: no handler, no clean-up
``stop=DURATION``  it stops itself with SIGSTOP; a helper process continues it after that time
``sleep=DURATION`` the thread that reached the point sleeps; other threads continue
``raise``          `InjectedFault` is raised, which no code in tahq catches

After the name, ``stage=`` and ``step=`` restrict the fault; without them it matches any. A point without a stage
or step passes -1.

A fault happens once. ``TAHQ_FAULTS_FOLDER`` names a folder in which a file records that it has happened, so that it
happens neither to the process that replaces a killed one, nor to another process of the run; a fault listed twice
happens twice. The file holds the time (`time.time`) and the process id, to measure how soon it was noticed.
Without a folder each process counts for itself.

Cost without planned faults: a call and a look into an empty dict, 0.1 µs.
"""

import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from tahq.errors import ConfigError
from tahq.units import parse_duration

FAULTS: Final = "TAHQ_FAULTS"
FOLDER: Final = "TAHQ_FAULTS_FOLDER"

# In a worker:
HANDSHAKE: Final = "handshake"  # it has been assigned its stage; its links are not up yet
FORWARD: Final = "forward"  # it begins a micro-batch's forward
BACKWARD: Final = "backward"  # it begins a micro-batch's backward
BEFORE_PREPARE: Final = "before-prepare"  # it has all gradients of the step, and has not reported them
PREPARED: Final = "prepared"  # it has sent PREPARE and waits for the decision
COMMITTING: Final = "committing"  # it has the decision and has not changed its weights yet
SAMPLING: Final = "sampling"  # it has passed on the first token of samples, and begins the second
SNAPSHOT: Final = "snapshot"  # it has written its part of a checkpoint, which is not durable and has no name yet
# In the coordinator:
COMMIT_DECIDED: Final = "commit-decided"  # it has decided; nothing is written yet
COMMIT_JOURNALLED: Final = "commit-journalled"  # the decision is durable; no worker has received it
COMMIT_SENT: Final = "commit-sent"  # only the first worker has been sent the decision
PUBLISHING: Final = "publishing"  # all parts of a checkpoint are durable; it is not declared complete yet
PUBLISHED: Final = "published"  # `latest` names the checkpoint; no worker has been told

NAMES: Final = (
    *(HANDSHAKE, FORWARD, BACKWARD, BEFORE_PREPARE, PREPARED, COMMITTING, SAMPLING, SNAPSHOT),
    *(COMMIT_DECIDED, COMMIT_JOURNALLED, COMMIT_SENT, PUBLISHING, PUBLISHED),
)


_FAULT = re.compile(
    rf"(?:(?P<action>kill|raise)|(?P<delay>stop|sleep)=(?P<duration>[^@]+))@(?P<point>{'|'.join(NAMES)})"
    r"(?::stage=(?P<stage>\d+)|:step=(?P<step>\d+))*"
)


class InjectedFault(Exception):
    """Raised by the fault ``raise``."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A planned fault; `position` in the list distinguishes equal ones, `stage` and `step` are -1 for any."""

    position: int
    text: str
    action: str
    duration_s: float
    point: str
    stage: int
    step: int


def reached(point: str, *, stage: int = -1, step: int = -1) -> None:
    """Mark that this process has reached a point; faults planned for it happen before this returns.

    Args:
        point: one of `NAMES`.
        stage: the worker's, -1 if it has none.
        step: the training step, from 0; for a checkpoint, the committed steps before it; -1 where there is none.

    Raises:
        InjectedFault: the fault ``raise``.
        ConfigError: `FAULTS` is malformed; at the first point that is reached.
    """
    for fault in _planned().get(point, ()):
        if fault.stage in (-1, stage) and fault.step in (-1, step) and _claim(fault):
            _inject(fault)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The faults in a list as in `FAULTS`; ConfigError names a malformed entry."""
    entries = [entry.strip() for entry in text.split(",")]
    return tuple(_parse_fault(position, entry) for position, entry in enumerate(entries) if entry)


@cache
def _planned() -> dict[str, list[Fault]]:
    by_point: dict[str, list[Fault]] = {}
    for fault in parse_faults(os.environ.get(FAULTS, "")):
        by_point.setdefault(fault.point, []).append(fault)
    return by_point


@cache
def _happened_here() -> set[int]:
    return set()


def _claim(fault: Fault) -> bool:
    """Whether this process is to inject the fault now; True once, in one process."""
    folder = os.environ.get(FOLDER)
    if not folder:
        is_first = fault.position not in _happened_here()
        _happened_here().add(fault.position)
        return is_first
    try:
        with (Path(folder) / f"{fault.position}-{fault.text}").open("x") as marker:
            marker.write(f"{time.time()!r} {os.getpid()}\n")
    except FileExistsError:
        return False
    return True


def _inject(fault: Fault) -> None:
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "stop":
        command = ["/bin/sh", "-c", f"sleep {fault.duration_s}; kill -CONT {os.getpid()}"]
        with subprocess.Popen(command):
            os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action == "sleep":
        time.sleep(fault.duration_s)
    else:
        raise InjectedFault(f"{fault.text} of {FAULTS}")


def _parse_fault(position: int, text: str) -> Fault:
    found = _FAULT.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"{FAULTS}: cannot read {text!r}: expected kill, stop=DURATION, sleep=DURATION or raise, then @ and one of "
            f"the points {', '.join(NAMES)}, then optionally :stage=NUMBER and :step=NUMBER"
        )
    part = found.groupdict()
    try:
        duration_s = parse_duration(part["duration"]) if part["duration"] else 0.0
    except ValueError as error:
        raise ConfigError(f"{FAULTS}: cannot read {text!r}: expected a duration: {error}") from None
    action, stage, step = part["action"] or part["delay"], part["stage"] or -1, part["step"] or -1
    return Fault(position, text, action, duration_s, part["point"], int(stage), int(step))
