"""Lines and queues of the wire, in virtual time."""

import math
from random import Random

import pytest
from support.ethernet_frames import tcp_frame

from tahq.comm.network_model import FULL_FRAME_NBYTES, queue_limit_nbytes
from tahq_netem.wire.lines import (
    LONGEST_RUN_S,
    Agenda,
    Gaps,
    Transmitter,
    Uplink,
    segments_within,
)
from tahq_netem.wire.packet import Packet, read_packet

RATE = 8e6  # one byte a microsecond
SECONDS_PER_FRAME = 1514e-6


def full_frame(name: bytes = b"") -> Packet:
    return Packet(name, FULL_FRAME_NBYTES)


class Arrivals:
    """What a line has forwarded, and when."""

    def __init__(self):
        self.times_s: list[float] = []
        self.names: list[bytes] = []

    def __call__(self, now_s: float, packet: Packet):
        self.times_s.append(now_s)
        self.names.append(packet.frame)


def make_line(rate: float | None = RATE, rtt_s: float = 0.0) -> tuple[Agenda, Arrivals, Transmitter]:
    agenda, arrivals = Agenda(), Arrivals()
    return agenda, arrivals, Transmitter(agenda, arrivals, rate, rtt_s)


def test_agenda_runs_in_order_of_time_then_of_entry():
    agenda, arrivals = Agenda(), Arrivals()
    for due_s, name in ((2.0, b"c"), (1.0, b"a"), (2.0, b"d"), (1.5, b"b"), (3.0, b"later")):
        agenda.put(due_s, arrivals, full_frame(name))
    agenda.run_until(2.0)
    assert (arrivals.names, arrivals.times_s) == ([b"a", b"b", b"c", b"d"], [1.0, 1.5, 2.0, 2.0])
    assert agenda.next_due_s == 3.0


def test_uplink_delivers_when_the_last_bit_has_left():
    agenda, arrivals = Agenda(), Arrivals()
    uplink = Uplink(agenda, RATE)
    for _ in range(2):
        uplink.enter(10.0, full_frame(), arrivals)
    uplink.enter(20.0, Packet(b"", 66), arrivals)
    agenda.run_until(math.inf)
    assert arrivals.times_s == pytest.approx([10 + SECONDS_PER_FRAME, 10 + 2 * SECONDS_PER_FRAME, 20 + 66e-6])
    Uplink(agenda, None).enter(30.0, full_frame(), arrivals)
    assert arrivals.times_s[-1] == 30.0


def test_uplink_hands_a_flows_frames_over_in_longer_runs_the_longer_it_lasts():
    agenda, arrivals = Agenda(), Arrivals()
    uplink, frame = Uplink(agenda, 1e9), read_packet(tcp_frame(bytes(40 * 1448), 1448))
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


def test_line_adds_nothing_to_packets_at_its_rate():
    agenda, arrivals, line = make_line()
    times_s = [5 + index * SECONDS_PER_FRAME for index in range(1000)]
    for now_s in times_s:
        agenda.run_until(now_s)
        line.enter(now_s, full_frame())
    agenda.run_until(math.inf)
    assert arrivals.times_s == pytest.approx(times_s, abs=1e-9)


def test_line_spreads_a_burst_at_its_rate():
    agenda, arrivals, line = make_line()
    for index in range(100):
        line.enter(5.0, full_frame(bytes([index])))
    agenda.run_until(math.inf)
    assert arrivals.names == [bytes([index]) for index in range(100)]
    # The first has been serialised before; an idle line saves up a burst of two frames.
    expected = [max(0, index - 2) * SECONDS_PER_FRAME + 5 for index in range(100)]
    assert arrivals.times_s == pytest.approx(expected, abs=1.01 * SECONDS_PER_FRAME)
    gaps_s = [later - earlier for earlier, later in zip(arrivals.times_s[4:], arrivals.times_s[5:], strict=False)]
    assert gaps_s == pytest.approx([SECONDS_PER_FRAME] * 95)


def test_late_wake_up_loses_no_rate():
    agenda, arrivals, line = make_line()
    for _ in range(100):
        line.enter(5.0, full_frame())
    agenda.run_until(5.1)  # two thirds of the burst in one go
    line.enter(5.1, full_frame())
    agenda.run_until(math.inf)
    assert arrivals.times_s[-1] - 5 == pytest.approx(100 * SECONDS_PER_FRAME, rel=0.04)


def test_queue_drops_at_the_tail():
    agenda, arrivals, line = make_line()
    limit = queue_limit_nbytes(RATE, 0.0)
    num_sent = limit // FULL_FRAME_NBYTES + 50
    for index in range(num_sent):
        line.enter(5.0, full_frame(index.to_bytes(4, "big")))
    agenda.run_until(math.inf)
    num_kept = len(arrivals.names)
    assert arrivals.names == [index.to_bytes(4, "big") for index in range(num_kept)]
    assert limit <= num_kept * FULL_FRAME_NBYTES <= limit + 3 * FULL_FRAME_NBYTES


def test_new_rate_holds_for_waiting_packets():
    agenda, arrivals, line = make_line()
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


@pytest.mark.parametrize(("rate", "expected"), [(1e6, 1), (1e7, 1), (1e8, 8), (1e9, 82)])
def test_runs_last_a_millisecond_at_most(rate: float, expected: int):
    assert segments_within(LONGEST_RUN_S, rate) == expected


@pytest.mark.parametrize("probability", [0.001, 0.01, 0.05, 0.5])
def test_gaps_choose_the_share_asked_for(probability: float):
    gaps = Gaps(Random(f"gaps {probability}"), probability)
    num_packets = 200_000
    num_chosen = sum(len(gaps.chosen(20)) for _ in range(num_packets // 20))
    deviation = math.sqrt(num_packets * probability * (1 - probability))
    assert abs(num_chosen - num_packets * probability) < 3.3 * deviation  # 99.9 %


def test_gaps_do_not_depend_on_how_packets_come_together():
    one_by_one, together = Gaps(Random("same"), 0.05), Gaps(Random("same"), 0.05)
    singly = [index for index in range(4400) if one_by_one.chosen(1)]
    in_frames = [44 * frame + position for frame in range(100) for position in together.chosen(44)]
    assert singly == in_frames
    assert singly


def test_gaps_take_a_new_probability_at_once():
    gaps = Gaps(Random(0), 0.0)
    assert gaps.chosen(10**9) == []
    gaps.set_probability(1.0)
    assert gaps.chosen(5) == [0, 1, 2, 3, 4]
    gaps.set_probability(0.0)
    assert gaps.chosen(1000) == []
