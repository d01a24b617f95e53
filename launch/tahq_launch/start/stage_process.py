"""One child process that serves a stage: started, watched, and always reaped.

Invariants:
- it has its own session, so Ctrl-C at the terminal reaches the launcher alone;
- its output is appended to the stage's log, and never appears on the terminal;
- after `kill` and `wait` neither it nor anything it started is left.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO, Protocol

from tahq_launch.start.fork_server import ForkedCommand, ForkServer

_TAIL_NBYTES = 8192


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """The command that starts a worker.

    `env` is added to this process's environment. With `forked_threads`, `argv` is a command line of `tahq`, run
    by a fork of a process that has everything imported, with this many torch threads, in the network namespace
    `namespace` if given. With `holds_stdin` the child's stdin is a pipe that stays open until it is asked to leave;
    otherwise it is empty. Either way it begins with `first_input`.
    """

    stage: int
    argv: tuple[str, ...]
    where: str
    """Host, for messages."""
    env: Mapping[str, str]
    forked_threads: int | None = None
    namespace: str | None = None
    holds_stdin: bool = False
    first_input: bytes = field(default=b"", repr=False)


class Child(Protocol):
    """A started process with its own session."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it has left by then."""

    def ask_to_leave(self) -> None:
        """Have it leave in order."""


class SpawnedChild:
    """A program that was started."""

    def __init__(self, command: WorkerCommand, log: BinaryIO) -> None:
        self._process = subprocess.Popen(
            command.argv,
            stdin=subprocess.PIPE if command.holds_stdin or command.first_input else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **command.env},
            start_new_session=True,
        )
        self._holds_stdin = command.holds_stdin
        if self._process.stdin is not None:
            self._say_first(self._process.stdin, command.first_input)

    def _say_first(self, stdin: IO[bytes], first_input: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has left already, and its log says why
            stdin.write(first_input)
            stdin.flush()
            if not self._holds_stdin:
                stdin.close()

    @property
    def pid(self) -> int:
        """Its process id (for a remote stage: of its ssh)."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has left by then."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def ask_to_leave(self) -> None:
        """SIGTERM, or for one that holds its stdin, the end of that."""
        if self._process.stdin is None or not self._holds_stdin:
            self._process.terminate()
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


class StageProcess:
    """A running worker.

    Args:
        command: what to run.
        log_path: what its stdout and stderr are appended to.
        forks: what a command with `forked_threads` is forked from.

    Raises:
        OSError: the program cannot be started.
        PeerLostError: what it would be forked from has died.
    """

    def __init__(self, command: WorkerCommand, log_path: Path, forks: ForkServer | None = None) -> None:
        self.command = command
        self.log_path = log_path
        with log_path.open("ab") as log:
            self._log_start = log.tell()
            self._child = self._start(command, log, forks)

    def _start(self, command: WorkerCommand, log: BinaryIO, forks: ForkServer | None) -> Child:
        if command.forked_threads is None:
            return SpawnedChild(command, log)
        if forks is None:
            raise AssertionError("local workers need a fork server")
        name = f"tahq stage {command.stage}"
        threads, namespace = command.forked_threads, command.namespace
        log_path = str(self.log_path)
        return forks.start(
            ForkedCommand(name, command.argv, log_path, threads, command.env, namespace, command.first_input)
        )

    @property
    def pid(self) -> int:
        """Process id of the child (for a remote stage: of its ssh)."""
        return self._child.pid

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._child.poll()

    def terminate(self) -> None:
        """Ask it to leave in order."""
        if self.poll() is None:
            self._child.ask_to_leave()

    def kill(self) -> None:
        """Make it leave, with everything that it started."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has left by then."""
        return self._child.wait(max(timeout_s, 0.0))

    def last_words(self, num_lines: int = 1) -> str:
        """The last lines that this child wrote, blank ones left out; empty if it wrote nothing."""
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - _TAIL_NBYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join([line.strip() for line in lines if line.strip()][-num_lines:])
