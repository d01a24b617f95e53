"""What the bytes took on the wire, told from departures and arrivals."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.inproc_transport import InprocPair, VirtualClock

from tahq.comm.link.frame import Direction, Frame, LogicalId, Purpose
from tahq.comm.link.outbound import BusyClocks, LinkCounter
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.wire_time import RECENT_S, HeartbeatTimes, PieceTimes, WireClock, busy_seconds

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def name(micro_batch, direction=FORWARD, cut=0):
    return LogicalId(1, 0, 0, Purpose.TRAIN, micro_batch, cut, direction)


AHEAD_S = 1000.0
"""What the receiver's clock is ahead."""


def piece(micro_batch, taken_s, acked_s, nbytes=100_000, direction=FORWARD, back_s=0.0, **changes):
    """It came `back_s` before it was acknowledged."""
    arrived_s = acked_s - back_s + AHEAD_S
    return PieceTimes(name(micro_batch, direction), nbytes, taken_s, taken_s, acked_s, arrived_s, **changes)


def heartbeat(took_s, left_s=0.0, epoch=0):
    return HeartbeatTimes(epoch, left_s, left_s + took_s + AHEAD_S)


def test_pieces_back_to_back_take_the_time_between_their_arrivals():
    """Three pieces of 1 s each over a way of 10 s; all taken at once."""
    sent = [piece(0, 0.0, 11.0), piece(0, 0.0, 12.0), piece(0, 0.0, 13.0)]
    passages = WireClock().passages({0: sent})
    assert [(p.begin_s, p.end_s) for p in passages] == [pytest.approx(times) for times in ((0, 1), (1, 2), (2, 3))]
    assert busy_seconds(passages) == {(0, FORWARD): pytest.approx(3.0)}


def test_length_of_the_way_is_not_taken_for_work():
    """Two frames of two pieces, 0.1 s a piece, 20 s apart: something is unacknowledged nearly all the time."""
    sent = [piece(0, 0.0, 15.1), piece(0, 0.0, 15.2), piece(1, 20.0, 35.1), piece(1, 20.0, 35.2)]
    assert busy_seconds(WireClock().passages({0: sent}))[0, FORWARD] == pytest.approx(0.4)


def test_links_of_a_host_share_its_uplink_and_no_moment_is_counted_twice():
    """1 s a piece in turns on two links, with ways of 10 s and 4 s."""
    near = [piece(0, 50.0, 55.0, direction=BACKWARD), piece(0, 50.0, 57.0, direction=BACKWARD)]
    far = [piece(3, 50.0, 62.0), piece(3, 50.0, 64.0)]
    clock = WireClock()
    # What each way takes alone is known from the step before.
    clock.passages({0: [piece(9, 0.0, 5.0, direction=BACKWARD), piece(9, 0.0, 6.0, direction=BACKWARD)]})
    clock.passages({1: [piece(9, 0.0, 11.0), piece(9, 0.0, 12.0)]})
    busy = busy_seconds(clock.passages({0: near, 1: far}))
    assert busy == {(0, BACKWARD): pytest.approx(2.0), (1, FORWARD): pytest.approx(2.0)}


def test_clock_of_another_process_at_the_other_end_is_another_clock():
    """1 s a piece on a way of 2 s; the second process's clock is 500 s ahead of the first one's."""
    first = [piece(0, 0.0, 3.0), piece(0, 0.0, 4.0)]
    second = [p._replace(epoch=1, arrived_s=p.arrived_s + 500.0) for p in (piece(1, 10.0, 13.0), piece(1, 10.0, 14.0))]
    third = [p._replace(epoch=2, arrived_s=p.arrived_s - 900.0) for p in (piece(2, 20.0, 23.0), piece(2, 20.0, 24.0))]
    clock = WireClock()
    assert busy_seconds(clock.passages({0: [*first, *second]})) == {(0, FORWARD): pytest.approx(4.0)}
    beats = [heartbeat(2.0, 19.0, epoch=1)]  # of the clock before, and of no use
    assert busy_seconds(clock.passages({0: third}, {0: beats})) == {(0, FORWARD): pytest.approx(2.0)}


