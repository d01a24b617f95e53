"""A tahq command as a real process; each line of its output is kept with the time of its arrival."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from support.runs import environment
from support.warm_process import WarmProcess


@dataclass(frozen=True, slots=True)
class Line:
    at_s: float
    """`time.time` of its arrival."""
    source: str
    text: str


class Program:
    """A running command; leaving its context kills it."""

    def __init__(self, name: str, process: subprocess.Popen[str] | WarmProcess) -> None:
        self.name = name
        self.process = process
        self.lines: list[Line] = []
        pipes = (process.stdout, process.stderr)
        self._readers = [threading.Thread(target=self._read, args=(pipe,), daemon=True) for pipe in pipes]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self.process.poll()

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)

    def send_signal(self, number: int) -> None:
        if self.status is None:
            os.kill(self.pid, number)

    def line_with(self, part: str, timeout_s: float) -> str:
        """Wait for a line that contains `part`; AssertionError if the program ends first, or time is up."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for line in tuple(self.lines):
                if part in line.text:
                    return line.text
            assert self.status is None, f"{self.name} has ended with {self.status}:\n{self.text}"
            time.sleep(0.02)
        raise AssertionError(f"{self.name} printed no {part!r} within {timeout_s} s:\n{self.text}")

    def close(self) -> None:
        """Kill it if it runs, and read the rest of its output."""
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
    """Start a tahq console script with everything imported already, `extra` added to its environment."""
    return Program(name, WarmProcess(program, arguments, folder, {**environment(), **(extra or {})}, namespace))


def cold(name: str, folder: Path, argv: Sequence[str], extra: Mapping[str, str]) -> Program:
    """Start any program from nothing, where something must happen before Python imports anything."""
    pipe, env = subprocess.PIPE, {**environment(), **extra}
    process = subprocess.Popen(argv, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
    return Program(name, process)
