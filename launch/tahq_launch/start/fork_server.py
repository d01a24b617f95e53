"""Local workers, forked from one process that has imported everything.

Importing torch and transformers keeps a core busy for several seconds. If every worker did it, start-up would take that
long times the number of workers, and the modules would be in memory as often. So the launcher first forks a server,
which imports everything while the launcher resolves the configuration, and from which the workers are forked. The
server computes nothing and starts no thread, so forking it is safe. When the launcher dies, the server and then the
workers die, too (`worker_lifetime`).

CUDA cannot be inherited once any import has initialised it, as some packages that transformers imports do (torchao,
bitsandbytes). Workers are then spawned instead, and import everything themselves.

The launcher sends lists of modules to import, and (command, path of its log) to start. The server answers with
(process id, None) for a started worker, and (process id, exit status) for one that has ended.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, Self

import torch

from tahq.errors import PeerLostError
from tahq_launch.start.worker_command import WorkerCommand

_FORK = multiprocessing.get_context("fork")
_SPAWN = multiprocessing.get_context("spawn")
_REAP_S = 1.0
"""Time between the server closing its end of the line and its exit status being known."""


class ForkServer:
    """The process that workers are forked from; as a context, it kills itself and all of them at its end.

    Create it while this process has one thread and no open files that workers must not inherit.
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
        """Start importing modules that workers need; returns at once."""
        with contextlib.suppress(ConnectionError):  # `start` reports it
            self._line.send(list(modules))

    def start(self, command: WorkerCommand, log_path: Path) -> int:
        """Fork a worker once the requested modules are imported; returns its process id.

        Raises:
            PeerLostError: the server has died, and with it all that was forked from it.
        """
        with contextlib.suppress(ConnectionError):  # the server may have sent something before it died
            self._line.send((command, log_path))
        while not self._is_lost:
            pid = self._listen()
            if pid is not None:
                return pid
        self._process.join(_REAP_S)
        status = self._process.exitcode
        end = f"was killed by signal {-status}" if status and status < 0 else f"has ended with status {status}"
        raise PeerLostError(
            f"the process that workers are forked from {'does not answer' if status is None else end}, so that no "
            f"tahq stage {command.stage} can be started; start the run again, with --resume if it has a checkpoint"
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
    context: ForkContext | SpawnContext | None = None  # unknown after each import, which may ask for CUDA
    try:
        while True:
            for ready in wait([line, *workers]):
                if ready is not line:
                    ended = workers.pop(ready)
                    ended.join()
                    line.send((ended.pid, ended.exitcode))
                elif isinstance(request := line.recv(), list):
                    context = None
                    _import(request)
                else:
                    context = context or (_SPAWN if _forks_lack_cuda() else _FORK)
                    worker = context.Process(target=_run, args=(*request, line, os.getcwd()), daemon=True)
                    worker.start()
                    workers[worker.sentinel] = worker
                    line.send((worker.pid, None))
    except (EOFError, ConnectionError):
        os._exit(0)  # do not wait for the workers; they notice


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        with contextlib.suppress(ImportError):  # the worker that needs it reports it
            importlib.import_module(module)


def _forks_lack_cuda() -> bool:
    """Whether this process, or one that it was forked from, has asked for CUDA; only a fork can tell."""
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

    network: contextlib.AbstractContextManager[None] = nullcontext()
    if command.namespace is not None:
        from tahq_netem.backends.namespaces import entered

        network = entered(command.namespace)
    with network:  # before any thread: a thread is in the namespace of the thread that starts it
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
