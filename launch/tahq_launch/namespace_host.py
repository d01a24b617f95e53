"""Workers on the hosts of a network on this machine: ``hosts: namespaces``.

Stage k runs on host k. The coordinator stays in the launcher's process, but listens on one more host, which is not
shaped and whose delay to each worker is that worker's own: a control message takes as long as a message between two
like hosts, and shares its worker's uplink and downlink with activations and gradients.

Invariants:
- no worker starts before the network was measured and found as configured; the measurements are in the run's
  network.json, also if they differ;
- however the launcher ends, the network is removed; after SIGKILL, by the next network that is built.
"""

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Final

from tahq.comm.network_config import HostConfig, NetworkConfig, PairConfig, host_names
from tahq.comm.zmq.addresses import format_address, parse_address
from tahq.config.cluster import ClusterConfig
from tahq.errors import NetworkError, file_errors
from tahq_launch.command_line import announce
from tahq_launch.start.prepared_run import PreparedRun
from tahq_launch.start.run_keys import WorkerSecret
from tahq_launch.start.worker_command import WorkerCommand, local_command
from tahq_netem.backends.choice import build_network
from tahq_netem.backends.namespaces import entered
from tahq_netem.backends.network import Network
from tahq_netem.measure.calibration import calibrate
from tahq_netem.measure.figures import Calibration

COORDINATOR: Final = "coordinator"
"""The host that the coordinator listens on."""

_ADVICE: Final = (
    "run as root, or set hosts: local, which needs no root (one rate and one delay for all links, imitated by the "
    "workers)"
)

log = logging.getLogger(__name__)


class NamespaceHosts:
    """The hosts of a running network: host0, host1, … and the coordinator's."""

    def __init__(self, network: Network) -> None:
        self._network = network

    @property
    def bind(self) -> str:
        """Address that the coordinator listens on: any free port of its host."""
        return format_address(self._network.address(COORDINATOR), 0)

    def on_coordinator(self) -> AbstractContextManager[None]:
        """Within the block, this thread opens its sockets on the coordinator's host."""
        return entered(self._network.namespace(COORDINATOR))

    def worker_command(
        self, stage: int, coordinator: str, threads: int, *, secret: WorkerSecret, debug: bool
    ) -> WorkerCommand:
        """The command that starts the worker of a stage on its host; see `local_command`."""
        host = f"host{stage}"
        peer = format_address(self._network.address(COORDINATOR), parse_address(coordinator, "coordinator")[1])
        command = local_command(stage, peer, threads, secret=secret, debug=debug)
        argv = (*command.argv, "--bind", format_address(self._network.address(host), 0))
        return replace(command, argv=argv, namespace=self._network.namespace(host))


@contextlib.contextmanager
def open_hosts(prepared: PreparedRun) -> Iterator[NamespaceHosts]:
    """Build the network of a run, measure it, and remove it afterwards; NetworkError if it is not as configured."""
    config = prepared.config
    backend = config.emulate.backend
    with build_network(network_of(config), backend=backend, option="emulate.backend", advice=_ADVICE) as network:
        maker = f"made by {network.backend}, TCP is {network.congestion_control}"
        announce(f"network of {config.pipeline.num_workers} hosts, {maker}; measuring it")
        begin_s = time.monotonic()
        measured = calibrate(network, pairs=links_of(config), quick=True)
        took_s = round(time.monotonic() - begin_s, 2)
        _keep(prepared, measured, took_s)
        measured.check()
        found = f"{len(measured.figures)} figures within their bounds" if measured.figures else "it has no links"
        announce(f"  {found}, measured in {took_s:.1f} s ({prepared.folder.network.name})")
        yield NamespaceHosts(network)


def network_of(config: ClusterConfig) -> NetworkConfig:
    """The stages' hosts and the coordinator's, whose delay to each is that host's own."""
    network = config.emulate.network(config.pipeline.num_workers)
    path_keys = {"delay", "jitter", "loss", "reorder"}
    pairs = [
        PairConfig(between=(name, COORDINATOR), **host.model_dump(include=path_keys))
        for name, host in network.hosts.items()
    ]
    hosts = {**network.hosts, COORDINATOR: HostConfig()}
    return network.model_copy(update={"hosts": hosts, "pairs": [*network.pairs, *pairs]})


def links_of(config: ClusterConfig) -> list[tuple[str, str]]:
    """(source, destination) of everything that a step sends."""
    pairs = config.grid.pairs(host_names(config.pipeline.num_workers))
    return [pair for one, other in pairs for pair in ((one, other), (other, one))]


def _keep(prepared: PreparedRun, measured: Calibration, took_s: float) -> None:
    """Write network.json; when a run is continued, the earlier file is kept beside it."""
    path, options = prepared.folder.network, prepared.options
    if options.start_step and path.exists():
        path.replace(path.with_name(f"network-until-step-{options.start_step}.json"))
    measured_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    record = {"measured_at": measured_at, "took_s": took_s, "start": options.epoch, "start_step": options.start_step}
    text = json.dumps(record | measured.as_dict(), indent=1, allow_nan=False)
    log.info("network: %s", text)
    with file_errors("write", path, NetworkError):
        path.write_text(f"{text}\n", encoding="utf-8")
