"""Named points of a run at which tests inject faults into the process that reaches them.

Nothing happens anywhere unless the environment says so. ``TAHQ_FAULTS`` lists faults, by commas::

    kill@prepared:stage=1:step=3, stop=20s@forward:stage=2, sleep=1s@committing, raise@snapshot:step=4

what               happens at the point
=================  =====================================================================================
``kill``           the process kills itself with SIGKILL: no handler, no clean-up
``stop=DURATION``  it stops itself with SIGSTOP; a helper process continues it after that time
``sleep=DURATION`` the thread that reached the point sleeps; the others go on
``raise``          `InjectedFault` is raised, which nothing in tahq expects

After the name, ``stage=`` and ``step=`` say where; what is left out matches any. A point that knows no stage
or step passes -1.

A fault happens once. ``TAHQ_FAULTS_FOLDER`` names a folder in which a file says that it has, so that it does not
happen again to the process that takes the place of a killed one, or to another of the run; what is listed twice
happens twice. The file holds the time (`time.time`) and the process, to measure how soon it was noticed.
Without a folder each process counts for itself.

Cost where nothing is planned: a call and a look into an empty dict, 0.1 µs.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from tahq.errors import ConfigError
from tahq.units import parse_duration

FAULTS: Final = "TAHQ_FAULTS"
FOLDER: Final = "TAHQ_FAULTS_FOLDER"

HANDSHAKE: Final = "handshake"
"""A worker has been assigned its stage, and its links are not yet up."""

FORWARD: Final = "forward"
"""A worker begins a micro-batch's forward."""

BACKWARD: Final = "backward"
"""A worker begins a micro-batch's backward."""

BEFORE_PREPARE: Final = "before-prepare"
"""A worker has all gradients of the step, and has not reported them."""

PREPARED: Final = "prepared"
"""A worker has sent PREPARE and waits for the decision."""

COMMITTING: Final = "committing"
"""A worker has the decision and has not changed its weights yet."""

SNAPSHOT: Final = "snapshot"
"""A worker has written its part of a snapshot, which is not yet durable and has no name."""

COMMIT_DECIDED: Final = "commit-decided"
"""The coordinator knows the decision; it stands nowhere yet."""

COMMIT_JOURNALLED: Final = "commit-journalled"
"""The coordinator's decision is durable; no worker knows of it."""

COMMIT_SENT: Final = "commit-sent"
"""The first of the workers has been sent the decision, the others have not."""

PUBLISHING: Final = "publishing"
"""All parts of a snapshot are durable, and the coordinator has heard of them; it is not declared complete yet."""

PUBLISHED: Final = "published"
"""A snapshot is what `latest` names, and no worker knows of it."""

NAMES: Final = (
    HANDSHAKE,
    FORWARD,
    BACKWARD,
    BEFORE_PREPARE,
    PREPARED,
    COMMITTING,
    SNAPSHOT,
    COMMIT_DECIDED,
    COMMIT_JOURNALLED,
    COMMIT_SENT,
    PUBLISHING,
    PUBLISHED,
)


class InjectedFault(Exception):
    """What the fault ``raise`` raises."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that shall happen.

    `position` is its place in the list, which tells it from an equal one; `stage` and `step` are -1 for any.
    """

    position: int
    text: str
    action: str
    duration_s: float
    point: str
    stage: int = -1
    step: int = -1

    def suits(self, stage: int, step: int) -> bool:
        """Whether this is the stage and the step that it is meant for."""
        return self.stage in (-1, stage) and self.step in (-1, step)


@dataclass(slots=True)
class _Planned:
    """The faults of this process by their points, and those of them that have happened where no folder knows."""

    faults: Mapping[str, tuple[Fault, ...]]
    folder: Path | None
    happened: set[int] = field(default_factory=set)

    def claim(self, fault: Fault) -> bool:
        """Whether it is this process's to do, now; True for one process, once."""
        if self.folder is None:
            is_first = fault.position not in self.happened
            self.happened.add(fault.position)
            return is_first
        return _make_marker(self.folder / marker_name(fault))


def reached(point: str, *, stage: int = -1, step: int = -1) -> None:
    """Say that this process has come to a point; what is planned for it happens before this returns.

    Args:
        point: one of `NAMES`.
        stage: the worker's, -1 if it has none yet or is none.
        step: the training step, from 0 on; of a snapshot, the committed steps behind it; -1 where there is none.

    Raises:
        InjectedFault: the fault ``raise``.
        ConfigError: the environment cannot be read; at the first point that is reached.
    """
    faults = _planned().faults.get(point)
    if faults:
        _let_happen(faults, stage, step)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The faults in a list as `FAULTS` holds it.

    Raises:
        ConfigError: an entry that is no fault; the message has it.
    """
    entries = [entry.strip() for entry in text.split(",")]
    return tuple(_parse_fault(position, entry) for position, entry in enumerate(entries) if entry)


def marker_name(fault: Fault) -> str:
    """Of the file that says that it has happened."""
    return f"{fault.position}-{fault.text}"


@cache
def _planned() -> _Planned:
    by_point: dict[str, tuple[Fault, ...]] = {}
    for fault in parse_faults(os.environ.get(FAULTS, "")):
        by_point[fault.point] = (*by_point.get(fault.point, ()), fault)
    folder = os.environ.get(FOLDER)
    return _Planned(by_point, Path(folder) if folder else None)


def _let_happen(faults: tuple[Fault, ...], stage: int, step: int) -> None:
    for fault in faults:
        if fault.suits(stage, step) and _planned().claim(fault):
            _happen(fault)


def _happen(fault: Fault) -> None:
    match fault.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            _stop_for(fault.duration_s)
        case "sleep":
            time.sleep(fault.duration_s)
        case _:
            raise InjectedFault(f"{fault.text} of {FAULTS}")


def _stop_for(duration_s: float) -> None:
    command = ["/bin/sh", "-c", f"sleep {duration_s}; kill -CONT {os.getpid()}"]
    with subprocess.Popen(command):
        os.kill(os.getpid(), signal.SIGSTOP)


def _make_marker(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{time.time()!r} {os.getpid()}\n")
    return True


def _parse_fault(position: int, text: str) -> Fault:
    what, at, where = text.partition("@")
    action, _, duration = what.partition("=")
    point, *conditions = where.split(":")
    if not at or action not in ("kill", "stop", "sleep", "raise"):
        raise _mistake(text, "kill, stop=DURATION, sleep=DURATION or raise, then @ and a point")
    if point not in NAMES:
        raise _mistake(text, f"one of the points {', '.join(NAMES)}")
    if (action in ("stop", "sleep")) != bool(duration):
        raise _mistake(text, "a duration after stop and sleep, as in stop=20s, and none after kill and raise")
    try:
        duration_s = parse_duration(duration) if duration else 0.0
    except ValueError as error:
        raise _mistake(text, str(error)) from None
    return Fault(position, text, action, duration_s, point, **_conditions(text, conditions))


def _conditions(text: str, conditions: list[str]) -> dict[str, int]:
    pairs = [condition.partition("=") for condition in conditions]
    values = {key: value for key, _, value in pairs}
    if not set(values) <= {"stage", "step"} or not all(value.isdecimal() for value in values.values()):
        raise _mistake(text, "after the point only :stage=NUMBER and :step=NUMBER")
    return {key: int(value) for key, value in values.items()}


def _mistake(text: str, expected: str) -> ConfigError:
    return ConfigError(f"{FAULTS}: cannot read {text!r}: expected {expected}")
