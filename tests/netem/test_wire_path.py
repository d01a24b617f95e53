"""What a path does to packets, in virtual time: loss, delay, jitter, reordering, caps; each reproducibly."""

import math

import pytest
from support.ethernet_frames import segments_of, tcp_frame, udp_frame

from tahq_netem.network.description import PathShape
from tahq_netem.wire.lines import Agenda, Path
from tahq_netem.wire.packet import Packet, read_packet


class Walk:
    """A path, what comes out of it, and the agenda that drives it."""

    def __init__(self, shape: PathShape, seed: str = "walk"):
        self.agenda = Agenda()
        self.arrivals: list[tuple[float, Packet]] = []
        self.path = Path(
            self.agenda, lambda now_s, packet: self.arrivals.append((now_s, packet)), shape, 0.1, seed=seed
        )

    def send(self, now_s: float, frame: bytes):
        self.agenda.run_until(now_s)
        self.path.enter(now_s, read_packet(frame))

    def finish(self):
        self.agenda.run_until(math.inf)
        return self.arrivals

    def numbers(self):
        return [int.from_bytes(packet.frame[-4:], "big") for _, packet in self.finish()]


def numbered(index: int) -> bytes:
    return udp_frame(index.to_bytes(4, "big"))


def test_delay_is_added_and_order_kept():
    walk = Walk(PathShape(delay_s=0.05))
    for index in range(10):
        walk.send(index * 1e-3, numbered(index))
    assert [now_s for now_s, _ in walk.finish()] == pytest.approx([0.05 + index * 1e-3 for index in range(10)])
    assert walk.numbers() == list(range(10))
    plain = Walk(PathShape())
    plain.send(1.0, numbered(0))
    assert [now_s for now_s, _ in plain.arrivals] == [1.0]


def test_jitter_stays_in_its_range():
    walk = Walk(PathShape(delay_s=0.02, jitter_s=0.005))
    for index in range(500):
        walk.send(index * 0.02, numbered(index))  # further apart than the jitter, so that each shows its own
    delays_s = [now_s - index * 0.02 for index, (now_s, _) in enumerate(walk.finish())]
    assert 0.015 <= min(delays_s) < max(delays_s) - 0.009 <= 0.025 - 0.009
    assert sum(delays_s) / 500 == pytest.approx(0.02, abs=3 * 0.005 / math.sqrt(3 * 500))


def test_jitter_keeps_the_order_and_never_makes_a_packet_early():
    dense, early = Walk(PathShape(delay_s=0.02, jitter_s=0.02)), Walk(PathShape(delay_s=0.001, jitter_s=0.01))
    for index in range(500):
        dense.send(index * 1e-4, numbered(index))
        early.send(float(index), numbered(index))
    assert dense.numbers() == list(range(500))
    assert all(now_s >= index for index, (now_s, _) in enumerate(early.finish()))


def test_segments_are_lost_one_by_one_not_by_the_frame():
    walk = Walk(PathShape(loss=0.02))
    payload = bytes(range(250)) * 160
    sent = []
    for index in range(200):
        frame = tcp_frame(payload, 1000, sequence=index * 40_000)
        sent += segments_of(frame)
        walk.send(0.0, frame)
    received = [segment for _, packet in walk.finish() for segment in segments_of(packet.frame)]
    missing = {segment.sequence for segment in sent} - {segment.sequence for segment in received}
    assert 120 < len(missing) < 200  # of 8,000: 160 ± 3.3 deviations of 12.5
    assert received == [segment for segment in sent if segment.sequence not in missing]


@pytest.mark.parametrize("shape", [PathShape(loss=0.1), PathShape(delay_s=0.1, jitter_s=0.05, reorder=0.2)])
def test_same_seed_means_same_fate(shape: PathShape):
    def outcome(seed: str) -> list[tuple[float, bytes]]:
        walk = Walk(shape, seed)
        for index in range(300):
            walk.send(index * 1e-3, numbered(index))
        return [(now_s, packet.frame) for now_s, packet in walk.finish()]

    assert outcome("one") == outcome("one")
    assert outcome("one") != outcome("other")


def test_reordered_share_skips_the_delay():
    walk = Walk(PathShape(delay_s=0.05, reorder=0.1))
    num_packets = 2000
    for index in range(num_packets):
        walk.send(index * 1e-3, numbered(index))
    delays_s = {number: now_s - number * 1e-3 for (now_s, _), number in zip(walk.finish(), walk.numbers(), strict=True)}
    overtakers = [number for number, delay_s in delays_s.items() if delay_s < 0.01]
    assert abs(len(overtakers) - 200) < 3.3 * math.sqrt(num_packets * 0.1 * 0.9)
    assert all(delays_s[number] == pytest.approx(0.05) for number in delays_s.keys() - set(overtakers))
    held_back = [number for number in walk.numbers() if number not in set(overtakers)]
    assert held_back == sorted(held_back)


def test_segments_of_one_frame_overtake_singly():
    walk = Walk(PathShape(delay_s=0.05, reorder=0.1))
    frame = tcp_frame(bytes(40_000), 1000)
    walk.send(0.0, frame)
    early = [segment for now_s, packet in walk.finish() if now_s == 0 for segment in segments_of(packet.frame)]
    late = [segment for now_s, packet in walk.finish() if now_s > 0 for segment in segments_of(packet.frame)]
    assert early
    assert sorted([*early, *late], key=lambda segment: segment.sequence) == segments_of(frame)


def test_cap_of_the_pair_holds_packets_of_mtu_size():
    rate = 8e6  # one byte a microsecond: longer frames are cut
    walk = Walk(PathShape(rate_bits_per_s=rate, delay_s=0.01))
    frame = tcp_frame(bytes(43 * 1448), 1448)
    walk.send(0.0, frame)
    arrivals = walk.finish()
    assert [packet.num_segments for _, packet in arrivals] == [1] * 43
    assert [segment for _, packet in arrivals for segment in segments_of(packet.frame)] == segments_of(frame)
    assert arrivals[-1][0] == pytest.approx(0.01 + 43 * 1514e-6, rel=0.07)


def test_new_shape_holds_for_later_packets_and_lets_none_overtake():
    walk = Walk(PathShape(delay_s=0.1))
    walk.send(0.0, numbered(0))
    walk.path.set_shape(0.0, PathShape(delay_s=0.3), 0.6)
    walk.send(0.01, numbered(1))
    walk.path.set_shape(0.02, PathShape(loss=1.0), 0.0)
    walk.send(0.02, numbered(2))
    walk.path.set_shape(0.03, PathShape(), 0.0)
    walk.send(0.03, numbered(3))
    walk.send(0.5, numbered(4))
    assert [now_s for now_s, _ in walk.finish()] == pytest.approx([0.1, 0.31, 0.31, 0.5])
    assert walk.numbers() == [0, 1, 3, 4]
