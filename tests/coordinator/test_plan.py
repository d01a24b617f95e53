"""Who dials whom, and how long a run is."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.comm.topology import Endpoint, Position, link_ends, plan_links, total_steps
from tahq.errors import ConfigError, UserError


def endpoints(*addresses):
    return [Endpoint(stage, f"host{stage}", address) for stage, address in enumerate(addresses)]


def test_higher_stage_dials_the_lower_one():
    assert plan_links(endpoints("a:1", "b:2", "c:3"), False) == [
        [[0, 1, "host1", "", "zmq", ""]],
        [[0, 0, "host0", "a:1", "zmq", ""], [1, 2, "host2", "", "zmq", ""]],
        [[1, 1, "host1", "b:2", "zmq", ""]],
    ]


def test_lower_stage_that_only_dials_out_dials_the_higher_one():
    assert plan_links(endpoints("", "b:2"), False) == [
        [[0, 1, "host1", "b:2", "zmq", ""]],
        [[0, 0, "host0", "", "zmq", ""]],
    ]


def test_pair_that_only_dials_out_is_refused_with_both_names():
    with pytest.raises(UserError, match=r"link 1 .* stage 1 \(host1\) and stage 2 \(host2\)"):
        plan_links(endpoints("a:1", "", ""), False)


@pytest.mark.parametrize(("num_stages", "number"), [(2, 1), (4, 3)])
def test_link_of_tied_embeddings_comes_last(num_stages, number):
    ends = link_ends(num_stages, True)[-1]
    assert (ends.link, ends.lower, ends.upper) == (number, 0, num_stages - 1)


def test_one_stage_has_no_links_tied_or_not():
    assert plan_links(endpoints("a:1"), True) == [[]]


def in_sites(*sites, devices=("cuda:0", "cuda:1", "cuda:0", "cuda:1")):
    places = zip(sites, devices, strict=False)
    return [Endpoint(stage, "host", f"a:{stage + 1}", *place) for stage, place in enumerate(places)]


def transports(rows):
    """By link, as both of its ends are told."""
    told = {}
    for row in itertools.chain(*rows):
        told.setdefault(row[0], []).append(row[4])
    assert all(len(both) == 2 and both[0] == both[1] for both in told.values())
    return {link: both[0] for link, both in told.items()}


def test_links_inside_a_site_have_their_transport_and_all_others_zmq():
    ends = in_sites("home", "home", "lab", "lab")
    assert transports(plan_links(ends, True, inside="gloo")) == {0: "gloo", 1: "zmq", 2: "gloo", 3: "zmq"}


def test_hosts_without_a_site_are_each_their_own():
    assert transports(plan_links(in_sites("", ""), False, inside="gloo")) == {0: "zmq"}


def test_nccl_joins_different_cuda_devices_only():
    assert transports(plan_links(in_sites("home", "home"), False, inside="nccl")) == {0: "nccl"}
    with pytest.raises(ConfigError, match=r"stage 0 \(host\) is on cpu, stage 1 \(host\) is on cuda:1"):
        plan_links(in_sites("home", "home", devices=("cpu", "cuda:1")), False, inside="nccl")
    with pytest.raises(ConfigError, match=r"joins two devices, but .* cuda:0, .* cuda:0"):
        plan_links(in_sites("home", "home", devices=("cuda:0", "cuda:0")), False, inside="nccl")


@given(st.lists(st.sampled_from(["", "x:1"]), min_size=1, max_size=8), st.booleans())
def test_of_every_link_exactly_one_end_dials_an_address_that_exists(addresses, tied):
    ends = endpoints(*addresses)
    try:
        rows = plan_links(ends, tied)
    except UserError:
        assert any(not ends[e.lower].address and not ends[e.upper].address for e in link_ends(len(ends), tied))
        return
    by_link = {}
    for stage, stage_rows in enumerate(rows):
        for link, peer, _, dial, *_ in stage_rows:
            by_link.setdefault(link, []).append((stage, peer, dial))
    for two in by_link.values():
        (a, peer_of_a, dial_a), (b, peer_of_b, dial_b) = two
        assert (peer_of_a, peer_of_b) == (b, a)
        assert (dial_a == "") != (dial_b == "")


@pytest.mark.parametrize(
    ("steps", "epochs", "samples", "expected"),
    [(60, None, 0, 60), (None, 1.0, 100, 12), (None, 2.5, 100, 31), (None, 0.01, 100, 1)],
)
def test_total_steps(steps, epochs, samples, expected):
    assert total_steps(steps, epochs, samples, 8) == expected


@pytest.mark.parametrize(
    ("start", "epochs", "samples", "expected"),
    [
        # 100 samples an epoch, 8 a step: 400 are left after 200 in 25 steps
        (Position(25, 200), 6.0, 100, 25 + 50),
        # half the sequence length: the same place is sample 400 of 200 an epoch, and 800 are left
        (Position(25, 400), 6.0, 200, 25 + 100),
        # nothing is left, and a run does not become shorter than it is
        (Position(25, 200), 1.0, 100, 25),
    ],
)
def test_total_steps_of_a_run_that_goes_on_end_with_its_epochs(start, epochs, samples, expected):
    assert total_steps(None, epochs, samples, 8, start) == expected
