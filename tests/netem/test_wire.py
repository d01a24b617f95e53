"""Frames counted and cut; lines, queues, paths and the switch of the wire, in virtual time."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ethernet_frames import FIN, PSH, segments_of, tcp_frame, udp_frame

from tahq.comm.network_config import HostConfig, NetworkConfig
from tahq.comm.network_model import FULL_FRAME_NBYTES, queue_limit_nbytes
from tahq_netem.network.description import HostShape, PathShape, plan_network, uniform
from tahq_netem.wire.lines import Agenda, Gaps, Path, ShapedUplink, Switch, Transmitter
from tahq_netem.wire.packet import Packet, cut, destination_address, read_packet, runs

RATE = 8e6  # one byte per microsecond
SECONDS_PER_FRAME = 1514e-6


def full_frame(name: bytes = b"") -> Packet:
    return Packet(name, FULL_FRAME_NBYTES)


class Arrivals:
    """What a line has forwarded, and when."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.packets: list[Packet] = []

    def __call__(self, now_s: float, packet: Packet) -> None:
        self.times_s.append(now_s)
        self.packets.append(packet)

    @property
    def names(self) -> list[bytes]:
        return [packet.frame for packet in self.packets]

    def numbers(self) -> list[int]:
        """Of datagrams that `numbered` made."""
        return [int.from_bytes(name[-4:], "big") for name in self.names]


def numbered(index: int) -> bytes:
    return udp_frame(index.to_bytes(4, "big"))


@pytest.fixture
def agenda():
    return Agenda()


@pytest.fixture
def arrivals():
    return Arrivals()


# -- uplinks --------------------------------------------------------------------------------------


def test_uplink_delivers_when_the_last_bit_has_left(agenda, arrivals):
    uplink = ShapedUplink(agenda, RATE)
    for _ in range(2):
        uplink.enter(10.0, full_frame(), arrivals)
    uplink.enter(20.0, Packet(b"", 66), arrivals)
    agenda.run_until(math.inf)
    assert arrivals.times_s == pytest.approx([10 + SECONDS_PER_FRAME, 10 + 2 * SECONDS_PER_FRAME, 20 + 66e-6])
    ShapedUplink(agenda, None).enter(30.0, full_frame(), arrivals)
    assert arrivals.times_s[-1] == 30.0


def test_uplink_hands_frames_over_in_longer_runs_the_longer_a_flow_lasts(agenda, arrivals):
    uplink, frame = ShapedUplink(agenda, 1e9), read_packet(tcp_frame(bytes(40 * 1448), 1448))
    duration_s = 8 * 40 * FULL_FRAME_NBYTES / 1e9
    num_runs = []
    for index in range(30):
        before = len(arrivals.times_s)
        uplink.enter(index * duration_s, frame, arrivals)
        agenda.run_until(math.inf)
        num_runs.append(len(arrivals.times_s) - before)
    # 100 µs are 8 packets of 40, then 250 µs are 20; after 10 ms, 21 frames, they stay whole.
    assert num_runs == [5, *[2] * 20, *[1] * 9]
    assert arrivals.times_s[-1] == pytest.approx(30 * duration_s)


# -- lines behind a queue -------------------------------------------------------------------------


@pytest.fixture
def line(agenda, arrivals):
    return Transmitter(agenda, arrivals, RATE, 0.0)


def test_line_spreads_a_burst_at_its_rate(agenda, arrivals, line):
    for index in range(100):
        line.enter(5.0, full_frame(bytes([index])))
    agenda.run_until(math.inf)
    assert arrivals.names == [bytes([index]) for index in range(100)]
    # The first has been serialised before; an idle line saves up a burst of two frames.
    expected = [max(0, index - 2) * SECONDS_PER_FRAME + 5 for index in range(100)]
    assert arrivals.times_s == pytest.approx(expected, abs=1.01 * SECONDS_PER_FRAME)
    gaps_s = [later - earlier for earlier, later in zip(arrivals.times_s[4:], arrivals.times_s[5:], strict=False)]
    assert gaps_s == pytest.approx([SECONDS_PER_FRAME] * 95)


