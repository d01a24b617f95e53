"""tahq's commands without the time that their imports take.

They are the same commands in processes of their own, with their own session of signals, folder, environment and pipes;
only what they import was imported before, in a server that every process of pytest has once. So what is read from the
environment while a module is imported cannot be set here: start a program of the environment instead (`runs.command`).
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import entry_points
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import TextIO

WARM = [
    "tahq_launch.cli",
    "tahq_launch.start.launcher",
    "tahq.worker.main",
    "transformers.modeling_utils",
    "transformers.models.gpt2.modeling_gpt2",
    "support.loaded_numba",
    "tahq_netem.backends.namespaces",
]

_ASKING = threading.Lock()
"""A process's status can be read once: of two threads that ask at a time, one is told 255. Starting one asks of all."""


class WarmProcess:
    """A running command, with as much of `subprocess.Popen` as tests use.

    Args:
        program: one of tahq's console scripts.
        arguments: what follows its name.
        folder: where it runs.
        environment: all of it.
        namespace: the network namespace that it runs in; None: this process's.
    """

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        namespace: str | None = None,
    ) -> None:
        self.args = [program, *arguments]
        out, its_out = os.pipe()
        err, its_err = os.pipe()
        self.stdout, self.stderr = os.fdopen(out, encoding="utf-8"), os.fdopen(err, encoding="utf-8")
        self._pool = ThreadPoolExecutor(2, "pipes")
        self._texts: list[Future[str]] = []
        call = (self.args, str(folder), dict(environment), DupFd(its_out), DupFd(its_err), namespace)
        self._process = _warm_context().Process(target=_run, args=call)
        with _ASKING:
            self._process.start()
        os.close(its_out)
        os.close(its_err)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        with _ASKING:
            return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; subprocess.TimeoutExpired if it does not come."""
        multiprocessing.connection.wait([self._process.sentinel], timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What is left of its stdout and stderr, to its end."""
        if not self._texts:
            self._texts = [self._pool.submit(_read_whole, pipe) for pipe in (self.stdout, self.stderr)]
            self._pool.shutdown(wait=False)
        try:
            out, err = (text.result(timeout) for text in self._texts)
        except TimeoutError:
            raise subprocess.TimeoutExpired(self.args, timeout) from None
        self.wait(timeout)
        return out, err

    def send_signal(self, number: int) -> None:
        """Send a signal to it, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> "WarmProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.communicate()


def _read_whole(pipe: TextIO) -> str:
    with pipe:
        return pipe.read()


def _warm_context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(WARM)
    return context


def _run(
    argv: list[str], folder: str, environment: dict[str, str], out: DupFd, err: DupFd, namespace: str | None
) -> None:
    """In the child: become the command."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out.detach(), 1), (err.detach(), 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdout.reconfigure(line_buffering=True)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = argv
    (script,) = entry_points(group="console_scripts", name=argv[0])
    # before any thread: those that come later are in the namespace of the one that starts them
    with _network(namespace):
        sys.exit(script.load()())


def _network(namespace: str | None) -> AbstractContextManager[None]:
    if namespace is None:
        return nullcontext()
    from tahq_netem.backends.namespaces import entered

    return entered(namespace)