def test_piece_that_came_before_it_was_sent_again_says_nothing_of_the_way():
    """It left at 0 and again at 8, and came at 3; the way takes 2 s, a piece 1 s."""
    lost = piece(0, 8.0, 11.0, back_s=8.0, is_again=True)
    clock = WireClock()
    assert busy_seconds(clock.passages({0: [lost]}, {0: [heartbeat(2.0)]})) == {(0, FORWARD): 0.0}
    later = piece(1, 20.0, 23.0)
    assert busy_seconds(clock.passages({0: [later]}, {0: [heartbeat(2.0)]})) == {(0, FORWARD): pytest.approx(1.0)}


def test_what_was_seen_long_ago_is_forgotten_since_clocks_drift():
    clock = WireClock()
    clock.passages({0: [piece(0, 0.0, 3.0)]}, {0: [heartbeat(2.0)]})
    late_s = 2 * RECENT_S
    drifted = [
        p._replace(arrived_s=p.arrived_s + 1.0) for p in (piece(1, late_s, late_s + 3), piece(1, late_s, late_s + 4))
    ]
    assert busy_seconds(clock.passages({0: drifted}, {0: [heartbeat(2.0)]})) == {(0, FORWARD): pytest.approx(2.0)}


@given(st.lists(st.integers(0, 2**64 - 1), min_size=4, max_size=4), st.integers(0, 2**64 - 1))
def test_no_time_that_a_peer_can_say_makes_more_of_a_piece_than_until_it_was_acknowledged(ticks, beat):
    sent = [piece(n, float(n), n + 2.0)._replace(arrived_s=time / 1e6) for n, time in enumerate(ticks)]
    honest = piece(9, 1.0, 3.0)
    passages = WireClock().passages({0: sent, 1: [honest]}, {0: [HeartbeatTimes(0, 0.0, beat / 1e6)]})
    assert all(p.piece.taken_s <= p.begin_s <= p.end_s <= max(5.0, p.piece.acked_s) for p in passages)
    assert all(a.end_s <= b.begin_s for a, b in pairwise(passages))
    assert sum(busy_seconds(passages).values()) <= 5.0


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_session_tells_sending_from_queueing_and_the_wire_from_the_way(delay_s):
    """8 Mbit/s is 1 MB/s: of two frames of 100 kB the second waits for the first."""
    clock = VirtualClock()
    pair = InprocPair(clock, shaping=Shaping(8e6, delay_s, piece_nbytes=20_000))
    for micro_batch, direction in ((0, FORWARD), (1, BACKWARD)):
        id = name(micro_batch, direction)
        pair.upper.expect(id, 100_000)
        pair.lower.send(Frame(id, 0, torch.uint8, (100_000,), torch.zeros(100_000, dtype=torch.uint8)))
    for _ in range(2):
        pair.upper.recv()
    clock.advance(1.0)
    stats = {entry.direction: entry for entry in pair.lower.take_stats()}
    first, second = stats[FORWARD], stats[BACKWARD]
    slack_s = 0.008  # an acknowledgement may wait 5 ms for company, headers take 1 ms
    assert first.busy_s == pytest.approx(0.1 + 2 * delay_s, abs=slack_s)
    assert first.sending_s == pytest.approx(first.busy_s)  # it never waits for another
    assert second.busy_s == pytest.approx(0.2 + 2 * delay_s, abs=slack_s)
    assert second.sending_s == pytest.approx(0.1 + 2 * delay_s, abs=0.02 + slack_s)  # from its first piece, 20 ms each
    assert len(first.pieces) == len(second.pieces) == 5
    wire = busy_seconds(WireClock().passages({0: [*first.pieces, *second.pieces]}))
    assert wire[0, FORWARD] == pytest.approx(0.1, abs=slack_s)
    assert wire[0, BACKWARD] == pytest.approx(0.1, abs=slack_s)


def test_frames_of_one_piece_far_apart_take_what_a_heartbeat_does_not_explain():
    """0.5 s a piece over a way of 0.1 s, one every second: nothing ever follows closely."""
    sent = [piece(n, float(n), n + 0.6) for n in range(8)]
    assert busy_seconds(WireClock().passages({0: sent})) == {(0, FORWARD): pytest.approx(0.0)}
    assert busy_seconds(WireClock().passages({0: sent}, {0: [heartbeat(0.1)]})) == {(0, FORWARD): pytest.approx(4.0)}


