"""Backend `relay`: for users who are not root. Every TCP connection goes through a process that takes its time.

All hosts are this machine, each with a loopback address of its own, 127.77.0.x, to bind to. What listens on a
port of a host is dialled at `dial_address`, which has the relay listen there::

    program on host0 ── dials 127.78.1.2:P ── relay: up, pair, delay, down ── 127.77.0.2:port ── program on host1

Rates and delays are those of the plan. But TCP's own work is done on loopback, twice: no slow start, no window
that a long path would need, nobody reacts to loss, and there is no loss. A run over it shows how long the data
takes, not how TCP gets along. Nothing but TCP is carried, and programs that dial a host's own address go past
the relay. A link that is down holds data up, as TCP would with its retransmissions; nothing is lost.
"""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tahq.errors import NetworkError
from tahq_netem.description import NetworkPlan, PathShape, RateChange, known_host
from tahq_netem.interpreter import module_argv, module_environment
from tahq_netem.leftovers import Guard
from tahq_netem.network import Network
from tahq_netem.relay_limits import relay_obstacle
from tahq_netem.relay_process import GRACE_S
from tahq_netem.wire_control import WireControl, plan_to_json

_RELAY_GRACE_S: Final = 2 * GRACE_S
"""The relay first gives programs that it has adopted a grace of its own."""
_CONGESTION_CONTROL: Final = Path("/proc/sys/net/ipv4/tcp_congestion_control")


class RelayNetwork(Network):
    """Hosts that are this machine, joined by a relay process.

    Raises:
        NetworkError: the plan has what only packets can have.
    """

    backend = "relay"

    def __init__(self, plan: NetworkPlan) -> None:
        _check_paths(plan.paths)
        self.plan = plan
        self._addresses = {host: f"127.77.0.{index + 1}" for index, host in enumerate(plan.hosts)}
        self.congestion_control = _CONGESTION_CONTROL.read_text().strip()
        self._dialled: dict[tuple[str, str, int], tuple[str, int]] = {}
        self._programs: list[subprocess.Popen[Any]] = []
        self._owner = os.getpid()
        self._control, self._relay = self._start()
        self._guard = Guard(self.close)

    def _start(self) -> tuple["RelayControl", subprocess.Popen[bytes]]:
        own_end, relay_end = socket.socketpair()
        owner = os.pidfd_open(os.getpid())
        descriptors = [relay_end.fileno(), owner]
        with relay_end, os.fdopen(owner, "rb"):
            relay = subprocess.Popen(
                module_argv("tahq_netem.relay_process", *map(str, descriptors)),
                pass_fds=descriptors,
                env=module_environment(),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        control = RelayControl(own_end)
        try:
            control.start({"plan": plan_to_json(self.plan), "addresses": self._addresses})
        except BaseException:
            _leave(control, relay)
            raise
        return control, relay

    def address(self, host: str) -> str:
        """127.77.0.x, in the order of the hosts."""
        return self._addresses[known_host(host, self.plan.hosts)]

    def dial_address(self, source: str, destination: str, port: int) -> tuple[str, int]:
        """Where the relay listens for connections of `source` to that port of `destination`, from now on."""
        key = (known_host(source, self.plan.hosts), known_host(destination, self.plan.hosts), port)
        if source == destination:
            return self.address(destination), port
        if key not in self._dialled:
            self._dialled[key] = self._control.listen(*key)
        return self._dialled[key]

    def interface(self, host: str) -> str:
        """Always lo."""
        return "lo"

    def popen(
        self, host: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on this machine, which every host is."""
        known_host(host, self.plan.hosts)
        program = subprocess.Popen(argv, env=env, **options)
        self._programs.append(program)
        self._control.adopt(program.pid)
        return program

    def set_rate(self, host: str, *, up: RateChange = ..., down: RateChange = ...) -> None:
        """Change a host's rates, from the next chunk on."""
        plan = self.plan.with_rates(host, up, down)
        self._control.set_rates(host, plan.host_shapes[host])
        self.plan = plan

    def set_path(self, source: str, destination: str, shape: PathShape) -> None:
        """Change rate and delay of a path, from the next chunk on; a loss of 1 holds everything up.

        Raises:
            NetworkError: the path has what only packets can have.
        """
        plan = self.plan.with_path(source, destination, shape)
        _check_paths({(source, destination): shape})
        self._control.set_path(source, destination, shape)
        self.plan = plan

    def set_link(self, host: str, *, is_up: bool) -> None:
        """Hold up everything to and from a host, or let it go."""
        self._control.set_link(known_host(host, self.plan.hosts), is_up=is_up)

    def reset_tcp(self, host: str) -> int:
        """Close the host's relayed connections, with RST to both ends."""
        return self._control.reset(known_host(host, self.plan.hosts))

    def describe(self) -> dict[str, Any]:
        """What is in force; says that TCP's dynamics are not shown."""
        return super().describe() | {
            "shows_tcp_dynamics": False,
            "shapers": "a relay of TCP connections on loopback",
            "tcp_reset": "the relay closes its sockets with SO_LINGER 0",
        }

    def close(self) -> None:
        """End what runs on the hosts, and the relay."""
        if os.getpid() != self._owner or self._relay.returncode is not None:
            return
        _end(self._programs)
        _leave(self._control, self._relay)
        self._guard.release()


def _check_paths(paths: Mapping[tuple[str, str], PathShape]) -> None:
    if obstacle := relay_obstacle(paths):
        raise NetworkError(f"{obstacle}; leave it out, or be root and take the backend tun or kernel")


def _end(programs: Sequence[subprocess.Popen[Any]]) -> None:
    """SIGTERM and, after a grace, SIGKILL, for what still runs."""
    running = [program for program in programs if program.poll() is None]
    for program in running:
        program.terminate()
    for program in running:
        try:
            program.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()


def _leave(control: WireControl, relay: subprocess.Popen[bytes]) -> None:
    """Tell the relay to end, and see to it."""
    control.close()
    try:
        relay.wait(_RELAY_GRACE_S)
    except subprocess.TimeoutExpired:
        relay.kill()
        relay.wait()


class RelayControl(WireControl):
    """The owner's end of the control socket; what a relay does beyond a wire."""

    process = "relay"

    def listen(self, source: str, destination: str, port: int) -> tuple[str, int]:
        """Have it listen for `source`; returns where."""
        request = {"do": "listen", "source": source, "destination": destination, "port": port}
        address, listening_port = self._ask(request)["address"]
        return address, listening_port

    def reset(self, host: str) -> int:
        """Have it end the host's connections; returns how many there were."""
        return int(self._ask({"do": "reset", "host": host})["num_connections"])

    def adopt(self, pid: int) -> None:
        """Have it end a program, should this process not get to it."""
        self._ask({"do": "adopt", "pid": pid})
