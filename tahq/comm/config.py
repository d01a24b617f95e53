"""`links:` and `hosts:` of cluster.yaml."""

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from tahq.comm.cap import Cap
from tahq.comm.keys import parse_public_key
from tahq.comm.link.sending_order import First
from tahq.comm.link.spec import MAX_CONNECTIONS
from tahq.comm.network_config import (
    BackendName,
    CongestionControl,
    Delay,
    HostChanges,
    Name,
    NetworkConfig,
    PairConfig,
    Share,
    Speed,
    check_pairs,
    host_names,
    listed,
)
from tahq.comm.network_config import HostConfig as NetworkHostConfig
from tahq.units import Rate, Section, Size

LinkTransport = Literal["zmq", "gloo", "nccl"]
"""What carries the frames of a link."""

_HOST_PORT = re.compile(r"(\[[0-9A-Za-z:.%]+\]|[^:\s\[\]/]+):([0-9]{1,5})")
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?")


def _host_port(text: str) -> str:
    match = _HOST_PORT.fullmatch(text)
    if match is None or int(match.group(2)) > 65535:
        raise ValueError(f"expected host:port, such as 0.0.0.0:7000 or [::1]:7000; got {text!r}")
    return text


def _dialled_host_port(text: str) -> str:
    if _host_port(text).rpartition(":")[2].strip("0") == "":
        raise ValueError(f"peers dial this address, so it needs the real port; got {text!r}")
    return text


def _advertised(text: str) -> str:
    return text if text == "none" else _dialled_host_port(text)


def _device(text: str) -> str:
    if _DEVICE.fullmatch(text) is None:
        raise ValueError(f"expected auto, cpu, cuda or cuda:N; got {text!r}")
    return text


def _bare_host(text: str) -> str:
    if not text or text.startswith("-") or re.search(r"[\s/]|^[^:]*:[^:]*$", text):
        raise ValueError(f"expected a host name or an IP address, without a port; got {text!r}")
    return text


def _ssh_destination(text: str) -> str:
    # ssh would read a leading dash as an option, and options can run commands.
    if not text or text.startswith("-") or any(char.isspace() for char in text):
        raise ValueError(f"expected [user@]host for ssh; got {text!r}")
    return text


def _variable_name(text: str) -> str:
    if not (text.isascii() and text.isidentifier()):
        raise ValueError(f"expected the name of an environment variable; got {text!r}")
    return text


HostPort = Annotated[str, AfterValidator(_host_port)]
"""host:port to listen on; port 0 is any free one, an IPv6 address stands in brackets."""

DialledHostPort = Annotated[str, AfterValidator(_dialled_host_port)]
"""host:port that others dial; port 0 is refused."""

Device = Annotated[str, AfterValidator(_device)]
"""auto, cpu, cuda or cuda:N."""


class LinksConfig(Section):
    """How fast and how far away the hosts are from each other.

    `rate` caps each host's uplink and, separately, its downlink; `delay` is one-way. None: not shaped.
    Under ``hosts: namespaces`` a network of this machine is made so, and the keys from `up` on may say more
    of it; elsewhere rate and delay are enforced between session and socket, in user space. How tahq uses the
    links, from `piece` to `cap_down`, holds everywhere.
    """

    rate: Rate | None = None
    delay: Delay = 0.0
    piece: Size = Field(default=256 * 1024, ge=4096, le=1024 * 1024)
    """Longest message; a larger frame travels in pieces, so that control is never stuck behind it."""
    inside: LinkTransport = "zmq"
    """What carries frames between neighbours of one site; between sites it is ZMQ."""
    first: First = "oldest"
    """What a host's uplink takes first of all that waits on its links."""
    connections: int = Field(default=1, ge=1, le=MAX_CONNECTIONS)
    """TCP connections of each link."""
    cap_up: Cap | None = None
    """What tahq may use of each host's uplink."""
    cap_down: Cap | None = None
    measured: str | None = Field(default=None, min_length=1)
    """A file of `tahq measure`, for a list of hosts: shares are of its rates, connections as many as it found."""
    up: Speed | None = None
    """Of each host, in place of `rate`."""
    down: Speed | None = None
    jitter: Delay = 0.0
    loss: Share = 0.0
    reorder: Share = 0.0
    profile: str | None = Field(default=None, min_length=1)
    """A kind of connection, in place of all that says so itself; its name, or the path of a file with one."""
    hosts: dict[Name, HostChanges] = Field(default_factory=dict)
    """What is otherwise with some hosts; host0 runs stage 0, and so on."""
    pairs: list[PairConfig] = Field(default_factory=list)
    """What is otherwise between some hosts or sites."""
    congestion_control: CongestionControl | None = None
    """TCP's, on every host; None: cubic."""
    tcp_slow_start_after_idle: bool | None = None
    """Whether TCP begins slowly again after a pause, on every host; None: as the kernel has it."""
    backend: BackendName = "auto"
    """What imitates the network."""

    @model_validator(mode="after")
    def _profile_says_it_all(self) -> "LinksConfig":
        said = [key for key in ("rate", "up", "down", "delay", "jitter", "loss", "reorder") if getattr(self, key)]
        if self.profile is not None and said:
            raise ValueError(
                f"profile {self.profile} says the network's {', '.join(said)} too; take one of them away "
                "(null), or say under hosts what is otherwise"
            )
        return self

    @property
    def shapes_in_namespaces(self) -> list[str]:
        """The keys with a value that only a network of namespaces can imitate."""
        fields = type(self).model_fields
        defaults = {key: fields[key].get_default(call_default_factory=True) for key in _OF_NAMESPACES}
        return [key for key, default in defaults.items() if getattr(self, key) != default]

    def network(self, num_hosts: int) -> NetworkConfig:
        """The network of `num_hosts` stages under ``hosts: namespaces``, its profile put in place before.

        Raises:
            ValueError: `hosts` or `pairs` name what there is not.
        """
        names = host_names(num_hosts)
        unknown = [name for name in self.hosts if name not in names]
        if unknown:
            raise ValueError(f"hosts: no host {unknown[0]}; there are {listed(names)}, which run the stages in order")
        hosts = {name: self._host(self.hosts.get(name, HostChanges())) for name in names}
        check_pairs(hosts, self.pairs)
        of_all = {key: getattr(self, key) for key in _OF_ALL_HOSTS}
        return NetworkConfig(hosts=hosts, pairs=self.pairs, **of_all)

    def _host(self, own: HostChanges) -> NetworkHostConfig:
        common = {"up": self.up or self.rate, "down": self.down or self.rate}
        common |= {key: getattr(self, key) for key in ("delay", "jitter", "loss", "reorder")}
        said = {key: value for key, value in own.model_dump().items() if value is not None}
        return NetworkHostConfig.model_validate({**common, **said})


