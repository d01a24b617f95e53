"""`links.measured`: puts the figures of `tahq measure` into a configuration with a list of hosts.

Caps that are shares become rates, and links get as many TCP connections as two neighbours were found to need.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from tahq.comm.host_shaping import HostRates, with_measured_rates
from tahq.comm.link.spec import MAX_CONNECTIONS
from tahq.config.cluster import ClusterConfig
from tahq.errors import ConfigError
from tahq.plan.cluster_numbers import ClusterNumbers, host_labels
from tahq_launch.plan.numbers import check_names, read_numbers


def with_measured(config: ClusterConfig) -> ClusterConfig:
    """Replace `links.measured` by its figures; without that key, return the configuration unchanged.

    Raises:
        ConfigError: the file cannot be read or has other hosts, or `hosts` is not a list.
    """
    if config.links.measured is None:
        return config
    if isinstance(config.hosts, str):
        raise ConfigError(
            f"links.measured is for a list of hosts; under hosts: {config.hosts} the rates are those that links sets"
        )
    path = Path(config.links.measured)
    try:
        cluster = read_numbers(path).cluster
        check_names(config, cluster, path)
    except ConfigError as error:
        raise ConfigError(f"links.measured: {error}") from error
    names = host_labels(config.hosts, config.pipeline.stages)
    known = {host.name: HostRates(host.up, host.down) for host in cluster.hosts}
    # A host with a link inside its site has no cap: a process group would not keep to it.
    rates = [HostRates() if config.has_group(stage) else known[name] for stage, name in enumerate(names)]
    hosts = with_measured_rates(config.links, config.hosts, rates)
    connections = max(config.links.connections, needed_connections(cluster, names))
    links = config.links.model_copy(update={"measured": None, "connections": connections})
    return config.model_copy(update={"hosts": hosts, "links": links})


def needed_connections(cluster: ClusterNumbers, names: Sequence[str]) -> int:
    """The most TCP connections that any two neighbours in this order of hosts were found to need."""
    neighbours = {frozenset(pair) for pair in pairwise(names)}
    needed = [path.connections or 1 for path in cluster.paths if frozenset((path.source, path.target)) in neighbours]
    return min(MAX_CONNECTIONS, max(needed, default=1))
