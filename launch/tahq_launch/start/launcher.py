"""A whole run from one command: the coordinator in this process, a child process for every stage.

Invariants:
- however this process ends, no worker is left: they are waited for, then terminated, then killed; after
  SIGKILL of this process they exit by themselves (`worker_lifetime`);
- the first SIGINT or SIGTERM stops the run in order, with a snapshot; the second stops it now.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self

from tahq.comm.control.server import ControlServer
from tahq.comm.zmq.addresses import format_address, parse_address
from tahq.comm.zmq.sockets import raise_descriptor_limit
from tahq.config.cluster import ClusterConfig
from tahq.coordinator.service import Coordinator
from tahq.errors import UserError
from tahq.observe.run_view import watch_run
from tahq_launch.start.codec_choice import wire_facts
from tahq_launch.start.fork_server import ForkServer
from tahq_launch.start.prepared_run import PreparedRun, StartRequest, prepared_run
from tahq_launch.start.run_folder import RunFolder
from tahq_launch.start.run_keys import PLAIN
from tahq_launch.start.stage_process import StageProcess, WorkerCommand
from tahq_launch.start.worker_command import (
    local_command,
    modules_of_workers,
    ssh_command,
    threads_of_each,
    worker_by_hand,
)
from tahq_launch.start.worker_lifetime import RestartTimes

if TYPE_CHECKING:
    from tahq_launch.namespace_host import NamespaceHosts

LEAVE_S = 5.0
"""Time for workers to exit by themselves after the coordinator has ended the run."""
ABORTED_S = 1.0
"""The same after a failed run: a worker that still builds its model does not listen, and has nothing to save."""
TERMINATE_S = 3.0
"""Time between SIGTERM and SIGKILL."""

ORDERLY = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit statuses of success and of a stop by a signal."""

_WILDCARD_HOSTS = ("0.0.0.0", "::")

Announce = Callable[[str], None]
"""Prints a line for the user."""

ExitListener = Callable[[int, int, str], None]
"""Called with (stage, exit status, last log line) of a worker that has exited."""


class Fleet:
    """The workers started from here; as a context, it ends with none of them running.

    Args:
        on_exit: called once for each worker that exits.
        forks: server to fork local workers from.
        max_restarts: largest number of restarts per stage.
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
        try:
            self._running.append(StageProcess(command, log_path, self._forks))
        except OSError as error:
            raise UserError(f"cannot start {command.argv[0]} for stage {command.stage}: {error.strerror}") from error

    def restart(self, stage: int) -> bool:
        """Schedule a restart of a stage's worker, and kill the old one; False: it was not started from here.

        Raises:
            PeerLostError: no restarts are left.
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
            status = process.poll()
            if status is not None:
                self._running.remove(process)
                self._on_exit(process.command.stage, status, _last_words(process))

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
        self._running = [process for process in self._running if not process.wait(deadline_s - time.monotonic())]


def _last_words(process: StageProcess) -> str:
    line = process.last_words()
    return f"its log {process.log_path} ends with: {line}" if line else f"its log {process.log_path} is empty"


def launch(request: StartRequest, announce: Announce) -> int:
    """Run a cluster.yaml from its first step to its last.

    Args:
        request: what to run.
        announce: prints what is resumed, and the commands for workers started by hand.

    Returns:
        The exit status of the run; the reason for a status other than 0 is on stderr.

    Raises:
        UserError: the run cannot start; no process is left.
    """
    with (
        ForkServer() as forks,
        _opened(request, announce, forks) as (prepared, coordinator, hosts),
        Fleet(coordinator.worker_exited, forks, prepared.config.run.restarts) as fleet,
    ):
        coordinator.restart = fleet.restart
        start_workers(prepared, coordinator.address, hosts, fleet, announce, debug=request.debug)
        return lead(coordinator, fleet)


def start_workers(
    prepared: PreparedRun,
    address: str,
    hosts: "NamespaceHosts | None",
    fleet: Fleet,
    announce: Announce,
    *,
    debug: bool,
) -> None:
    """Start a worker for every stage, or print the command for one that is started by hand.

    Args:
        prepared: what they are for.
        address: host:port of the coordinator, as workers dial it.
        hosts: of the run's network namespaces, if any.
        fleet: they belong to.
        announce: told what to type.
        debug: log in detail.
    """
    for stage in range(prepared.config.pipeline.stages):
        command = worker_command(prepared, stage, address, hosts, debug=debug)
        if command is not None:
            fleet.start(command, prepared.folder.stage_log(stage))
        else:
            announce(_by_hand(prepared.config, stage, address))
    _announce_key(prepared, announce)


def lead(coordinator: Coordinator, fleet: Fleet) -> int:
    """Run the coordinator to the end and wait for all workers; returns the exit status."""
    status = coordinator.run(fleet.tick)
    fleet.close(LEAVE_S if status in ORDERLY else ABORTED_S)
    return status


def serve(request: StartRequest, announce: Announce) -> int:
    """Run the coordinator alone, for workers that are started by hand; else as `launch`."""
    with _opened(request, announce, None) as (prepared, coordinator, _):
        for stage in range(prepared.config.pipeline.stages):
            announce(_by_hand(prepared.config, stage, coordinator.address))
        _announce_key(prepared, announce)
        return coordinator.run(lambda: None)


