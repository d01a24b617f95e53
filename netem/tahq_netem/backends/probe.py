"""Find out what this kernel and this user can do, by trying each part on a throwaway link in a throwaway namespace.

A kernel's configuration says little: parts are modules that may not load, and containers take rights away.
"""

import errno
import os
import platform
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pyroute2 import IPRoute, NetlinkError
from pyroute2.protocols import ETH_P_IP

from tahq.errors import NetworkError
from tahq_netem.backends.namespace_group import NamespaceGroup
from tahq_netem.backends.namespaces import netlink
from tahq_netem.backends.tcp_reset import can_reset
from tahq_netem.backends.tun import open_device
from tahq_netem.network.description import NetworkPlan

_LABEL: Final = "_probe"
_LINK: Final = "probe"


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to try; `attempt` raises OSError, NetlinkError or NetworkError if it does not work."""

    attempt: Callable[[IPRoute], object]
    meaning: str
    """What does not work without it."""
    module: str


@dataclass(frozen=True, slots=True)
class Probe:
    """The findings. `parts` says of each of `PARTS` whether it works; empty without namespaces."""

    is_root: bool
    namespaces_obstacle: str | None
    """Why namespaces cannot be made; None if they can."""
    parts: Mapping[str, bool]
    congestion_controls: tuple[str, ...]
    kernel: str = field(default_factory=platform.release)

    @property
    def has_netem(self) -> bool:
        """Whether the kernel itself can delay, lose and reorder."""
        return self.parts.get("netem", False)

    def obstacle(self, backend: str, plan: NetworkPlan) -> str | None:
        """Why a backend cannot build `plan` here; None if it can."""
        if self.namespaces_obstacle is not None:
            return self.namespaces_obstacle
        missing = [name for name in _needs(backend, plan) if not self.parts[name]]
        return f"this kernel has no {_with_modules(missing)}" if missing else None

    def lines(self) -> list[str]:
        """One line for each part, saying what a missing part means."""
        rows = [
            ("kernel", self.kernel),
            ("root", "yes" if self.is_root else "no"),
            ("namespaces", self._namespaces_finding()),
            *((name, self._finding(name)) for name in PARTS),
            ("TCP", f"congestion control {', '.join(self.congestion_controls) or 'unknown'}"),
        ]
        width = max(len(name) for name, _ in rows)
        return [f"{name:{width}}  {finding}" for name, finding in rows]

    def _namespaces_finding(self) -> str:
        if self.namespaces_obstacle is None:
            return "yes"
        return f"no: {self.namespaces_obstacle}; without them there are no hosts"

    def _finding(self, name: str) -> str:
        if name not in self.parts:
            return "not tried: that needs a namespace"
        return "yes" if self.parts[name] else f"no (module {PARTS[name].module}): without it, {PARTS[name].meaning}"


def probe() -> Probe:
    """Try every part; takes about a tenth of a second and leaves nothing behind."""
    parts: dict[str, bool] = {}
    obstacle = None
    try:
        with closing(NamespaceGroup([_LABEL])) as group:
            parts = _try_parts(group[_LABEL])
    except NetworkError as error:
        obstacle = str(error)
    return Probe(os.geteuid() == 0, obstacle, parts, _congestion_controls())


def _congestion_controls() -> tuple[str, ...]:
    path = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    return tuple(path.read_text().split()) if path.exists() else ()


def _try_parts(namespace: str) -> dict[str, bool]:
    with netlink(namespace) as kernel:
        return {name: _works(part, kernel) for name, part in PARTS.items()}


def _works(part: Part, kernel: IPRoute) -> bool:
    try:
        part.attempt(kernel)
    except (NetlinkError, OSError, NetworkError):
        return False
    return True


def _needs(backend: str, plan: NetworkPlan) -> list[str]:
    has_caps = any(path.rate_bits_per_s is not None for path in plan.paths.values())
    if backend == "tun":
        wanted = {"tun": True, "htb": True, "u32": has_caps}
    else:
        has_leaves = has_caps or plan.needs_netem
        wanted = {"veth": True, "bridge": True, "htb": True, "u32": has_leaves, "netem": plan.needs_netem}
    return [name for name, is_wanted in wanted.items() if is_wanted]


def _with_modules(names: list[str]) -> str:
    return ", ".join(f"{name} (module {PARTS[name].module})" for name in names)


def _try_link(kernel: IPRoute, kind: str, **options: Any) -> None:
    kernel.link("add", ifname=f"{_LINK}-{kind}", kind=kind, **options)


def _try_veth(kernel: IPRoute) -> None:
    _try_link(kernel, "veth", peer=f"{_LINK}-peer")


def _device(kernel: IPRoute) -> int:
    """The throwaway veth, or lo where there is none."""
    return int(next(iter(kernel.link_lookup(ifname=f"{_LINK}-veth")), 1))


def _try_qdisc(kernel: IPRoute, kind: str, **options: Any) -> None:
    index = _device(kernel)
    kernel.tc("add", kind, index, 0x10000, **options)
    kernel.tc("del", index=index, handle=0x10000, root=True)


def _try_htb(kernel: IPRoute) -> None:
    index = _device(kernel)
    kernel.tc("add", "htb", index, 0x10000, default=0)
    try:
        kernel.tc("add-class", "htb", index, 0x10001, parent=0x10000, rate=125_000, burst=3000, quantum=1514)
    finally:
        kernel.tc("del", index=index, handle=0x10000, root=True)


def _try_u32(kernel: IPRoute) -> None:
    index = _device(kernel)
    kernel.tc("add", "htb", index, 0x10000, default=0)
    try:
        keys = ["0x0a4d0001/0xffffffff+12"]
        kernel.tc("add-filter", "u32", index, parent=0x10000, prio=1, protocol=ETH_P_IP, target=0x10001, keys=keys)
    finally:
        kernel.tc("del", index=index, handle=0x10000, root=True)


def _try_tun(kernel: IPRoute) -> None:
    os.close(open_device(f"{_LINK}-tun"))


def _try_nfqueue(kernel: IPRoute) -> None:
    """Bind to queue 0: NFQNL_MSG_CONFIG with NFQNL_CFG_CMD_BIND of linux/netfilter/nfnetlink_queue.h."""
    body = struct.pack("=BBH", socket.AF_UNSPEC, 0, 0) + struct.pack("=HHBBH", 8, 1, 1, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12) as netfilter:
        netfilter.send(struct.pack("=IHHII", 16 + len(body), 3 << 8 | 2, 0x5, 0, 0) + body)
        number = -struct.unpack_from("=i", netfilter.recv(4096), 16)[0]
    if number:
        raise OSError(number, os.strerror(number))


def _try_reset(kernel: IPRoute) -> None:
    if not can_reset():
        raise OSError(errno.EOPNOTSUPP, "no SOCK_DESTROY")


PARTS: Final[dict[str, Part]] = {
    "veth": Part(_try_veth, "backend kernel has no links", "veth"),
    "bridge": Part(lambda kernel: _try_link(kernel, "bridge"), "backend kernel cannot join its hosts", "bridge"),
    "htb": Part(_try_htb, "rates cannot be shaped by kernel or tun", "sch_htb"),
    "u32": Part(
        _try_u32, "backend kernel shapes hosts alone, no path of its own, and backend tun caps no pairs", "cls_u32"
    ),
    "netem": Part(
        lambda kernel: _try_qdisc(kernel, "netem", delay=1000, limit=10),
        "backend kernel shapes rates only; backend tun delays and loses packets in its place",
        "sch_netem",
    ),
    "tbf": Part(
        lambda kernel: _try_qdisc(kernel, "tbf", rate=125_000, burst=3000, latency=50_000),
        "nothing is missing: htb shapes rates",
        "sch_tbf",
    ),
    "tun": Part(_try_tun, "backend tun does not work", "tun"),
    "nfqueue": Part(_try_nfqueue, "nothing is missing: backend tun needs no firewall", "nfnetlink_queue"),
    "tcp-reset": Part(_try_reset, "faults cannot reset TCP connections", "tcp_diag"),
}
"""In the order of trying: later ones use the veth and the htb of earlier ones."""
