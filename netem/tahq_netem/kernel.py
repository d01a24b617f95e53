"""Backend `kernel`: the kernel's own shapers do all the work.

Hosts are namespaces, each with one veth to a bridge in a namespace of its own, the switch::

    host0 eth0 ──── port0 ┐
    htb: up, pair caps    ├ bridge
    host1 eth0 ──── port1 ┘
                    htb: netem per sender, then down

A host's egress is held to `up` and the caps of its pairs by htb alone, so that TCP feels it as it would its
own network card's pace. What happens on the way (netem: delay, jitter, loss, reordering) happens behind it,
on the port of the host that receives, told apart by sender; the port's root is the host's `down`. So a
packet is sent, travels, and then queues for the receiver's line, in this order, and loss meets packets of
the size that a line has: the kernel cuts larger ones where they leave the host.

Without delay, jitter, loss and reordering no netem is needed.
"""

import math
import time
from dataclasses import replace
from typing import Any, Final

from pyroute2 import IPRoute
from pyroute2.netlink.rtnl import ndmsg

from tahq.errors import NetworkError
from tahq_netem.description import NetworkPlan, PathShape, known_host
from tahq_netem.names import HOST_DEVICE, SWITCH, host_mac, switch_port
from tahq_netem.namespaced_network import NamespacedNetwork
from tahq_netem.namespaces import namespace_path, netlink, refusals_explained
from tahq_netem.traffic_control import SOURCE_FIELD, Leaf, Shaper, Tree
from tahq_netem.wire_packet import FULL_FRAME_BYTES
from tahq_netem.wire_queue import queue_limit_bytes

_BRIDGE: Final = "switch"
_FORWARDING: Final = 3
_FORWARDING_WITHIN_S: Final = 10.0
_FEWEST_SEGMENTS: Final = 4
_LONGEST_RUN_S: Final = 2e-4
_CATCH_UP_S: Final = 1e-3
_CATCH_UP_NBYTES: Final = 12_500
"""What a host's shaper may catch up after a late wake-up: 12,500 bytes make a message of 1 MB look 1.2 % faster,
3,000 lose 4 to 8 % of 100 Mbit/s where a virtual machine's cores sleep in between."""
_SECOND_BURST_S: Final = 5e-4
_SECOND_BURST_NBYTES: Final = 10 * FULL_FRAME_BYTES
_UNSHAPED_QUEUE_BITS_PER_S: Final = 10e9
_SPARE_PACKETS: Final = 1000


class KernelNetwork(NamespacedNetwork):
    """Namespaces joined by veths and a bridge, shaped by htb and netem.

    Raises:
        NetworkError: the kernel lacks a part, or this user may not; nothing stays behind.
    """

    backend = "kernel"

    def __init__(self, plan: NetworkPlan) -> None:
        super().__init__(plan, [SWITCH])

    def set_link(self, host: str, *, is_up: bool) -> None:
        """Take the host's port out of the bridge, or put it back; what is on its way to the host still arrives."""
        index = self.plan.hosts.index(known_host(host, self.plan.hosts))
        with refusals_explained(), netlink(self._namespaces[SWITCH]) as kernel:
            # The cable itself stays up: hosts on the Internet don't see each other's carrier either.
            if is_up:
                [bridge] = kernel.link_lookup(ifname=_BRIDGE)
                _join(kernel, bridge, self._ports[host], index)
            else:
                kernel.link("set", index=self._ports[host], master=0)

    def describe(self) -> dict[str, Any]:
        """What is in force, with the kernel's and pyroute2's versions."""
        shapers = "htb on each host's device and port" + (", netem per sender" if self.plan.needs_netem else "")
        return super().describe() | {"shapers": shapers}

    def _connect(self) -> None:
        with netlink(self._namespaces[SWITCH]) as kernel:
            kernel.link("add", ifname=_BRIDGE, kind="bridge")
            [bridge] = kernel.link_lookup(ifname=_BRIDGE)
            kernel.link("set", index=bridge, state="up")
            self._ports = {host: self._plug(kernel, bridge, index) for index, host in enumerate(self.plan.hosts)}
        self._port_shapers = {host: Shaper(port, SOURCE_FIELD, self._addresses) for host, port in self._ports.items()}
        self._set_up_hosts()
        self._await_forwarding()

    def _egress_tree(self, host: str) -> Tree:
        return egress_tree(self.plan, host)

    def _shape(self) -> None:
        super()._shape()
        with netlink(self._namespaces[SWITCH]) as kernel:
            for host, shaper in self._port_shapers.items():
                shaper.apply(kernel, port_tree(self.plan, host))

    def _await_forwarding(self) -> None:
        """The bridge notices a moment later that a cable's other end is up; until then it would drop packets."""
        deadline_s = time.monotonic() + _FORWARDING_WITHIN_S
        with netlink(self._namespaces[SWITCH]) as kernel:
            while any(_port_state(kernel, port) != _FORWARDING for port in self._ports.values()):
                if time.monotonic() > deadline_s:
                    raise NetworkError(f"a port of the bridge does not forward within {_FORWARDING_WITHIN_S:g} s")
                time.sleep(0.005)

    def _plug(self, kernel: IPRoute, bridge: int, index: int) -> int:
        name = switch_port(index)
        # The other end is born in the host's namespace; nothing is ever made in this process's own.
        with open(namespace_path(self._namespaces[self.plan.hosts[index]]), "rb") as namespace:
            peer = {"ifname": HOST_DEVICE, "net_ns_fd": namespace.fileno()}
            kernel.link("add", ifname=name, kind="veth", peer=peer)
        [port] = kernel.link_lookup(ifname=name)
        kernel.link("set", index=port, state="up")
        _join(kernel, bridge, port, index)
        return int(port)