_OF_ALL_HOSTS = ("congestion_control", "tcp_slow_start_after_idle", "backend")
_OF_NAMESPACES = (
    *("up", "down", "jitter", "loss", "reorder"),
    *("profile", "hosts", "pairs"),
    *_OF_ALL_HOSTS,
)


class HostConfig(Section):
    """One machine of a `hosts:` list; the n-th host runs stage n."""

    address: Annotated[str, AfterValidator(_bare_host)]
    """Where its neighbours reach it: a name or an IP address, without a port."""
    ssh: Annotated[str, AfterValidator(_ssh_destination)] | None = None
    """Destination for OpenSSH ([user@]host); None: started by hand with `tahq-worker`."""
    ssh_options: list[str] = Field(default_factory=list)
    """More arguments for ssh, such as ["-p", "2222"]."""
    bind: HostPort = "0.0.0.0:0"
    """Address and port that its worker listens on; port 0: any free one."""
    advertise: Annotated[str, AfterValidator(_advertised)] | None = None
    """host:port that neighbours dial, if it differs (a port forwarded by a router); `none`: this
    host can only dial out. None: address and the bound port."""
    device: Device = "auto"
    cap_up: Cap | None = None
    """What tahq may use of its uplink, in place of `links.cap_up`."""
    cap_down: Cap | None = None
    python: str = Field(default="python3", min_length=1)
    """Interpreter there that has tahq installed."""
    workdir: str | None = None
    """Folder there that relative paths (runs, data, models) start from; None: the login folder."""
    env: dict[Annotated[str, AfterValidator(_variable_name)], str] = Field(default_factory=dict)
    """Environment of its worker."""
    site: Name | None = None
    """Hosts of one site are on one fast network; see `links.inside`. None: a site of its own."""
    public_key: Annotated[str, AfterValidator(parse_public_key)] | None = None
    """Of its worker, which then may join, and nobody else for this stage. None: any that may join."""

    @model_validator(mode="after")
    def _ssh_settings_need_ssh(self) -> "HostConfig":
        if self.ssh is not None and self.public_key is not None:
            raise ValueError("public_key is for hosts that are started by hand; a worker that ssh starts gets a key")
        if self.ssh is None and (self.ssh_options or self.env or self.workdir):
            raise ValueError("ssh_options, env and workdir are for hosts that are started by ssh; set ssh too")
        return self


def _kind_of_hosts(value: object) -> str:
    return "list" if isinstance(value, Sequence) and not isinstance(value, str) else "name"


Hosts = Annotated[
    Annotated[Literal["local", "namespaces"], Tag("name")]
    | Annotated[Annotated[list[HostConfig], Field(min_length=1)], Tag("list")],
    Discriminator(_kind_of_hosts),
]
"""`local`, `namespaces`, or the machines; told apart by kind, so that an error speaks of the one meant."""
