"""A whole run from one command: the coordinator in this process, a child process for every stage.

Invariants:
- however this process ends, no worker is left: they are waited for, then terminated, then killed; after
  SIGKILL of this process they exit by themselves (`worker_lifetime`);
- the first SIGINT or SIGTERM stops the run in order, with a checkpoint; the second stops it now.
"""

import contextlib
import importlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from tahq.comm.control.members import Admission
from tahq.comm.control.messages import Welcome
from tahq.comm.control.server import ControlServer
from tahq.comm.relay.process import Relay
from tahq.comm.zmq.addresses import format_address, parse_address
from tahq.comm.zmq.sockets import raise_descriptor_limit
from tahq.config.cluster import ClusterConfig
from tahq.coordinator.service import Coordinator
from tahq.observe.run_view import Observers, watch_run
from tahq_launch.command_line import announce, collect_as_usual
from tahq_launch.dashboard.process import DashboardProcess
from tahq_launch.plan.advice import advice
from tahq_launch.runs.at_address import WorkerFiles
from tahq_launch.runs.pull import collected
from tahq_launch.start.local_checks import files_needed
from tahq_launch.start.prepared_run import PreparedRun, StartRequest, prepared_run, startable_config
from tahq_launch.start.run_folder import members_of
from tahq_launch.start.run_keys import PLAIN
from tahq_launch.start.worker_command import (
    WorkerCommand,
    local_command,
    local_peer,
    modules_of_workers,
    ssh_command,
    worker_by_hand,
)
from tahq_launch.start.worker_processes import LEAVE_S, Fleet, ForkServer
from tahq_launch.trackers import TrackerProcess

if TYPE_CHECKING:
    from tahq_launch.namespace_host import NamespaceHosts

ABORTED_S = 1.0
"""Time for workers to exit after a failed run: a worker that still builds its model ignores messages, and has nothing
to save."""

ORDERLY = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit statuses of success and of a stop by a signal."""

MakeCoordinator = Callable[[PreparedRun, ControlServer], Coordinator]


def launch(request: StartRequest) -> int:
    """Run a cluster.yaml from its first step to its last, with workers or without; UserError if it cannot start.

    Returns:
        The exit status of the run; the reason for a status other than 0 is on stderr.
    """
    return run_stages(request, partial(_training_coordinator, request))


@contextlib.contextmanager
def with_forks(request: StartRequest) -> Iterator[StartRequest]:
    """The request with a process to fork workers from, if it has none yet; UserError if the run cannot start.

    What workers need is imported here, once for both, except numba, which is loaded there while the run is planned.
    """
    if request.forks is not None or not request.starts_workers:
        yield request
        return
    config = startable_config(request)
    modules = modules_of_workers(config)
    announce("importing libraries")
    for name in modules:
        with contextlib.suppress(ImportError):  # reported by what needs it
            if ":" not in name:
                importlib.import_module(name)
    with ForkServer() as forks:
        if config.hosts != "namespaces":  # else after the network was measured
            forks.import_modules(modules)
        yield replace(request, forks=forks)


def run_stages(request: StartRequest, make_coordinator: MakeCoordinator, *, restarts_workers: bool = True) -> int:
    """Run a coordinator with a worker for every stage to the end; see `launch`."""
    with contextlib.ExitStack() as stack:
        request = stack.enter_context(with_forks(request))
        prepared = stack.enter_context(prepared_run(request))
        hosts, forks = None, request.forks
        if prepared.config.hosts == "namespaces" and forks is not None:
            from tahq_launch.namespace_host import open_hosts  # pyroute2 is slow to import

            hosts = stack.enter_context(open_hosts(prepared))
            forks.import_modules(modules_of_workers(prepared.config))
        server = stack.enter_context(_listening(prepared, hosts))
        coordinator = make_coordinator(prepared, server)
        stack.callback(coordinator.close)
        if prepared.keys is not None:
            members = members_of(request.config_path if request.joined else prepared.folder.path)
            welcome = Welcome(files_needed(prepared.config))
            coordinator.admission = Admission(members, server, welcome, coordinator.warn)
        stack.enter_context(_signals_to(coordinator.request_stop))
        fleet = stack.enter_context(Fleet(coordinator.worker_exited, forks, prepared.config.run.restarts))
        if restarts_workers:
            coordinator.restart = fleet.restart
        for stage in range(prepared.config.pipeline.num_workers):
            address, command = coordinator.address, None
            if request.starts_workers:
                command = worker_command(prepared, stage, address, hosts, debug=request.debug)
            if command is not None:
                fleet.start(command, prepared.folder.stage_log(stage))
            elif not (request.joins_again or request.joined):
                announce(_by_hand(prepared.config, stage, address))
        if not (request.joins_again or request.joined):
            _announce_key(prepared)
        collect_as_usual()
        status = coordinator.run(fleet.tick)
        fleet.close(LEAVE_S if status in ORDERLY else ABORTED_S)
        return status


def _training_coordinator(request: StartRequest, prepared: PreparedRun, server: ControlServer) -> Coordinator:
    observer = watch_run(
        prepared.folder.metrics,
        prepared.options.start_step,
        program=request.program,
        resume_command=request.resume_command,
        export_command=f"tahq export {prepared.folder.path} {prepared.folder.path.name}-hf",
        advise=partial(advice, prepared.config),
        traces=prepared.folder.traces,
        start=prepared.options.epoch,
    )
    if request.dashboard:
        observer = Observers([observer, DashboardProcess(prepared.folder.logs / "dashboard.log")])
    if prepared.config.run.trackers:
        # the first, so that its last warnings are still written
        observer = Observers([TrackerProcess(prepared.config, prepared.options.run_id, observer.warned), observer])
    for line in prepared.notes:
        announce(line)
    relay = _relay(prepared, server)
    coordinator = Coordinator(prepared.options, server, observer, journal=prepared.journal, relay=relay)
    if prepared.keys is not None:
        here = local_peer(prepared.config.run.bind, format_address("localhost", server.port))
        connect = partial(WorkerFiles, here, prepared.keys.coordinator)
        coordinator.collect = partial(collected, prepared.folder.path, connect, coordinator.warn)
    return coordinator


def relay_place(config: ClusterConfig, server: ControlServer) -> tuple[str, int] | None:
    """Host and port of this machine on which a run's relay listens; None: it has none."""
    if config.run.relay == "never" or config.hosts == "namespaces":
        return None
    port = server.port - 1 if config.run.relay == "auto" else config.run.relay
    return parse_address(config.run.bind, "run.bind")[0], port


