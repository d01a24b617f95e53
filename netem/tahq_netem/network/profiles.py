"""Named kinds of connections, and networks of hosts that have them.

The figures and their sources are in profiles.yaml. A user's own file holds one such entry, without the name.
"""

import functools
from importlib.resources import files
from pathlib import Path

import yaml
from pydantic import Field, model_validator

from tahq.comm.network_config import HostConfig, NetworkConfig, PairConfig, host_names, nearest
from tahq.errors import ConfigError
from tahq.typed_yaml.mistakes import Origins, read_section, validated
from tahq.units import WRITTEN_BY_HAND, Section


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