def _join(kernel: IPRoute, bridge: int, port: int, index: int) -> None:
    """Put a port into the bridge, which is told whose it is: what it had to find out, it would flood to all others."""
    kernel.link("set", index=port, master=bridge)
    kernel.brport("set", index=port, learning=0, unicast_flood=0, mcast_flood=0, bcast_flood=0)
    # NUD_PERMANENT, fdb's default, would be an address of the bridge itself.
    kernel.fdb("add", ifindex=port, lladdr=host_mac(index), state=ndmsg.NUD_NOARP, flags=ndmsg.NTF_MASTER)


def _port_state(kernel: IPRoute, port: int) -> int | None:
    [link] = kernel.get_links(port)
    slave = link.get_attr("IFLA_LINKINFO").get_attr("IFLA_INFO_SLAVE_DATA")
    return None if slave is None else slave.get_attr("IFLA_BRPORT_STATE")


def egress_tree(plan: NetworkPlan, host: str) -> Tree:
    """The shaper of a host's own device: its uplink, and the caps of its pairs."""
    up = plan.host_shapes[host].up_bits_per_s
    leaves = {
        index: Leaf(PathShape(rate_bits_per_s=path.rate_bits_per_s), _queue_nbytes(plan, host, path.rate_bits_per_s))
        for index, other in enumerate(plan.hosts)
        if other != host and (path := plan.paths[host, other]).rate_bits_per_s is not None
    }
    queue_nbytes, burst_s = _queue_nbytes(plan, host, up), _egress_burst_s(up)
    return Tree(up, queue_nbytes, leaves, most_segments=_most_segments(plan, host), burst_s=burst_s)


def _egress_burst_s(up_bits_per_s: float | None) -> float:
    return min(_CATCH_UP_S, 8 * _CATCH_UP_NBYTES / up_bits_per_s) if up_bits_per_s is not None else 0.0


def port_tree(plan: NetworkPlan, host: str) -> Tree:
    """The shaper of the port that a host receives through: a netem for each sender that needs one, then `down`."""
    down = plan.host_shapes[host].down_bits_per_s
    queue_nbytes = _queue_nbytes(plan, host, down)
    leaves = {
        index: Leaf(replace(path, rate_bits_per_s=None), queue_nbytes, _netem_limit(plan, other, host, queue_nbytes))
        for index, other in enumerate(plan.hosts)
        if other != host and (path := plan.paths[other, host]).needs_netem
    }
    return Tree(down, queue_nbytes, leaves, burst_s=_port_burst_s(plan, host))


def _port_burst_s(plan: NetworkPlan, host: str) -> float:
    """More than usual where every sender's line is as slow already, and this one matters only when several send.

    Two shapers of one rate in a row lose what the second could not send while the first was late to wake up:
    4 % with the usual burst on a busy machine.
    """
    down = plan.host_shapes[host].down_bits_per_s
    if down is None or any(_line_bits_per_s(plan, other, host) > down for other in plan.hosts if other != host):
        return 0.0
    return max(8 * _SECOND_BURST_NBYTES / down, _SECOND_BURST_S)


def _line_bits_per_s(plan: NetworkPlan, source: str, destination: str) -> float:
    """What `source` can send to `destination` at most."""
    rates = (plan.host_shapes[source].up_bits_per_s, plan.paths[source, destination].rate_bits_per_s)
    return min((rate for rate in rates if rate is not None), default=math.inf)


def _queue_nbytes(plan: NetworkPlan, host: str, rate_bits_per_s: float | None) -> int:
    longest_s = max((plan.round_trip_s(host, other) for other in plan.hosts if other != host), default=0.0)
    return queue_limit_bytes(rate_bits_per_s or _UNSHAPED_QUEUE_BITS_PER_S, longest_s)


def _netem_limit(plan: NetworkPlan, source: str, destination: str, queue_nbytes: int) -> int:
    """Packets that a path and the queue behind it hold.

    The faster of both directions counts: acknowledgements of a fast download fill a slow uplink's path
    with many small packets.
    """
    rates = (plan.rate_bits_per_s(source, destination), plan.rate_bits_per_s(destination, source))
    fastest = max(rate or _UNSHAPED_QUEUE_BITS_PER_S for rate in rates)
    path = plan.paths[source, destination]
    under_way_nbytes = fastest / 8 * (path.delay_s + path.jitter_s)
    return int((under_way_nbytes + queue_nbytes) / FULL_FRAME_BYTES) + _SPARE_PACKETS


def _most_segments(plan: NetworkPlan, host: str) -> int | None:
    """How many packets TCP may hand over as one: one where packets meet their fate singly, few where rates matter.

    htb lets a packet go when its first bit may, so with a last one of 64 kB a message of 1 MB would look 6 %
    faster; very short ones would keep a core busy at high rates.
    """
    others = [other for other in plan.hosts if other != host]
    paths = [plan.paths[host, other] for other in others]
    if any(path.loss or path.reorder or path.jitter_s for path in paths):
        return 1
    rates = [rate for other in others if (rate := plan.rate_bits_per_s(host, other)) is not None]
    return max(_FEWEST_SEGMENTS, int(min(rates) * _LONGEST_RUN_S / 8 / FULL_FRAME_BYTES)) if rates else None
