"""Backend `kernel`: htb and netem in the kernel do all the shaping.

Hosts are namespaces, each joined by a veth to a bridge in a further namespace, the switch::

    host0 eth0 ──── port0 ┐
    htb: up, pair caps    ├ bridge
    host1 eth0 ──── port1 ┘
                    htb: netem per sender, then down

A host's device holds it to `up` and to the caps of its pairs. Delay, jitter, loss and reordering happen behind that,
on the port of the receiving host, in one netem for each sender; the port's root class is the receiver's `down`. So a
packet is sent, travels, and then queues for the receiver's line, in this order, and loss hits single packets: the
kernel cuts larger ones where they leave the host. A network of rates alone needs no netem.
"""

import math
import time
from dataclasses import replace
from typing import Final

from pyroute2 import IPRoute
from pyroute2.netlink.rtnl import ndmsg

from tahq.comm.network_model import FULL_FRAME_NBYTES, queue_limit_nbytes
from tahq.errors import NetworkError
from tahq_netem.backends.namespaces import (
    HOST_DEVICE,
    SWITCH,
    host_mac,
    namespace_path,
    netlink,
    refusals_explained,
)
from tahq_netem.backends.network import Network
from tahq_netem.backends.traffic_control import SOURCE_FIELD, Leaf, Shaper, Tree
from tahq_netem.network.description import NetworkPlan, PathShape, known_host

_BRIDGE: Final = "switch"
_FORWARDING: Final = 3
_FORWARDING_WITHIN_S: Final = 10.0
_FEW_SEGMENTS: Final = 4
_LONGEST_RUN_S: Final = 2e-4
_LONGEST_SHORT_RUN_S: Final = 1e-3
_CATCH_UP_S: Final = 1e-3
_CATCH_UP_NBYTES: Final = 12_500
"""How much a host's shaper may catch up after a late wake-up: 12,500 bytes make a message of 1 MB look 1.2 % faster;
with 3,000, a virtual machine whose cores sleep in between loses 4 to 8 % of 100 Mbit/s."""
_SECOND_BURST_S: Final = 5e-4
_SECOND_BURST_NBYTES: Final = 10 * FULL_FRAME_NBYTES
_UNSHAPED_QUEUE_BITS_PER_S: Final = 10e9
_SPARE_PACKETS: Final = 1000


class KernelNetwork(Network):
    """Namespaces joined by veths and a bridge, shaped by htb and netem."""

    backend = "kernel"

    def __init__(self, plan: NetworkPlan) -> None:
        super().__init__(plan, [SWITCH])
        try:
            self._await_forwarding()
        except BaseException:
            self.close()
            raise

    def set_link(self, host: str, *, is_up: bool) -> None:
        """Take the host's port out of the bridge, or put it back; packets already past the bridge still arrive."""
        index = self.plan.hosts.index(known_host(host, self.plan.hosts))
        with refusals_explained(), netlink(self._namespaces[SWITCH]) as kernel:
            # The veth stays up: hosts on the Internet don't see each other's carrier either.
            if is_up:
                [bridge] = kernel.link_lookup(ifname=_BRIDGE)
                _join(kernel, bridge, self._ports[host], index)
            else:
                kernel.link("set", index=self._ports[host], master=0)

    def _connect(self) -> None:
        with netlink(self._namespaces[SWITCH]) as kernel:
            kernel.link("add", ifname=_BRIDGE, kind="bridge")
            [bridge] = kernel.link_lookup(ifname=_BRIDGE)
            kernel.link("set", index=bridge, state="up")
            self._ports = {host: self._plug(kernel, bridge, index) for index, host in enumerate(self.plan.hosts)}
        self._port_shapers = {host: Shaper(port, SOURCE_FIELD, self._addresses) for host, port in self._ports.items()}

    def _plug(self, kernel: IPRoute, bridge: int, index: int) -> int:
        name = f"port{index}"
        # The other end is created in the host's namespace; nothing is ever created in this process's own.
        with open(namespace_path(self._namespaces[self.plan.hosts[index]]), "rb") as namespace:
            peer = {"ifname": HOST_DEVICE, "net_ns_fd": namespace.fileno()}
            kernel.link("add", ifname=name, kind="veth", peer=peer)
        [port] = kernel.link_lookup(ifname=name)
        kernel.link("set", index=port, state="up")
        _join(kernel, bridge, port, index)
        return int(port)

    def _egress_tree(self, host: str) -> Tree:
        return egress_tree(self.plan, host)

    def _shape(self) -> None:
        super()._shape()
        with netlink(self._namespaces[SWITCH]) as kernel:
            for host, shaper in self._port_shapers.items():
                shaper.apply(kernel, port_tree(self.plan, host))

    def _await_forwarding(self) -> None:
        """Wait until the bridge has noticed that its ports are up; until then it would drop packets."""
        deadline_s = time.monotonic() + _FORWARDING_WITHIN_S
        with netlink(self._namespaces[SWITCH]) as kernel:
            while any(_port_state(kernel, port) != _FORWARDING for port in self._ports.values()):
                if time.monotonic() > deadline_s:
                    raise NetworkError(f"a port of the bridge does not forward within {_FORWARDING_WITHIN_S:g} s")
                time.sleep(0.005)