def _relay(prepared: PreparedRun, server: ControlServer) -> Relay | None:
    """The relay of a run on machines that may not reach each other, which is not started yet."""
    config, keys, folder = prepared.config, prepared.keys, prepared.folder
    place = relay_place(config, server)
    if place is None:
        return None
    return Relay(
        *place,
        secret="" if keys is None else keys.coordinator.secret,
        run_id=prepared.options.run_id,
        num_links=len(prepared.options.grid.links()) + prepared.options.num_stages,  # and those for files
        log=folder.logs / "relay.log",
    )


@contextlib.contextmanager
def _listening(prepared: PreparedRun, hosts: "NamespaceHosts | None") -> Iterator[ControlServer]:
    """The coordinator's socket, on its own host where there are `hosts`; UserError if its address cannot be bound."""
    run, keys = prepared.config.run, prepared.keys
    raise_descriptor_limit()
    with hosts.on_coordinator() if hosts is not None else contextlib.nullcontext():
        server = ControlServer(
            run.bind if hosts is None else hosts.bind,
            advertise=run.advertise if hosts is None else None,
            heartbeat_s=run.peer_timeout / 5,
            keys=None if keys is None else keys.coordinator,
            allowed=() if keys is None else keys.allowed,
        )
    with contextlib.closing(server):
        yield server


@contextlib.contextmanager
def _signals_to(request_stop: Callable[[int], None]) -> Iterator[None]:
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
    """The command for a stage's worker that dials the coordinator at `address`; None if it is started by hand."""
    config, keys = prepared.config, prepared.keys
    if isinstance(config.hosts, list) and not config.hosts[stage].is_started:
        return None
    secret = PLAIN if keys is None else keys.secret_of(stage)
    if isinstance(config.hosts, list) and config.hosts[stage].ssh is not None:
        host, threads = config.hosts[stage], config.run.threads
        return ssh_command(host, stage, address, threads=threads, secret=secret, debug=debug)
    # a resolved configuration has them, unless other machines take part
    threads = config.run.threads or max(1, len(os.sched_getaffinity(0)) // len(config.local_stages))
    if hosts is not None:
        return hosts.worker_command(stage, address, threads, secret=secret, debug=debug)
    return local_command(stage, local_peer(config.run.bind, address), threads, secret=secret, debug=debug)


def _by_hand(config: ClusterConfig, stage: int, address: str) -> str:
    where = "" if isinstance(config.hosts, str) else f" on {config.hosts[stage].address}"
    return f"start stage {stage}{where} with: {worker_by_hand(stage, address, curve=config.security.curve)}"


def _announce_key(prepared: PreparedRun) -> None:
    """Print how workers of other accounts get their keys, if any worker is started by hand."""
    keys = prepared.keys
    if keys is not None and len(keys.stages) < prepared.config.pipeline.num_workers:
        announce(
            f"on a machine without this account's key, add --coordinator-key {keys.coordinator.public}, and list the "
            "worker's public key here in security.allow (`tahq keygen` there makes a key and prints it, `tahq keygen "
            "--show` prints an existing one)"
        )
