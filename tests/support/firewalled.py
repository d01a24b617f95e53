"""Machines that drop whatever is dialled from outside, as routers with NAT and firewalls do: network namespaces.

::

    hub (10.98.0.1, fd98::1) ── bridge ── left (10.98.0.2, fd98::2), behind drop-inbound
                                    └──── right (10.98.0.3, fd98::3), behind drop-inbound
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

NFT = shutil.which("nft", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
_DROP_INBOUND = """
table inet firewall {
    chain input {
        type filter hook input priority 0; policy drop;
        iif "lo" accept
        ct state established,related accept
        meta l4proto { icmp, ipv6-icmp } accept
    }
}
"""


@dataclass(frozen=True)
class Machines:
    """Names of the namespaces; `hub` can be dialled by all, the others by none."""

    hub: str
    left: str
    right: str


def obstacle() -> str | None:
    """Why no firewall can be set up here; None: it can."""
    if NFT is None:
        return "no nft: apt-get install nftables"
    done = subprocess.run([NFT, "list", "tables"], capture_output=True, text=True)
    return None if done.returncode == 0 else f"nft does not work here: {done.stderr.strip()}"


@contextmanager
def firewalled() -> Iterator[Machines]:
    """The machines, for as long as this is open."""
    names = [f"tahq-nat-{os.getpid()}-{name}" for name in ("hub", "left", "right")]
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
            _ip("-n", name, "link", "set", "lo", "up")
        hub = names[0]
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        _give_addresses(hub, "bridge", 1)
        for number, name in enumerate(names[1:], start=2):
            port = f"port{number}"
            _ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", hub, "link", "set", port, "master", "bridge", "up")
            _give_addresses(name, "eth0", number)
            _ip("-n", name, "link", "set", "eth0", "up")
            rules = ["ip", "netns", "exec", name, str(NFT), "-f", "-"]
            subprocess.run(rules, input=_DROP_INBOUND, text=True, check=True)
        yield Machines(*names)


def _give_addresses(name: str, device: str, number: int) -> None:
    _ip("-n", name, "address", "add", f"10.98.0.{number}/24", "dev", device)
    _ip("-n", name, "address", "add", f"fd98::{number}/64", "dev", device, "nodad")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