def _join(kernel: IPRoute, bridge: int, port: int, index: int) -> None:
    """Add a port to the bridge and tell it the host's address, so that it need not flood packets to learn it."""
    kernel.link("set", index=port, master=bridge)
    kernel.brport("set", index=port, learning=0, unicast_flood=0, mcast_flood=0, bcast_flood=0)
    # NUD_PERMANENT, the default of fdb, would make it an address of the bridge itself.
    kernel.fdb("add", ifindex=port, lladdr=host_mac(index), state=ndmsg.NUD_NOARP, flags=ndmsg.NTF_MASTER)


def _port_state(kernel: IPRoute, port: int) -> int | None:
    [link] = kernel.get_links(port)
    slave = link.get_attr("IFLA_LINKINFO").get_attr("IFLA_INFO_SLAVE_DATA")
    return None if slave is None else slave.get_attr("IFLA_BRPORT_STATE")


def egress_tree(plan: NetworkPlan, host: str) -> Tree:
    """The shaper of a host's own device: its uplink, and the caps of its pairs."""
    up = plan.host_shapes[host].up_bits_per_s
    leaves = {
        index: Leaf(PathShape(rate_bits_per_s=cap), _queue_nbytes(plan, host, cap))
        for index, other in enumerate(plan.hosts)
        if other != host and (cap := plan.paths[host, other].rate_bits_per_s) is not None
    }
    burst_s = min(_CATCH_UP_S, 8 * _CATCH_UP_NBYTES / up) if up is not None else 0.0
    return Tree(up, _queue_nbytes(plan, host, up), leaves, burst_s, _most_segments(plan, host))


def port_tree(plan: NetworkPlan, host: str) -> Tree:
    """The shaper of the port that a host receives through: a netem for each sender that needs one, then `down`."""
    down = plan.host_shapes[host].down_bits_per_s
    queue_nbytes = _queue_nbytes(plan, host, down)
    leaves = {
        index: Leaf(replace(path, rate_bits_per_s=None), queue_nbytes, _netem_limit(plan, other, host, queue_nbytes))
        for index, other in enumerate(plan.hosts)
        if other != host and (path := plan.paths[other, host]).needs_netem
    }
    return Tree(down, queue_nbytes, leaves, _port_burst_s(plan, host))


def _port_burst_s(plan: NetworkPlan, host: str) -> float:
    """The burst of a receiver's line: larger where no sender is faster, so that the line matters only if several send.

    Two shapers of the same rate in a row lose what the second could not send while the first woke up late: 4 % with
    the usual burst on a busy machine.
    """
    down = plan.host_shapes[host].down_bits_per_s
    if down is None:
        return 0.0
    for sender in (other for other in plan.hosts if other != host):
        rates = (plan.host_shapes[sender].up_bits_per_s, plan.paths[sender, host].rate_bits_per_s)
        if min((rate for rate in rates if rate is not None), default=math.inf) > down:
            return 0.0
    return max(8 * _SECOND_BURST_NBYTES / down, _SECOND_BURST_S)


def _queue_nbytes(plan: NetworkPlan, host: str, rate_bits_per_s: float | None) -> int:
    return queue_limit_nbytes(rate_bits_per_s or _UNSHAPED_QUEUE_BITS_PER_S, plan.longest_round_trip_s(host))


def _netem_limit(plan: NetworkPlan, source: str, destination: str, queue_nbytes: int) -> int:
    """Packets that a path and the queue behind it hold.

    The faster direction counts: acknowledgements of a fast download fill a slow uplink's path with small packets.
    """
    rates = (plan.rate_bits_per_s(source, destination), plan.rate_bits_per_s(destination, source))
    fastest = max(rate or _UNSHAPED_QUEUE_BITS_PER_S for rate in rates)
    path = plan.paths[source, destination]
    under_way_nbytes = fastest / 8 * (path.delay_s + path.jitter_s)
    return int((under_way_nbytes + queue_nbytes) / FULL_FRAME_NBYTES) + _SPARE_PACKETS


def _most_segments(plan: NetworkPlan, host: str) -> int | None:
    """How many packets TCP may hand over as one: one at low rates and where packets are lost or reordered singly.

    htb releases a packet when its first bit may leave, so a last packet of 64 kB would make a message of 1 MB look 6 %
    faster; very short ones would keep a core busy at high rates.
    """
    others = [other for other in plan.hosts if other != host]
    paths = [plan.paths[host, other] for other in others]
    if any(path.loss or path.reorder or path.jitter_s for path in paths):
        return 1
    rates = [rate for other in others if (rate := plan.rate_bits_per_s(host, other)) is not None]
    if not rates:
        return None
    packets_per_s = min(rates) / 8 / FULL_FRAME_NBYTES
    few = min(_FEW_SEGMENTS, int(packets_per_s * _LONGEST_SHORT_RUN_S))
    return max(1, few, int(packets_per_s * _LONGEST_RUN_S))
