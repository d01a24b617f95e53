"""Building a network: finds out what this machine can do, chooses a backend by it, and starts it.

Each part of the kernel is tried on a throwaway link in a throwaway namespace. A kernel's configuration says little:
parts are modules that may not load, and containers take rights away.
"""

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pyroute2 import IPRoute, NetlinkError
from pyroute2.protocols import ETH_P_IP

from tahq.comm.network_config import BackendName, NetworkConfig
from tahq.errors import NetworkError
from tahq_netem.backends.kernel import KernelNetwork
from tahq_netem.backends.namespace_group import NamespaceGroup, sweep_leftovers
from tahq_netem.backends.namespaces import netlink, try_reset
from tahq_netem.backends.network import Network
from tahq_netem.backends.tun import TunNetwork, open_device
from tahq_netem.network.description import NetworkPlan, plan_network

_BUILDERS: Final[dict[BackendName, Callable[[NetworkPlan], Network]]] = {"kernel": KernelNetwork, "tun": TunNetwork}
ADVICE: Final = (
    "run it as root (sudo), where namespaces and veth or TUN are allowed; `tahq-netem probe` shows what is missing"
)
_LABEL: Final = "_probe"
_LINK: Final = "probe"
_QDISC: Final = 0x10000


def build_network(
    config: NetworkConfig,
    *,
    backend: BackendName | None = None,
    option: str = "backend",
    advice: str = ADVICE,
    rates_only: bool = False,
) -> Network:
    """Build a network and return it when it is up, after removing what killed runs left behind.

    `backend` replaces the configuration's; `option` names it in messages, and `advice` says there what to do where
    namespaces cannot be created.

    Raises:
        ConfigError: the description does not make sense.
        NetworkError: this machine or this user cannot build it; says what to do.
    """
    plan, found = plan_network(config), probe()
    chosen = choose_backend(plan, found, backend or config.backend, option, advice, rates_only=rates_only)
    sweep_leftovers()
    return _BUILDERS[chosen](plan)


