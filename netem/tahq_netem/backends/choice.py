"""Building a network: removes what killed runs left behind, chooses a backend by what works here, and starts it."""

from collections.abc import Callable
from typing import Final

from tahq.comm.network_config import BackendName, NetworkConfig
from tahq.errors import NetworkError
from tahq_netem.backends.kernel import KernelNetwork
from tahq_netem.backends.leftovers import sweep_leftovers
from tahq_netem.backends.network import Network
from tahq_netem.backends.probe import Probe, probe
from tahq_netem.backends.tun import TunNetwork
from tahq_netem.network.description import NetworkPlan, plan_network

_BUILDERS: Final[dict[BackendName, Callable[[NetworkPlan], Network]]] = {"kernel": KernelNetwork, "tun": TunNetwork}
ADVICE: Final = (
    "run it as root (sudo), where namespaces and veth or TUN are allowed; `tahq-netem probe` shows what is missing"
)


def build_network(
    config: NetworkConfig,
    *,
    backend: BackendName | None = None,
    option: str = "backend",
    advice: str = ADVICE,
    rates_only: bool = False,
) -> Network:
    """Build a network and return it when it is up.

    `backend` replaces the configuration's; `option` names it in messages, and `advice` says there what to do where
    namespaces cannot be made.

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
    found: Probe,
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
    order: tuple[BackendName, ...] = ("kernel", "tun") if found.has_netem or rates_only else ("tun", "kernel")
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
