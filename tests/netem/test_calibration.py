"""Calibration: its arithmetic and judgement, and the measuring itself over loopback, without root."""

import itertools
import json
import math
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.loopback_network import LoopbackNetwork

from tahq.errors import NetworkError
from tahq_netem.measure import meter
from tahq_netem.measure.calibration import (
    FULL,
    QUICK,
    PathMeasurements,
    calibrate,
    fastest,
    lifted,
    neighbours,
    turns,
)
from tahq_netem.measure.figures import (
    Figure,
    acceptance_interval,
    goodput_figure,
    loss_figure,
    round_trip_figure,
)
from tahq_netem.measure.machine import BusyMeter, num_usable_cores
from tahq_netem.measure.meter import Responder, StreamFigures
from tahq_netem.network.description import plan_network, uniform

GOODPUT_SHARE = 1448 / 1514


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


ENDS = ("host0", "host1")


@pytest.mark.parametrize(
    ("network", "figure_of", "within", "off"),
    [
        (
            {"rate": 100e6},
            lambda plan, share: goodput_figure(plan, "steady goodput", *ENDS, share * 100e6 * GOODPUT_SHARE),
            (0.971, 1.029),
            (0.969, 1.031),
        ),
        ({}, lambda plan, measured: goodput_figure(plan, "steady goodput", *ENDS, measured), (1.0, 1e12), ()),
        (
            {"delay": 0.025},
            lambda plan, trip_s: round_trip_figure(plan, *ENDS, trip_s, 31),
            (0.0481, 0.0519),
            (0.0479, 0.0521),
        ),
        # Most packets overtake.
        (
            {"delay": 0.05, "reorder": 0.25},
            lambda plan, trip_s: round_trip_figure(plan, *ENDS, trip_s, 31),
            (1.0,),
            (),
        ),
        # B(5000, 1 %): 50 ± 3.29·√49.5 = 50 ± 23.
        (
            {"loss": 0.01},
            lambda plan, num_lost: loss_figure(plan, *ENDS, 5000, 5000 - num_lost),
            (50,),
            (10, 90),
        ),
    ],
    ids=["goodput", "unshaped", "round trip", "reordered", "loss"],
)
def test_figure_may_be_off_by_its_tolerance(network, figure_of, within, off):
    plan = plan_network(uniform(2, **network))
    assert all(figure_of(plan, measured).is_within for measured in within)
    assert not any(figure_of(plan, measured).is_within for measured in off)


def test_round_trip_may_take_its_serialisation_and_stray_with_jitter():
    # 64 + 42 bytes at 64 kbit/s take 13.25 ms at the uplink and as long at the downlink, there and back.
    slow = round_trip_figure(plan_network(uniform(2, rate=64e3)), *ENDS, 0.05, 31)
    assert slow.high == pytest.approx(4 * 8 * 106 / 64e3 + 2e-3)
    # Each way is uniform ± 10 ms: σ² = 10²/3 each, and 3.3 of 1.25·σ/√31 of the sum are 6.05 ms.
    figure = round_trip_figure(plan_network(uniform(2, delay=0.05, jitter=0.01)), *ENDS, 0.1, 31)
    assert figure.high - 0.1 == pytest.approx(0.002 + 0.00605, abs=1e-5)


@pytest.mark.parametrize(
    ("unit", "attempts", "counts", "num_attempts"),
    [
        ("bit/s", [90.0, 98.0, 99.0], 98.0, 2),  # fast enough
        ("bit/s", [90.0, 95.0, 91.0, 100.0], 95.0, 3),  # no further attempt
        ("bit/s", [120.0, 100.0], 120.0, 1),  # too fast
        ("s", [120.0, 101.0], 101.0, 2),  # a duration that was too long
    ],
)
def test_slow_figure_is_measured_again_and_the_fastest_attempt_counts(unit, attempts, counts, num_attempts):
    left = [Figure("steady goodput", "a", "b", unit, measured, 100.0, 97.0, 103.0) for measured in attempts]
    figure = fastest(lambda: left.pop(0), 3)
    assert (figure.measured, figure.num_attempts) == (counts, num_attempts)
    assert len(attempts) - len(left) == num_attempts


def test_flows_at_once_have_no_host_in_common_and_fit_the_machine():
    plan = plan_network(uniform(8, rate=100e6))
    paths = neighbours(plan)
    found = turns(paths, plan, 500e6)
    assert sorted(itertools.chain(*found)) == sorted(paths)
    assert [len(turn) for turn in found] == [4, 4, 3, 3]
    assert all(len({host for path in turn for host in path}) == 2 * len(turn) for turn in found)
    assert max(map(len, turns(paths, plan, 200e6))) == 2
    assert turns(paths, plan, 0.0) == [[path] for path in paths]


