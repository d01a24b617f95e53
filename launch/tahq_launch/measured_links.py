"""`links.measured`: what `tahq measure` found, put into a configuration whose hosts are listed.

Caps that are shares become rates, and where more than one TCP connection carried more between two neighbours, links
have as many.
"""

from itertools import pairwise
from pathlib import Path

from tahq.comm.hello import MAX_CONNECTIONS
from tahq.comm.host_shaping import HostRates, with_measured_rates
from tahq.config import ClusterConfig
from tahq.coordinator.cluster_numbers import ClusterNumbers, host_labels
from tahq.errors import ConfigError
from tahq_launch.plan_numbers import check_names, read_numbers


def with_measured(config: ClusterConfig) -> ClusterConfig:
    """The configuration with the figures of `links.measured` in its place; without that key, the configuration.

    Raises:
        ConfigError: the file cannot be read, knows other hosts, or hosts are not a list.
    """
    if config.links.measured is None:
        return config
    if isinstance(config.hosts, str):
        raise ConfigError(
            f"links.measured is for a list of hosts; under hosts: {config.hosts} the rates are those that links sets"
        )
    path = Path(config.links.measured)
    cluster = read_numbers(path).cluster
    check_names(config, cluster, path)
    names = host_labels(config.hosts, config.pipeline.stages)
    known = {host.name: HostRates(host.up, host.down) for host in cluster.hosts}
    hosts = with_measured_rates(config.links, config.hosts, [known[name] for name in names])
    connections = max(config.links.connections, _connections(cluster, names))
    links = config.links.model_copy(update={"measured": None, "connections": connections})
    return config.model_copy(update={"hosts": hosts, "links": links})


def _connections(cluster: ClusterNumbers, names: list[str]) -> int:
    """The most that any two neighbours were found to need."""
    neighbours = {frozenset(pair) for pair in pairwise(names)}
    needed = [path.connections or 1 for path in cluster.paths if frozenset((path.source, path.target)) in neighbours]
    return min(MAX_CONNECTIONS, max(needed, default=1))
