"""Local workers, forked from one process that has imported everything.

Importing torch and transformers takes about five seconds of a core. Four workers that each do it keep two
cores busy for ten seconds, and then have the same modules four times; so one process imports them once,
while the launcher resolves the configuration, and the workers are forked from it. multiprocessing's fork
server is that process. It computes nothing and starts no thread, so forking it is safe. When the launcher
dies the workers notice (`parent_watch`), and when they have left, so does the server.
"""

import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import forkserver
from pathlib import Path

_PRELOADED = ("tahq.worker", "transformers.modeling_utils")


def start_fork_server(environment: Mapping[str, str], modules: Sequence[str] = ()) -> None:
    """Have the process that workers are forked from start importing; returns at once.

    Args:
        environment: added to this process's for the fork server, and so for every local worker.
        modules: what workers will need beside the usual.
    """
    multiprocessing.set_forkserver_preload([*_PRELOADED, *modules])
    with _changed_environment(environment):
        forkserver.ensure_running()


class ForkedChild:
    """A process forked from the fork server that runs one `tahq` command line.

    Args:
        name: what ps calls it, at most 15 letters.
        arguments: what follows `tahq` on the command line.
        log_path: what its stdout and stderr are appended to.
        environment: for the fork server, where none runs yet.
        namespace: the network namespace that it serves in; None: this process's.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str],
        namespace: str | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        call = (name, tuple(arguments), str(log_path), namespace)
        self._process = context.Process(target=_serve, args=call, daemon=True)
        with _changed_environment(environment):
            self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        pid = self._process.pid
        if pid is None:
            raise AssertionError("a started process has a pid")
        return pid

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float) -> bool:
        """Whether it has left by then."""
        self._process.join(timeout_s)
        return self._process.exitcode is not None

    def ask_to_leave(self) -> None:
        """SIGTERM."""
        self._process.terminate()


def _serve(name: str, arguments: tuple[str, ...], log_path: str, namespace: str | None) -> None:
    """In the child: a session, a log and perhaps a network of its own, then the command."""
    os.setsid()
    _redirect(log_path)
    Path("/proc/self/comm").write_text(name)  # what ps and top call it
    sys.argv = ["tahq", *arguments]
    from tahq_launch.cli import main

    # Before any thread: those that come later are in the namespace of the one that starts them.
    with _network(namespace):
        sys.exit(main())


def _network(namespace: str | None) -> AbstractContextManager[None]:
    if namespace is None:
        return nullcontext()
    from tahq_netem.namespaces import entered

    return entered(namespace)


def _redirect(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)


@contextmanager
def _changed_environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
