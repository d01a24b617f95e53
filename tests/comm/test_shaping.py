"""The shaping cores on virtual times; test_shaped_sockets.py measures the real thing."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inproc_transport import InprocPair, VirtualClock

from tahq.comm.link.shaping import DelayLine, Downlink, Shaping, Uplink
from tahq.comm.link.spec import SessionLimits

MEGABIT = 1e6


def releases(line: DelayLine[str]) -> list[tuple[str, float]]:
    """Every item with the time at which it is let go."""
    out = []
    while (due_s := line.next_s) < math.inf:
        out += [(item, pytest.approx(due_s)) for item in line.take_due(due_s)]
    return out


RATE = Shaping(rate_bits_per_s=8 * MEGABIT)  # a byte takes 1 µs


@pytest.mark.parametrize(
    ("shaping", "sent", "released"),
    [
        (Shaping(), [("a", 10**9, 5.0), ("b", 10**9, 5.0)], [("a", 5.0), ("b", 5.0)]),
        (Shaping(delay_s=0.25), [("a", 10**9, 1.0), ("b", 10**9, 1.0)], [("a", 1.25), ("b", 1.25)]),
        (Shaping(8 * MEGABIT, 0.25), [("a", 500_000, 10.0)], [("a", 10.75)]),
        # all were ready at 10.0; the thread enters them late
        (RATE, [(item, 100_000, 10.0) for item in "abc"], [("a", 10.1), ("b", 10.2), ("c", 10.3)]),
        (
            RATE,
            [("a", 100_000, 10.0), ("b", 100_000, 20.0), ("c", 100_000, 20.0)],
            [("a", 10.1), ("b", 20.1), ("c", 20.2)],
        ),
    ],
    ids=["unshaped", "delay alone", "serialised, then delayed", "backlog", "idle time is not saved up"],
)
def test_uplink_serialises_and_delays(shaping, sent, released):
    uplink = Uplink(shaping)
    for item, nbytes, ready_s in sent:
        uplink.send(item, nbytes, ready_s)
    is_paced = shaping.rate_bits_per_s is not None
    assert (uplink.free_s <= sent[0][2]) is not is_paced
    assert releases(uplink) == released


@pytest.mark.parametrize(
    ("arrivals", "released"),
    [
        ([10.0, 10.1, 10.2], [10.0, 10.1, 10.2]),
        ([10.0, 10.0, 10.1, 10.1], [10.0, 10.1, 10.2, 10.3]),
        ([10.0, 90.0], [10.0, 90.0]),
    ],
    ids=["one sender of the same rate", "two senders", "after a pause"],
)
def test_downlink_paces_only_what_comes_faster_than_its_rate(arrivals, released):
    downlink = Downlink(Shaping(rate_bits_per_s=8 * MEGABIT, delay_s=99.0))
    for arrival_s in arrivals:
        downlink.receive("x", 100_000, arrival_s)
    assert [at for _, at in releases(downlink)] == released


def test_new_shaping_holds_for_what_enters_from_then_on():
    uplink = Uplink(Shaping(delay_s=1.0))
    uplink.send("a", 1, ready_s=0.0)
    uplink.reshape(Shaping(delay_s=3.0))
    uplink.send("b", 1, ready_s=0.0)
    assert releases(uplink) == [("a", 1.0), ("b", 3.0)]


# Caps: at 8 Mbit/s a byte takes 1 µs, and the bucket holds 20,000 of them

CAP = 8 * MEGABIT
BURST_NBYTES = 20_000


def test_full_bucket_does_not_make_the_imitated_line_faster():
    uplink = Uplink(Shaping(rate_bits_per_s=10 * CAP, delay_s=0.5, cap_up_bits_per_s=CAP))
    uplink.send("a", 10_000, ready_s=10.0)
    assert releases(uplink) == [("a", 10.501)]


@given(steps=st.lists(st.tuples(st.floats(0, 0.3), st.integers(0, 60_000)), min_size=1, max_size=30))
def test_no_stretch_of_time_carries_more_than_cap_bucket_and_a_message(steps):
    uplink, now_s, let_go = Uplink(Shaping(cap_up_bits_per_s=CAP)), 5.0, []
    for pause_s, nbytes in steps:
        now_s += pause_s
        now_s = max(now_s, uplink.free_s)
        uplink.send(nbytes, nbytes, now_s)
    while (due_s := uplink.next_s) < math.inf:
        let_go += [(due_s, nbytes) for nbytes in uplink.take_due(due_s)]
    for i, (start_s, _) in enumerate(let_go):
        for j in range(i, len(let_go)):
            carried = sum(nbytes for _, nbytes in let_go[i : j + 1])
            at_most = CAP / 8 * (let_go[j][0] - start_s) + BURST_NBYTES + let_go[i][1]
            assert carried <= at_most + 1e-3


def test_backlog_gets_all_of_the_cap():
    uplink, now_s = Uplink(Shaping(cap_up_bits_per_s=CAP)), 0.0
    for _ in range(100):
        now_s = max(now_s, uplink.free_s)
        uplink.send("x", 50_000, ready_s=0.0, now_s=now_s)
    assert releases(uplink)[-1][1] == pytest.approx(100 * 0.05 - 0.02)


@pytest.mark.parametrize(
    ("cap", "longest"), [(None, 262_144), (8e9, 262_144), (8 * MEGABIT, 25_000), (1e4, 4096)], ids=str
)
def test_messages_are_short_enough_for_the_cap(cap, longest):
    assert Shaping(cap_up_bits_per_s=cap).message_nbytes == longest


@pytest.mark.parametrize(
    ("cap", "window"), [(None, 2**26), (8e9, 2**26), (8 * MEGABIT, 250_000), (1e4, 65_536)], ids=str
)
def test_little_is_under_way_to_a_host_whose_downlink_is_capped(cap, window):
    assert Shaping(cap_down_bits_per_s=cap).receive_window_nbytes(2**26) == window


# Through sessions


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