def import_meanwhile(forks: ForkServer | None, config: ClusterConfig) -> None:
    """Start importing modules for workers; with namespaces this waits until their network is measured."""
    if config.hosts != "namespaces":
        if forks is not None:
            forks.import_modules(modules_of_workers(config))
    elif forks is None:
        raise UserError(
            "hosts: namespaces is for tahq-launch, which makes the network and starts the workers in it; workers "
            "that are started by hand need hosts: local or a list"
        )


@contextlib.contextmanager
def _opened(
    request: StartRequest, announce: Announce, forks: ForkServer | None
) -> Iterator["tuple[PreparedRun, Coordinator, NamespaceHosts | None]"]:
    """A coordinator that listens, with signals going to it, and the network around it if there is one.

    Local workers are forked from `forks`; without it, workers are started by hand.
    """
    with (
        prepared_run(request, partial(import_meanwhile, forks), starts_workers=forks is not None) as prepared,
        own_network(prepared, announce, forks) as hosts,
        listening(prepared, hosts) as server,
    ):
        observer = watch_run(
            prepared.folder.metrics,
            prepared.options.start_step,
            program=request.program,
            resume_command=request.resume_command,
            export_command=_export_command(prepared.folder),
            facts=wire_facts(prepared.config),
            traces=prepared.folder.traces,
            start=prepared.options.epoch,
        )
        coordinator = Coordinator(prepared.options, server, observer, journal=prepared.journal)
        with signals_to(coordinator.request_stop):
            for line in prepared.notes:
                announce(line)
            yield prepared, coordinator, hosts


@contextlib.contextmanager
def own_network(
    prepared: PreparedRun, announce: Announce, forks: ForkServer | None
) -> "Iterator[NamespaceHosts | None]":
    """Create and measure the network of `hosts: namespaces`; None for other hosts."""
    if prepared.config.hosts != "namespaces" or forks is None:
        yield None
        return
    from tahq_launch.namespace_host import open_hosts  # pyroute2 is slow to import

    with open_hosts(prepared, announce) as hosts:
        forks.import_modules(modules_of_workers(prepared.config))
        yield hosts


@contextlib.contextmanager
def listening(prepared: PreparedRun, hosts: "NamespaceHosts | None" = None) -> Iterator[ControlServer]:
    """The coordinator's socket, on its own host where there are `hosts`; UserError if its address cannot be bound."""
    run, keys = prepared.config.run, prepared.keys
    open_server = partial(
        ControlServer,
        heartbeat_s=run.peer_timeout / 5,
        keys=None if keys is None else keys.coordinator,
        allowed=() if keys is None else keys.allowed,
    )
    raise_descriptor_limit()
    if hosts is None:
        server = open_server(run.bind, advertise=run.advertise)
    else:
        with hosts.on_coordinator():
            server = open_server(hosts.bind)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def signals_to(request_stop: Callable[[int], None]) -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into requests to stop."""

    def ask(number: int, frame: FrameType | None) -> None:
        request_stop(signal.SIGTERM if number == signal.SIGHUP else number)

    wanted = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup wants it ignored
        wanted.append(signal.SIGHUP)
    before = {number: signal.signal(number, ask) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def worker_command(
    prepared: PreparedRun, stage: int, address: str, hosts: "NamespaceHosts | None" = None, *, debug: bool = False
) -> WorkerCommand | None:
    """The command for a stage's worker; None if it is started by hand.

    Args:
        prepared: the run.
        stage: which.
        address: host:port of the coordinator, as workers dial it.
        hosts: of the run's network namespaces, if any.
        debug: log in detail.
    """
    config, keys = prepared.config, prepared.keys
    if isinstance(config.hosts, list) and config.hosts[stage].ssh is None:
        return None
    secret = PLAIN if keys is None else keys.secret_of(stage)
    threads = threads_of_each(config.pipeline.stages, config.run.threads)
    if hosts is not None:
        return hosts.worker_command(stage, address, threads, secret=secret, debug=debug)
    if isinstance(config.hosts, str):
        return local_command(stage, local_peer(config.run.bind, address), threads, secret=secret, debug=debug)
    return ssh_command(config.hosts[stage], stage, address, threads=config.run.threads, secret=secret, debug=debug)


def local_peer(bind: str, address: str) -> str:
    """Address that local workers dial: loopback if the coordinator binds all addresses, else the bound address."""
    host, _ = parse_address(bind, "run.bind")
    _, port = parse_address(address, "coordinator")
    return format_address("127.0.0.1", port) if host in _WILDCARD_HOSTS else format_address(host, port)


def _by_hand(config: ClusterConfig, stage: int, address: str) -> str:
    where = "" if isinstance(config.hosts, str) else f" on {config.hosts[stage].address}"
    return f"start stage {stage}{where} with: {worker_by_hand(stage, address, curve=config.security.curve)}"


def _announce_key(prepared: PreparedRun, announce: Announce) -> None:
    """Print how workers of other accounts get their keys, if any worker is started by hand."""
    keys = prepared.keys
    if keys is not None and len(keys.stages) < prepared.config.pipeline.stages:
        announce(
            f"where this account's key is not: add --coordinator-key {keys.coordinator.public}, and here the "
            "worker's public key to security.allow (`tahq keygen` there makes one and prints it, `tahq keygen --show` "
            "prints the one that is there)"
        )


def _export_command(folder: RunFolder) -> str:
    return f"tahq export {folder.path} {folder.path.name}-hf"
