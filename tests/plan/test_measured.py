"""From what workers say to a file's numbers."""

from dataclasses import replace

import pytest

from tahq.comm.config import MachineConfig
from tahq.comm.control.messages import ComputeMeasured, PathsMeasured
from tahq.errors import RemoteProtocolError
from tahq.plan.cluster_numbers import ClusterNumbers, host_labels
from tahq.plan.measure.jobs import Job
from tahq.plan.measure.measured import Imitated, Measured, chosen_connections

TIMES = {"micro_batch": 2, "block_forward": 0.0101234, "block_backward": 0.02, "block_activation_bytes": 1000}
PATH = Job("path", 1, (0,))
NOTHING = Imitated()


def compute(stage, **changes):
    figures = ComputeMeasured(stage, 8_000_000_123, [TIMES], {"raw:dtype=fp32": [1e-9, 2e-9]})
    return replace(figures, **changes)


def paths(**changes):
    return replace(PathsMeasured(1, 1, [0.020], [50e6], [20e6]), **changes)


@pytest.fixture
def measured():
    """Two hosts that have timed themselves."""
    measured = Measured(["host0", "host1"], ["a", "b"])
    for stage in range(2):
        measured.take_compute(compute(stage), "cpu", f"stage {stage}")
    return measured


def ways(measured, imitated=NOTHING):
    return {(path.source, path.target): path for path in measured.numbers(imitated, "").paths}


def test_figures_get_four_digits_and_are_read_back_by_the_planner(measured):
    measured.take_paths(PATH, paths(), "stage 1")
    measured.take_compute(compute(1, memory_bytes=0, notes=["micro-batches of 4 do not fit"]), "cpu", "stage 1")
    assert measured.notes == ["host1: micro-batches of 4 do not fit"]
    numbers = measured.numbers(Imitated(), "here")
    host, unknown = numbers.hosts
    assert host.compute[0].block_forward == 0.01012
    assert host.compute[0].block_input_gradient is None
    assert (host.memory, unknown.memory) == (8_000_000_000, None)
    assert host.codecs["raw:dtype=fp32"].decode_per_element == 2e-9
    assert ClusterNumbers.model_validate(numbers.model_dump()) == numbers


def test_workers_of_one_device_share_its_memory():
    measured = Measured(["host0", "host1", "host2"], ["a", "a", "a"])
    for stage, device in enumerate(["cuda:0", "cuda:0", "cuda:1"]):
        measured.take_compute(compute(stage), device, "")
    numbers = measured.numbers(Imitated(), "")
    assert [host.memory for host in numbers.hosts] == [4_000_000_000, 4_000_000_000, 8_000_000_000]


def test_the_dialler_sends_out_and_the_peer_in(measured):
    measured.take_paths(PATH, paths(), "stage 1")
    assert ways(measured)["host1", "host0"].rate == 50e6
    assert ways(measured)["host0", "host1"].rate == 20e6
    assert ways(measured)["host0", "host1"].round_trip == 0.02


def test_what_workers_enforce_themselves_is_put_on_top(measured):
    measured.take_paths(PATH, paths(), "stage 1")
    imitated = ways(measured, Imitated(30e6, 0.005))
    assert [imitated[ends].rate for ends in (("host1", "host0"), ("host0", "host1"))] == [30e6, 20e6]
    assert imitated["host0", "host1"].round_trip == pytest.approx(0.030)


def test_more_connections_are_written_down_where_they_gain(measured):
    measured.take_paths(PATH, paths(), "stage 1")
    measured.take_paths(
        Job("connections", 1, (0, 0)), paths(round_trips=[0.02] * 2, outward=[26e6] * 2, inward=[15e6] * 2), ""
    )
    found = ways(measured)
    assert (found["host1", "host0"].rate, found["host1", "host0"].connections) == (50e6, None)
    assert (found["host0", "host1"].rate, found["host0", "host1"].connections) == (30e6, 2)


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({}, 1),
        ({1: 50}, 1),
        ({1: 50, 2: 80, 4: 85, 8: 86}, 2),
        ({1: 50, 2: 54, 4: 56}, 4),
        ({1: 50, 2: 40, 8: 45}, 1),
        ({2: 10.0, 4: 30.0}, 4),
    ],
)
def test_the_fewest_connections_that_are_worth_it(rates, chosen):
    assert chosen_connections(rates) == chosen


