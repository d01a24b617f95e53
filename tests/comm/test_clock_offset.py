"""Two clocks that nobody has set alike, compared by messages that take their time."""

import math
import random

import pytest

from tahq.comm.control.clock_offset import SAMPLES, ClockComparison


def exchange(comparison, now_s, skew_s, there_s, back_s, held_s=0.0, rate=1.0):
    """One round trip that begins here at `now_s`; the other clock reads rate·t + skew."""

    def other(t):
        return rate * t + skew_s

    arrived_s = now_s + there_s
    left_s = arrived_s + held_s
    comparison.note(now_s, other(arrived_s), other(left_s), left_s + back_s)


@pytest.mark.parametrize("skew_s", [0.0, 12345.678, -98765.4321])
def test_equal_ways_give_the_offset_itself(skew_s):
    comparison = ClockComparison()
    exchange(comparison, 100.0, skew_s, 0.03, 0.03, held_s=1.5)
    assert comparison.best.offset_s == pytest.approx(skew_s, abs=1e-9)
    assert comparison.best.error_s == pytest.approx(0.03)


def test_error_is_never_above_half_the_round_trip():
    """Whatever the two ways take: 200 draws, ways of 1 to 300 ms."""
    draw = random.Random(0)
    for _ in range(200):
        comparison = ClockComparison()
        skew_s = draw.uniform(-1e4, 1e4)
        exchange(
            comparison, draw.uniform(0, 1e5), skew_s, draw.uniform(1e-3, 0.3), draw.uniform(1e-3, 0.3), draw.random()
        )
        assert abs(comparison.best.offset_s - skew_s) <= comparison.best.error_s + 1e-9


def test_shortest_round_trip_of_the_last_few_counts():
    comparison = ClockComparison()
    exchange(comparison, 0.0, 5.0, 0.001, 0.001)
    exchange(comparison, 1.0, 5.0, 0.2, 0.01)
    assert comparison.best.error_s == pytest.approx(0.001)
    for second in range(2, 2 + SAMPLES):
        exchange(comparison, float(second), 5.0, 0.2, 0.01)
    assert comparison.best.error_s == pytest.approx(0.105)


def test_drift_is_followed():
    """100 µs a second, a sample every 2 s: after an hour the offset is still known to a few milliseconds."""
    comparison = ClockComparison()
    rate = 1 + 1e-4
    for number in range(1800):
        exchange(comparison, 2.0 * number, 7.0, 0.002, 0.002, rate=rate)
    truth_s = rate * 3600 + 7.0 - 3600
    assert comparison.best.offset_s == pytest.approx(truth_s, abs=0.002 + 2 * SAMPLES * 1e-4)


@pytest.mark.parametrize(
    "times",
    [
        (math.nan, 0.0, 0.0, 1.0),
        (0.0, math.inf, 0.0, 1.0),
        (5.0, 0.0, 0.0, 1.0),  # back before it left
        (0.0, 0.0, 9.0, 1.0),  # held longer than it was away
        (0.0, 0.0, 0.0, 1e6),
    ],
)
def test_what_cannot_be_is_left_out(times):
    comparison = ClockComparison()
    comparison.note(*times)
    assert comparison.best is None
