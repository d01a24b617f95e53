"""The networks of a sweep: which points can share one, and how one is built and measured."""

from collections.abc import Sequence
from typing import Any

from tahq.comm.network_config import NetworkConfig
from tahq_netem.backends.choice import build_network
from tahq_netem.backends.network import Network
from tahq_netem.measure.calibration import calibrate
from tahq_netem.network.description import NetworkPlan, PathShape, plan_network
from tahq_netem.network.faults import conditions
from tahq_netem.sweep.points import NetworkChoice, Point
from tahq_netem.sweep.spec import SweepConfig


def demands(choice: NetworkChoice, num_hosts: int) -> tuple[bool, bool, float]:
    """Whether a network loses packets, whether it delays them, and the longest delay: a measure of its difficulty."""
    paths = choice.plan(num_hosts).paths.values()
    has_losses = any(path.loss or path.reorder for path in paths)
    return has_losses, any(path.needs_netem for path in paths), max(path.delay_s for path in paths)


def by_network_kind(points: Sequence[Point]) -> list[list[Point]]:
    """Group points by number of hosts, losses and delays, so that a point pays only for what its network needs."""
    kinds: dict[tuple[int, bool, bool], list[Point]] = {}
    for point in points:
        has_losses, has_delays, _ = demands(point.network, point.session.stages)
        kinds.setdefault((point.session.stages, has_losses, has_delays), []).append(point)
    return list(kinds.values())


def open_network(config: NetworkConfig, sweep: SweepConfig) -> Network:
    """Build a network, by the kernel alone where that is enough, since it costs least."""
    plan = plan_network(config)
    settings = [conditions(plan, faults) for faults in ([], *([fault] for fault in sweep.faults))]
    shapes = [shape for each in settings for shape in each.values() if isinstance(shape, PathShape)]
    rates_only = not any(shape.needs_netem for shape in shapes)
    return build_network(config, backend=sweep.backend, rates_only=rates_only)


def calibrate_quickly(network: Network) -> dict[str, Any]:
    """Measure a network between neighbours; return the figures, fit for JSON."""
    found = calibrate(network, quick=True)
    found.check()
    return found.as_dict()


def apply_plan(network: Network, plan: NetworkPlan) -> None:
    """Give a network that is up other rates and paths."""
    for host, shape in plan.host_shapes.items():
        network.set_rate(host, up=shape.up_bits_per_s, down=shape.down_bits_per_s)
    for (source, destination), path in plan.paths.items():
        if network.plan.paths[source, destination] != path:
            network.set_path(source, destination, path)
