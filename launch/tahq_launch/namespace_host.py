"""Workers on the hosts of a network of this machine's own: ``hosts: namespaces``.

Stage k runs on host k. The coordinator stays in the launcher's process, but listens on one host more, which
is not shaped and lies as far from each worker as that worker's own delay: a control message takes as long as
a message between two like hosts, and shares its worker's uplink and downlink with activations and gradients.

Invariants:
- no worker starts before the network was measured and found as described; what was measured is kept in
  the run's network.json, also where it was not;
- however the launcher ends, the network goes; after SIGKILL, the next one that is made removes it.
"""

import contextlib
import itertools
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tahq.comm.network_config import HostConfig, NetworkConfig, PairConfig, host_names
from tahq.comm.zmq.addresses import format_address, parse_address
from tahq.config.cluster import ClusterConfig
from tahq.errors import ConfigError, NetworkError
from tahq_launch.start.prepared_run import PreparedRun
from tahq_launch.start.run_keys import WorkerSecret
from tahq_launch.start.stage_process import WorkerCommand
from tahq_launch.start.worker_command import local_command
from tahq_netem.backend_choice import backend_of_own_hosts
from tahq_netem.backend_label import backend_label
from tahq_netem.calibration import Calibration, calibrate
from tahq_netem.namespaces import entered
from tahq_netem.network import Network, build_network

COORDINATOR: Final = "coordinator"
"""The host that the coordinator listens on."""

_ADVICE: Final = (
    "run it as root, or set links.backend: relay (rates and delays, but nothing of TCP's dynamics) or hosts: local"
)

log = logging.getLogger(__name__)


class NamespaceHosts:
    """The hosts of a network that is up, as the launcher needs them.

    Args:
        network: of host0, host1, … and the coordinator's.
    """

    def __init__(self, network: Network) -> None:
        self._network = network

    @property
    def bind(self) -> str:
        """Where the coordinator listens: any free port of its host."""
        return format_address(self._network.address(COORDINATOR), 0)

    def on_coordinator(self) -> AbstractContextManager[None]:
        """Sockets that this thread opens meanwhile are on the coordinator's host."""
        namespace = self._network.namespace(COORDINATOR)
        return nullcontext() if namespace is None else entered(namespace)

    def worker_command(
        self, stage: int, coordinator: str, threads: int, *, secret: WorkerSecret, debug: bool
    ) -> WorkerCommand:
        """What starts the worker of a stage on its host.

        Args:
            stage: which.
            coordinator: host:port that the coordinator listens on.
            threads: compute threads it may use.
            secret: by which it learns its key.
            debug: have it log in detail.
        """
        host = _host(stage)
        peer = self._dialled(host, COORDINATOR, parse_address(coordinator, "coordinator")[1])
        command = local_command(stage, peer, threads, secret=secret, debug=debug)
        argv = (*command.argv, *self._addresses(stage))
        return replace(command, argv=argv, where=host, namespace=self._network.namespace(host))

    def _addresses(self, stage: int) -> tuple[str, ...]:
        """Where the worker listens and, if neighbours reach it elsewhere, what they dial."""
        address = self._network.address(_host(stage))
        if self._network.namespace(_host(stage)) is not None:
            return ("--bind", format_address(address, 0))
        # Behind a relay, which has to know the port; the next stage is the only one that dials (coordinator/plan.py).
        port = _free_port(address)
        dialled = self._dialled(_host(stage + 1), _host(stage), port) if self._has_next(stage) else "none"
        return ("--bind", format_address(address, port), "--advertise", dialled)

    def _has_next(self, stage: int) -> bool:
        return _host(stage + 1) in self._network.plan.hosts

    def _dialled(self, source: str, destination: str, port: int) -> str:
        return format_address(*self._network.dial_address(source, destination, port))


def _host(stage: int) -> str:
    return f"host{stage}"


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def open_hosts(prepared: PreparedRun, announce: Callable[[str], None]) -> Iterator[NamespaceHosts]:
    """Make the network of a run, measure it, and remove it afterwards.

    Args:
        prepared: the run; resolved.
        announce: told what was made and measured.

    Raises:
        NetworkError: it cannot be made here, or is not as described; says what to do.
    """
    config = prepared.config
    description = network_of(config)
    backend = backend_of_own_hosts(description, config.links.backend, "links.backend", _ADVICE)
    _check_relay(config, backend)
    with build_network(description, backend=backend) as network:
        maker = f"made by {backend_label(network.describe())}, TCP is {network.congestion_control}"
        announce(f"network of {config.pipeline.stages} hosts, {maker}; measuring it")
        measured = calibrate(network, pairs=links_of(config), quick=True)
        _keep(prepared, measured)
        measured.check()
        found = f"{len(measured.figures)} figures within their bounds" if measured.figures else "it has no links"
        announce(f"  {found} ({prepared.folder.network.name})")
        yield NamespaceHosts(network)


def network_of(config: ClusterConfig) -> NetworkConfig:
    """The stages' hosts, and the coordinator's, which is as far from each as that host's own delay."""
    network = config.links.network(config.pipeline.stages)
    pairs = [_to_coordinator(name, host) for name, host in network.hosts.items()]
    hosts = {**network.hosts, COORDINATOR: HostConfig()}
    return network.model_copy(update={"hosts": hosts, "pairs": [*network.pairs, *pairs]})


def _to_coordinator(name: str, host: HostConfig) -> PairConfig:
    path = {key: getattr(host, key) for key in ("delay", "jitter", "loss", "reorder")}
    return PairConfig(between=(name, COORDINATOR), **path)


def links_of(config: ClusterConfig) -> list[tuple[str, str]]:
    """(source, destination) of everything that a step sends: neighbours, and the ends if embeddings are tied."""
    names = host_names(config.pipeline.stages)
    chain = list(itertools.pairwise(names))
    if config.model.tie == "sync" and len(names) > 2:
        chain.append((names[0], names[-1]))
    return [pair for one, other in chain for pair in ((one, other), (other, one))]


def _check_relay(config: ClusterConfig, backend: str) -> None:
    if backend == "relay" and config.model.tie == "sync" and config.pipeline.stages > 2:
        raise ConfigError(
            "model.tie: sync joins first and last stage, for which links.backend: relay has no way; "
            "take model.tie: untied, or links.backend: tun or kernel"
        )


def _keep(prepared: PreparedRun, measured: Calibration) -> None:
    """Write network.json; that of the start before is kept beside it when a run is continued."""
    path, start_step = prepared.folder.network, prepared.options.start_step
    if start_step and path.exists():
        path.replace(path.with_name(f"network-until-step-{start_step}.json"))
    text = json.dumps(_record(prepared, measured), indent=1, allow_nan=False)
    _write(path, f"{text}\n")
    log.info("network: %s", text)


def _record(prepared: PreparedRun, measured: Calibration) -> dict[str, Any]:
    started = {"start": prepared.options.epoch, "start_step": prepared.options.start_step}
    return {"measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **started, **measured.as_dict()}


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise NetworkError(f"cannot write {path}: {error.strerror}") from error
