"""The order of measurements: each pair meets once, and no host is in two pairs at a time."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.comm.topology import Endpoint
from tahq.plan.measure.jobs import Job, MeasureRequest, diallers, measuring_rounds, planned_jobs, tournament

ONE_CODEC = MeasureRequest(micro_batches=(2,), codecs=("raw:dtype=fp32",))


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
    assert all(len(pairs) == 1 for pairs in measuring_rounds("aaaa", parallel=True))


@pytest.mark.parametrize(
    ("lower", "upper", "expected"), [("a:1", "b:1", (1, 0)), ("a:1", "", (1, 0)), ("", "b:1", (0, 1)), ("", "", None)]
)
def test_the_higher_stage_dials_unless_the_lower_only_dials_out(lower, upper, expected):
    assert diallers((0, 1), ends(lower, upper)) == expected


def test_ways_come_first_then_what_each_host_does_with_all_others():
    batches, apart = planned_jobs(ends("a:1", "b:1", ""), ["a", "b", "c"], ONE_CODEC)
    assert apart == []
    assert batches == [
        [Job("path", 2, (1,))],
        [Job("path", 2, (0,))],
        [Job("path", 1, (0,))],
        [Job("access", 2, (0, 1))],  # the others have one other that they can dial, and know the way there
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
