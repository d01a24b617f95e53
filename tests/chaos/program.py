"""One of tahq's commands as a real process, whose lines are kept with the time at which they came."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from support.runs import environment
from support.warm_process import WarmProcess


@dataclass(frozen=True, slots=True)
class Line:
    """What a program said, and when it was heard."""

    at_s: float
    """`time.time`."""
    source: str
    text: str


class _Running(Protocol):
    stdout: TextIO
    stderr: TextIO
    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class Program:
    """A running command; as a context, it is killed when that ends.

    Args:
        name: for messages.
        process: started with pipes for stdout and stderr, as text.
    """

    def __init__(self, name: str, process: _Running) -> None:
        self.name = name
        self.process = process
        self.lines: list[Line] = []
        self._readers = [
            threading.Thread(target=self._read, args=(pipe,), daemon=True) for pipe in (process.stdout, process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self.process.poll()

    @property
    def text(self) -> str:
        """All that it has said so far."""
        return "\n".join(line.text for line in self.lines)

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.status is None:
            os.kill(self.pid, number)

    def line_with(self, part: str, timeout_s: float) -> str:
        """The first line that has this in it; AssertionError if none comes in time."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for line in tuple(self.lines):
                if part in line.text:
                    return line.text
            assert self.status is None, f"{self.name} has ended with {self.status}:\n{self.text}"
            time.sleep(0.02)
        raise AssertionError(f"{self.name} did not say {part!r} in {timeout_s} s:\n{self.text}")

    def close(self) -> None:
        """Kill it if it runs, and read what it said to the end."""
        self.send_signal(signal.SIGKILL)
        self.process.wait(10)
        for reader in self._readers:
            reader.join(5)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, pipe: TextIO) -> None:
        with pipe, suppress(ValueError):
            for text in pipe:
                self.lines.append(Line(time.time(), self.name, text.rstrip("\n")))


def warm(
    name: str,
    folder: Path,
    program: str,
    *arguments: str,
    extra: Mapping[str, str] | None = None,
    namespace: str | None = None,
) -> Program:
    """One of tahq's console scripts with everything imported already, `extra` added to its environment."""
    process = WarmProcess(program, arguments, folder, {**environment(), **(extra or {})}, namespace)
    return Program(name, process)


def cold(name: str, folder: Path, argv: Sequence[str], *, extra: Mapping[str, str] | None = None) -> Program:
    """Any program, from nothing: for what must be so before Python imports anything."""
    process = subprocess.Popen(
        argv,
        cwd=folder,
        env={**environment(), **(extra or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Program(name, process)
