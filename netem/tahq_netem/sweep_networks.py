"""The networks of a sweep: which points can share one, and how one is opened and measured."""

from collections.abc import Sequence
from typing import Any, Final

from tahq.errors import NetworkError
from tahq_netem.backend_choice import backend_of_own_hosts
from tahq_netem.calibration import calibrate
from tahq_netem.description import NetworkConfig, plan_network
from tahq_netem.faults import conditions
from tahq_netem.network import Network, build_network
from tahq_netem.sweep_points import NetworkChoice, Point
from tahq_netem.sweep_spec import SweepConfig

_WITHOUT_NAMESPACES: Final = "run as root, or say `backend: relay` for tahq's own figures without TCP's dynamics"


def demands(choice: NetworkChoice, num_hosts: int) -> tuple[bool, bool, float]:
    """What a network asks of the kernel, in order: packets lost, packets delayed, by how much."""
    paths = choice.plan(num_hosts).paths.values()
    has_losses = any(path.loss or path.reorder for path in paths)
    return has_losses, any(path.needs_netem for path in paths), max(path.delay_s for path in paths)


def by_network_kind(points: Sequence[Point]) -> list[list[Point]]:
    """Points by number of hosts and by what the network has to do: whoever loses no packet shall not pay for it."""
    kinds: dict[tuple[int, bool, bool], list[Point]] = {}
    for point in points:
        has_losses, has_delays, _ = demands(point.network, point.session.stages)
        kinds.setdefault((point.session.stages, has_losses, has_delays), []).append(point)
    return list(kinds.values())


def open_network(config: NetworkConfig, sweep: SweepConfig) -> Network:
    """The network, by the kernel alone where that is enough: it costs least.

    Raises:
        NetworkError: it cannot be built here; or, unless it is asked for, by the relay alone.
    """
    if sweep.backend == "auto" and not _needs_packets(config, sweep):
        try:
            return build_network(config, backend="kernel")
        except NetworkError:
            pass  # no namespaces, or no htb: the choice below says so, or finds another way
    return build_network(config, backend=backend_of_own_hosts(config, sweep.backend, "backend", _WITHOUT_NAMESPACES))


def _needs_packets(config: NetworkConfig, sweep: SweepConfig) -> bool:
    """Whether packets are ever delayed or lost, by the network itself or by a fault."""
    plan = plan_network(config)
    plays = [conditions(plan, [fault]) for fault in sweep.faults]
    return plan.needs_netem or any(path.needs_netem for play in plays for path in play.paths.values())


def calibrate_quickly(network: Network) -> dict[str, Any]:
    """What the network was measured to be, between neighbours.

    Raises:
        NetworkError: something is off.
    """
    found = calibrate(network, quick=True)
    found.check()
    return found.as_dict()
