"""What a relay of TCP connections cannot imitate, for want of packets. Pure."""

from collections.abc import Mapping

from tahq_netem.description import PathShape


def relay_obstacle(paths: Mapping[tuple[str, str], PathShape]) -> str | None:
    """Why a relay cannot carry these paths, naming the first that it cannot; None: it can.

    A loss of 1 is an outage, which a relay can show: it holds everything up.
    """
    for (source, destination), shape in paths.items():
        for what, value in (("loss", shape.loss % 1.0), ("jitter", shape.jitter_s), ("reorder", shape.reorder)):
            if value:
                return f"from {source} to {destination}: a relay of TCP connections has no packets, and so no {what}"
    return None
