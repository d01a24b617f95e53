"""What the things that tahq-netem makes are called, and how a name tells whose it is.

A namespace is `tahq-<pid>-<host>` (`tahq-<pid>.<n>-<host>` for the n-th further network of one process):
the pid is that of the process that made it and that will remove it. Devices live inside namespaces only
and so need no pid; their names stay within the kernel's 15 characters.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

NAMESPACE_FOLDER: Final = Path("/run/netns")
"""Where `ip netns` looks, too."""

SWITCH: Final = "_switch"
"""Name of the namespace that joins the hosts; no host's name starts with an underscore."""

HOST_DEVICE: Final = "eth0"
"""The one network device of a host, besides lo."""

_NAMESPACE = re.compile(r"tahq-(?P<pid>[0-9]+)(?:\.[0-9]+)?-(?P<host>.+)")


def namespace_prefix(pid: int, taken: Collection[str]) -> str:
    """The start of the names of a new network: one that none of the `taken` names has."""
    prefixes = (f"tahq-{pid}-" if number == 0 else f"tahq-{pid}.{number}-" for number in range(len(taken) + 1))
    return next(prefix for prefix in prefixes if not any(name.startswith(prefix) for name in taken))


def owner_pid(namespace: str) -> int | None:
    """The pid of the process that made a namespace; None: the name is not one of ours."""
    match = _NAMESPACE.fullmatch(namespace)
    return None if match is None else int(match["pid"])


def switch_port(index: int) -> str:
    """The device on the switch that the index-th host's cable ends in."""
    return f"port{index}"


def host_address(index: int) -> str:
    """The index-th host's address within its network."""
    return f"10.77.0.{index + 1}"


def host_mac(index: int) -> str:
    """The index-th host's link-layer address: locally administered, and known in advance."""
    return f"02:77:00:00:00:{index + 1:02x}"
