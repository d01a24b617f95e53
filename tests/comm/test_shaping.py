"""The shaping cores on virtual times; test_shaped_sockets.py measures the real thing."""

import pytest

from tahq.comm.inproc_transport import InprocPair
from tahq.comm.session import SessionLimits
from tahq.comm.shaping import DelayLine, Downlink, Shaping, Uplink
from tahq.comm.virtual_clock import VirtualClock

MEGABIT = 1e6


def releases(line: DelayLine[str]) -> list[tuple[str, float]]:
    """Every item with the time at which it is let go."""
    out = []
    while (due_s := line.next_s()) is not None:
        out += [(item, pytest.approx(due_s)) for item in line.take_due(due_s)]
    return out


def test_unshaped_uplink_is_always_free_and_holds_nothing():
    uplink = Uplink(Shaping())
    for item in "abc":
        assert uplink.is_free(5.0)
        uplink.send(item, 10**9, ready_s=5.0)
    assert list(uplink.take_due(5.0)) == ["a", "b", "c"]


def test_message_is_serialised_and_then_delayed():
    uplink = Uplink(Shaping(rate_bits_per_s=8 * MEGABIT, delay_s=0.25))
    uplink.send("a", 500_000, ready_s=10.0)  # 0.5 s on the wire
    assert releases(uplink) == [("a", 10.75)]
    assert not uplink.is_free(10.49)
    assert uplink.is_free(10.5)


def test_backlog_is_paced_exactly_however_late_the_thread_wakes():
    uplink = Uplink(Shaping(rate_bits_per_s=8 * MEGABIT))
    for item in "abc":  # all were ready at 10.0; the thread enters them late
        uplink.send(item, 100_000, ready_s=10.0)
    assert releases(uplink) == [("a", 10.1), ("b", 10.2), ("c", 10.3)]


def test_idle_time_is_not_saved_up():
    uplink = Uplink(Shaping(rate_bits_per_s=8 * MEGABIT))
    uplink.send("a", 100_000, ready_s=10.0)
    uplink.send("b", 100_000, ready_s=20.0)
    uplink.send("c", 100_000, ready_s=20.0)
    assert releases(uplink) == [("a", 10.1), ("b", 20.1), ("c", 20.2)]


def test_delay_alone_does_not_pace():
    uplink = Uplink(Shaping(delay_s=0.25))
    for item in "ab":
        uplink.send(item, 10**9, ready_s=1.0)
        assert uplink.is_free(1.0)
    assert releases(uplink) == [("a", 1.25), ("b", 1.25)]


def test_downlink_adds_nothing_to_one_sender_of_the_same_rate():
    downlink = Downlink(Shaping(rate_bits_per_s=8 * MEGABIT, delay_s=99.0))
    for i in range(3):
        downlink.receive("abc"[i], 100_000, arrival_s=10.0 + 0.1 * i)
    assert releases(downlink) == [("a", 10.0), ("b", 10.1), ("c", 10.2)]


def test_two_senders_share_a_downlink():
    downlink = Downlink(Shaping(rate_bits_per_s=8 * MEGABIT))
    for i in range(3):
        for sender in "xy":
            downlink.receive(f"{sender}{i}", 100_000, arrival_s=10.0 + 0.1 * i)
    assert [at for _, at in releases(downlink)] == [pytest.approx(10.0 + 0.1 * i) for i in range(6)]


def test_downlink_forgets_a_pause():
    downlink = Downlink(Shaping(rate_bits_per_s=8 * MEGABIT))
    downlink.receive("a", 100_000, arrival_s=10.0)
    downlink.receive("b", 100_000, arrival_s=90.0)
    assert releases(downlink) == [("a", 10.0), ("b", 90.0)]


def test_new_shaping_holds_for_what_enters_from_then_on():
    uplink = Uplink(Shaping(delay_s=1.0))
    uplink.send("a", 1, ready_s=0.0)
    uplink.reshape(Shaping(delay_s=3.0))
    uplink.send("b", 1, ready_s=0.0)
    assert releases(uplink) == [("a", 1.0), ("b", 3.0)]


@pytest.mark.parametrize("rate_mbit", [20, 100, 300])
def test_goodput_of_a_link_is_what_is_set(rate_mbit, make_frame):
    rate = rate_mbit * MEGABIT
    clock = VirtualClock()
    shaping = Shaping(rate, delay_s=0.02)
    pair = InprocPair(clock, run_id=77, shaping=shaping)
    frames = [make_frame(1_000_000, micro_batch=i) for i in range(5)]
    for frame in frames:
        pair.upper.expect(frame.id, 1_000_000)
        pair.lower.send(frame)
    pair.upper.recv(10.0)
    assert clock() == pytest.approx(8e6 / rate + 0.02, rel=0.01)  # 4 headers of 100 bytes in 1 MB: 0.04 %
    started_s = clock()
    for _ in frames[1:]:
        pair.upper.recv(10.0)
    assert 4 * 8e6 / (clock() - started_s) == pytest.approx(rate, rel=0.01)


def test_goodput_in_the_statistics_is_what_is_set(make_frame):
    clock = VirtualClock()
    pair = InprocPair(clock, run_id=77, shaping=Shaping(100 * MEGABIT, delay_s=0.02))
    for i in range(5):
        pair.lower.send(make_frame(1_000_000, micro_batch=i))
    clock.advance(60.0)
    (stats,) = pair.lower.take_stats()
    # 40 Mbit at 100 Mbit/s, and one round trip until the last acknowledgement.
    assert stats.busy_s == pytest.approx(0.4 + 0.04, rel=0.01)


def test_small_frame_at_idle_takes_the_delay(make_frame):
    clock = VirtualClock()
    pair = InprocPair(clock, run_id=77, shaping=Shaping(20 * MEGABIT, delay_s=0.05))
    frame = make_frame(4096)
    pair.upper.expect(frame.id, 4096)
    clock.advance(1.0)
    pair.lower.send(frame)
    pair.upper.recv(1.0)
    assert clock() == pytest.approx(1.05 + 8 * 4196 / 20e6, abs=1e-9)


def test_heartbeats_pass_between_the_pieces_of_what_is_queued(make_frame):
    # 10 MB at 1 Mbit/s are 80 s of queue; the timeout of 3 s must not notice.
    limits = SessionLimits(peer_timeout_s=3.0, heartbeat_s=0.6, piece_nbytes=65536)
    clock = VirtualClock()
    pair = InprocPair(clock, run_id=77, shaping=Shaping(1 * MEGABIT, 0.1, 65536), limits=limits)
    frame = make_frame(10_000_000)
    pair.upper.expect(frame.id, 10_000_000)
    pair.lower.send(frame)
    assert pair.upper.recv(100.0).payload.numel() == 10_000_000
    assert clock() == pytest.approx(80.1, rel=0.01)
