"""A runtime under a sweep: workers on the hosts of a network that keep training, and a record of every step.

A session continues until it is closed. Its training is thrown away, so the workers are killed. `TahqSession` runs tahq
itself; `gloo` has the other runtimes.
"""

import json
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tahq.comm.keys import SecurityConfig
from tahq.comm.zmq.addresses import format_address
from tahq.config.cluster import ClusterConfig
from tahq.config.file import dump_yaml
from tahq.errors import TahqError
from tahq_netem.backends.network import Network
from tahq_netem.programs import module_argv, module_environment

POLL_S = 0.02
CONTROL_PORT = 7700
DATA_PORT = 7701
_FORWARD, _BACKWARD = ("forward",), ("backward", "input_gradient", "weight_gradient")
_ENCODE, _DECODE = ("encode", "beside:encode"), ("decode", "beside:decode")
_TAHQ = "tahq_launch.cli"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class RuntimeLostError(TahqError):
    """A runtime did not start, stopped, or is stuck; the message has the last lines of its logs."""


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """The session to start."""

    config: ClusterConfig
    """Resolved except for the codecs' parameters."""
    schedule: str
    """Its name; `config` cannot have every runtime's schedules."""
    network: Network
    hosts: tuple[str, ...]
    """Names in the network, one per stage."""
    folder: Path
    """For logs and other files; empty."""


@dataclass(frozen=True, slots=True)
class RuntimeStep:
    """One finished step; bytes are the payload on each cut."""

    step: int
    """From 1."""
    seconds: float
    """Since the end of the previous step."""
    loss: float | None
    """Nats per token; None if the runtime does not report it."""
    activation_nbytes: tuple[float, ...]
    gradient_nbytes: tuple[float, ...]
    compute_s: tuple[tuple[float, float], ...] = ()
    """Each stage's (forward, backward), with the other stages' turns on a shared GPU; empty if not known."""
    codec_s: tuple[tuple[float, float], ...] = ()
    """Each stage's (encode, decode); empty if not known."""


class RuntimeSession(ABC):
    """Processes that train, each with its own log; a context manager that ends them.

    They run in their own process sessions, so that Ctrl-C reaches the sweep alone. Their stdin is a pipe from the
    sweep, which they watch (`programs.leave_with_stdin`): they end when the sweep does, killed or not.
    """

    def __init__(self, request: SessionRequest) -> None:
        self.request = request
        self.running: dict[str, subprocess.Popen[Any]] = {}
        """The processes by name."""
        self._pending: list[RuntimeStep] = []
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _start_all(self) -> None:
        """Start every process, with `start`."""

    @abstractmethod
    def steps_so_far(self) -> list[RuntimeStep]:
        """The steps finished since the last call."""

    def start(self, name: str, host: str, argv: Sequence[str]) -> None:
        """Run a program on a host, under this name."""
        limits = dict.fromkeys(_THREAD_VARIABLES, str(self.request.config.run.threads or 1))
        with self._log(name).open("ab") as log:
            process = self.request.network.popen(
                *(host, argv),
                # measurements of another network must not be found
                env={**module_environment(), **limits, "PYTHONUNBUFFERED": "1", "TAHQ_CACHE": "cache"},
                cwd=self.request.folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running[name] = process

    def check(self) -> None:
        """Raise RuntimeLostError if a process has ended, with its last output."""
        ended = {name: status for name, process in self.running.items() if (status := process.poll()) is not None}
        if ended:
            first = next((name for name, status in ended.items() if status != 0), next(iter(ended)))
            raise RuntimeLostError(f"{first} ended with status {ended[first]}; {self.last_words()}")

    def close(self) -> None:
        """Kill and reap each process with all its descendants; a second time does nothing."""
        for process in self.running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self.running.clear()

    def next_step(self, timeout_s: float) -> RuntimeStep:
        """Wait for the next step."""
        deadline_s = time.monotonic() + timeout_s
        while not self._pending:
            self._pending += self.steps_so_far()
            if not self._pending:
                self.check()
                if time.monotonic() > deadline_s:
                    raise RuntimeLostError(f"no step in {timeout_s:.0f} s; {self.last_words()}")
                time.sleep(POLL_S)
        return self._pending.pop(0)

    def take_finished(self) -> list[RuntimeStep]:
        """The finished steps that `next_step` has not returned."""
        finished = [*self._pending, *self.steps_so_far()]
        self._pending.clear()
        return finished

    def last_words(self) -> str:
        """The last line of every log."""
        words = []
        for name in self.running:
            lines = self._log(name).read_text(errors="replace").strip().splitlines()
            words += [f"{name}: {lines[-1].strip()}"] if lines else []
        return "; ".join(words) or "the logs are empty"

    def _log(self, name: str) -> Path:
        return self.request.folder / f"{name}.log"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


StartSession = Callable[[SessionRequest], RuntimeSession]


class GrowingLines:
    """The objects of a JSON-lines file while another process writes it; it need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Whole lines added since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        yield from map(json.loads, whole.splitlines())


class TahqSession(RuntimeSession):
    """A run of tahq: its coordinator and workers, started by their own commands.

    The coordinator runs on the first stage's host, as it usually does; so every other host's part of a step's commit
    crosses the network.
    """

    def _start_all(self) -> None:
        config, network, hosts = self.request.config, self.request.network, self.request.hosts
        self._metrics = GrowingLines(self.request.folder / config.run.dir / config.run.name / "metrics.jsonl")
        # Without CURVE, like everything that it is compared with.
        plain = config.model_copy(update={"security": SecurityConfig(curve=False)})
        (self.request.folder / "cluster.yaml").write_text(dump_yaml(plain, with_unset=False), encoding="utf-8")
        peer = format_address(network.address(hosts[0]), CONTROL_PORT)
        coordinator = ("coordinator", "cluster.yaml", "--bind", peer, "--set", f"run.name={config.run.name}")
        self.start("coordinator", hosts[0], module_argv("tahq_netem.programs", _TAHQ, *coordinator))
        for stage, host in enumerate(hosts):
            bind = format_address(network.address(host), DATA_PORT)
            places = ("--stage", str(stage), "--peer", peer, "--bind", bind)
            worker = module_argv(_TAHQ, "worker", *places, "--no-curve", "--exit-with-stdin")
            self.start(f"stage {stage}", host, worker)

    def steps_so_far(self) -> list[RuntimeStep]:
        """The lines of metrics.jsonl since the last call."""
        return [self._record(row) for row in self._metrics.read()]

    def _record(self, row: Mapping[str, Any]) -> RuntimeStep:
        num_cuts = self.request.config.pipeline.stages - 1

        def seconds(*kinds: Iterable[str]) -> tuple[Any, ...]:
            """Seconds of two kinds of activity, by stage."""
            timings = [stage["timing_s"] for stage in row["stages"]]
            return tuple(tuple(sum(float(timing.get(n, 0.0)) for n in names) for names in kinds) for timing in timings)

        def nbytes(direction: str) -> tuple[float, ...]:
            """Payload by cut."""
            links = {link["link"]: link["payload_bytes"] for link in row["links"] if link["direction"] == direction}
            return tuple(float(links.get(cut, 0.0)) for cut in range(num_cuts))

        return RuntimeStep(
            step=int(row["step"]),
            seconds=float(row["step_time_s"]),
            loss=row["loss"],
            activation_nbytes=nbytes("activations"),
            gradient_nbytes=nbytes("gradients"),
            compute_s=seconds(_FORWARD, _BACKWARD),
            codec_s=seconds(_ENCODE, _DECODE),
        )
