"""The wire's hosts and what joins them: where a frame goes, and what it meets there. Pure.

::

    frame of a → [a up?] → uplink of a → path a→b: loss · pair's rate · delay → transmitter of b → [b up?] → frame to b

Hosts are known by their index in the plan and by their IPv4 address; frames to other addresses (multicast, outside) are
dropped.
"""

import socket
from collections.abc import Callable, Sequence
from functools import partial

from tahq_netem.network.description import HostShape, NetworkPlan, PathShape
from tahq_netem.wire.lines import Agenda, Path, ShapedUplink, Transmitter
from tahq_netem.wire.packet import Packet, destination_address, read_packet


class Switch:
    """Everything between the hosts' devices; `deliver(host, frame)` is called with each frame that arrives.

    Args:
        plan: hosts and shapes; `set_rates` and `set_path` replace it.
        addresses: of each host, in the plan's order.
        deliver: takes frames.
    """

    def __init__(self, plan: NetworkPlan, addresses: Sequence[str], deliver: Callable[[int, bytes], object]) -> None:
        self._plan = plan
        self._deliver = deliver
        self._by_address = {socket.inet_aton(address): index for index, address in enumerate(addresses)}
        self._index = {name: index for index, name in enumerate(plan.hosts)}
        self._cut_off: set[int] = set()
        self._agenda = Agenda()
        self._uplinks = [ShapedUplink(self._agenda, plan.host_shapes[host].up_bits_per_s) for host in plan.hosts]
        self._downlinks = [
            Transmitter(
                self._agenda,
                partial(self._arrive, index),
                plan.host_shapes[host].down_bits_per_s,
                plan.longest_round_trip_s(host),
            )
            for index, host in enumerate(plan.hosts)
        ]
        self._paths = {
            (self._index[source], self._index[destination]): Path(
                self._agenda,
                self._downlinks[self._index[destination]].enter,
                shape,
                plan.round_trip_s(source, destination),
                seed=f"{source}/{destination}",
            )
            for (source, destination), shape in plan.paths.items()
        }

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
        if destination is None or destination == source or source in self._cut_off:
            return
        self._uplinks[source].enter(now_s, read_packet(frame), self._paths[source, destination].enter)

    def _arrive(self, destination: int, now_s: float, packet: Packet) -> None:
        if destination not in self._cut_off:
            self._deliver(destination, packet.frame)

    def set_link(self, host: str, *, is_up: bool) -> None:
        """Cut a host off (its traffic is lost in both directions) or join it again."""
        (self._cut_off.discard if is_up else self._cut_off.add)(self._index[host])

    def set_rates(self, now_s: float, host: str, shape: HostShape) -> None:
        """Set a host's access link."""
        self._plan = self._plan.with_rates(host, shape.up_bits_per_s, shape.down_bits_per_s)
        index = self._index[host]
        self._uplinks[index].set_rate(shape.up_bits_per_s)
        self._downlinks[index].set_rate(now_s, shape.down_bits_per_s, self._plan.longest_round_trip_s(host))

    def set_path(self, now_s: float, source: str, destination: str, shape: PathShape) -> None:
        """Set what packets from `source` to `destination` meet."""
        self._plan = self._plan.with_path(source, destination, shape)
        rtt_s = self._plan.round_trip_s(source, destination)
        self._paths[self._index[source], self._index[destination]].set_shape(now_s, shape, rtt_s)
        for host in (source, destination):
            self.set_rates(now_s, host, self._plan.host_shapes[host])  # the length of a queue follows the round trip
