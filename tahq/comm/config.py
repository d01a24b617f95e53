"""`links:` and `hosts:` of cluster.yaml, and the shaping of each stage's host that follows from them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    SerializationInfo,
    Tag,
    ValidationInfo,
    model_validator,
)

from tahq.comm.keys import parse_public_key
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import MAX_CONNECTIONS, First
from tahq.comm.network_config import (
    EmulatedNetwork,
    Name,
    host_names,
    matching,
)
from tahq.comm.network_model import GOODPUT_SHARE
from tahq.errors import ConfigError
from tahq.units import WRITTEN_BY_HAND, Section, Size, parse_rate, write_rate

LinkTransport = Literal["zmq", "gloo", "nccl"]
"""Transport of a link's frames."""

_HOST_PORT = re.compile(r"(\[[0-9A-Za-z:.%]+\]|[^:\s\[\]/]+):([0-9]{1,5})")


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


HostPort = Annotated[str, AfterValidator(_host_port)]
"""host:port to listen on; port 0 is any free port, an IPv6 address is in brackets."""

DialledHostPort = Annotated[str, AfterValidator(_dialled_host_port)]
"""host:port that others dial; port 0 is refused."""

Device = Annotated[str, matching("auto|cpu|cuda(:[0-9]+)?", "auto, cpu, cuda or cuda:N")]
"""auto, cpu, cuda or cuda:N."""


LEAST_CAP_BITS_PER_S = 1e5
"""Below this, heartbeats would wait long for the shortest message, of 4 KiB."""

_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")


def parse_cap(value: object) -> float | str:
    """Bits per second from ``20mbit``, or ``60%`` as text; a float passes unchanged; ValueError: neither of these."""
    match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        percent = Decimal(match.group(1))
        if not 0 < percent <= 100:
            raise ValueError(f"a share must be above 0 % and at most 100 %; got {value!r}")
        return f"{percent.normalize():f}%"
    try:
        rate = parse_rate(value)
    except ValueError as error:
        raise ValueError(f"a cap must be a rate, such as 20mbit, or a share, such as 60%: {error}") from error
    if rate < LEAST_CAP_BITS_PER_S:
        raise ValueError(f"a cap must be at least {write_rate(LEAST_CAP_BITS_PER_S)}; got {value!r}")
    return rate


def cap_bits_per_s(cap: float | str, rate_bits_per_s: float | None) -> float | None:
    """A cap in bits per second on a line of this rate; None: a share of an unknown rate."""
    if not isinstance(cap, str):
        return cap
    return None if rate_bits_per_s is None else float(Decimal(cap.removesuffix("%")) / 100) * rate_bits_per_s


def _validate_cap(value: object, info: ValidationInfo) -> float | str:
    if isinstance(value, float) and info.context == WRITTEN_BY_HAND:
        raise ValueError(f"a quantity needs a unit, such as 20mbit or 60%; got {value!r}")
    return parse_cap(value)


def _serialize_cap(value: Any, info: SerializationInfo) -> Any:
    return write_rate(value) if isinstance(value, float) and info.context == WRITTEN_BY_HAND else value


Cap = Annotated[float | str, BeforeValidator(_validate_cap), PlainSerializer(_serialize_cap)]
"""A pydantic field: a rate (``20mbit``) as bits per second, or a share (``60%``) of the host's rate as text."""


class LinksConfig(Section):
    """How tahq uses the links between the hosts.

    Example: `links: {cap_up: 60%, first: gradients}`
    """

    piece: Size = Field(default=256 * 1024, ge=4096, le=1024 * 1024)
    """Longest message; a larger frame travels in pieces."""
    inside: LinkTransport = "zmq"
    """Transport between neighbours of one site; between sites it is ZMQ."""
    first: First = "oldest"
    """What a host's uplink takes first: the frame that was queued first, or all frames of one direction."""
    connections: int = Field(default=1, ge=1, le=MAX_CONNECTIONS)
    """TCP connections of each link; more where one cannot fill a long, fast or lossy path."""
    cap_up: Cap | None = None
    """Most that tahq uses of each host's uplink: `20mbit`, or `60%` of its rate."""
    cap_down: Cap | None = None
    """The same for the downlink."""
    measured: str | None = Field(default=None, min_length=1)
    """A file of `tahq measure`, for a list of hosts: rates for shares, and the number of connections."""