def test_quick_calibration_measures_only_what_is_judged(network):
    network.set_plan(plan_network(uniform(2)))
    assert {figure.what for figure in calibrate(network, quick=True).figures} == {"round trip"}
    network.set_plan(plan_network(uniform(2, rate=1e6)))  # where a message would take seconds
    assert {figure.what for figure in calibrate(network, quick=True).figures} == {"round trip", "steady goodput"}


# -- measuring ------------------------------------------------------------------------------------


@pytest.fixture
def target():
    with closing(Responder("127.0.0.1")) as responder:
        yield "127.0.0.1", responder.port


@pytest.fixture
def network():
    return LoopbackNetwork(uniform(2, rate=100e6, delay=0.005))


def test_every_datagram_of_a_train_comes_back_or_is_counted_under_its_train(target):
    trips_s = meter.round_trips(target, count=20, interval_s=1e-3, wait_s=2.0)
    assert len(trips_s) == 20
    assert all(0 < trip_s < 2.0 for trip_s in trips_s)
    assert [meter.count_datagrams(target, count, datagrams_per_s=1e4, wait_s=0.2) for count in (300, 20)] == [300, 20]


def test_message_arrives_whole_and_a_flow_ends_with_its_time_or_its_last_byte(target):
    message = meter.message(target, num_bytes=1_000_000, idle_s=0.0, timeout_s=10.0, num_wakers=3)
    assert message.num_bytes == 1_000_000
    assert message.total_s > 0
    assert message.congestion_control
    figures = meter.steady(target, max_bytes=10**13, skip_s=0.1, duration_s=0.3)
    assert 0 < figures.steady_bytes < figures.num_bytes
    assert 0.1 < figures.steady_s < figures.total_s
    short = meter.steady(target, max_bytes=3_000_000, skip_s=5.0, duration_s=30.0)
    assert (short.num_bytes, short.steady_bytes, short.steady_s) == (3_000_000, 0, 0.0)


def test_network_that_lets_nothing_through_is_an_error(network):
    with PathMeasurements(network) as measurements:
        measurements._targets["host1"] = ("127.0.0.1", 1)
        with pytest.raises(NetworkError, match="a measurement from host0 failed: ConnectionRefusedError"):
            measurements.steady("host0", "host1")
        with pytest.raises(NetworkError, match=r"ConnectionRefusedError|none of 15 datagrams came back"):
            measurements.round_trip("host0", "host1")


def test_only_rates_hold_while_a_pair_is_lifted(network):
    before = network.plan
    with lifted(network, ("host0", "host1")):
        assert not network.plan.needs_netem
        assert network.plan.host_shapes == before.host_shapes
    assert network.plan == before


def test_calibration_measures_the_wanted_paths_and_refuses_a_network_that_is_too_fast(network):
    # Loopback is a thousand times as fast as described, which no noise explains.
    calibration = calibrate(network, pairs=[("host1", "host0")], quick=True)
    assert [(figure.what, figure.source) for figure in calibration.figures] == [
        ("round trip", "host1"),
        ("goodput of a message after idle", "host1"),
        ("steady goodput", "host1"),
    ]
    assert calibration.congestion_controls == (Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),)
    stored = json.loads(json.dumps(calibration.as_dict()))
    assert stored["network"]["backend"] == "loopback"
    assert not stored["is_within"]
    assert not stored["figures"][-1]["is_within"]
    with pytest.raises(NetworkError, match=r"not as described: .*host1 → host0: steady goodput .* bit/s, expected 95"):
        calibration.check()


@pytest.mark.parametrize("effort", [FULL, QUICK], ids=["full", "quick"])
def test_steady_goodput_of_an_unshaped_path_is_not_limited(effort, monkeypatch):
    def steady(_target, max_bytes, skip_s, duration_s):
        total_s = min(duration_s, 8 * max_bytes / 100e9)
        return StreamFigures(max_bytes, total_s, int((total_s - skip_s) * 100e9 / 8), total_s - skip_s, "cubic")

    monkeypatch.setattr(meter, "steady", steady)
    with PathMeasurements(LoopbackNetwork(uniform(2)), effort) as measurements:
        assert measurements.steady("host0", "host1").measured == pytest.approx(100e9)


def test_busy_cores_count_a_grandchild_that_computes_and_not_sleeping():
    # process time, so that a busy machine makes it take longer and not count less
    spin = (
        "import time; end = time.process_time() + 0.6\nwhile time.process_time() < end: pass\n"
        "print('done', flush=True)\ninput()"
    )
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"
    counted = BusyMeter()
    begin_s = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"done\n"
    busy, seconds = counted.read(), time.monotonic() - begin_s
    process.communicate(b"\n")
    assert busy.own * seconds > 0.55
    assert busy.own <= num_usable_cores() + 0.1
    assert busy.machine >= busy.own - 0.1
    sleeping = BusyMeter()
    time.sleep(0.2)
    assert sleeping.read().own < 0.2
