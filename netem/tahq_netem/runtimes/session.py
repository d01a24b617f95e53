"""What a sweep asks of a runtime: workers on the hosts of a network that keep training, and a line about every step.

A session goes on until it is closed. What its workers learn is thrown away, so they are ended the short way.
"""

import json
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tahq.config.cluster import ClusterConfig
from tahq.errors import TahqError
from tahq_netem.backends.network import Network
from tahq_netem.programs import module_environment

POLL_S = 0.02
_TAIL_NBYTES = 4096
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class RuntimeLostError(TahqError):
    """A runtime did not start, stopped, or stands still; the message has its last words."""


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What to start.

    Attributes:
        config: model, data, training, pipeline and wire; everything is resolved but the codecs' parameters.
        schedule: its name; not every runtime's schedules are in `config`.
        network: where.
        hosts: names in the network, one a stage.
        folder: for logs and whatever else is written; empty.
        cores: the core that each stage's process is held to; empty: any.
    """

    config: ClusterConfig
    schedule: str
    network: Network
    hosts: tuple[str, ...]
    folder: Path
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step.

    Attributes:
        step: its number, from 1.
        seconds: from the end of the step before.
        loss: nats a token; None where the runtime does not say.
        activation_nbytes: payload on each cut, forward.
        gradient_nbytes: payload on each cut, backward.
        compute_s: what each stage spent in (forward, backward); empty where it is not known. On a GPU that stages
            share, the others' turns are in it.
        codec_s: what each stage spent in (encode, decode); empty where it is not known.
    """

    step: int
    seconds: float
    loss: float | None
    activation_nbytes: tuple[float, ...]
    gradient_nbytes: tuple[float, ...]
    compute_s: tuple[tuple[float, float], ...] = ()
    codec_s: tuple[tuple[float, float], ...] = ()


class Session(ABC):
    """Workers that train; as a context, none is left when it ends."""

    @abstractmethod
    def steps_so_far(self) -> list[StepRecord]:
        """The steps that have finished since the last call."""

    @abstractmethod
    def check(self) -> None:
        """Raise RuntimeLostError if a process has ended."""

    @abstractmethod
    def close(self) -> None:
        """End every process; a second time does nothing."""

    def next_step(self, timeout_s: float) -> StepRecord:
        """Wait for the next step.

        Raises:
            RuntimeLostError: a process ended, or no step in time.
        """
        pending = self._pending
        deadline_s = time.monotonic() + timeout_s
        while not pending:
            pending += self.steps_so_far()
            if not pending:
                self.check()
                if time.monotonic() > deadline_s:
                    raise RuntimeLostError(f"no step in {timeout_s:.0f} s; {self.last_words()}")
                time.sleep(POLL_S)
        return pending.pop(0)

    def take_finished(self) -> list[StepRecord]:
        """The steps that have finished by now and that nobody has waited for."""
        finished = [*self._pending, *self.steps_so_far()]
        self._pending.clear()
        return finished

    @abstractmethod
    def last_words(self) -> str:
        """What the processes' logs end with."""

    def __init__(self) -> None:
        self._pending: list[StepRecord] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


StartSession = Callable[[SessionRequest], Session]


@dataclass
class HostProcesses:
    """The processes of a session, each with a log of its own.

    They run in sessions of their own, so that Ctrl-C reaches the sweep alone, and hold a pipe from it as their
    stdin. Each watches that, and ends when the sweep does, killed or not (`stdin_watch`, or by itself).
    """

    request: SessionRequest
    running: dict[str, subprocess.Popen[Any]] = field(default_factory=dict)

    def start(self, name: str, host: str, argv: Sequence[str], *, core: int | None = None) -> None:
        """Run a program on a host under a name of its own."""
        threads = str(self.request.config.run.threads or 1)
        limits = dict.fromkeys(_THREAD_VARIABLES, threads)
        environment = {**module_environment(), **limits, "PYTHONUNBUFFERED": "1"}
        with self._log(name).open("ab") as log:
            process = self.request.network.popen(
                *(host, argv),
                env=environment,
                cwd=self.request.folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running[name] = process
        if core is not None:
            os.sched_setaffinity(process.pid, {core})  # threads that it starts later inherit it

    def check(self) -> None:
        """Raise RuntimeLostError if one has ended, with its last words."""
        ended = {name: status for name, process in self.running.items() if (status := process.poll()) is not None}
        if ended:
            first = next((name for name, status in ended.items() if status != 0), next(iter(ended)))
            raise RuntimeLostError(f"{first} ended with status {ended[first]}; {self.last_words()}")

    def close(self) -> None:
        """Kill each with everything that it started, which may outlive it, and reap it."""
        for process in self.running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self.running.clear()

    def last_words(self) -> str:
        """The last line of every log."""
        lines = {name: self._last_line(name) for name in self.running}
        return "; ".join(f"{name}: {line}" for name, line in lines.items() if line) or "the logs are empty"

    def _log(self, name: str) -> Path:
        return self.request.folder / f"{name}.log"

    def _last_line(self, name: str) -> str:
        with self._log(name).open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(0, end - _TAIL_NBYTES))
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""


class GrowingLines:
    """The objects of a JSON-lines file that somebody is writing, as they come in.

    Args:
        path: the file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Whole lines that were added since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        yield from map(json.loads, whole.splitlines())
