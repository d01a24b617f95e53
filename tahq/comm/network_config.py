"""Configuration of a network of hosts: each host's connection, and exceptions between pairs.

Every network that tahq-netem builds is described by these sections, and `emulate:` of cluster.yaml uses them
under ``hosts: namespaces``, so the same key means the same in both. They are here because cluster.yaml is checked
without tahq-netem; `tahq_netem.network.description.plan_network` resolves them for each pair of hosts.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from tahq.units import Duration, Rate, Section

MAX_HOSTS: Final = 250
"""Hosts of one network: they share 10.77.0.0/24."""


def matching(pattern: str, expected: str) -> AfterValidator:
    """A check that a whole text matches; `expected` describes that in the error."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(f"expected {expected}; got {text!r}")
        return text

    return AfterValidator(check)


Name = Annotated[str, matching("[A-Za-z0-9]([A-Za-z0-9_-]{0,30}[A-Za-z0-9])?", "at most 32 letters, digits, - and _")]
"""The name of a host or a site."""

Share = Annotated[float, Field(ge=0, le=1)]
"""A share of packets, 0 to 1."""

Delay = Annotated[Duration, Field(le=60.0)]
"""A one-way delay of at most a minute."""

Speed = Annotated[Rate, Field(ge=1e4, le=34e9)]
"""A rate that the kernel's shapers can handle: 10kbit to 34gbit."""

CongestionControl = Annotated[str, Field(pattern="^[a-z0-9_]{1,15}$")]
"""A name known to Linux: cubic, bbr, reno."""


def _not_removed(name: object) -> object:
    if name == "relay":
        raise ValueError(
            "the backend relay was removed; run as root with auto, kernel or tun, or set hosts: local "
            "(one rate and one delay for all links)"
        )
    return name


BackendName = Annotated[Literal["auto", "kernel", "tun"], BeforeValidator(_not_removed)]
"""What shapes a network of namespaces; auto: the best that works on this machine."""


class PathConfig(Section):
    """The path of a host's outgoing packets."""

    delay: Delay = 0.0
    """One-way delay of what this host sends."""
    jitter: Delay = 0.0
    """Uniform, ± around `delay` and never below zero; packets keep their order unless `reorder` is set."""
    loss: Share = 0.0
    """Share of packets that are lost: 0.01 is 1 %."""
    reorder: Share = 0.0
    """Share of packets that overtake others, being sent without delay; needs a delay."""


class HostConfig(PathConfig):
    """One host: its access link and its outgoing path. None: not shaped."""

    up: Speed | None = None
    down: Speed | None = None
    site: Name | None = None
    """Hosts of one site can be near each other: see `pairs`."""


class PathChanges(Section):
    """Exceptions to the general values; None: no exception."""

    delay: Delay | None = None
    """One-way."""
    jitter: Delay | None = None
    """Of that delay."""
    loss: Share | None = None
    """Share of packets that are lost."""
    reorder: Share | None = None
    """Share of packets that overtake others."""


class HostChanges(PathChanges):
    """Exceptions for one host; what is not set stays as `emulate` or its profile has it.

    Example: `emulate.hosts: {host1: {up: 20mbit, site: home}, host2: {site: lab, loss: 0.01}}`
    """

    up: Speed | None = None
    """Rate of everything that it sends."""
    down: Speed | None = None
    """Rate of everything that it receives."""
    site: Name | None = None
    """A place that it shares with other hosts, for `pairs` and `links.inside`."""


class PairConfig(PathChanges):
    """An exception between two hosts, a host and a site, or two sites, in both directions.

    Example: `emulate.pairs: [{between: [home, lab], delay: 60ms}, {between: [lab, lab], delay: 0, rate: 1gbit}]`
    """

    between: tuple[Name, Name]
    """Hosts or sites; the same site twice is traffic inside it."""
    rate: Speed | None = None
    """Cap in each direction, below the hosts' `up` and `down`."""


class NetworkConfig(Section):
    """A network of hosts on one machine."""

    hosts: dict[Name, HostConfig] = Field(min_length=1, max_length=MAX_HOSTS)
    """In order: the k-th host has the k-th address."""
    pairs: list[PairConfig] = Field(default_factory=list)
    congestion_control: CongestionControl | None = None
    """TCP's, on every host; None: cubic, as on most machines."""
    tcp_slow_start_after_idle: bool | None = None
    """Whether TCP repeats its slow start after a pause, on every host; None: the kernel's setting, which is yes."""
    backend: BackendName = "auto"

    @field_validator("hosts", mode="before")
    @classmethod
    def _host_without_figures(cls, value: object) -> object:
        # `host2:` with nothing after it is null in YAML and means an unshaped host.
        if isinstance(value, Mapping):
            return {name: {} if host is None else host for name, host in value.items()}
        return value

    @model_validator(mode="after")
    def _pairs_name_hosts_and_sites(self) -> "NetworkConfig":
        check_pairs(self.hosts, self.pairs)
        return self


