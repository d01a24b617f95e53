"""The workers that a launcher has started: each one a process that is watched, and always reaped.

Invariants:
- a worker has its own session, so Ctrl-C at the terminal reaches the launcher alone;
- its output is appended to the stage's log, and never appears on the terminal;
- after `kill` and `wait` neither it nor anything it started is left; at the end of a `Fleet`, no worker is.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO, Self

from tahq.errors import UserError
from tahq_launch.start.fork_server import ForkServer
from tahq_launch.start.worker_command import WorkerCommand
from tahq_launch.start.worker_lifetime import RestartTimes

LEAVE_S = 5.0
"""Time for workers to exit by themselves after the coordinator has ended the run."""
TERMINATE_S = 3.0
"""Time between SIGTERM and SIGKILL."""
_TAIL_NBYTES = 8192

ExitListener = Callable[[int, int, str], None]
"""Called with (stage, exit status, last log line) of a worker that has exited."""


class StageProcess:
    """A running worker, started as a program or forked from `forks`; its output is appended to `log_path`."""

    def __init__(self, command: WorkerCommand, log_path: Path, forks: ForkServer | None = None) -> None:
        self.command = command
        self.log_path = log_path
        with log_path.open("ab") as log:
            self._log_start = log.tell()
            child = _SpawnedChild(command, log) if forks is None else _ForkedChild(command, log_path, forks)
        self._child = child
        self.pid = child.pid
        """Process id of the child (for a remote stage: of its ssh)."""

    def wait(self, timeout_s: float = 0.0) -> int | None:
        """Exit status, negative for a signal; None if it still runs after the timeout."""
        return self._child.wait(max(timeout_s, 0.0))

    def terminate(self) -> None:
        """Ask it to exit in order."""
        if self.wait() is None:
            self._child.ask_to_leave()

    def kill(self) -> None:
        """Kill it, with everything that it started."""
        if self.wait() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The last line that this child wrote to its log that is not blank; empty if it wrote nothing."""
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - _TAIL_NBYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class _SpawnedChild:
    """A program that was started."""

    def __init__(self, command: WorkerCommand, log: BinaryIO) -> None:
        self._process = subprocess.Popen(
            command.argv,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **command.env},
            start_new_session=True,
        )
        self._holds_stdin = command.holds_stdin
        self.pid = self._process.pid
        with contextlib.suppress(BrokenPipeError):  # it has exited already, and its log says why
            self._stdin.write(command.first_input)
            self._stdin.flush()
            if not command.holds_stdin:
                self._stdin.close()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None, "a pipe was asked for"
        return self._process.stdin

    def wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def ask_to_leave(self) -> None:
        """Send SIGTERM; if it holds its stdin, close that instead, which reaches a worker behind ssh."""
        if not self._holds_stdin:
            self._process.terminate()
            return
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()


class _ForkedChild:
    """A local worker of the fork server."""

    def __init__(self, command: WorkerCommand, log_path: Path, forks: ForkServer) -> None:
        self._forks = forks
        self.pid = forks.start(command, log_path)

    def wait(self, timeout_s: float) -> int | None:
        return self._forks.status_of(self.pid, timeout_s)

    def ask_to_leave(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)


class Fleet:
    """The workers started from here; as a context, it ends with none of them running.

    `on_exit` is called once for each worker that exits.
    """

    def __init__(self, on_exit: ExitListener, forks: ForkServer | None = None, max_restarts: int = 0) -> None:
        self._on_exit = on_exit
        self._forks = forks
        self._running: list[StageProcess] = []
        self._commands: dict[int, tuple[WorkerCommand, Path]] = {}
        self._restarts = RestartTimes(max_restarts)
        self._due: dict[int, float] = {}
        """Times at which stages are to be restarted."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(LEAVE_S if error is None else 0.0)

    def start(self, command: WorkerCommand, log_path: Path) -> None:
        """Start one worker.

        Raises:
            UserError: the program cannot be started (ssh is not installed, say).
            PeerLostError: the fork server has died.
        """
        self._commands[command.stage] = (command, log_path)
        forks = self._forks if command.forked_threads is not None else None
        try:
            self._running.append(StageProcess(command, log_path, forks))
        except OSError as error:
            raise UserError(f"cannot start {command.argv[0]} for stage {command.stage}: {error.strerror}") from error

    def restart(self, stage: int) -> bool:
        """Schedule a restart of a stage's worker, and kill the old one; False: it was not started from here.

        PeerLostError if no restarts are left.
        """
        if stage not in self._commands:
            return False
        for process in [process for process in self._running if process.command.stage == stage]:
            process.kill()
            process.wait(TERMINATE_S)
            self._running.remove(process)
        self._due[stage] = time.monotonic() + self._restarts.delay_s(stage)
        return True

    def tick(self) -> None:
        """Report workers that have exited, and start those whose restart is due."""
        for stage in [stage for stage, due_s in self._due.items() if time.monotonic() >= due_s]:
            del self._due[stage]
            self.start(*self._commands[stage])
        for process in tuple(self._running):
            status = process.wait()
            if status is not None:
                self._running.remove(process)
                line, log = process.last_words(), f"its log {process.log_path}"
                self._on_exit(process.command.stage, status, f"{log} ends with: {line}" if line else f"{log} is empty")

    def close(self, leave_s: float) -> None:
        """Wait for workers to exit, then terminate, then kill them."""
        self._wait(leave_s)
        for process in self._running:
            process.terminate()
        self._wait(TERMINATE_S)
        for process in self._running:
            process.kill()
            process.wait(TERMINATE_S)
        self._running.clear()

    def _wait(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        self._running = [each for each in self._running if each.wait(deadline_s - time.monotonic()) is None]
