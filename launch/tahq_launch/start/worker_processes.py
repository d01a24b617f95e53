"""The workers that a launcher starts: forks of one process that has imported everything, or programs such as ssh.

Importing torch and transformers keeps a core busy for several seconds. If every worker did it, start-up would take that
long times the number of workers, and the modules would be in memory as often. So the launcher, which needs them as
well, imports them and forks a server, from which local workers are forked; it loads numba while the launcher plans. The
server computes nothing and starts no thread, so forking it is safe. When the launcher dies, the server and then the
workers die, too (`worker_lifetime`).

CUDA cannot be inherited once any import has initialised it, as some packages that transformers imports do (torchao,
bitsandbytes). Workers are then spawned instead, and import everything themselves.

Invariants:
- a worker has its own session, so Ctrl-C at the terminal reaches the launcher alone;
- its output is appended to the stage's log, and never appears on the terminal;
- after `kill` and `wait` neither it nor anything it started is left; at the end of a `Fleet`, no worker is.
"""

import contextlib
import multiprocessing
import os
import pkgutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, Self

import torch

from tahq.errors import PeerLostError, UserError
from tahq_launch.start.worker_command import WorkerCommand
from tahq_launch.start.worker_lifetime import RestartTimes

LEAVE_S = 5.0
"""Time for workers to exit by themselves after the coordinator has ended the run."""
TERMINATE_S = 3.0
"""Time between SIGTERM and SIGKILL."""
_TAIL_NBYTES = 8192
_FORK = multiprocessing.get_context("fork")
_SPAWN = multiprocessing.get_context("spawn")

ExitListener = Callable[[int, int, str], None]
"""Called with (stage, exit status, last log line) of a worker that has exited."""


# -- the fork server -------------------------------------------------------------------------------


class ForkServer:
    """The process that workers are forked from; it and all of them are killed when this context ends.

    Create it while this process has one thread and no open files that workers must not inherit. The launcher sends it
    lists of modules to import, and (command, path of its log) to start; it answers with (process id, None) for a
    started worker, and (process id, exit status) for one that has ended.
    """

    def __init__(self) -> None:
        self._statuses: dict[int, int] = {}
        self._is_lost = False
        self._line, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_serve, args=(self._line, theirs))
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()
        self._process.kill()
        self._process.join()

    def import_modules(self, modules: Sequence[str]) -> None:
        """Start importing modules that workers need, and calling functions (``module:function``); returns at once."""
        with contextlib.suppress(ConnectionError):  # `start` reports it
            self._line.send(list(modules))

    def start(self, command: WorkerCommand, log_path: Path) -> int:
        """Fork a worker once the requested modules are imported: its process id; PeerLostError if the server died."""
        with contextlib.suppress(ConnectionError):  # the server may have sent something before it died
            self._line.send((command, log_path))
        while not self._is_lost:
            pid = self._listen()
            if pid is not None:
                return pid
        self._process.join(1.0)  # it closes its end of the line a little before its status is known
        status = self._process.exitcode
        end = f"was killed by signal {-status}" if status and status < 0 else f"ended with status {status}"
        raise PeerLostError(
            f"the process that workers are forked from {'does not answer' if status is None else end}, so the worker "
            f"of stage {command.stage} cannot be started; start the run again, with --resume if it has a checkpoint"
        )

    def status_of(self, pid: int, timeout_s: float = 0.0) -> int | None:
        """Exit status of a worker, negative for a signal; None if it still runs after the timeout."""
        deadline_s = time.monotonic() + timeout_s
        while pid not in self._statuses and not self._is_lost:
            if not self._line.poll(max(0.0, deadline_s - time.monotonic())):
                return None
            self._listen()
        return self._statuses.get(pid, -signal.SIGKILL)  # children of a lost server are killed

    def _listen(self) -> int | None:
        """Take the server's next message; returns the process id of a worker that has started."""
        try:
            pid, status = self._line.recv()
        except (EOFError, ConnectionResetError):
            self._is_lost = True
            return None
        if status is None:
            return int(pid)
        self._statuses[pid] = status
        return None


def _serve(launchers_end: Connection, line: Connection) -> NoReturn:
    """In the server: obey the launcher, report exited workers, and exit when the launcher is gone."""
    launchers_end.close()
    os.setsid()
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's signals are for the launcher
        signal.signal(number, signal.SIG_IGN)
    _name_this_process("tahq forks")
    workers: dict[Any, BaseProcess] = {}  # by what becomes ready when they have ended
    context: ForkContext | SpawnContext | None = None  # unknown after each import, which may initialise CUDA
    try:
        while True:
            for ready in wait([line, *workers]):
                if ready is not line:
                    ended = workers.pop(ready)
                    ended.join()
                    line.send((ended.pid, ended.exitcode))
                elif isinstance(request := line.recv(), list):
                    context = None
                    for name in request:
                        with contextlib.suppress(ImportError):  # the worker that needs it reports it
                            needed = pkgutil.resolve_name(name)
                            if callable(needed):
                                needed()
                else:
                    context = context or (_SPAWN if _forks_lack_cuda() else _FORK)
                    worker = context.Process(target=_run, args=(*request, line, os.getcwd()), daemon=True)
                    worker.start()
                    workers[worker.sentinel] = worker
                    line.send((worker.pid, None))
    except (EOFError, ConnectionError):
        os._exit(0)  # do not wait for the workers; they notice


