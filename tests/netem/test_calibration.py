"""Calibration's arithmetic and its judgement; the measuring itself is tried in test_calibration_measuring."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.errors import NetworkError
from tahq_netem.measure.calibration import Calibration, neighbours
from tahq_netem.measure.figures import (
    Figure,
    acceptance_interval,
    goodput,
    goodput_figure,
    loss_figure,
    round_trip_figure,
)
from tahq_netem.measure.path_measurements import fastest
from tahq_netem.network.description import HostConfig, NetworkConfig, plan_network, uniform


def _figure(measured: float, unit="bit/s") -> Figure:
    return Figure("steady goodput", "a", "b", unit, measured, 100.0, 97.0, 103.0)


def test_acceptance_interval_of_a_coin():
    # B(10, ½): P(K ≤ 1) = 11/1024 < 5 %, P(K ≤ 2) = 56/1024 > 5 %, and the same from above.
    assert acceptance_interval(10, 0.5, 0.9) == (2, 8)


@given(st.integers(1, 60), st.floats(0.001, 0.999), st.floats(0.5, 0.9999))
def test_acceptance_interval_holds_its_confidence_and_no_more(num_packets, share, confidence):
    low, high = acceptance_interval(num_packets, share, confidence)
    weights = [math.comb(num_packets, k) * share**k * (1 - share) ** (num_packets - k) for k in range(num_packets + 1)]
    tail, rounding = (1 - confidence) / 2, 1e-9
    assert 0 <= low <= high <= num_packets
    assert sum(weights[:low]) <= tail + rounding
    assert sum(weights[high + 1 :]) <= tail + rounding
    assert sum(weights[: low + 1]) >= tail - rounding
    assert sum(weights[high:]) >= tail - rounding


@pytest.mark.parametrize(("share", "expected"), [(0.0, (0, 0)), (1.0, (500, 500))])
def test_acceptance_interval_of_certainty_is_one_count(share, expected):
    assert acceptance_interval(500, share, 0.999) == expected


def test_acceptance_interval_of_many_packets_does_not_overflow():
    low, high = acceptance_interval(40_000, 0.001, 0.999)
    # 40 ± 3.29·√40 = 40 ± 20.8, skewed upwards as a binomial of small p is.
    assert 19 <= low <= 23
    assert 60 <= high <= 65


def test_goodput_is_the_payload_of_full_frames_at_the_slowest_rate():
    plan = plan_network(
        NetworkConfig(hosts={"a": HostConfig(up=10e6, down=100e6), "b": HostConfig(up=50e6, down=20e6)})
    )
    assert goodput(plan, "a", "b") == pytest.approx(10e6 * 1448 / 1514)
    assert goodput(plan, "b", "a") == pytest.approx(50e6 * 1448 / 1514)


@pytest.mark.parametrize(("share", "is_within"), [(0.969, False), (0.971, True), (1.029, True), (1.031, False)])
def test_goodput_may_be_3_percent_off(share, is_within):
    plan = plan_network(uniform(2, rate=100e6))
    figure = goodput_figure(plan, "steady goodput", "host0", "host1", share * 100e6 * 1448 / 1514)
    assert figure.is_within is is_within


def test_goodput_of_an_unshaped_path_may_be_anything():
    figure = goodput_figure(plan_network(uniform(2)), "steady goodput", "host0", "host1", 1.0)
    assert figure.is_within
    assert figure.line() == "host0 → host1: steady goodput 1 bit/s"


@pytest.mark.parametrize(("measured_ms", "is_within"), [(47.9, False), (48.1, True), (51.9, True), (52.1, False)])
def test_round_trip_may_be_2_ms_off(measured_ms, is_within):
    plan = plan_network(uniform(2, delay=0.025))
    assert round_trip_figure(plan, "host0", "host1", measured_ms / 1e3, 31, 64).is_within is is_within


def test_round_trip_of_a_slow_link_may_take_its_serialisation():
    # 64 + 42 bytes at 64 kbit/s take 13.25 ms at the uplink and as long at the downlink, there and back.
    plan = plan_network(uniform(2, rate=64e3))
    figure = round_trip_figure(plan, "host0", "host1", 0.05, 31, 64)
    assert figure.high == pytest.approx(4 * 8 * 106 / 64e3 + 2e-3)


def test_round_trip_with_jitter_may_stray_as_its_median_does():
    plan = plan_network(uniform(2, delay=0.05, jitter=0.01))
    figure = round_trip_figure(plan, "host0", "host1", 0.1, 31, 64)
    # Each way is uniform ± 10 ms: σ² = 10²/3 each, and 3.3 of 1.25·σ/√31 of the sum are 6.05 ms.
    assert figure.high - 0.1 == pytest.approx(0.002 + 0.00605, abs=1e-5)


def test_round_trip_where_most_overtake_is_not_judged():
    plan = plan_network(uniform(2, delay=0.05, reorder=0.25))
    assert round_trip_figure(plan, "host0", "host1", 1.0, 31, 64).is_within


@pytest.mark.parametrize(("num_lost", "is_within"), [(10, False), (50, True), (90, False)])
def test_loss_is_to_be_inside_its_interval(num_lost, is_within):
    # B(5000, 1 %): 50 ± 3.29·√49.5 = 50 ± 23.
    plan = plan_network(uniform(2, loss=0.01))
    assert loss_figure(plan, "host0", "host1", 5000, 5000 - num_lost).is_within is is_within


def test_attempts_end_with_the_first_that_is_fast_enough():
    attempts = iter([_figure(90.0), _figure(98.0), _figure(99.0)])
    assert fastest(lambda: next(attempts), 3).measured == 98.0
    assert next(attempts).measured == 99.0


def test_attempts_are_no_more_than_a_few_and_the_fastest_counts():
    attempts = iter([_figure(90.0), _figure(95.0), _figure(91.0), _figure(100.0)])
    assert fastest(lambda: next(attempts), 3).measured == 95.0


def test_what_is_too_fast_is_not_measured_again():
    attempts = iter([_figure(120.0), _figure(100.0)])
    assert fastest(lambda: next(attempts), 3).measured == 120.0


def test_a_duration_is_measured_again_when_it_is_too_long():
    attempts = iter([_figure(120.0, "s"), _figure(101.0, "s")])
    assert fastest(lambda: next(attempts), 3).measured == 101.0


def test_calibration_that_is_off_names_every_figure_in_one_line():
    figures = (
        Figure("steady goodput", "a", "b", "bit/s", 80e6, 95.6e6, 92.8e6, 98.5e6),
        Figure("round trip", "a", "b", "s", 0.0501, 0.05, 0.048, 0.052),
        Figure("loss", "b", "a", "share", 0.2, 0.01, 0.005, 0.015, 5000),
    )
    with pytest.raises(NetworkError) as caught:
        Calibration(figures, ("cubic",), {}, False).check()
    message = str(caught.value)
    assert "a → b: steady goodput 80 Mbit/s, expected 95.6 Mbit/s (92.8 Mbit/s to 98.5 Mbit/s)" in message
    assert "b → a: loss 20.000%, expected 1.000%" in message
    assert "round trip" not in message
    assert "\n" not in message


def test_calibration_that_is_within_passes_and_is_stored_with_its_verdict():
    calibration = Calibration((_figure(100.0),), ("cubic",), {"backend": "tun"}, True)
    calibration.check()
    stored = calibration.as_dict()
    assert stored["is_within"]
    assert stored["figures"][0]["measured"] == 100.0
    assert stored["figures"][0]["is_within"]
    assert stored["network"] == {"backend": "tun"}


def test_neighbours_are_both_directions_of_each_cut_of_a_pipeline():
    plan = plan_network(uniform(3))
    assert neighbours(plan) == [("host0", "host1"), ("host1", "host0"), ("host1", "host2"), ("host2", "host1")]
