"""Hosts joined by the switch, in virtual time: who gets what, when, and what an outage does."""

import math

import pytest
from support.ethernet_frames import segments_of, tcp_frame, udp_frame

from tahq.comm.network_config import HostConfig, NetworkConfig
from tahq_netem.network.description import HostShape, PathShape, plan_network, uniform
from tahq_netem.wire.lines import Switch

RATE = 8e6  # one byte a microsecond


class Bench:
    """A switch and what it delivers; the switch's clock is `now_s`."""

    def __init__(self, config: NetworkConfig):
        plan = plan_network(config)
        self.addresses = [f"10.77.0.{index + 1}" for index in range(len(plan.hosts))]
        self.delivered: list[tuple[float, int, bytes]] = []
        self.now_s = 0.0
        self.switch = Switch(plan, self.addresses, self._deliver)

    def _deliver(self, host: int, frame: bytes):
        self.delivered.append((self.now_s, host, frame))

    def run(self, until_s: float = math.inf) -> list[tuple[float, int, bytes]]:
        while (due_s := self.switch.next_due_s) is not None and due_s <= until_s:
            self.now_s = due_s
            self.switch.run_until(due_s)
        self.now_s = max(self.now_s, until_s if until_s < math.inf else 0.0)
        return self.delivered

    def send(self, source: int, destination: int, payload_bytes: int = 4, at_s: float = 0.0):
        self.run(at_s)
        frame = udp_frame(bytes(payload_bytes), source=self.addresses[source], destination=self.addresses[destination])
        self.switch.send(at_s, source, frame)

    def arrivals(self) -> list[tuple[float, int]]:
        return [(now_s, host) for now_s, host, _ in self.run()]


@pytest.mark.parametrize(
    ("rate", "num_segments"),
    [(None, [18]), (1e9, [8, 8, 2])],  # after idle, at most 100 µs at a time: 8 full packets at 1 Gbit/s
)
def test_receiver_gets_the_frame_as_it_was_sent(rate, num_segments):
    bench = Bench(uniform(2, rate=rate, delay=0.01))
    frame = tcp_frame(bytes(range(256)) * 100, 1448)
    bench.switch.send(0.0, 0, frame)
    parts = [part for _, _, part in bench.run()]
    assert [len(segments_of(part)) for part in parts] == num_segments
    assert [segment for part in parts for segment in segments_of(part)] == segments_of(frame)


def test_up_and_down_count_once_for_a_single_packet():
    bench = Bench(NetworkConfig(hosts={"home": HostConfig(up=RATE / 10, down=RATE), "centre": HostConfig(up=RATE)}))
    bench.send(0, 1, payload_bytes=1472)
    bench.send(1, 0, payload_bytes=1472)
    assert bench.arrivals() == [(pytest.approx(1514e-6), 0), (pytest.approx(15140e-6), 1)]


def test_two_senders_share_the_receivers_downlink():
    bench = Bench(uniform(3, rate=RATE))
    for index in range(100):
        for source in (0, 1):
            bench.send(source, 2, payload_bytes=1472, at_s=index * 1514e-6)
    times_s = [now_s for now_s, _ in bench.arrivals()]
    assert len(times_s) == 200
    assert times_s[-1] == pytest.approx(200 * 1514e-6, rel=0.03)


def test_host_that_is_cut_off_neither_sends_nor_receives():
    bench = Bench(uniform(3, delay=0.01))
    bench.send(0, 1)  # under way when the link goes
    bench.run(0.005)
    bench.switch.set_link(0.0, "host1", False)
    bench.send(0, 1, at_s=0.006)
    bench.send(1, 2, at_s=0.007)
    bench.send(0, 2, at_s=0.008)
    assert bench.arrivals() == [(pytest.approx(0.018), 2)]
    bench.switch.set_link(0.0, "host1", True)
    bench.send(0, 1, at_s=1.0)
    assert bench.arrivals()[-1] == (pytest.approx(1.01), 1)


def test_rates_and_paths_change_at_run_time():
    bench = Bench(uniform(2, rate=RATE))
    bench.switch.set_rates(0.0, "host0", HostShape(RATE / 2, RATE))
    bench.send(0, 1, payload_bytes=1472)
    assert bench.arrivals()[-1][0] == pytest.approx(3028e-6)
    bench.switch.set_path(1.0, "host0", "host1", PathShape(delay_s=0.2))
    bench.send(0, 1, payload_bytes=1472, at_s=1.0)
    assert bench.arrivals()[-1][0] == pytest.approx(1.2 + 3028e-6)


def test_queue_grows_with_the_round_trip():
    config = uniform(2, down=RATE)
    bench = Bench(config)
    bench.switch.set_path(0.0, "host0", "host1", PathShape(delay_s=1.0))
    for _ in range(1000):
        bench.send(0, 1, payload_bytes=1472)
    # A round trip of 1 s at one byte per microsecond is 1 MB: 660 full frames.
    assert len(bench.run()) == pytest.approx(662, abs=2)


def test_frames_to_other_addresses_are_dropped():
    bench = Bench(uniform(2))
    bench.switch.send(0.0, 0, udp_frame(b"x", destination="224.0.0.1"))
    bench.switch.send(0.0, 0, udp_frame(b"x", destination="10.77.0.1"))  # to itself: never leaves a real host
    bench.switch.send(0.0, 0, b"\0" * 30)
    assert bench.arrivals() == []
