"""A network measured after it was built: is it what its description says?

How each figure is taken is in `path_measurements`, what it should be in `figures`. A calibration is stored beside
the results of the experiment that it belongs to, and an experiment on a network that is off does not start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tahq.errors import NetworkError
from tahq_netem.description import NetworkPlan
from tahq_netem.figures import Figure
from tahq_netem.measuring_agent import MeasuringAgents
from tahq_netem.network import Network
from tahq_netem.path_measurements import FULL, QUICK, PathMeasurements


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured, of what network."""

    figures: tuple[Figure, ...]
    congestion_controls: tuple[str, ...]
    """TCP's, as the measuring sockets had it: one, unless hosts differ."""
    network: dict[str, Any]
    is_quick: bool

    @property
    def is_within(self) -> bool:
        """Whether every figure is as it should be."""
        return all(figure.is_within for figure in self.figures)

    def check(self) -> None:
        """Refuse a network that is not what was asked for.

        Raises:
            NetworkError: a figure is off; names all that are.
        """
        wrong = [figure.line() for figure in self.figures if not figure.is_within]
        if wrong:
            advice = "end what else runs on this machine and try again, or ask for less than it can imitate"
            raise NetworkError(f"the network is not as described: {'; '.join(wrong)}; {advice}")

    def lines(self) -> list[str]:
        """A line for each figure, for people."""
        return [f"{'ok ' if figure.is_within else 'OFF'}  {figure.line()}" for figure in self.figures]

    def as_dict(self) -> dict[str, Any]:
        """Everything, fit for JSON."""
        return {
            "is_within": self.is_within,
            "is_quick": self.is_quick,
            "congestion_controls": list(self.congestion_controls),
            "figures": [figure.as_dict() for figure in self.figures],
            "network": self.network,
        }


def neighbours(plan: NetworkPlan) -> list[tuple[str, str]]:
    """Each host and the next, in both directions: what a pipeline uses, and every up- and downlink."""
    chain = zip(plan.hosts, plan.hosts[1:], strict=False)
    return [path for one, other in chain for path in ((one, other), (other, one))]


def calibrate(network: Network, *, pairs: Sequence[tuple[str, str]] | None = None, quick: bool = False) -> Calibration:
    """Measure a network.

    Args:
        network: one that is up, and that carries nothing else meanwhile.
        pairs: (source, destination) of each path to measure; None: `neighbours`.
        quick: shorter flows, and nothing that is not judged.

    Returns:
        What was measured; call its `check` to refuse a network that is off.

    Raises:
        NetworkError: nothing gets through.
    """
    chosen = neighbours(network.plan) if pairs is None else list(pairs)
    with MeasuringAgents(network) as agents:
        measurements = PathMeasurements(network, agents, QUICK if quick else FULL)
        figures: list[Figure] = []
        for (one, other), directions in _by_ends(chosen).items():
            figures += measurements.between(one, other, directions)
    return Calibration(tuple(figures), tuple(sorted(measurements.congestion_controls)), network.describe(), quick)


def _by_ends(paths: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """The directions that are wanted of each two hosts, under the direction named first."""
    grouped: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for path in paths:
        ends = path if path[::-1] not in grouped else path[::-1]
        grouped.setdefault(ends, []).append(path)
    return grouped
