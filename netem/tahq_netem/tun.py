"""Backend `tun`: for kernels without netem. Rates up are the kernel's, all the rest is a wire in user space.

Each host is a namespace whose one interface is a TUN device; the descriptors of all are read and written by
one process, the wire::

    host0 eth0 ── htb: up, pair caps ──┐
    host1 eth0 ── htb ─────────────────┤ wire: loss, pair caps, delay, jitter, reordering, down
    host2 eth0 ── htb ─────────────────┘

htb holds a host's egress to `up` and to the caps of its pairs, so that TCP feels them as it would its own
network card's pace; what is dropped further on is dropped as routers do, at the tail of a queue one round
trip deep (`wire_queue.queue_limit_bytes`).

The wire ends when this object is closed or this process ends, and the devices with it.
"""

import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from tahq_netem.description import NetworkPlan, PathShape, RateChange, known_host
from tahq_netem.interpreter import module_argv, module_environment
from tahq_netem.kernel import egress_tree
from tahq_netem.names import HOST_DEVICE
from tahq_netem.namespaced_network import NamespacedNetwork
from tahq_netem.namespaces import netlink
from tahq_netem.traffic_control import Tree
from tahq_netem.tun_device import open_device
from tahq_netem.wire_control import WireControl, plan_to_json
from tahq_netem.wire_queue import longest_run_segments

MOST_SEGMENTS: Final = 44
"""TCP segments in a frame at most: 64 kB."""
CATCH_UP_S: Final = 5e-3
"""How far a host's shaper may catch up after a late wake-up. On a busy machine 1 to 5 ms are common, and with the
usual burst of 100 µs they cost 20 % of the rate at 1 Gbit/s; a host's full line then shows up to 5 ms of queue."""
RING_FRAMES: Final = 16384
"""Frames that wait for the wire in a device. A full ring drops, so it outlasts a wire kept from its core for 0.1 s."""
_GRACE_S: Final = 3.0


class TunNetwork(NamespacedNetwork):
    """Namespaces with TUN devices, joined by a wire process.

    Args:
        plan: what the network looks like.
        seed: of losses, jitter and reordering: the same packets meet the same fate.

    Raises:
        NetworkError: the kernel lacks a part, or this user may not; nothing stays behind.
    """

    backend = "tun"

    _wire: "WireProcess | None" = None

    def __init__(self, plan: NetworkPlan, *, seed: int = 0) -> None:
        self._seed = seed
        super().__init__(plan)

    @property
    def wire(self) -> "WireProcess":
        """The process that moves the packets."""
        if self._wire is None:
            raise RuntimeError("the network is closed")
        return self._wire

    def set_rate(self, host: str, *, up: RateChange = ..., down: RateChange = ...) -> None:
        """Change a host's rates; what waits in queues stays there and leaves at the new rate."""
        changed = self.plan.with_rates(host, up, down)
        self.wire.control.set_rates(host, changed.host_shapes[host])
        self._change(changed)

    def set_path(self, source: str, destination: str, shape: PathShape) -> None:
        """Change what packets meet that are sent from now on; those on their way keep the delay that they got."""
        changed = self.plan.with_path(source, destination, shape)
        self.wire.control.set_path(source, destination, shape)
        self._change(changed)

    def set_link(self, host: str, *, is_up: bool) -> None:
        """Let the wire drop everything to and from the host, or stop doing so. Its interface stays up."""
        self.wire.control.set_link(known_host(host, self.plan.hosts), is_up=is_up)

    def counters(self) -> dict[str, Any]:
        """Packets that each path has seen, lost and dropped so far."""
        return self.wire.control.counters()

    def describe(self) -> dict[str, Any]:
        """What is in force, with the kernel's and pyroute2's versions."""
        return super().describe() | {
            "shapers": "htb on each host's device; down, delay, jitter, loss, reordering in a user-space wire",
            "wire_scheduling": self.wire.scheduling,
        }

    def close(self) -> None:
        """End what runs in the namespaces, remove them, and end the wire."""
        super().close()
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def _connect(self) -> None:
        devices: list[int] = []
        try:
            for host in self.plan.hosts:
                with netlink(self._namespaces[host]) as kernel:
                    devices.append(open_device(HOST_DEVICE))
                    kernel.link("set", index=kernel.link_lookup(ifname=HOST_DEVICE)[0], txqlen=RING_FRAMES)
            self._wire = WireProcess(devices, self.plan, list(self._addresses.values()), self._seed)
        finally:
            # The wire has its own copies; without these, the devices go when it does.
            for device in devices:
                os.close(device)
        self._set_up_hosts()

    def _egress_tree(self, host: str) -> Tree:
        return wire_tree(self.plan, host)


def wire_tree(plan: NetworkPlan, host: str) -> Tree:
    """The shaper of a host's device: the kernel backend's, with larger frames of TCP and larger bursts.

    The wire serialises every packet once more at the exact rate, so neither shows in what arrives.
    """
    return replace(egress_tree(plan, host), most_segments=most_segments(plan, host), burst_s=CATCH_UP_S)


def most_segments(plan: NetworkPlan, host: str) -> int:
    """How many segments TCP may hand over as one frame: what the host's own line sends within 1 ms.

    Slower lines further on don't count: the wire cuts frames for them.
    """
    rate = plan.host_shapes[host].up_bits_per_s
    return MOST_SEGMENTS if rate is None else min(MOST_SEGMENTS, longest_run_segments(rate))


class WireProcess:
    """The wire as its owner sees it: started, spoken to, ended."""

    def __init__(self, devices: Sequence[int], plan: NetworkPlan, addresses: Sequence[str], seed: int) -> None:
        own_end, wire_end = socket.socketpair()
        self.control = WireControl(own_end)
        owner = os.pidfd_open(os.getpid())
        descriptors = [wire_end.fileno(), owner, *devices]
        with wire_end, os.fdopen(owner, "rb"):
            self._process = subprocess.Popen(
                module_argv("tahq_netem.wire", *map(str, descriptors)),
                pass_fds=descriptors,
                env=module_environment(),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            facts = self.control.start({"plan": plan_to_json(plan), "addresses": list(addresses), "seed": seed})
        except BaseException:
            self.close()
            raise
        self.pid = self._process.pid
        self.scheduling = str(facts["scheduling"])

    def close(self) -> None:
        """End the process."""
        self.control.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
