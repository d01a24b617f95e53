"""A network of hosts as every backend builds it: rates of every host, and the path between every two.

A host's own figures apply to what it *sends*: `delay` is one-way, so the round trip between a and b is
delay(a→b) + delay(b→a). Exceptions (`pairs`) name two hosts, a host and a site, or two sites, and hold in both
directions; a figure that an exception leaves out comes from the next wider one, and at last from the sending host.
The sections that a user writes are in `tahq.comm.network_config`, where cluster.yaml uses them too.

Profiles are named kinds of connections, with their figures and sources in profiles.yaml. A user's own file holds one
such entry, without the name.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Final

import yaml
from pydantic import Field, model_validator

from tahq.comm.network_config import HostConfig, NetworkConfig, PairConfig, PathConfig, host_names, listed, nearest
from tahq.errors import ConfigError
from tahq.typed_yaml.mistakes import Origins, read_section, validated
from tahq.units import WRITTEN_BY_HAND, Section

MIN_RATE_BITS_PER_S: Final = 1e4
"""Below, a full packet would take more than a second."""


@dataclass(frozen=True, slots=True)
class PathShape:
    """What packets from one host to another meet; the rate is the cap of the pair."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    reorder: float = 0.0
    rate_bits_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.reorder and not self.delay_s:
            raise ConfigError("reorder needs a delay: packets overtake only those that wait")
        _check_rates(self.rate_bits_per_s)

    @property
    def needs_netem(self) -> bool:
        """Whether it needs more than shaping of rates."""
        return any((self.delay_s, self.jitter_s, self.loss, self.reorder))


@dataclass(frozen=True, slots=True)
class HostShape:
    """A host's access link; None: unshaped."""

    up_bits_per_s: float | None = None
    down_bits_per_s: float | None = None

    def __post_init__(self) -> None:
        _check_rates(self.up_bits_per_s, self.down_bits_per_s)


def _check_rates(*rates_bits_per_s: float | None) -> None:
    for rate in rates_bits_per_s:
        if rate is not None and rate < MIN_RATE_BITS_PER_S:
            raise ConfigError(f"a rate must be at least {MIN_RATE_BITS_PER_S:g} bit/s; got {rate:g}")


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """A network with every exception applied; `paths` has every ordered pair of different hosts."""

    hosts: tuple[str, ...]
    host_shapes: Mapping[str, HostShape]
    paths: Mapping[tuple[str, str], PathShape]
    congestion_control: str | None = None
    tcp_slow_start_after_idle: bool | None = None

    @property
    def needs_netem(self) -> bool:
        """Whether any path needs more than shaping of rates."""
        return any(path.needs_netem for path in self.paths.values())

    def with_rates(self, host: str, shape: HostShape) -> "NetworkPlan":
        """The plan with other rates of a host."""
        return replace(self, host_shapes={**self.host_shapes, known_host(host, self.hosts): shape})

    def with_path(self, source: str, destination: str, shape: PathShape) -> "NetworkPlan":
        """The plan with another path from `source` to `destination`."""
        for host in (source, destination):
            known_host(host, self.hosts)
        if source == destination:
            raise ConfigError(f"a path joins two hosts; got {source} twice")
        return replace(self, paths={**self.paths, (source, destination): shape})

    def rate_bits_per_s(self, source: str, destination: str) -> float | None:
        """The smallest of the source's up, the destination's down and the pair's cap; None: unshaped."""
        rates = (
            self.host_shapes[source].up_bits_per_s,
            self.host_shapes[destination].down_bits_per_s,
            self.paths[source, destination].rate_bits_per_s,
        )
        return min((rate for rate in rates if rate is not None), default=None)

    def round_trip_s(self, one: str, other: str) -> float:
        """Round trip between two hosts without queues."""
        return self.paths[one, other].delay_s + self.paths[other, one].delay_s

    def longest_round_trip_s(self, host: str) -> float:
        """Round trip to the farthest other host; 0 for a host without others."""
        return max((self.round_trip_s(host, other) for other in self.hosts if other != host), default=0.0)


def known_host(name: str, hosts: Iterable[str]) -> str:
    """Return `name` if it is one of `hosts`; else raise ConfigError with the hosts and the nearest name."""
    names = list(hosts)
    if name not in names:
        raise ConfigError(f"no host {name!r} in this network of {listed(names)}{nearest(name, names)}")
    return name


