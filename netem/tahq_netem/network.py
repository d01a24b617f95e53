"""A network of hosts on this machine: one interface, whatever imitates the links.

`build_network` is the way in: it sweeps what killed runs left behind, picks a backend by trying what the
kernel and the user can do, and returns a `Network` that is up. A network is a context manager, and goes
with its process however that ends: see `tahq_netem.leftovers`.
"""

import platform
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from types import TracebackType
from typing import Any, Final, Self

from tahq.errors import NetworkError
from tahq_netem.description import BackendName, NetworkConfig, NetworkPlan, PathShape, RateChange, plan_network
from tahq_netem.leftovers import sweep_leftovers
from tahq_netem.names import HOST_DEVICE
from tahq_netem.probe import Probe, probe


class Network(ABC):
    """Hosts that reach each other at `address(host)`, over links shaped as in `plan`.

    `plan` is what holds now: `set_rate` and `set_path` replace it.
    """

    backend: str
    """kernel, tun or relay."""
    plan: NetworkPlan
    congestion_control: str
    """TCP's, as it is in force on every host."""

    @abstractmethod
    def address(self, host: str) -> str:
        """The IPv4 address that `host` binds to."""

    def dial_address(self, source: str, destination: str, port: int) -> tuple[str, int]:
        """Where `source` reaches what listens on `port` of `destination`."""
        return self.address(destination), port

    def namespace(self, host: str) -> str | None:
        """The network namespace that `host` is, for a process that enters it by itself; None: it is none."""
        return None

    def interface(self, host: str) -> str:
        """The network device of `host`, such as GLOO_SOCKET_IFNAME wants."""
        return HOST_DEVICE

    @abstractmethod
    def popen(
        self, host: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """`subprocess.Popen(argv, env=env, **options)` on `host`. What still runs when the network closes is ended."""

    @abstractmethod
    def set_rate(self, host: str, *, up: RateChange = ..., down: RateChange = ...) -> None:
        """Change a host's rates in bit/s, from the next packet on; None: not shaped, ...: as it is."""

    @abstractmethod
    def set_path(self, source: str, destination: str, shape: PathShape) -> None:
        """Change what packets from `source` to `destination` meet; those under way are not held to it."""

    @abstractmethod
    def set_link(self, host: str, *, is_up: bool) -> None:
        """Cut a host off, or join it again: packets to and from it vanish meanwhile, without an error."""

    @abstractmethod
    def reset_tcp(self, host: str) -> int:
        """End a host's TCP connections with RST to both ends; returns how many there were."""

    def describe(self) -> dict[str, Any]:
        """What this network is, fit for JSON; a backend adds what is its own."""
        return {
            "backend": self.backend,
            "shows_tcp_dynamics": True,
            "congestion_control": self.congestion_control,
            "hosts": {
                host: {"address": self.address(host), **asdict(shape)} for host, shape in self.plan.host_shapes.items()
            },
            "paths": [
                {"source": source, "destination": destination, **asdict(shape)}
                for (source, destination), shape in self.plan.paths.items()
            ],
            "kernel": platform.release(),
            "python": platform.python_version(),
            "pyroute2": version("pyroute2"),
        }

    @abstractmethod
    def close(self) -> None:
        """End what runs on the hosts and remove everything that was made; a second time does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def build_network(config: NetworkConfig, *, backend: BackendName | None = None) -> Network:
    """A network that is up, after leftovers of killed runs are gone.

    Args:
        config: what it looks like.
        backend: in place of the configuration's.

    Raises:
        ConfigError: the description does not make sense.
        NetworkError: this machine or this user cannot build it; says what can be done.
    """
    plan = plan_network(config)
    found = probe()
    if found.can_make_namespaces:
        sweep_leftovers()
    return _BUILDERS[choose_backend(plan, found, backend or config.backend)](plan)


def choose_backend(plan: NetworkPlan, found: Probe, wanted: BackendName = "auto") -> BackendName:
    """The wanted backend if it can build `plan` here; for auto the first of kernel, tun, relay that can.

    The kernel's own shaping comes first only where it has netem: a network of rates alone could not be
    given a delay at run time.

    Raises:
        NetworkError: none can, and what each lacks.
    """
    obstacles = {name: found.obstacle(name, plan) for name in _BUILDERS}
    if wanted != "auto":
        if obstacles[wanted] is not None:
            raise NetworkError(f"backend {wanted} does not work here: {obstacles[wanted]}")
        return wanted
    order: list[BackendName] = ["kernel", "tun", "relay"] if found.has_netem else ["tun", "kernel", "relay"]
    for name in order:
        if obstacles[name] is None:
            return name
    reasons = "; ".join(f"{name}: {obstacles[name]}" for name in order)
    raise NetworkError(f"no backend can build this network here ({reasons}); `tahq-netem probe` says more")


# Imported when chosen: each backend needs parts of the kernel, or packages, that the others do without.


def _build_kernel(plan: NetworkPlan) -> Network:
    from tahq_netem.kernel import KernelNetwork

    return KernelNetwork(plan)


def _build_tun(plan: NetworkPlan) -> Network:
    from tahq_netem.tun import TunNetwork

    return TunNetwork(plan)


def _build_relay(plan: NetworkPlan) -> Network:
    from tahq_netem.relay import RelayNetwork

    return RelayNetwork(plan)


_BUILDERS: Final[dict[BackendName, Callable[[NetworkPlan], Network]]] = {
    "kernel": _build_kernel,
    "tun": _build_tun,
    "relay": _build_relay,
}
