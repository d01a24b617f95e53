"""`links:` and `hosts:` of cluster.yaml."""

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from tahq.units import Duration, Rate, Section, Size

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

    `rate` caps each host's uplink and, separately, its downlink; `delay` is one-way. None: not
    shaped. Enforced between session and socket, in user space, wherever the workers run.
    """

    rate: Rate | None = None
    delay: Duration = Field(default=0.0, le=60.0)
    piece: Size = Field(default=256 * 1024, ge=4096, le=1024 * 1024)
    """Longest message; a larger frame travels in pieces, so that control is never stuck behind it."""


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
    python: str = Field(default="python3", min_length=1)
    """Interpreter there that has tahq installed."""
    workdir: str | None = None
    """Folder there that relative paths (runs, data, models) start from; None: the login folder."""
    env: dict[Annotated[str, AfterValidator(_variable_name)], str] = Field(default_factory=dict)
    """Environment of its worker."""

    @model_validator(mode="after")
    def _ssh_settings_need_ssh(self) -> "HostConfig":
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