class EmulatedNetwork(Section):
    """Slow links between the hosts.

    `rate` and `delay` are imitated inside the workers, or, with `hosts: namespaces`, by a real network on this machine,
    for which the keys from `up` on are.
    """

    rate: Rate | None = None
    """Cap of each host's uplink and, separately, of its downlink. Not set: not limited."""
    delay: Delay = 0.0
    """One-way, between any two hosts; a round trip takes twice as long."""
    up: Speed | None = None
    """Uplink of each host, in place of `rate`."""
    down: Speed | None = None
    """Downlink of each host, in place of `rate`."""
    jitter: Delay = 0.0
    """Delays are spread evenly over `delay` ± `jitter`."""
    loss: Share = 0.0
    """Share of packets that are lost: 0.01 is 1 %."""
    reorder: Share = 0.0
    """Share of packets that overtake others."""
    profile: str | None = Field(default=None, min_length=1)
    """A kind of connection (`cable`, `4g`, …; `tahq-netem profiles` lists them), or a YAML file with one, in place
    of rates and delays."""
    hosts: dict[Name, HostChanges] = Field(default_factory=dict)
    """Exceptions for some hosts; host0 runs stage 0, and so on."""
    pairs: list[PairConfig] = Field(default_factory=list)
    """Exceptions between some hosts or sites."""
    congestion_control: CongestionControl | None = None
    """TCP's, on every host: `cubic`, `bbr`, … Not set: cubic."""
    tcp_slow_start_after_idle: bool | None = None
    """Whether TCP begins slowly again after a pause. Not set: the kernel's setting, which is `true`."""
    backend: BackendName = "auto"
    """What shapes the network; `auto`: `kernel` where the kernel has netem, else `tun`."""

    @model_validator(mode="after")
    def _profile_says_it_all(self) -> "EmulatedNetwork":
        said = [key for key in ("rate", "up", "down", "delay", "jitter", "loss", "reorder") if getattr(self, key)]
        if self.profile is not None and said:
            raise ValueError(
                f"profile {self.profile} also sets the network's {', '.join(said)}; remove one of them "
                "(null), or put exceptions under hosts"
            )
        return self

    @property
    def shapes_in_namespaces(self) -> list[str]:
        """The keys whose values only a network of namespaces can imitate."""
        fields = type(self).model_fields
        defaults = {key: fields[key].get_default(call_default_factory=True) for key in _OF_NAMESPACES}
        return [key for key, default in defaults.items() if getattr(self, key) != default]

    def network(self, num_hosts: int) -> NetworkConfig:
        """The network of `num_hosts` stages under ``hosts: namespaces``, after its profile was applied.

        Raises:
            ValueError: `hosts` or `pairs` name unknown hosts or sites.
        """
        names = host_names(num_hosts)
        unknown = [name for name in self.hosts if name not in names]
        if unknown:
            raise ValueError(f"hosts: unknown host {unknown[0]}; expected {listed(names)}")
        common = {"up": self.up or self.rate, "down": self.down or self.rate}
        common |= {key: getattr(self, key) for key in ("delay", "jitter", "loss", "reorder")}
        changes = {name: self.hosts[name].model_dump(exclude_none=True) for name in self.hosts}
        hosts = {name: HostConfig.model_validate(common | changes.get(name, {})) for name in names}
        check_pairs(hosts, self.pairs)
        of_all = {key: getattr(self, key) for key in _OF_ALL_HOSTS}
        return NetworkConfig(hosts=hosts, pairs=self.pairs, **of_all)


_OF_ALL_HOSTS = ("congestion_control", "tcp_slow_start_after_idle", "backend")
_OF_NAMESPACES = ("up", "down", "jitter", "loss", "reorder", "profile", "hosts", "pairs", *_OF_ALL_HOSTS)


def host_names(num_hosts: int) -> list[str]:
    """host0, host1, …; under ``hosts: namespaces`` the n-th runs stage n."""
    return [f"host{index}" for index in range(num_hosts)]


def check_pairs(hosts: Mapping[str, HostConfig], pairs: Sequence[PairConfig]) -> None:
    """Raise ValueError for exceptions that name unknown hosts or sites, or the same pair twice."""
    sites = {host.site for host in hosts.values() if host.site is not None}
    both = sites & set(hosts)
    if both:
        raise ValueError(f"{min(both)!r} is the name of a host and of a site; rename one of them")
    known = [*hosts, *sorted(sites)]
    seen: set[frozenset[str]] = set()
    for pair in pairs:
        first, second = pair.between
        for name in pair.between:
            if name not in known:
                raise ValueError(
                    f"pairs: unknown host or site {name!r}; expected {listed(known)}{nearest(name, known)}"
                )
        if first == second and first in hosts:
            raise ValueError(f"pairs: expected two different hosts; got {first} twice")
        if frozenset(pair.between) in seen:
            raise ValueError(f"pairs: {' and '.join(pair.between)} are named twice; merge the two exceptions")
        seen.add(frozenset(pair.between))


def nearest(name: str, names: Sequence[str]) -> str:
    """`; did you mean X?`, or nothing if no name is near."""
    found = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def listed(names: Sequence[str]) -> str:
    """Names with commas; of many, the middle ones are left out."""
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:11])}, … {names[-1]}"
