"""Two clocks that were not set alike, compared by heartbeats that take their time."""

import random

import pytest

from tahq.comm.control.server import clock_offset
from tahq.comm.link.wire_time import HeartbeatTimes


def beat(now_s, skew_s, there_s, back_s, rate=1.0):
    """A heartbeat that leaves at `now_s`; the other clock reads rate·t + skew."""
    return HeartbeatTimes(0, now_s, rate * (now_s + there_s) + skew_s, now_s + there_s + back_s)


def test_error_is_never_above_half_the_round_trip_and_equal_directions_give_the_offset_itself():
    """Whatever the two directions take: 200 draws of 1 to 300 ms."""
    draw = random.Random(0)
    for _ in range(200):
        skew_s = draw.uniform(-1e4, 1e4)
        best = clock_offset([beat(draw.uniform(0, 1e5), skew_s, draw.uniform(1e-3, 0.3), draw.uniform(1e-3, 0.3))])
        assert abs(best.offset_s - skew_s) <= best.error_s + 1e-9
        equal = clock_offset([beat(100.0, skew_s, 0.03, 0.03)])
        assert (equal.offset_s, equal.error_s) == (pytest.approx(skew_s, abs=1e-9), pytest.approx(0.03))


def test_shortest_round_trip_counts_and_impossible_ones_are_left_out():
    impossible = [HeartbeatTimes(0, 5.0, 0.0, 1.0), HeartbeatTimes(0, 0.0, 0.0, 1e6)]
    best = clock_offset([*impossible, beat(0.0, 5.0, 0.001, 0.001), beat(1.0, 5.0, 0.2, 0.01)])
    assert best.error_s == pytest.approx(0.001)
    assert clock_offset(impossible) is None
