"""The wire's hosts and what joins them: where a frame goes, and what it meets there. Pure.

::

    frame of a → [a up?] → Uplink(a) → Path(a→b): loss · pair's rate · delay → Transmitter(b) → [b up?] → frame to b

Hosts are known by their index in the plan and by their IPv4 address; frames to other addresses (multicast, outside) are
counted and dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tahq_netem.network.description import HostShape, NetworkPlan, PathShape
from tahq_netem.wire.lines import Agenda, Path, Transmitter, Uplink
from tahq_netem.wire.packet import Packet, destination_address, read_packet

Deliver = Callable[[int, bytes], bool]
"""Gives a frame to a host; returns whether the host accepted it."""


@dataclass(slots=True)
class _Host:
    uplink: Uplink
    downlink: Transmitter
    is_up: bool = True


class Switch:
    """Everything between the hosts' devices; `deliver(host, frame)` is called with each frame that arrives.

    Args:
        plan: hosts and shapes; `set_rates` and `set_path` replace it.
        addresses: of each host, as four bytes, in the plan's order.
        deliver: where frames go.
        seed: of every random choice.
    """

    def __init__(self, plan: NetworkPlan, addresses: Sequence[bytes], deliver: Deliver, *, seed: int = 0) -> None:
        self._plan = plan
        self._deliver = deliver
        self._by_address = {address: index for index, address in enumerate(addresses)}
        self._agenda = Agenda()
        self._hosts = [self._make_host(index) for index in range(len(plan.hosts))]
        self._paths = {
            (plan.hosts.index(source), plan.hosts.index(destination)): self._make_path(source, destination, seed)
            for source, destination in plan.paths
        }
        self.num_elsewhere = 0
        self.num_cut_off = 0
        self.num_refused = 0

    def _make_host(self, index: int) -> _Host:
        name = self._plan.hosts[index]
        shape = self._plan.host_shapes[name]
        arrive = partial(self._arrive, index)
        downlink = Transmitter(self._agenda, arrive, shape.down_bits_per_s, self._longest_round_trip_s(name))
        return _Host(Uplink(self._agenda, shape.up_bits_per_s), downlink)

    def _make_path(self, source: str, destination: str, seed: int) -> Path:
        downlink = self._hosts[self._plan.hosts.index(destination)].downlink
        shape = self._plan.paths[source, destination]
        rtt_s = self._plan.round_trip_s(source, destination)
        return Path(self._agenda, downlink.enter, shape, rtt_s, seed=f"{seed}/{source}/{destination}")

    @property
    def next_due_s(self) -> float | None:
        """When `run_until` next has something to do; None: not before the next frame."""
        return self._agenda.next_due_s

    def run_until(self, now_s: float) -> None:
        """Deliver what is due."""
        self._agenda.run_until(now_s)

    def send(self, now_s: float, source: int, frame: bytes) -> None:
        """Take a frame that the host `source` has started to send."""
        destination = self._by_address.get(destination_address(frame))
        if destination is None or destination == source:
            self.num_elsewhere += 1
            return
        host = self._hosts[source]
        packet = read_packet(frame)
        if host.is_up:
            host.uplink.enter(now_s, packet, self._paths[source, destination].enter)
        else:
            self.num_cut_off += packet.num_segments

    def _arrive(self, destination: int, now_s: float, packet: Packet) -> None:
        if not self._hosts[destination].is_up:
            self.num_cut_off += packet.num_segments
        elif not self._deliver(destination, packet.frame):
            self.num_refused += packet.num_segments

    def set_link(self, host: str, *, is_up: bool) -> None:
        """Cut a host off (its traffic is lost in both directions) or join it again."""
        self._hosts[self._plan.hosts.index(host)].is_up = is_up

    def set_rates(self, now_s: float, host: str, shape: HostShape) -> None:
        """Another access link for a host."""
        self._plan = self._plan.with_rates(host, shape.up_bits_per_s, shape.down_bits_per_s)
        entry = self._hosts[self._plan.hosts.index(host)]
        entry.uplink.set_rate(shape.up_bits_per_s)
        entry.downlink.set_rate(now_s, shape.down_bits_per_s, self._longest_round_trip_s(host))

    def set_path(self, now_s: float, source: str, destination: str, shape: PathShape) -> None:
        """Another shape for what `source` sends to `destination`."""
        hosts = self._plan.hosts
        self._plan = self._plan.with_path(source, destination, shape)
        rtt_s = self._plan.round_trip_s(source, destination)
        self._paths[hosts.index(source), hosts.index(destination)].set_shape(now_s, shape, rtt_s)
        for host in (source, destination):
            self.set_rates(now_s, host, self._plan.host_shapes[host])  # the length of a queue follows the round trip

    def counters(self) -> dict[str, Any]:
        """Packets so far, fit for JSON: by path, by downlink, and those not delivered."""
        names = self._plan.hosts
        return {
            "paths": [
                {"source": names[source], "destination": names[destination], **path.counters()}
                for (source, destination), path in self._paths.items()
            ],
            "dropped_by_downlink": {
                name: host.downlink.num_dropped for name, host in zip(names, self._hosts, strict=True)
            },
            "cut_off": self.num_cut_off,
            "elsewhere": self.num_elsewhere,
            "refused": self.num_refused,
        }

    def _longest_round_trip_s(self, host: str) -> float:
        plan = self._plan
        return max((plan.round_trip_s(host, other) for other in plan.hosts if other != host), default=0.0)
