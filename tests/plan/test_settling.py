"""When a stream's rate has settled: arrivals on a virtual clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.plan.measure.meter_wire import Settling


def feed(settling, rate_of, step_s=0.01, until_s=60.0):
    """Arrivals every `step_s` at a rate that depends on the time, until it is enough; returns when."""
    now_s = 0.0
    settling.add(now_s, 1500)
    while not settling.is_over and now_s < until_s:
        now_s += step_s
        settling.add(now_s, int(rate_of(now_s) * step_s / 8))
    return now_s


def test_a_steady_stream_is_over_after_the_least_time():
    settling = Settling(0.1, least_s=1.0, most_s=30.0)
    assert feed(settling, lambda now_s: 100e6) == pytest.approx(1.0, abs=0.05)
    assert settling.rate_bits_per_s == pytest.approx(100e6, rel=1e-3)


def test_slow_start_is_no_part_of_the_rate():
    """It doubles every 0.3 s, from 1 to 100 Mbit/s: for 2 s it has not settled."""
    settling = Settling(0.1, least_s=0.5, most_s=30.0)
    over_s = feed(settling, lambda now_s: min(100e6, 1e6 * 2 ** (now_s / 0.3)))
    assert 2.0 < over_s < 4.0
    assert settling.rate_bits_per_s == pytest.approx(100e6, rel=0.01)


def test_a_stream_that_grows_for_ever_is_over_after_the_most_time():
    settling = Settling(0.1, least_s=0.5, most_s=5.0)
    assert feed(settling, lambda now_s: 1e6 * 2**now_s) == pytest.approx(5.0, abs=0.1)
    assert settling.rate_bits_per_s > 10e6


def test_a_pause_of_the_machine_does_not_count():
    """A tenth of a second in which nothing comes, of one."""
    settling = Settling(0.1, least_s=1.0, most_s=30.0)
    feed(settling, lambda now_s: 0.0 if 0.6 < now_s < 0.7 else 50e6)
    assert settling.rate_bits_per_s == pytest.approx(50e6, rel=0.01)


def test_windows_of_a_slow_stream_are_as_long_as_packets_need():
    """1 Mbit/s is 8 packets in 0.1 s; the windows take half a second each, eight of them."""
    settling = Settling(0.1, least_s=1.0, most_s=30.0)
    over_s = feed(settling, lambda now_s: 1e6, step_s=0.012)
    assert 4.0 < over_s < 5.0
    assert settling.rate_bits_per_s == pytest.approx(1e6, rel=0.01)


def test_nothing_but_a_first_arrival_is_no_rate():
    settling = Settling(0.1, 1.0, 5.0)
    settling.add(3.0, 1500)
    assert (settling.rate_bits_per_s, settling.lasted_s, settling.nbytes) == (0.0, 0.0, 1500)


@given(st.lists(st.tuples(st.floats(1e-6, 2.0), st.integers(1, 10**6)), min_size=1, max_size=50))
def test_the_rate_lies_between_the_slowest_and_the_fastest_moment(arrivals):
    settling, now_s, rates = Settling(0.1, 1.0, 5.0), 0.0, []
    settling.add(now_s, 1)
    for gap_s, nbytes in arrivals:
        now_s += gap_s
        settling.add(now_s, nbytes)
        rates.append(8 * nbytes / gap_s)
    # The times are differences of sums, off by a part in 10^7 where 1e-6 s follow tens of seconds.
    assert 0.999 * min(rates) <= settling.rate_bits_per_s <= 1.001 * max(rates)
