"""Backend `tun`: for kernels without netem. The kernel shapes uplinks; a user-space wire does the rest.

Each host is a namespace whose one interface is a TUN device; the descriptors of all are read and written by
one process, the wire::

    host0 eth0 ── htb: up, pair caps ──┐
    host1 eth0 ── htb ─────────────────┤ wire: loss, pair caps, delay, jitter, reordering, down
    host2 eth0 ── htb ─────────────────┘

Beyond the uplink, packets are dropped at the tail of a queue one round trip deep, as routers do. The wire ends with the
network or this process, and the devices with it. Devices carry Ethernet frames (IFF_TAP), so that the kernel's shaper
counts 1,514 bytes for a full packet. IFF_VNET_HDR puts a virtio-net header before each frame, in which the kernel hands
over TCP segments in one piece of up to 64 kB with their checksum left open: no data is summed or cut on the path.
"""

import fcntl
import os
from dataclasses import replace
from struct import Struct
from typing import Final

from tahq.errors import NetworkError
from tahq_netem.backends.kernel import egress_tree
from tahq_netem.backends.namespaces import HOST_DEVICE, netlink
from tahq_netem.backends.network import Network
from tahq_netem.backends.traffic_control import Tree
from tahq_netem.network.description import NetworkPlan, known_host
from tahq_netem.wire.lines import LONGEST_RUN_S, segments_within
from tahq_netem.wire.packet import VNET_HEADER_BYTES
from tahq_netem.wire.process import WireProcess

_TUN: Final = "/dev/net/tun"
_TUNSETIFF: Final = 0x400454CA
_TUNSETOFFLOAD: Final = 0x400454D0
_TUNSETVNETHDRSZ: Final = 0x400454D8
_IFF_TAP: Final = 0x0002
_IFF_NO_PI: Final = 0x1000
_IFF_VNET_HDR: Final = 0x4000
_TUN_F_CSUM: Final = 0x01
_TUN_F_TSO4: Final = 0x02
_INTERFACE_REQUEST: Final = Struct("16sH22x")  # struct ifreq: name, flags

MOST_SEGMENTS: Final = 44
"""Most TCP segments in a frame: 64 kB."""
CATCH_UP_S: Final = 5e-3
"""How far a host's shaper may catch up after a late wake-up. On a busy machine 1 to 5 ms are common; with the usual
burst of 100 µs they cost 20 % of the rate at 1 Gbit/s. A full line then shows up to 5 ms of queue."""
RING_FRAMES: Final = 16384
"""Frames that can wait for the wire in a device: enough for 0.1 s without a core. A full ring drops frames."""


def open_device(name: str) -> int:
    """Create the interface `name` in the calling thread's network namespace; return a non-blocking descriptor.

    The interface goes when the last copy of the descriptor is closed.
    """
    try:
        descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NetworkError(
            f"cannot open {_TUN}: {error.strerror}; the tun backend needs root and `modprobe tun`"
        ) from None
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(descriptor, _TUNSETIFF, _INTERFACE_REQUEST.pack(name.encode(), flags))
        fcntl.ioctl(descriptor, _TUNSETVNETHDRSZ, Struct("i").pack(VNET_HEADER_BYTES))
        # Neither UDP's segmentation nor ECN's: the kernel cuts those before they get here.
        fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    except OSError as error:
        os.close(descriptor)
        raise NetworkError(f"cannot make the TUN device {name}: {error.strerror}; it needs CAP_NET_ADMIN") from None
    return descriptor


class TunNetwork(Network):
    """Namespaces with TUN devices, joined by a wire process.

    Losses, jitter and reordering are pseudo-random: the same packets meet the same fate.
    """

    backend = "tun"
    wire: WireProcess
    """The process that moves the packets."""

    def set_plan(self, plan: NetworkPlan) -> None:
        """Give the network other rates and paths; waiting packets leave at the new rate, others keep their delay."""
        before = self.plan
        self.wire.ask("set_plan", plan)
        try:
            super().set_plan(plan)
        except BaseException:
            self.wire.ask("set_plan", before)
            raise

    def set_link(self, host: str, *, is_up: bool) -> None:
        """Have the wire drop everything to and from the host, or stop doing so. Its interface stays up."""
        self.wire.ask("set_link", known_host(host, self.plan.hosts), is_up)

    def close(self) -> None:
        """End what runs in the namespaces, remove them, and end the wire."""
        super().close()
        if hasattr(self, "wire"):
            self.wire.close()

    def _connect(self) -> None:
        devices: list[int] = []
        try:
            for host in self.plan.hosts:
                with netlink(self._namespaces[host]) as kernel:
                    devices.append(open_device(HOST_DEVICE))
                    kernel.link("set", index=kernel.link_lookup(ifname=HOST_DEVICE)[0], txqlen=RING_FRAMES)
            self.wire = WireProcess(devices, self.plan, list(self._addresses.values()))
        finally:
            # The wire has its own copies; without these, the devices go when it does.
            for device in devices:
                os.close(device)

    def _egress_tree(self, host: str) -> Tree:
        return wire_tree(self.plan, host)


def wire_tree(plan: NetworkPlan, host: str) -> Tree:
    """The shaper of a host's device: the kernel backend's, with larger TCP frames and larger bursts.

    The wire serialises every packet once more at the exact rate, so neither shows in what arrives. A frame has at most
    as many segments as the host's own line sends within 1 ms; the wire cuts frames for slower lines further on.
    """
    up = plan.host_shapes[host].up_bits_per_s
    most_segments = MOST_SEGMENTS if up is None else min(MOST_SEGMENTS, segments_within(LONGEST_RUN_S, up))
    return replace(egress_tree(plan, host), most_segments=most_segments, burst_s=CATCH_UP_S)
