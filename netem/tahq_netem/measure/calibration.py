"""A network measured after it was built: is it what its description says?

`path_measurements` takes the figures, `figures` says what they should be. A calibration is stored beside the results
of the experiment that it belongs to, and an experiment on a network that is off does not start.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tahq.errors import NetworkError, UserError
from tahq_netem.backends.network import Network
from tahq_netem.measure.figures import Figure
from tahq_netem.measure.path_measurements import FULL, QUICK, PathMeasurements
from tahq_netem.network.description import NetworkPlan


@dataclass(frozen=True, slots=True)
class Calibration:
    """The figures of a network, and the network that they are of."""

    figures: tuple[Figure, ...]
    congestion_controls: tuple[str, ...]
    """TCP's, as the measuring sockets had it."""
    network: dict[str, Any]
    is_quick: bool

    def check(self) -> None:
        """Raise NetworkError if a figure is off; names all that are."""
        wrong = [figure.line() for figure in self.figures if not figure.is_within]
        if wrong:
            advice = "end what else runs on this machine and try again, or ask for less than it can imitate"
            raise NetworkError(f"the network is not as described: {'; '.join(wrong)}; {advice}")

    def lines(self) -> list[str]:
        """A line for each figure."""
        return [f"{'ok ' if figure.is_within else 'OFF'}  {figure.line()}" for figure in self.figures]

    def as_dict(self) -> dict[str, Any]:
        """All figures and the network, fit for JSON."""
        figures = [asdict(figure) | {"is_within": figure.is_within} for figure in self.figures]
        return {
            "is_within": all(figure.is_within for figure in self.figures),
            "is_quick": self.is_quick,
            "congestion_controls": list(self.congestion_controls),
            "figures": figures,
            "network": self.network,
        }

    def write(self, path: Path) -> None:
        """Write the figures as JSON."""
        try:
            path.write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error


def neighbours(plan: NetworkPlan) -> list[tuple[str, str]]:
    """Each host and the next, in both directions: covers what a pipeline uses, and every uplink and downlink."""
    chain = zip(plan.hosts, plan.hosts[1:], strict=False)
    return [path for one, other in chain for path in ((one, other), (other, one))]


def calibrate(network: Network, *, pairs: Sequence[tuple[str, str]] | None = None, quick: bool = False) -> Calibration:
    """Measure a network that carries nothing else meanwhile; `check` of the result refuses one that is off.

    `pairs` are (source, destination) of each path to measure (None: `neighbours`); a quick calibration has shorter
    flows, and only figures that are judged.

    Raises:
        NetworkError: nothing gets through.
    """
    # The wanted directions of each two hosts, under the direction named first.
    grouped: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for path in neighbours(network.plan) if pairs is None else pairs:
        grouped.setdefault(path[::-1] if path[::-1] in grouped else path, []).append(path)
    with PathMeasurements(network, QUICK if quick else FULL) as measurements:
        figures = [figure for ends, paths in grouped.items() for figure in measurements.between(*ends, paths)]
    return Calibration(tuple(figures), tuple(sorted(measurements.congestion_controls)), network.describe(), quick)
