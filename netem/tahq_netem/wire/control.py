"""The protocol between the owner of a network and its wire process: JSON, one object per line.

The owner sends an order over a socket pair, then one request at a time, each of which is answered::

    → {"plan": …, "addresses": […], "seed": 0}
    ← {"ready": {…}}                                            once, when the wire moves packets
    → {"do": "rates", "host": "a", "shape": {…HostShape}}       ← {"done": {}}
    → {"do": "path", "source": "a", "destination": "b", "shape": {…PathShape}}
    → {"do": "link", "host": "a", "is_up": false}
    → {"do": "counters"}                                        ← {"done": {…}}
                                                                ← {"error": "why"}

The process ends at end of file, and so with its owner.
"""

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

from tahq.errors import NetworkError, TahqError
from tahq_netem.network.description import HostShape, NetworkPlan, PathShape

ANSWER_TIMEOUT_S: Final = 10.0
START_TIMEOUT_S: Final = 60.0
"""For a process to start and to take its order: 7 s for the 62,250 paths of 250 hosts."""
_PIECE_BYTES: Final = 65536

CarryOut = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Carries out a request; returns the answer, or raises an error."""


def plan_to_json(plan: NetworkPlan) -> dict[str, Any]:
    """A plan, fit for JSON."""
    return {
        "hosts": [{"name": name, "shape": asdict(plan.host_shapes[name])} for name in plan.hosts],
        "paths": [
            {"source": source, "destination": destination, "shape": asdict(shape)}
            for (source, destination), shape in plan.paths.items()
        ],
    }


def plan_from_json(entry: Mapping[str, Any]) -> NetworkPlan:
    """The plan that `plan_to_json` wrote, without TCP's settings."""
    return NetworkPlan(
        hosts=tuple(host["name"] for host in entry["hosts"]),
        host_shapes={host["name"]: HostShape(**host["shape"]) for host in entry["hosts"]},
        paths={(path["source"], path["destination"]): PathShape(**path["shape"]) for path in entry["paths"]},
    )


def read_line(connection: socket.socket) -> bytes | None:
    """Wait for a line, which is the only one under way; None: the other end has closed."""
    received = bytearray()
    while not received.endswith(b"\n"):
        try:
            piece = connection.recv(_PIECE_BYTES)
        except ConnectionError:
            return None
        if not piece:
            return None
        received += piece
    return bytes(received)


def send_line(connection: socket.socket, entry: Mapping[str, Any]) -> None:
    """Send an object."""
    connection.sendall(json.dumps(entry).encode() + b"\n")


def serve(connection: socket.socket, carry_out: CarryOut) -> bool:
    """Wait for a request and answer it, on the process's side; False: the owner is gone."""
    line = read_line(connection)
    if line is None:
        return False
    try:
        answer: dict[str, Any] = {"done": carry_out(json.loads(line))}
    except (TahqError, OSError, ValueError, KeyError, TypeError) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    answer_owner(connection, answer)
    return True


def answer_owner(connection: socket.socket, entry: Mapping[str, Any]) -> None:
    """Send the owner an object; that the owner is gone is noticed by the next read."""
    with suppress(ConnectionError):
        send_line(connection, entry)


class WireControl:
    """The owner's end. Threads may share it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._turn = threading.Lock()
        self._owner = os.getpid()
        self._failure: str | None = None

    def start(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Send the process its order; return its answer when it is ready."""
        return self._exchange(order, "ready", START_TIMEOUT_S)

    def set_rates(self, host: str, shape: HostShape) -> None:
        """Change a host's access link."""
        self._ask({"do": "rates", "host": host, "shape": asdict(shape)})

    def set_path(self, source: str, destination: str, shape: PathShape) -> None:
        """Change what packets from `source` to `destination` meet."""
        self._ask({"do": "path", "source": source, "destination": destination, "shape": asdict(shape)})

    def set_link(self, host: str, *, is_up: bool) -> None:
        """Cut a host off or join it again."""
        self._ask({"do": "link", "host": host, "is_up": is_up})

    def counters(self) -> dict[str, Any]:
        """Packets so far; see `Switch.counters`."""
        return self._ask({"do": "counters"})

    def close(self) -> None:
        """End the process; also from a signal handler, or while another thread waits for an answer."""
        # Closing alone would not wake that thread up. A forked child only closes its copy.
        if os.getpid() == self._owner:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return self._exchange(request, "done", ANSWER_TIMEOUT_S)

    def _exchange(self, entry: Mapping[str, Any], expected: str, timeout_s: float) -> dict[str, Any]:
        with self._turn:
            answer = json.loads(self._answer(entry, timeout_s))
        if expected not in answer:
            raise NetworkError(f"the network's wire process refused: {answer.get('error')}")
        return dict(answer[expected])

    def _answer(self, entry: Mapping[str, Any], timeout_s: float) -> bytes:
        """After a failure every exchange fails: the next line could be the answer to an earlier request."""
        if self._failure is None:
            try:
                self._connection.settimeout(timeout_s)
                send_line(self._connection, entry)
                if (answer := read_line(self._connection)) is not None:
                    return answer
                self._failure = "has ended (see its output on stderr)"
            except TimeoutError:
                self._failure = f"did not answer within {timeout_s:g} s"
            except OSError as error:
                self._failure = f"is gone ({error.strerror})"
        raise NetworkError(f"the network's wire process {self._failure}; build the network again")
