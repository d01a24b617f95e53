"""The order of a cluster's measurements, and the numbers made of what workers report."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.comm.config import MachineConfig
from tahq.comm.control.messages import ComputeMeasured, PathsMeasured
from tahq.comm.topology import Endpoint
from tahq.errors import RemoteProtocolError
from tahq.plan.cluster_numbers import ClusterNumbers, host_labels
from tahq.plan.measure.measurement import (
    Imitated,
    Job,
    Measured,
    MeasureRequest,
    chosen_connections,
    diallers,
    measuring_rounds,
    planned_jobs,
    tournament,
)

ONE_CODEC = MeasureRequest(micro_batches=(2,), codecs=("raw:dtype=fp32",))

TIMES = {"micro_batch": 2, "block_forward": 0.0101234, "block_backward": 0.02, "block_activation_bytes": 1000}
PATH = Job("path", 1, (0,))


def ends(*addresses):
    return [Endpoint(stage, f"host{stage}", address) for stage, address in enumerate(addresses)]


@given(st.integers(0, 25))
def test_each_pair_meets_once_and_no_player_twice_in_a_round(num_players):
    rounds = tournament(num_players)
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(num_players), 2))
    for pairs in rounds:
        players = list(itertools.chain(*pairs))
        assert len(players) == len(set(players))
    assert len(rounds) <= max(0, num_players - 1 + num_players % 2)


@given(st.lists(st.sampled_from("abcdef"), max_size=9))
def test_no_machine_is_in_two_pairs_at_a_time(machines):
    rounds = measuring_rounds(machines, parallel=True)
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(len(machines)), 2))
    for pairs in rounds:
        busy = list(itertools.chain(*({machines[stage] for stage in pair} for pair in pairs)))
        assert len(busy) == len(set(busy))


def test_one_pair_at_a_time_unless_asked():
    assert measuring_rounds("abcd", parallel=False) == [[pair] for pairs in tournament(4) for pair in pairs]
    assert measuring_rounds("abcd", parallel=True) == tournament(4)


@pytest.mark.parametrize(
    ("lower", "upper", "expected"), [("a:1", "b:1", (1, 0)), ("a:1", "", (1, 0)), ("", "b:1", (0, 1)), ("", "", None)]
)
def test_the_higher_stage_dials_unless_the_lower_only_dials_out(lower, upper, expected):
    assert diallers((0, 1), ends(lower, upper)) == expected


def test_paths_come_first_then_each_host_with_all_others():
    batches, apart = planned_jobs(ends("a:1", "b:1", ""), ["a", "b", "c"], ONE_CODEC)
    assert apart == []
    assert batches == [
        [Job("path", 2, (1,))],
        [Job("path", 2, (0,))],
        [Job("path", 1, (0,))],
        [Job("access", 2, (0, 1))],  # the others have one other that they can dial, and know the path there
    ]


def test_more_connections_are_tried_after_one():
    request = MeasureRequest((2,), (), connections=(2, 4), access=False)
    batches, _ = planned_jobs(ends("a:1", "b:1"), ["a", "b"], request)
    assert batches == [
        [Job("path", 1, (0,))],
        [Job("connections", 1, (0, 0))],
        [Job("connections", 1, (0, 0, 0, 0))],
    ]


def test_pairs_that_only_dial_out_are_known_before():
    batches, apart = planned_jobs(ends("", "b:1", ""), ["a", "b", "c"], ONE_CODEC)
    assert apart == [(0, 2)]
    assert [job.pair for batch in batches for job in batch] == [(1, 2), (0, 1)]


@pytest.mark.parametrize("num_hosts", [0, 1])
def test_alone_there_is_nothing_to_measure(num_hosts):
    batches, _ = planned_jobs(ends("a:1", "a:2", "a:3"), ["a"] * 3, ONE_CODEC)
    assert {job.kind for batch in batches for job in batch} == {"path"}  # one machine has no access between its stages
    assert planned_jobs(ends(*["a:1"] * num_hosts), ["a"] * num_hosts, ONE_CODEC) == ([], [])


# -- results -------------------------------------------------------------------------------------


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


NOTHING = Imitated()


def ways(measured, imitated=NOTHING):
    return {(path.source, path.target): path for path in measured.numbers(imitated, "").paths}


def test_figures_get_four_digits_and_are_read_back_by_the_planner(measured):
    measured.take_paths(PATH, paths(), "stage 1")
    measured.take_compute(compute(1, memory_bytes=0, notes=["micro-batches of 4 do not fit"]), "cpu", "stage 1")
    assert measured.notes == ["host1: micro-batches of 4 do not fit"]
    numbers = measured.numbers(NOTHING, "here")
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
    numbers = measured.numbers(NOTHING, "")
    assert [host.memory for host in numbers.hosts] == [4_000_000_000, 4_000_000_000, 8_000_000_000]


@pytest.mark.parametrize(
    ("imitated", "rates", "round_trip"), [(NOTHING, [50e6, 20e6], 0.02), (Imitated(30e6, 0.005), [30e6, 20e6], 0.03)]
)
def test_limits_that_workers_enforce_are_put_on_top_of_their_rates(measured, imitated, rates, round_trip):
    measured.take_paths(PATH, paths(), "stage 1")  # the dialler sends out, its peer in
    found = ways(measured, imitated)
    assert [found[ends].rate for ends in (("host1", "host0"), ("host0", "host1"))] == rates
    assert found["host0", "host1"].round_trip == pytest.approx(round_trip)


def test_more_connections_are_written_where_they_gain(measured):
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
        *(({}, 1), ({1: 50}, 1), ({1: 50, 2: 80, 4: 85, 8: 86}, 2)),
        *(({1: 50, 2: 54, 4: 56}, 4), ({1: 50, 2: 40, 8: 45}, 1), ({2: 10.0, 4: 30.0}, 4)),
    ],
)
def test_the_fewest_connections_that_are_worth_it(rates, chosen):
    assert chosen_connections(rates) == chosen


def test_uplink_has_the_rate_of_all_paths_together_and_at_least_of_each():
    measured = Measured(["host0", "host1", "host2"], ["a", "b", "c"])
    for stage in range(3):
        measured.take_compute(compute(stage), "cpu", "")
    access = Job("access", 1, (0, 2))
    measured.take_paths(access, paths(round_trips=[0.02] * 2, outward=[20e6, 25e6], inward=[5e6, 5e6]), "")
    measured.take_paths(PATH, paths(), "")
    hosts = measured.numbers(NOTHING, "").hosts
    assert (hosts[1].up, hosts[1].down) == (50e6, 20e6)
    assert hosts[0].up is None


def test_path_that_failed_has_its_reason_and_the_rest_is_kept(measured):
    error = "host0 (192.0.2.1:7001): Connection refused"
    measured.take_paths(PATH, paths(round_trips=[], outward=[], inward=[], error=error), "stage 1")
    assert measured.failures == [f"from host1 to host0: {error}"]
    assert measured.has_failed(0, 1)
    numbers = measured.numbers(NOTHING, "")
    assert len(numbers.hosts) == 2
    assert {path.failure for path in numbers.paths} == {error}
    measured.note_apart((0, 1))
    assert measured.failures[-1].startswith("host0 and host1: both only dial out")


def test_a_direction_that_was_measured_before_the_other_failed_is_kept(measured):
    measured.take_paths(PATH, paths(inward=[], error="host0 (a:1): no answer within 10 s"), "stage 1")
    found = ways(measured)
    assert (found["host1", "host0"].rate, found["host1", "host0"].failure) == (50e6, None)
    assert found["host0", "host1"].rate is None
    assert found["host0", "host1"].failure


def test_host_without_compute_is_left_out_with_its_paths():
    measured = Measured(["host0", "host1"], ["a", "b"])
    assert not measured.has_hosts
    measured.take_compute(compute(0), "cpu", "")
    measured.take_paths(PATH, paths(), "")
    numbers = measured.numbers(NOTHING, "")
    assert ([host.name for host in numbers.hosts], numbers.paths) == (["host0"], [])


@pytest.mark.parametrize(
    "changes",
    [
        {"host_memory_bytes": -1},
        {"times": [{"micro_batch": 0, "block_forward": 1.0, "block_backward": 1.0}]},
        {"times": [{**TIMES, "block_forward": float("nan")}]},
        {"times": [{**TIMES, "colour": 1.0}]},
        {"codecs": {"raw:dtype=fp32": [1.0]}},
        {"codecs": {"raw:dtype=fp32": [-1.0, 1.0]}},
        {"memory_bytes": -1},
    ],
)
def test_impossible_times_are_a_remote_protocol_error(changes):
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
def test_impossible_rates_are_a_remote_protocol_error(measured, changes):
    with pytest.raises(RemoteProtocolError, match="stage 1 sent"):
        measured.take_paths(PATH, paths(**changes), "stage 1")


def test_hosts_are_called_by_their_address_or_by_number():
    listed = [MachineConfig(address=address) for address in ("192.0.2.1", "192.0.2.2", "192.0.2.1")]
    assert host_labels(listed, 3) == ["192.0.2.1#1", "192.0.2.2", "192.0.2.1#2"]
    assert host_labels("namespaces", 2) == host_labels("local", 2) == ["host0", "host1"]