def test_queue_drops_at_the_tail(agenda, arrivals, line):
    limit = queue_limit_nbytes(RATE, 0.0)
    for index in range(limit // FULL_FRAME_NBYTES + 50):
        line.enter(5.0, full_frame(index.to_bytes(4, "big")))
    agenda.run_until(math.inf)
    num_kept = len(arrivals.names)
    assert arrivals.numbers() == list(range(num_kept))
    assert limit <= num_kept * FULL_FRAME_NBYTES <= limit + 3 * FULL_FRAME_NBYTES


def test_new_rate_holds_for_waiting_packets(agenda, arrivals, line):
    for _ in range(102):
        line.enter(5.0, full_frame())
    agenda.run_until(5.0)
    num_before = len(arrivals.times_s)
    line.set_rate(5.0, RATE / 10, 0.0)
    agenda.run_until(6.0)
    assert len(arrivals.times_s) - num_before == pytest.approx(1.0 / (10 * SECONDS_PER_FRAME), abs=2)
    line.set_rate(6.0, None, 0.0)
    line.enter(6.0, full_frame(b"last"))
    agenda.run_until(6.0)
    assert len(arrivals.times_s) == 103
    assert arrivals.names[-1] == b"last"


# -- random choices -------------------------------------------------------------------------------


@pytest.mark.parametrize("probability", [0.001, 0.01, 0.05, 0.5])
def test_gaps_choose_the_given_share(probability):
    gaps = Gaps(Random(f"gaps {probability}"), probability)
    num_packets = 200_000
    num_chosen = sum(len(gaps.chosen(20)) for _ in range(num_packets // 20))
    deviation = math.sqrt(num_packets * probability * (1 - probability))
    assert abs(num_chosen - num_packets * probability) < 3.3 * deviation  # 99.9 %


# -- paths ----------------------------------------------------------------------------------------


def walk(shape: PathShape, frames, seed: str = "walk") -> Arrivals:
    """What comes out of a path; `frames` are (time, frame)."""
    agenda, arrivals = Agenda(), Arrivals()
    path = Path(agenda, arrivals, shape, 0.1, seed=seed)
    for now_s, frame in frames:
        agenda.run_until(now_s)
        path.enter(now_s, read_packet(frame))
    agenda.run_until(math.inf)
    return arrivals


def every(seconds: float, count: int):
    """Numbered datagrams, so many seconds apart."""
    return [(index * seconds, numbered(index)) for index in range(count)]


def test_jitter_stays_in_its_range():
    # Further apart than the jitter, so that each shows its own.
    arrivals = walk(PathShape(delay_s=0.02, jitter_s=0.005), every(0.02, 500))
    delays_s = [now_s - index * 0.02 for index, now_s in enumerate(arrivals.times_s)]
    assert 0.015 <= min(delays_s) < max(delays_s) - 0.009 <= 0.025 - 0.009
    assert sum(delays_s) / 500 == pytest.approx(0.02, abs=3 * 0.005 / math.sqrt(3 * 500))


def test_jitter_keeps_the_order_and_never_makes_a_packet_early():
    assert walk(PathShape(delay_s=0.02, jitter_s=0.02), every(1e-4, 500)).numbers() == list(range(500))
    early = walk(PathShape(delay_s=0.001, jitter_s=0.01), every(1.0, 200))
    assert all(now_s >= index for index, now_s in enumerate(early.times_s))


def test_segments_are_lost_one_by_one_not_by_the_frame():
    payload = bytes(range(250)) * 160
    frames = [tcp_frame(payload, 1000, sequence=index * 40_000) for index in range(200)]
    arrivals = walk(PathShape(loss=0.02), [(0.0, frame) for frame in frames])
    sent = [segment for frame in frames for segment in segments_of(frame)]
    received = [segment for frame in arrivals.names for segment in segments_of(frame)]
    missing = {segment.sequence for segment in sent} - {segment.sequence for segment in received}
    assert 120 < len(missing) < 200  # of 8,000: 160 ± 3.3 deviations of 12.5
    assert received == [segment for segment in sent if segment.sequence not in missing]


@pytest.mark.parametrize("shape", [PathShape(loss=0.1), PathShape(delay_s=0.1, jitter_s=0.05, reorder=0.2)])
def test_same_seed_means_same_fate(shape):
    one, again, other = (walk(shape, every(1e-3, 300), seed) for seed in ("one", "one", "other"))
    assert (one.times_s, one.names) == (again.times_s, again.names)
    assert (one.times_s, one.names) != (other.times_s, other.names)


def test_reordered_share_skips_the_delay():
    num_packets = 2000
    arrivals = walk(PathShape(delay_s=0.05, reorder=0.1), every(1e-3, num_packets))
    delays_s = {
        number: now_s - number * 1e-3 for now_s, number in zip(arrivals.times_s, arrivals.numbers(), strict=True)
    }
    overtakers = {number for number, delay_s in delays_s.items() if delay_s < 0.01}
    assert abs(len(overtakers) - 200) < 3.3 * math.sqrt(num_packets * 0.1 * 0.9)
    assert all(delays_s[number] == pytest.approx(0.05) for number in delays_s.keys() - overtakers)
    held_back = [number for number in arrivals.numbers() if number not in overtakers]
    assert held_back == sorted(held_back)


def test_cap_of_the_pair_holds_packets_of_mtu_size():
    frame = tcp_frame(bytes(43 * 1448), 1448)
    arrivals = walk(PathShape(rate_bits_per_s=RATE, delay_s=0.01), [(0.0, frame)])
    assert [packet.num_segments for packet in arrivals.packets] == [1] * 43
    assert [segment for part in arrivals.names for segment in segments_of(part)] == segments_of(frame)
    assert arrivals.times_s[-1] == pytest.approx(0.01 + 43 * 1514e-6, rel=0.07)


# -- frames ---------------------------------------------------------------------------------------

HEADERS = 14 + 20 + 32


@pytest.mark.parametrize(
    ("frame", "num_segments", "wire_bytes"),
    [
        (tcp_frame(bytes(3 * 1448 + 10), 1448), 4, 3 * 1514 + HEADERS + 10),
        (tcp_frame(b"", 1448), 1, HEADERS),
        (tcp_frame(bytes(1448), 1448), 1, 1514),
        (udp_frame(bytes(1472)), 1, 1514),
    ],
)
def test_every_segment_counts_with_its_headers(frame, num_segments, wire_bytes):
    packet = read_packet(frame)
    assert (packet.num_segments, packet.wire_bytes) == (num_segments, wire_bytes)


def test_destination_is_read_from_ipv4_only():
    frame = udp_frame(b"x", destination="10.77.0.9")
    assert destination_address(frame) == bytes([10, 77, 0, 9])
    assert destination_address(frame[:22] + b"\x86\xdd" + frame[24:]) == b""
    assert destination_address(frame[:40]) == b""


@given(
    payload_bytes=st.integers(1, 9000),
    segment_bytes=st.integers(536, 1448),
    header=st.fixed_dictionaries(
        {
            "sequence": st.integers(0, 2**32 - 1),
            "identification": st.integers(0, 2**16 - 1),
            "flags": st.sampled_from([16, 16 | PSH, 16 | FIN, 16 | PSH | FIN]),
            "options": st.sampled_from([b"", b"\x01\x01\x08\x0a" + bytes(range(8))]),
        }
    ),
    data=st.data(),
)
def test_any_run_holds_exactly_its_segments(payload_bytes, segment_bytes, header, data):
    payload = bytes(index * 31 % 251 for index in range(payload_bytes))
    frame = tcp_frame(payload, segment_bytes, **header)
    whole = segments_of(frame)
    packet = read_packet(frame)
    assert packet.num_segments == len(whole)
    first = data.draw(st.integers(0, len(whole) - 1))
    count = data.draw(st.integers(1, len(whole) - first))
    part = cut(packet, first, count)
    assert segments_of(part.frame) == whole[first : first + count]
    header_bytes = 14 + 40 + len(header["options"])
    assert part.wire_bytes == sum(header_bytes + len(segment.payload) for segment in whole[first : first + count])
    # What was cut can be cut again.
    assert [s for run in runs(part, 2) for s in segments_of(run.frame)] == whole[first : first + count]


# -- the switch -----------------------------------------------------------------------------------


class Bench:
    """A switch and what it delivers; the switch's clock is `now_s`."""

    def __init__(self, config: NetworkConfig):
        self.plan = plan_network(config)
        self.addresses = [f"10.77.0.{index + 1}" for index in range(len(self.plan.hosts))]
        self.delivered: list[tuple[float, int, bytes]] = []
        self.now_s = 0.0
        self.switch = Switch(self.plan, self.addresses, self._deliver)

    def change(self, now_s: float, plan):
        self.plan = plan
        self.switch.set_plan(now_s, plan)

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
    bench.change(0.0, bench.plan.with_rates("host0", HostShape(RATE / 2, RATE)))
    bench.send(0, 1, payload_bytes=1472)
    assert bench.arrivals()[-1][0] == pytest.approx(3028e-6)
    bench.change(1.0, bench.plan.with_path("host0", "host1", PathShape(delay_s=0.2)))
    bench.send(0, 1, payload_bytes=1472, at_s=1.0)
    assert bench.arrivals()[-1][0] == pytest.approx(1.2 + 3028e-6)


def test_frames_to_other_addresses_are_dropped():
    bench = Bench(uniform(2))
    bench.switch.send(0.0, 0, udp_frame(b"x", destination="224.0.0.1"))
    bench.switch.send(0.0, 0, udp_frame(b"x", destination="10.77.0.1"))  # to itself: never leaves a real host
    bench.switch.send(0.0, 0, b"\0" * 30)
    assert bench.arrivals() == []