def choose_backend(
    plan: NetworkPlan,
    found: "Probe",
    wanted: BackendName = "auto",
    option: str = "backend",
    advice: str = ADVICE,
    *,
    rates_only: bool = False,
) -> BackendName:
    """The wanted backend if it can build `plan` here; for auto the better of those that can.

    `kernel` comes first where the kernel has netem. A network of rates alone could be shaped without netem, but not be
    given a delay later; `rates_only` says that it never will be.
    """
    if found.namespaces_obstacle is not None:
        raise NetworkError(f"hosts need network namespaces: {found.namespaces_obstacle}; {advice}")
    order: tuple[BackendName, ...] = ("kernel", "tun") if found.parts["netem"] or rates_only else ("tun", "kernel")
    obstacles = {name: found.obstacle(name, plan) for name in order}
    usable = [name for name in order if obstacles[name] is None]
    if not usable:
        reasons = "; ".join(f"backend {name}: {obstacles[name]}" for name in order)
        raise NetworkError(
            f"this machine cannot build such a network ({reasons}); load a missing module (modprobe) or boot another "
            "kernel"
        )
    if wanted == "auto":
        return usable[0]
    if wanted not in usable:
        raise NetworkError(
            f"backend {wanted} does not work here: {obstacles[wanted]}; leave {option} at auto, which takes {usable[0]}"
        )
    return wanted


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the kernel; `attempt` raises OSError, NetlinkError or NetworkError if it does not work."""

    attempt: Callable[[IPRoute], object]
    meaning: str
    """What does not work without it."""
    module: str


@dataclass(frozen=True, slots=True)
class Probe:
    """What this kernel and this user can do. `parts`: whether each of `PARTS` works; empty without namespaces."""

    is_root: bool
    namespaces_obstacle: str | None
    """Why namespaces cannot be made; None if they can."""
    parts: Mapping[str, bool]
    congestion_controls: tuple[str, ...]
    kernel: str = field(default_factory=platform.release)

    def obstacle(self, backend: str, plan: NetworkPlan) -> str | None:
        """Why a backend cannot build `plan` here; None if it can."""
        if self.namespaces_obstacle is not None:
            return self.namespaces_obstacle
        has_caps = any(path.rate_bits_per_s is not None for path in plan.paths.values())
        if backend == "tun":
            needs = {"tun": True, "htb": True, "u32": has_caps}
        else:
            netem = plan.needs_netem
            needs = {"veth": True, "bridge": True, "htb": True, "u32": has_caps or netem, "netem": netem}
        missing = [name for name, is_needed in needs.items() if is_needed and not self.parts[name]]
        named = ", ".join(f"{name} (module {PARTS[name].module})" for name in missing)
        return f"this kernel has no {named}" if missing else None

    def lines(self) -> list[str]:
        """One line for each part, saying what a missing part means."""
        obstacle = self.namespaces_obstacle
        rows = {
            "kernel": self.kernel,
            "root": "yes" if self.is_root else "no",
            "namespaces": "yes" if obstacle is None else f"no: {obstacle}; without them there are no hosts",
        }
        for name, part in PARTS.items():
            missing = f"no (module {part.module}): without it, {part.meaning}"
            rows[name] = "not tried: that needs a namespace" if obstacle else "yes" if self.parts[name] else missing
        rows["TCP"] = f"congestion control {', '.join(self.congestion_controls) or 'unknown'}"
        return [f"{name:{max(map(len, rows))}}  {finding}" for name, finding in rows.items()]


def probe() -> Probe:
    """Try every part; takes about a tenth of a second and leaves nothing behind."""
    parts: dict[str, bool] = {}
    obstacle = None
    try:
        with closing(NamespaceGroup([_LABEL])) as group, netlink(group[_LABEL]) as kernel:
            parts = {name: _works(part, kernel) for name, part in PARTS.items()}
    except NetworkError as error:
        obstacle = str(error)
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    controls = tuple(available.read_text().split()) if available.exists() else ()
    return Probe(os.geteuid() == 0, obstacle, parts, controls)


def _works(part: Part, kernel: IPRoute) -> bool:
    try:
        part.attempt(kernel)
    except (NetlinkError, OSError, NetworkError):
        return False
    return True


@contextmanager
def _qdisc(kernel: IPRoute, kind: str, **options: int) -> Iterator[int]:
    """A queueing discipline on the throwaway veth, or on lo where there is none; gives the device's index."""
    index = int(next(iter(kernel.link_lookup(ifname=f"{_LINK}-veth")), 1))
    kernel.tc("add", kind, index, _QDISC, **options)
    try:
        yield index
    finally:
        kernel.tc("del", index=index, handle=_QDISC, root=True)


def _try_htb(kernel: IPRoute) -> None:
    with _qdisc(kernel, "htb", default=0) as index:
        kernel.tc("add-class", "htb", index, _QDISC + 1, parent=_QDISC, rate=125_000, burst=3000, quantum=1514)


def _try_u32(kernel: IPRoute) -> None:
    keys = ["0x0a4d0001/0xffffffff+12"]
    with _qdisc(kernel, "htb", default=0) as index:
        kernel.tc("add-filter", "u32", index, parent=_QDISC, prio=1, protocol=ETH_P_IP, target=_QDISC + 1, keys=keys)


def _try_netem(kernel: IPRoute) -> None:
    with _qdisc(kernel, "netem", delay=1000, limit=10):
        pass


PARTS: Final[dict[str, Part]] = {
    "veth": Part(
        lambda kernel: kernel.link("add", ifname=f"{_LINK}-veth", kind="veth", peer=f"{_LINK}-peer"),
        "backend kernel has no links",
        "veth",
    ),
    "bridge": Part(
        lambda kernel: kernel.link("add", ifname=f"{_LINK}-bridge", kind="bridge"),
        "backend kernel cannot join its hosts",
        "bridge",
    ),
    "htb": Part(_try_htb, "rates cannot be shaped by kernel or tun", "sch_htb"),
    "u32": Part(_try_u32, "backend kernel cannot shape single paths, and backend tun cannot cap pairs", "cls_u32"),
    "netem": Part(
        _try_netem, "backend kernel shapes rates only; backend tun delays and loses packets in its place", "sch_netem"
    ),
    "tun": Part(lambda kernel: os.close(open_device(f"{_LINK}-tun")), "backend tun does not work", "tun"),
    "tcp-reset": Part(lambda kernel: try_reset(), "faults cannot reset TCP connections", "tcp_diag"),
}
"""In the order of trying: later ones use the veth and the htb of earlier ones."""
