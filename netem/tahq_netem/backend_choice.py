"""Which backend gives programs hosts of their own; the relay is none of those, and is used only on request.

`build_network` falls back on the relay by itself, which is right for whoever looks at what it says of
itself. A run or somebody's program would take it for real hosts, so here it has to be asked for.
"""

from typing import Final

from tahq.errors import NetworkError
from tahq_netem.description import BackendName, NetworkConfig, NetworkPlan, plan_network
from tahq_netem.network import choose_backend
from tahq_netem.probe import Probe, probe

_OF_OWN_HOSTS: Final[tuple[BackendName, ...]] = ("kernel", "tun")


def backend_of_own_hosts(
    config: NetworkConfig, wanted: BackendName, option: str, without_namespaces: str
) -> BackendName:
    """The backend to build a network with.

    Args:
        config: the network.
        wanted: `auto`, or the one that was asked for.
        option: where a backend is asked for, for the message.
        without_namespaces: what to do where there can be none, for the message.

    Raises:
        ConfigError: the description does not make sense.
        NetworkError: it cannot be built here; or, for `auto`, by the relay alone.
    """
    plan, found = plan_network(config), probe()
    if wanted != "relay" and found.namespaces_obstacle is not None:
        raise NetworkError(
            f"there can be no hosts in namespaces here: {found.namespaces_obstacle}; {without_namespaces}"
        )
    usable = [name for name in _OF_OWN_HOSTS if found.obstacle(name, plan) is None]
    if not usable and wanted != "relay":
        raise NetworkError(_lacking(plan, found))
    if wanted not in ("auto", "relay", *usable):
        obstacle = found.obstacle(wanted, plan)
        raise NetworkError(
            f"backend {wanted} does not work here: {obstacle}; leave {option} at auto, which takes {usable[0]}"
        )
    return choose_backend(plan, found, wanted)


def _lacking(plan: NetworkPlan, found: Probe) -> str:
    obstacles = "; ".join(f"backend {name}: {found.obstacle(name, plan)}" for name in _OF_OWN_HOSTS)
    return f"there can be no such network here ({obstacles}); load what one lacks (modprobe), or boot another kernel"