class MachineConfig(Section):
    """Where the workers run: `local` (the default), `namespaces`, a number of invited machines (`hosts: {invited: 3}`),
    or a list, of which the n-th machine runs stage n. Keys in `host_defaults` are for all entries that do not set them.

    With `namespaces` each worker has a host of a network that is made on this machine, as `emulate` says; needs root.

    Example: `hosts: [{address: 198.51.100.20, ssh: ada@198.51.100.20}, {address: laptop.example.net, advertise: none}]`
    """

    address: Annotated[
        str, matching(r"(?!-)(?![^:]*:[^:]*\Z)[^\s/]+", "a host name or an IP address, without a port")
    ] = ""
    """Name or IP address by which its neighbours reach it, without a port. Left open for this machine: the one at which
    they reach the coordinator (`ClusterConfig`)."""
    local: bool = False
    """This machine: its worker is started here, without ssh."""
    # ssh would read a leading dash as an option, and options can run commands.
    ssh: Annotated[str, matching(r"(?!-)\S+", "[user@]host for ssh")] | None = None
    """Destination for the system's OpenSSH, [user@]host, which then starts the worker. Not set: started by hand with
    `tahq-worker`."""
    ssh_options: list[str] = Field(default_factory=list)
    """More arguments for ssh, such as `["-p", "2222"]`."""
    bind: HostPort = "0.0.0.0:0"
    """Where its worker listens; port 0 follows `run.base_port`."""
    advertise: Annotated[str, AfterValidator(_advertised)] | None = None
    """host:port that neighbours dial, if it differs, such as a port that a router forwards. `none`: this host only
    dials out."""
    device: Device = "auto"
    """`cpu`, `cuda`, `cuda:1`; `auto` follows `run.device`."""
    cap_up: Cap | None = None
    """Most that tahq uses of its uplink, in place of `links.cap_up`."""
    cap_down: Cap | None = None
    """The same for its downlink."""
    python: str = Field(default="python3", min_length=1)
    """Interpreter there that has tahq installed."""
    workdir: str | None = None
    """Folder there that relative paths start from. Not set: the login folder."""
    env: dict[Annotated[str, matching("[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable")], str] = Field(
        default_factory=dict
    )
    """Environment of its worker, such as `{CUDA_VISIBLE_DEVICES: "1"}`."""
    site: Name | None = None
    """Hosts of one site share a fast network, for `links.inside`. Not set: a site of its own."""
    public_key: Annotated[str, AfterValidator(parse_public_key)] | None = None
    """Key of the only worker that may take this stage by hand. Not set: any admitted worker."""

    @model_validator(mode="after")
    def _is_reached_in_one_way(self) -> "MachineConfig":
        if not self.local and not self.address:
            raise ValueError("address is missing; give a host name or an IP address, or local: true for this machine")
        if self.local and self.ssh is not None:
            raise ValueError("local: true is for this machine, which needs no ssh; remove one of them")
        if not self.address:
            self.set_default("address", "127.0.0.1")
        return self

    @property
    def is_started(self) -> bool:
        """Whether the launcher starts its worker, here or by ssh; else a person does."""
        return self.local or self.ssh is not None

    @model_validator(mode="after")
    def _ssh_settings_need_ssh(self) -> "MachineConfig":
        if self.is_started and self.public_key is not None:
            raise ValueError(
                "public_key is for hosts that are started by hand; a worker that tahq-launch starts gets a key"
            )
        if self.ssh is None and (self.ssh_options or self.env or self.workdir):
            raise ValueError("ssh_options, env and workdir are for hosts that are started by ssh; set ssh too")
        return self


def _kind_of_hosts(value: object) -> str:
    return "list" if isinstance(value, Sequence) and not isinstance(value, str) else "name"


MOST_INVITED = 256


def num_invited(hosts: object) -> int:
    """How many machines ``{invited: 3}`` asks for; 0: this is another kind of `hosts`."""
    if not isinstance(hosts, Mapping):
        return 0
    count = hosts.get("invited")
    if list(hosts) != ["invited"] or type(count) is not int or not 1 <= count <= MOST_INVITED:
        raise ValueError(
            "expected local, namespaces, a list of machines, or {invited: 3}, with the number of machines that join by "
            f"invite, 1 to {MOST_INVITED}"
        )
    return count


def _machines(hosts: object) -> object:
    """The machines of ``{invited: 3}`` before they have joined: nothing is known of them but their number."""
    count = num_invited(hosts)
    return [{"address": f"invited-{number}"} for number in range(1, count + 1)] if count else hosts