def uniform(
    num_hosts: int,
    *,
    rate: float | None = None,
    names: Sequence[str] | None = None,
    congestion_control: str | None = None,
    **host: float,
) -> NetworkConfig:
    """A network of identical hosts, called host0, host1, … if `names` does not name them.

    `rate` is in bit/s, of each uplink and downlink; `host` has other fields of `HostConfig`, such as delay=0.01.
    """
    config = HostConfig.model_validate({"up": rate, "down": rate} | host)
    return NetworkConfig(
        hosts=dict.fromkeys(names or host_names(num_hosts), config), congestion_control=congestion_control
    )


def plan_network(config: NetworkConfig) -> NetworkPlan:
    """Apply the exceptions: host pair, then host and site, then site pair, then the host's own figures."""
    return NetworkPlan(
        hosts=tuple(config.hosts),
        host_shapes={name: HostShape(host.up, host.down) for name, host in config.hosts.items()},
        paths={
            (source, destination): _path(config, source, destination)
            for source in config.hosts
            for destination in config.hosts
            if source != destination
        },
        congestion_control=config.congestion_control,
        tcp_slow_start_after_idle=config.tcp_slow_start_after_idle,
    )


def _path(config: NetworkConfig, source: str, destination: str) -> PathShape:
    exceptions = _exceptions(config, source, destination)
    levels: list[PathConfig | PairConfig] = [*exceptions, config.hosts[source]]

    def first(field: str) -> float:
        return next(float(value) for level in levels if (value := getattr(level, field)) is not None)

    rate = next((pair.rate for pair in exceptions if pair.rate), None)
    try:
        return PathShape(first("delay"), first("jitter"), first("loss"), first("reorder"), rate)
    except ConfigError as error:
        raise ConfigError(f"from {source} to {destination}: {error}") from None


def _exceptions(config: NetworkConfig, source: str, destination: str) -> list[PairConfig]:
    """The exceptions for a pair of hosts, the most specific first."""
    source_site, destination_site = config.hosts[source].site, config.hosts[destination].site
    levels: list[set[frozenset[str | None]]] = [
        {frozenset((source, destination))},
        {frozenset((source, destination_site)), frozenset((source_site, destination))},
        {frozenset((source_site, destination_site))},
    ]
    return [pair for level in levels for pair in config.pairs if frozenset(pair.between) in level]


class Profile(Section):
    """One kind of connection: the same for every host, or hosts are divided among different sites."""

    title: str
    source: list[str] = Field(min_length=1)
    """Where each figure comes from."""
    host: HostConfig | None = None
    """The connection of every host, if there are no sites."""
    sites: dict[str, HostConfig] = Field(default_factory=dict)
    """The connection of each site's hosts; the first hosts are in the first site."""
    pairs: list[PairConfig] = Field(default_factory=list)
    """Exceptions between sites."""

    @model_validator(mode="after")
    def _one_kind_or_sites(self) -> "Profile":
        if (self.host is None) == (not self.sites):
            raise ValueError("expected host (all hosts are alike) or sites, not both")
        return self

    def network(self, num_hosts: int, names: list[str] | None = None) -> NetworkConfig:
        """A network of `num_hosts` hosts, divided evenly among the sites if there are any."""
        if num_hosts < max(1, len(self.sites)):
            raise ConfigError(f"{self.title} needs at least {max(1, len(self.sites))} hosts; got {num_hosts}")
        sites = [host.model_copy(update={"site": site}) for site, host in self.sites.items()]
        if self.host is not None:
            sites = [self.host]
        hosts = [sites[index * len(sites) // num_hosts] for index in range(num_hosts)]
        named = dict(zip(names or host_names(num_hosts), hosts, strict=True))
        return validated(NetworkConfig, {"hosts": named, "pairs": self.pairs}, Origins(self.title))


def profile(name: str, num_hosts: int, names: list[str] | None = None) -> NetworkConfig:
    """A network of hosts with the connections of a profile, given by its name or the path of a YAML file.

    Raises:
        ConfigError: there is no such profile or file, or it does not make sense.
    """
    return load_profile(name).network(num_hosts, names)


def load_profile(name: str) -> Profile:
    """The profile of that name, or in the YAML file of that path."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        return read_section(Profile, Path(name), "host", "`tahq-netem profiles` lists the named profiles")
    known = named_profiles()
    if name not in known:
        raise ConfigError(f"no profile {name!r}; there are {', '.join(known)}{nearest(name, list(known))}")
    return known[name]


def profiles_text() -> str:
    """The file of the named profiles: figures, and the sources of those."""
    return (files("tahq_netem") / "profiles.yaml").read_text(encoding="utf-8")


@functools.cache
def named_profiles() -> dict[str, Profile]:
    """The named profiles, in the order of the file."""
    entries = yaml.safe_load(profiles_text()).items()
    return {name: Profile.model_validate(entry, context=WRITTEN_BY_HAND) for name, entry in entries}