@pytest.mark.parametrize("nbytes", [20_000, 200_000])
def test_heartbeats_of_a_session_tell_the_length_of_its_way(nbytes):
    """50 ms each way at 8 Mbit/s; a small frame's acknowledgement may wait 5 ms, a large one's does not."""
    clock = VirtualClock()
    pair = InprocPair(clock, shaping=Shaping(8e6, 0.05))
    clock.advance(3.0)
    for micro_batch in range(4):
        id = name(micro_batch)
        pair.upper.expect(id, nbytes)
        pair.lower.send(Frame(id, 0, torch.uint8, (nbytes,), torch.zeros(nbytes, dtype=torch.uint8)))
        pair.upper.recv()
        clock.advance(1.0)
    (stats,) = pair.lower.take_stats()
    assert {round(beat.arrived_s - beat.left_s, 3) for beat in stats.heartbeats} == {0.05}
    wire = busy_seconds(WireClock().passages({0: stats.pieces}, {0: stats.heartbeats}))
    assert wire[0, FORWARD] == pytest.approx(4 * nbytes / 1e6, rel=0.02)


def test_acknowledgements_behind_a_receiver_s_slow_uplink_are_not_counted():
    """8 Mbit/s there and 0.1 Mbit/s back, where each gradient of 10 kB takes 0.8 s; activations of 20 kB take 20 ms."""
    clock = VirtualClock()
    pair = InprocPair(clock, shaping=Shaping(8e6, 0.05), upper_shaping=Shaping(8e6, 0.05, cap_up_bits_per_s=1e5))
    clock.advance(3.0)
    for micro_batch in range(4):
        gradient, activation = (pair.upper, pair.lower, BACKWARD, 10_000), (pair.lower, pair.upper, FORWARD, 20_000)
        for sender, receiver, direction, nbytes in (gradient, activation):
            id = name(micro_batch, direction)
            receiver.expect(id, nbytes)
            sender.send(Frame(id, 0, torch.uint8, (nbytes,), torch.zeros(nbytes, dtype=torch.uint8)))
        clock.advance(2.0)
    (stats,) = pair.lower.take_stats()
    assert all(piece.acked_s - piece.taken_s > 0.5 for piece in stats.pieces)  # not 0.12 s
    wire = busy_seconds(WireClock().passages({0: stats.pieces}, {0: stats.heartbeats}))
    assert wire[0, FORWARD] == pytest.approx(4 * 0.02, rel=0.02)


def test_heartbeat_that_met_data_on_its_way_says_nothing():
    clock = VirtualClock()
    pair = InprocPair(clock, shaping=Shaping(8e6, 0.05))
    id = name(0)
    pair.upper.expect(id, 8_000_000)
    pair.lower.send(Frame(id, 0, torch.uint8, (8_000_000,), torch.zeros(8_000_000, dtype=torch.uint8)))
    pair.upper.recv()  # 8 s, in which heartbeats are sent
    clock.advance(0.5)
    (stats,) = pair.lower.take_stats()
    assert stats.heartbeats == ()


def test_a_time_that_ends_before_it_was_read_last_never_counts_negatively():
    """The thread that ends it looked at the clock before the other one did."""
    id = LogicalId(1, 0, 0, Purpose.TRAIN, 0, 0, Direction.FORWARD)
    counter, busy, sending = LinkCounter(0, None), BusyClocks(), BusyClocks()
    frame = Frame(id, 0, torch.uint8, (8,), torch.zeros(8, dtype=torch.uint8))
    found = []
    for begin_s, read_s, end_s in ((10.0, 10.5, 10.495), (11.0, 11.003, 11.1), (12.0, 12.25, 12.25)):
        counter.count(frame)
        for clocks in (busy, sending):
            clocks.change(id, 1, begin_s)
        (stats,) = counter.take(busy, sending, read_s)
        assert stats.busy_s == stats.sending_s
        found.append(stats.busy_s)
        for clocks in (busy, sending):
            clocks.change(id, -1, end_s)
    assert min(found) >= 0
    assert found == pytest.approx([0.5, 0.0, 0.345])