def _forks_lack_cuda() -> bool:
    """Whether CUDA is initialised here or in a parent, so that forks cannot use it; only a fork can tell."""
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def _run(command: WorkerCommand, log_path: Path, servers_line: Connection, folder: str) -> NoReturn:
    """In the worker: new session, log, perhaps a network namespace; then run the command."""
    servers_line.close()
    os.chdir(folder)  # a spawned worker begins where the launcher did
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _redirect(log_path, command.first_input)
    _name_this_process(f"tahq stage {command.stage}")
    os.environ.update(command.env)
    torch.set_num_threads(command.forked_threads or 1)  # its libraries have read the environment before
    sys.argv = ["tahq", *command.argv]
    from tahq_launch.cli import main

    with contextlib.ExitStack() as stack:
        if command.namespace is not None:  # before any thread: a thread is in the namespace of its parent
            from tahq_netem.backends.namespaces import entered

            stack.enter_context(entered(command.namespace))
        sys.exit(main())


def _name_this_process(name: str) -> None:
    """For ps and top."""
    Path("/proc/self/comm").write_text(name)


def _redirect(log_path: Path, first_input: bytes) -> None:
    """Append stdout and stderr to the log; stdin holds `first_input`."""
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    stdin, end = os.pipe()
    os.write(end, first_input)  # far below the capacity of a pipe
    os.close(end)
    for source, target in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(stdin)


# -- in the launcher -------------------------------------------------------------------------------


class StageProcess(ABC):
    """A running worker, whose output is appended to `log_path`; `pid` is of the child (for a remote stage its ssh)."""

    pid: int

    def __init__(self, stage: int, log_path: Path) -> None:
        self.stage = stage
        self.log_path = log_path
        log_path.touch()
        self._log_start = log_path.stat().st_size

    @abstractmethod
    def wait(self, timeout_s: float = 0.0) -> int | None:
        """Exit status, negative for a signal; None if it still runs after the timeout."""

    @abstractmethod
    def terminate(self) -> None:
        """Ask it to exit cleanly."""

    def kill(self) -> None:
        """Kill it, with everything that it started."""
        if self.wait() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def last_line(self) -> str:
        """The last line that this child wrote to its log, blank ones aside; empty if it wrote nothing."""
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - _TAIL_NBYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class StartedProgram(StageProcess):
    """A worker that was started as a program."""

    def __init__(self, command: WorkerCommand, log_path: Path) -> None:
        super().__init__(command.stage, log_path)
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command.argv,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **command.env},
                start_new_session=True,
            )
        self.pid = self._process.pid
        assert self._process.stdin is not None, "a pipe was asked for"
        self._stdin, self._holds_stdin = self._process.stdin, command.holds_stdin
        with contextlib.suppress(BrokenPipeError):  # it has exited already, and its log says why
            self._stdin.write(command.first_input)
            self._stdin.flush()
            if not command.holds_stdin:
                self._stdin.close()

    def wait(self, timeout_s: float = 0.0) -> int | None:
        """See `StageProcess.wait`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Send SIGTERM; if it holds its stdin, close that instead, which reaches a worker behind ssh."""
        if not self._holds_stdin:
            self._process.terminate()
            return
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()


class _ForkedWorker(StageProcess):
    """A local worker of the fork server."""

    def __init__(self, command: WorkerCommand, log_path: Path, forks: ForkServer) -> None:
        super().__init__(command.stage, log_path)
        self._forks = forks
        self.pid = forks.start(command, log_path)

    def wait(self, timeout_s: float = 0.0) -> int | None:
        return self._forks.status_of(self.pid, timeout_s)

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.wait() is None:
                os.kill(self.pid, signal.SIGTERM)


class Fleet:
    """The workers started from here; when this context ends, all of them have ended.

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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(LEAVE_S if kind is None else 0.0)

    def start(self, command: WorkerCommand, log_path: Path) -> None:
        """Start one worker; UserError if its program (ssh, say) cannot be started."""
        self._commands[command.stage] = (command, log_path)
        try:
            if self._forks is not None and command.forked_threads is not None:
                self._running.append(_ForkedWorker(command, log_path, self._forks))
            else:
                self._running.append(StartedProgram(command, log_path))
        except OSError as error:
            raise UserError(f"cannot start {command.argv[0]} for stage {command.stage}: {error.strerror}") from error

    def restart(self, stage: int) -> bool:
        """Schedule a restart of a stage's worker, and kill the old one; False: it was not started from here.

        PeerLostError if no restarts are left.
        """
        if stage not in self._commands:
            return False
        for process in [process for process in self._running if process.stage == stage]:
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
                line, log = process.last_line(), f"its log {process.log_path}"
                self._on_exit(process.stage, status, f"{log} ends with: {line}" if line else f"{log} is empty")

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
        self._running = [each for each in self._running if each.wait(max(0, deadline_s - time.monotonic())) is None]
