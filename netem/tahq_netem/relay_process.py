"""The relay's process: listens where hosts are told to dial, and relays every connection at the network's pace.

Started by `tahq_netem.relay` as ``python -m tahq_netem.relay_process CONTROL OWNER`` with open descriptors, and
spoken to as `wire_control` says. It ends with the control socket's end of file, or with its owner (a pidfd),
whatever ended that: a forked child of the owner may keep the socket open. It then also ends the programs that the
owner had started on the hosts and did not get to end itself.
"""

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from tahq.errors import LocalProtocolError
from tahq_netem.description import HostShape, PathShape
from tahq_netem.leftovers import start_ticks
from tahq_netem.reactor import READABLE, Reactor
from tahq_netem.relay_connection import BUFFER_BYTES, Connection, close_with_reset
from tahq_netem.relay_line import RelayPaths
from tahq_netem.wire_control import Orders, plan_from_json

GRACE_S: Final = 3.0
"""How long orphaned programs have between SIGTERM and SIGKILL."""
_RETRY_S: Final = 0.1
"""After how long a listener is tried again that the system had no descriptor for."""


class Relay:
    """Listeners and connections, over the loop."""

    def __init__(self, reactor: Reactor, order: Mapping[str, Any]) -> None:
        self._reactor = reactor
        self._paths = RelayPaths(plan_from_json(order["plan"]))
        self._addresses: dict[str, str] = order["addresses"]
        self._connections: set[Connection] = set()
        self._listeners: list[socket.socket] = []
        self.programs: dict[int, int | None] = {}
        """What the owner has started on the hosts: pid and start, which tells a process from a later one."""

    def listen(self, source: str, destination: str, port: int) -> dict[str, Any]:
        """Where `source` reaches what listens on that port of `destination`."""
        listener = socket.create_server((self._dialled_address(source, destination), 0), backlog=128)
        # Connections inherit it, and their senders' windows are measured by it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        listener.setblocking(False)
        self._watch(listener, partial(self._connect, (source, destination), port))
        self._listeners.append(listener)
        return {"address": listener.getsockname()}

    def _dialled_address(self, source: str, destination: str) -> str:
        """127.78.S.D: that of a host with 127.77.0.x would be in the way of its own ports."""
        hosts = self._paths.plan.hosts
        return f"127.78.{hosts.index(source) + 1}.{hosts.index(destination) + 1}"

    def _watch(self, listener: socket.socket, connect: Callable[[socket.socket], None]) -> None:
        self._reactor.watch(listener.fileno(), READABLE, lambda _events: self._accept(listener, connect))

    def _accept(self, listener: socket.socket, connect: Callable[[socket.socket], None]) -> None:
        try:
            near, _peer = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            # Out of descriptors or memory: the caller waits in the queue, and this loop does not spin.
            self._reactor.forget(listener.fileno())
            self._reactor.call_at(self._reactor.now_s() + _RETRY_S, partial(self._watch, listener, connect))
            return
        connect(near)

    def _connect(self, ends: tuple[str, str], port: int, near: socket.socket) -> None:
        """Connect to the port of the destination; where that fails here already, the source gets RST."""
        sockets = [near]
        try:
            far = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sockets.append(far)
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            far.setblocking(False)
            far.bind((self._addresses[ends[0]], 0))
            far.connect_ex((self._addresses[ends[1]], port))
            self._connections.add(Connection(self._paths, self._reactor, ends, (near, far), self._connections.discard))
        except OSError:
            for connected in sockets:
                close_with_reset(connected)

    def set_rates(self, host: str, shape: HostShape) -> dict[str, Any]:
        """Other rates of a host."""
        self._paths.set_rates(host, shape)
        return {}

    def set_path(self, source: str, destination: str, shape: PathShape) -> dict[str, Any]:
        """Another path; one that loses everything holds everything up."""
        self._paths.set_path(source, destination, shape)
        return self._wake()

    def set_link(self, host: str, is_up: bool) -> dict[str, Any]:
        """Hold up everything to and from a host, or let it go."""
        self._paths.set_link(host, is_up=is_up)
        return self._wake()

    def _wake(self) -> dict[str, Any]:
        for connection in list(self._connections):
            for flow in connection.flows:
                flow.wake()
        return {}

    def reset(self, host: str) -> dict[str, Any]:
        """End a host's connections with RST to both ends."""
        concerned = [connection for connection in self._connections if host in connection.ends]
        for connection in concerned:
            connection.reset()
        return {"num_connections": len(concerned)}

    def carry_out(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what the owner asks for; returns the answer."""
        match request:
            case {"do": "listen", "source": source, "destination": destination, "port": port}:
                return self.listen(source, destination, port)
            case {"do": "rates", "host": host, "shape": shape}:
                return self.set_rates(host, HostShape(**shape))
            case {"do": "path", "source": source, "destination": destination, "shape": shape}:
                return self.set_path(source, destination, PathShape(**shape))
            case {"do": "link", "host": host, "is_up": bool(is_up)}:
                return self.set_link(host, is_up)
            case {"do": "reset", "host": host}:
                return self.reset(host)
            case {"do": "adopt", "pid": int(pid)}:
                self.programs[pid] = start_ticks(pid)
                return {}
        raise LocalProtocolError(f"no such request: {request}")


def end_orphans(reactor: Reactor, programs: Mapping[int, int | None]) -> None:
    """SIGTERM for programs that still run and, after `GRACE_S`, SIGKILL; none of them left: return at once."""
    deadline_s = reactor.now_s() + GRACE_S
    signal_orphans(programs, signal.SIGTERM)

    def look() -> None:
        if reactor.now_s() >= deadline_s:
            signal_orphans(programs, signal.SIGKILL)
            reactor.stop()
        elif signal_orphans(programs, 0):
            reactor.call_at(reactor.now_s() + 0.05, look)
        else:
            reactor.stop()

    look()


def signal_orphans(programs: Mapping[int, int | None], number: int) -> int:
    """Send a signal to the programs that are still those that were started; returns how many."""
    alive = [pid for pid, start in programs.items() if start is not None and start_ticks(pid) == start]
    for pid in alive:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return len(alive)


def main(control_descriptor: int, owner: int) -> None:
    """Relay until the owner is gone."""
    # Ctrl-C is for the owner, who closes the control socket when everything else has been ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _allow_many_connections()
    with socket.socket(fileno=control_descriptor) as control:
        orders = Orders(control)
        order = orders.read_order()
        if order is not None:
            reactor = Reactor()
            serve_owner(reactor, Relay(reactor, order), orders, owner)


def serve_owner(reactor: Reactor, relay: Relay, orders: Orders, owner: int) -> None:
    """Carry requests out, over the loop, until the owner is gone; then end what it has left behind."""

    def leave() -> None:
        for descriptor in (orders.descriptor, owner):
            reactor.forget(descriptor)
        end_orphans(reactor, relay.programs)

    def serve() -> None:
        if orders.serve(relay.carry_out):
            reactor.watch(orders.descriptor, orders.events, lambda _events: serve())
        else:
            leave()

    reactor.watch(orders.descriptor, READABLE, lambda _events: serve())
    reactor.watch(owner, READABLE, lambda _events: leave())
    orders.ready({})
    reactor.run()


def _allow_many_connections() -> None:
    """Two descriptors each, of which many systems let a process have no more than 1,024 unless it asks."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
