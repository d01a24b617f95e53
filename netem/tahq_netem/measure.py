"""The measuring program that runs on every measured host: ``python -m tahq_netem.measure --address 10.77.0.1``.

It answers other hosts' measurements and makes its own when told to. First line on stdout: ``{"port": …}``. Then
each line on stdin is a measurement, such as ``{"do": "message", "target": ["10.77.0.2", 40001], …}`` with the
arguments of the function of that name in `meter`, and each line on stdout its result. The end of stdin ends it, so
that it never outlives who started it.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from tahq_netem import meter
from tahq_netem.responder import Responder

MEASUREMENTS: Final[dict[str, Callable[..., Any]]] = {
    "round_trips": meter.round_trips,
    "stream_round_trips": meter.stream_round_trips,
    "message": lambda target, **arguments: asdict(meter.message(target, **arguments)),
    "steady": lambda target, **arguments: asdict(meter.steady(target, **arguments)),
    "count_datagrams": meter.count_datagrams,
}


def measure(command: dict[str, Any]) -> dict[str, Any]:
    """Make one measurement; what the network does to it (nobody listens, a reset) is a result, too."""
    arguments = dict(command)
    function = MEASUREMENTS[arguments.pop("do")]
    target = tuple(arguments.pop("target"))
    try:
        return {"result": function(target, **arguments)}
    except OSError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Serve, and measure what stdin says, until it ends."""
    parser = argparse.ArgumentParser(prog="python -m tahq_netem.measure", description=__doc__)
    parser.add_argument("--address", required=True, help="this host's own address, where it answers")
    responder = Responder(parser.parse_args().address)
    responder.start()
    print(json.dumps({"port": responder.port}), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