Hosts = Annotated[
    Annotated[Literal["local", "namespaces"], Tag("name")]
    | Annotated[Annotated[list[MachineConfig], Field(min_length=1)], Tag("list")],
    Discriminator(_kind_of_hosts),
    BeforeValidator(_machines),
]
"""`local`, `namespaces`, or the machines; discriminated by type, so that errors name the right one."""


# The shaping of a host

_ORDERED_CAP = "95%"
"""Cap of an uplink whose order of sending is to be kept. That order (`links.first`) holds only among frames that wait
in the worker; TCP shares an uplink among those that it already has. So where another order than the default is wanted
and the rate is known, the uplink is capped a little below it, as routers do to keep the queue to themselves."""


@dataclass(frozen=True, slots=True)
class HostRates:
    """A host's rates in bits per second of tahq's own bytes; None: not known."""

    up_bits_per_s: float | None = None
    down_bits_per_s: float | None = None


def host_shaping(links: LinksConfig, network: EmulatedNetwork, hosts: Hosts, stage: int, num_stages: int) -> Shaping:
    """The limits that the worker of a stage enforces between its sessions and its sockets; `network` has no profile.

    A cap that is a share refers to `emulate.rate` where the workers imitate it, to the rates of the stage's host under
    ``hosts: namespaces``, or to a measured rate (`with_measured_rates`).

    Raises:
        ConfigError: a cap is a share, and the host's rate is unknown, or so low that the cap would be below the least.
    """
    is_imitated = hosts != "namespaces"
    rates = HostRates(network.rate, network.rate)
    if not is_imitated:
        host = network.network(num_stages).hosts[host_names(num_stages)[stage]]
        rates = HostRates(host.up and GOODPUT_SHARE * host.up, host.down and GOODPUT_SHARE * host.down)
    own = hosts[stage] if isinstance(hosts, list) else None
    caps = _caps(links, own, rates, is_shaped=is_imitated and network.rate is not None)
    return Shaping(
        network.rate if is_imitated else None,
        network.delay if is_imitated else 0.0,
        links.piece,
        *(_known(name, cap, rate, own, stage) for name, (cap, rate) in caps.items()),
    )


def with_measured_rates(
    links: LinksConfig, network: EmulatedNetwork, hosts: Sequence[MachineConfig], rates: Sequence[HostRates]
) -> list[MachineConfig]:
    """The machines of a `hosts:` list, with shares of measured rates replaced by rates; other shares stay.

    `rates` are goodputs of TCP.

    Raises:
        ConfigError: a share of a rate is below the least cap.
    """
    machines = []
    for stage, (host, of_host) in enumerate(zip(hosts, rates, strict=True)):
        known = {
            name: _known(name, cap, rate, host, stage)
            for name, (cap, rate) in _caps(links, host, of_host, is_shaped=network.rate is not None).items()
            if cap is not None and not (rate is None and isinstance(cap, str))
        }
        machines.append(host.model_copy(update=known))
    return machines


def _caps(
    links: LinksConfig, own: MachineConfig | None, rates: HostRates, *, is_shaped: bool
) -> dict[str, tuple[float | str | None, float | None]]:
    """The cap of a host's uplink and of its downlink, each with the rate that a share refers to."""
    up, down = rates.up_bits_per_s, rates.down_bits_per_s
    cap_up = (own.cap_up if own else None) or links.cap_up
    if cap_up is None and links.first != "oldest" and up is not None and not is_shaped:
        ordered = cap_bits_per_s(_ORDERED_CAP, up)
        cap_up = _ORDERED_CAP if ordered is not None and ordered >= LEAST_CAP_BITS_PER_S else None
    return {"cap_up": (cap_up, up), "cap_down": ((own.cap_down if own else None) or links.cap_down, down)}


def _known(
    name: str, cap: float | str | None, rate_bits_per_s: float | None, own: MachineConfig | None, stage: int
) -> float | None:
    if cap is None:
        return None
    key = f"hosts.{stage}.{name}" if own is not None and getattr(own, name) is not None else f"links.{name}"
    bits_per_s = cap_bits_per_s(cap, rate_bits_per_s)
    if bits_per_s is None:
        raise ConfigError(
            f"{key}: {cap} is a share of a rate, and that of stage {stage}'s host is not known; measure it with "
            f"tahq measure, or give the cap as a rate, such as 20mbit"
        )
    if bits_per_s < LEAST_CAP_BITS_PER_S:
        got, least = write_rate(float(f"{bits_per_s:.3g}")), write_rate(LEAST_CAP_BITS_PER_S)
        raise ConfigError(f"{key}: {cap} of the rate of stage {stage}'s host is {got}; expected at least {least}")
    return bits_per_s
