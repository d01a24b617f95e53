"""Local workers, forked from one process that has imported everything.

Importing torch and transformers keeps a core busy for several seconds. If every worker did it, start-up would take that
long times the number of workers, and the modules would be in memory as often. So the launcher first forks a server,
which imports everything while the launcher resolves the configuration, and from which the workers are forked. The
server computes nothing and starts no thread, so forking it is safe. When the launcher dies, the server and then the
workers die, too (`worker_lifetime`).

CUDA cannot be inherited once any import has initialised it, as some packages that transformers imports do (torchao,
bitsandbytes). Workers are then spawned instead, and import everything themselves.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, Self

import torch

from tahq.errors import PeerLostError

_FORK = multiprocessing.get_context("fork")
_SPAWN = multiprocessing.get_context("spawn")
_BURY_S = 1.0
"""From when a process has closed its end of a line until its status is there."""


@dataclass(frozen=True, slots=True)
class ForkedCommand:
    """A command line of `tahq` for a process that has everything imported.

    Attributes:
        name: process name in ps, at most 15 letters.
        arguments: what follows `tahq`.
        log_path: file to which its stdout and stderr are appended.
        threads: for torch's operations.
        environment: added to the launcher's.
        namespace: its network namespace; None: the launcher's.
        first_input: the content of its stdin.
    """

    name: str
    arguments: tuple[str, ...]
    log_path: str
    threads: int
    environment: Mapping[str, str]
    namespace: str | None = None
    first_input: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class _Started:
    pid: int


@dataclass(frozen=True, slots=True)
class _Exited:
    pid: int
    status: int


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

    @property
    def pid(self) -> int:
        """Its process id."""
        return _known(self._process.pid)

    def import_modules(self, modules: Sequence[str]) -> None:
        """Start importing modules that workers need; returns at once."""
        with contextlib.suppress(ConnectionError):  # `start` says it
            self._line.send(tuple(modules))

    def start(self, command: ForkedCommand) -> "ForkedChild":
        """Fork a process once the requested modules are imported.

        Raises:
            PeerLostError: the server has died, and with it all that was forked from it.
        """
        with contextlib.suppress(ConnectionError):  # it may have said something before it died
            self._line.send(command)
        while not self._is_lost:
            said = self._listen()
            if isinstance(said, _Started):
                return ForkedChild(self, said.pid)
        raise PeerLostError(
            f"the process that workers are forked from {self._end()}, so that no {command.name} can be started; "
            "start the run again, with --resume if it has a snapshot"
        )

    def _end(self) -> str:
        """How the server has died, in words."""
        self._process.join(_BURY_S)
        status = self._process.exitcode
        if status is None:
            return "does not answer"
        return f"was killed by signal {-status}" if status < 0 else f"has ended with status {status}"

    def status_of(self, pid: int, timeout_s: float = 0.0) -> int | None:
        """Exit status of a child, negative for a signal; None if it still runs after so long."""
        deadline_s = time.monotonic() + timeout_s
        while pid not in self._statuses and not self._is_lost:
            if not self._line.poll(max(0.0, deadline_s - time.monotonic())):
                return None
            self._listen()
        return self._statuses.get(pid, -signal.SIGKILL)  # children of a lost server are killed

    def _listen(self) -> _Started | _Exited | None:
        """What the server says next; None when it is gone."""
        try:
            said: _Started | _Exited = self._line.recv()
        except (EOFError, ConnectionResetError):
            self._is_lost = True
            return None
        if isinstance(said, _Exited):
            self._statuses[said.pid] = said.status
        return said


@dataclass(frozen=True, slots=True)
class ForkedChild:
    """A process that a fork server has started.

    Attributes:
        server: is told how it ends.
        pid: its process id.
    """

    server: ForkServer
    pid: int

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self.server.status_of(self.pid)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has left by then."""
        return self.server.status_of(self.pid, timeout_s) is not None

    def ask_to_leave(self) -> None:
        """SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)


def _serve(launchers_end: Connection, line: Connection) -> NoReturn:
    """In the server: obey the launcher, report exited children, and exit when the launcher is gone."""
    launchers_end.close()
    os.setsid()
    for number in (signal.SIGINT, signal.SIGHUP):  # what a terminal says is for the launcher
        signal.signal(number, signal.SIG_IGN)
    _name_this_process("tahq forks")
    server = _Server(line)
    try:
        while True:
            for ready in wait([line, *server.children]):
                if ready is line:
                    server.obey()
                else:
                    server.bury(server.children.pop(ready))
    except (EOFError, ConnectionError):
        os._exit(0)  # do not wait for the children; they notice


class _Server:
    """What the server does for the launcher at the other end of a line."""

    def __init__(self, line: Connection) -> None:
        self.children: dict[Any, BaseProcess] = {}
        """By what is ready when they have left."""
        self._line = line
        self._maker: ForkContext | SpawnContext | None = None  # of processes; None: to be found out, after an import

    def obey(self) -> None:
        """Start what is asked for, or import it."""
        request: ForkedCommand | tuple[str, ...] = self._line.recv()
        if isinstance(request, ForkedCommand):
            self._start(request)
            return
        self._maker = None
        for module in request:
            with contextlib.suppress(ImportError):  # the worker that needs it says it
                importlib.import_module(module)

    def bury(self, child: BaseProcess) -> None:
        """Tell how a child has ended."""
        child.join()
        self._line.send(_Exited(_known(child.pid), _known(child.exitcode)))

    def _start(self, command: ForkedCommand) -> None:
        if self._maker is None:
            self._maker = _SPAWN if _forks_lack_cuda() else _FORK
        child = self._maker.Process(target=_run, args=(command, self._line, os.getcwd()), daemon=True)
        child.start()
        self.children[child.sentinel] = child
        self._line.send(_Started(_known(child.pid)))


def _forks_lack_cuda() -> bool:
    """Whether this process, or one that it was forked from, has asked for CUDA. Only a fork is told."""
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def _run(command: ForkedCommand, servers_line: Connection, folder: str) -> NoReturn:
    """In the child: new session, log, perhaps a network namespace; then run the command."""
    servers_line.close()
    os.chdir(folder)  # one that is spawned begins where the launcher did
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _redirect(command.log_path, command.first_input)
    _name_this_process(command.name)
    os.environ.update(command.environment)
    torch.set_num_threads(command.threads)  # its libraries have read the environment before
    sys.argv = ["tahq", *command.arguments]
    from tahq_launch.cli import main

    # Before any thread: those that come later are in the namespace of the one that starts them.
    with _network(command.namespace):
        sys.exit(main())


def _known(number: int | None) -> int:
    if number is None:
        raise AssertionError("a started process has a pid, and a status when it has ended")
    return number


def _name_this_process(name: str) -> None:
    """For ps and top."""
    Path("/proc/self/comm").write_text(name)


def _network(namespace: str | None) -> AbstractContextManager[None]:
    if namespace is None:
        return nullcontext()
    from tahq_netem.backends.namespaces import entered

    return entered(namespace)


def _redirect(log_path: str, first_input: bytes) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    stdin, end = os.pipe()
    os.write(end, first_input)  # far below what a pipe holds
    os.close(end)
    for source, target in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(stdin)