def test_an_uplink_carries_what_all_ways_carry_together_and_each_alone():
    measured = Measured(["host0", "host1", "host2"], ["a", "b", "c"])
    for stage in range(3):
        measured.take_compute(compute(stage), "cpu", "")
    access = Job("access", 1, (0, 2))
    measured.take_paths(access, paths(round_trips=[0.02] * 2, outward=[20e6, 25e6], inward=[5e6, 5e6]), "")
    measured.take_paths(PATH, paths(), "")
    hosts = measured.numbers(Imitated(), "").hosts
    assert (hosts[1].up, hosts[1].down) == (50e6, 20e6)
    assert hosts[0].up is None


def test_a_way_that_failed_says_why_and_the_rest_stands(measured):
    error = "host0 (192.0.2.1:7001): Connection refused"
    measured.take_paths(PATH, paths(round_trips=[], outward=[], inward=[], error=error), "stage 1")
    assert measured.failures == [f"from host1 to host0: {error}"]
    assert measured.has_failed(0, 1)
    numbers = measured.numbers(Imitated(), "")
    assert len(numbers.hosts) == 2
    assert {path.failure for path in numbers.paths} == {error}
    measured.note_apart((0, 1))
    assert measured.failures[1].startswith("host0 and host1: both only dial out")


def test_a_direction_that_was_measured_before_the_other_failed_is_kept(measured):
    measured.take_paths(PATH, paths(inward=[], error="host0 (a:1): no answer within 10 s"), "stage 1")
    found = ways(measured)
    assert (found["host1", "host0"].rate, found["host1", "host0"].failure) == (50e6, None)
    assert found["host0", "host1"].rate is None
    assert found["host0", "host1"].failure


def test_a_host_without_compute_is_left_out_with_its_ways():
    measured = Measured(["host0", "host1"], ["a", "b"])
    assert not measured.has_hosts
    measured.take_compute(compute(0), "cpu", "")
    measured.take_paths(PATH, paths(), "")
    numbers = measured.numbers(Imitated(), "")
    assert ([host.name for host in numbers.hosts], numbers.paths) == (["host0"], [])


@pytest.mark.parametrize(
    "changes",
    [
        {"times": []},
        {"times": [{"micro_batch": 0, "block_forward": 1.0, "block_backward": 1.0}]},
        {"times": [{**TIMES, "block_forward": float("nan")}]},
        {"times": [{**TIMES, "colour": 1.0}]},
        {"codecs": {"raw:dtype=fp32": [1.0]}},
        {"codecs": {"raw:dtype=fp32": [-1.0, 1.0]}},
        {"memory_bytes": -1},
    ],
)
def test_times_that_cannot_be_are_the_workers_fault(changes):
    with pytest.raises(RemoteProtocolError, match="stage 0 sent"):
        Measured(["host0"], ["a"]).take_compute(compute(0, **changes), "cpu", "stage 0")


@pytest.mark.parametrize(
    "changes",
    [
        {"outward": [0.0]},
        {"outward": [float("inf")]},
        {"inward": [float("nan")]},
        {"round_trips": []},
        {"outward": [1.0, 2.0]},
        {"error": "late", "outward": [1.0, 2.0]},
    ],
)
def test_rates_that_cannot_be_are_the_workers_fault(measured, changes):
    with pytest.raises(RemoteProtocolError, match="stage 1 sent"):
        measured.take_paths(PATH, paths(**changes), "stage 1")


def test_hosts_are_called_by_their_address_or_by_number():
    listed = [MachineConfig(address=address) for address in ("192.0.2.1", "192.0.2.2", "192.0.2.1")]
    assert host_labels(listed, 3) == ["192.0.2.1#1", "192.0.2.2", "192.0.2.1#2"]
    assert host_labels("namespaces", 2) == host_labels("local", 2) == ["host0", "host1"]
