"""Which end of a link dials, its transport, and how long a run is."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.comm.topology import Endpoint, Grid, Position, plan_links, total_steps
from tahq.errors import ConfigError, UserError


def endpoints(*addresses):
    return [Endpoint(stage, f"host{stage}", address) for stage, address in enumerate(addresses)]


def in_sites(*sites, devices=("cuda:0", "cuda:1", "cuda:0", "cuda:1")):
    places = zip(sites, devices, strict=False)
    return [Endpoint(stage, "host", f"a:{stage + 1}", *place) for stage, place in enumerate(places)]


@pytest.mark.parametrize(
    ("addresses", "rows"),
    [
        (
            ["a:1", "b:2", "c:3"],
            [
                [[0, 1, "host1", "", "zmq", ""]],
                [[0, 0, "host0", "a:1", "zmq", ""], [1, 2, "host2", "", "zmq", ""]],
                [[1, 1, "host1", "b:2", "zmq", ""]],
            ],
        ),
        (["", "b:2"], [[[0, 1, "host1", "b:2", "zmq", ""]], [[0, 0, "host0", "", "zmq", ""]]]),
    ],
)
def test_higher_stage_dials_unless_the_lower_one_only_dials_out(addresses, rows):
    assert plan_links(endpoints(*addresses), Grid(len(addresses))) == rows


def test_pair_that_only_dials_out_is_refused_without_a_relay():
    with pytest.raises(UserError, match=r"link 1 .* stage 1 \(host1\) and stage 2 \(host2\) cannot be made"):
        plan_links(endpoints("a:1", "", ""), Grid(3))


@pytest.mark.parametrize(
    ("unreachable", "dials"),
    [
        ({}, ["", "a:1"]),
        ({0: {1: "firewall"}}, ["b:2", ""]),
        ({1: {0: "firewall"}}, ["", "a:1"]),
        ({0: {1: "firewall"}, 1: {0: "firewall"}}, ["ticket 0.0", "ticket 0.1"]),
    ],
)
def test_relay_is_taken_only_where_neither_end_can_be_dialled(unreachable, dials):
    ends = [replace(end, unreachable=unreachable.get(end.stage, {})) for end in endpoints("a:1", "b:2")]
    rows = plan_links(ends, Grid(2), ticket=lambda link, end: f"ticket {link}.{end}")
    assert [row[3] for (row,) in rows] == dials


def test_link_over_a_relay_has_no_process_group():
    ends = [replace(end, address="") for end in in_sites("home", "home")]
    rows = plan_links(ends, Grid(2), inside="gloo", ticket=lambda link, end: f"ticket {link}.{end}")
    assert [row[4] for (row,) in rows] == ["zmq", "zmq"]


def test_link_of_tied_embeddings_comes_last_and_one_stage_has_no_links():
    for num_stages, number in ((2, 1), (4, 3)):
        ends = Grid(num_stages, tie_link=True).links()[-1]
        assert (ends.link, ends.lower, ends.upper) == (number, 0, num_stages - 1)
    assert plan_links(endpoints("a:1"), Grid(1, tie_link=True)) == [[]]


def test_links_of_replicas_are_numbered_through_and_those_of_their_sums_come_last():
    grid = Grid(num_stages=2, replicas=3)
    assert [(ends.link, ends.lower, ends.upper, ends.cut) for ends in grid.links()] == [
        *((0, 0, 1, 0), (1, 2, 3, 0), (2, 4, 5, 0)),
        *((3, 0, 2, None), (4, 0, 4, None), (5, 2, 4, None)),
        *((6, 1, 3, None), (7, 1, 5, None), (8, 3, 5, None)),
    ]
    assert (grid.first_sum_link, grid.num_workers, list(grid.replicas_of(3))) == (3, 6, [1, 3, 5])
    assert [stage for stage in range(6) if grid.is_last(stage)] == [1, 3, 5]


@pytest.mark.parametrize(
    ("sites", "tied", "inside", "transports"),
    [
        (("home", "home", "lab", "lab"), True, "gloo", {0: "gloo", 1: "zmq", 2: "gloo", 3: "zmq"}),
        (("", ""), False, "gloo", {0: "zmq"}),
        (("home", "home"), False, "nccl", {0: "nccl"}),
    ],
    ids=["two sites", "hosts without a site", "nccl"],
)
def test_links_inside_a_site_have_their_transport_and_all_others_zmq(sites, tied, inside, transports):
    rows = [
        row for rows in plan_links(in_sites(*sites), Grid(len(sites), tie_link=tied), inside=inside) for row in rows
    ]
    assert len(rows) == 2 * len(transports)
    assert all(row[4] == transports[row[0]] for row in rows)


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        (("cpu", "cuda:1"), r"stage 0 \(host\) is on cpu, stage 1 \(host\) is on cuda:1"),
        (("cuda:0", "cuda:0"), r"joins two devices, but .* cuda:0, .* cuda:0"),
    ],
)
def test_nccl_joins_different_cuda_devices_only(devices, reason):
    with pytest.raises(ConfigError, match=reason):
        plan_links(in_sites("home", "home", devices=devices), Grid(2), inside="nccl")


@given(st.lists(st.sampled_from(["", "x:1"]), min_size=1, max_size=8), st.booleans())
def test_of_every_link_exactly_one_end_dials_an_address_that_exists(addresses, tied):
    ends, grid = endpoints(*addresses), Grid(len(addresses), tie_link=tied)
    try:
        rows = plan_links(ends, grid)
    except UserError:
        assert any(not ends[e.lower].address and not ends[e.upper].address for e in grid.links())
        return
    by_link = {}
    for stage, stage_rows in enumerate(rows):
        for link, peer, _, dial, *_ in stage_rows:
            by_link.setdefault(link, []).append((stage, peer, dial))
    for (a, peer_of_a, dial_a), (b, peer_of_b, dial_b) in by_link.values():
        assert (peer_of_a, peer_of_b) == (b, a)
        assert (dial_a == "") != (dial_b == "")


@pytest.mark.parametrize(
    ("steps", "epochs", "samples", "start", "expected"),
    [
        (60, None, 0, Position(), 60),
        (None, 1.0, 100, Position(), 12),
        (None, 2.5, 100, Position(), 31),
        (None, 0.01, 100, Position(), 1),
        # 100 samples per epoch, 8 per step: 400 are left after 200 in 25 steps
        (None, 6.0, 100, Position(25, 200), 25 + 50),
        # half the sequence length: the same place is sample 400 of 200 per epoch, and 800 are left
        (None, 6.0, 200, Position(25, 400), 25 + 100),
        # nothing is left, and a run does not become shorter than it is
        (None, 1.0, 100, Position(25, 200), 25),
    ],
)
def test_total_steps_end_with_the_epochs_also_of_a_resumed_run(steps, epochs, samples, start, expected):
    assert total_steps(steps, epochs, samples, 8, start) == expected


@given(st.integers(1, 40), st.sets(st.integers(0, 9), min_size=1))
def test_replicas_share_all_micro_batches_in_order_as_equally_as_possible(count, computing):
    shares = Grid(2, replicas=10).shares(count, sorted(computing))
    assert list(shares) == sorted(computing)
    assert [number for share in shares.values() for number in share] == list(range(count))
    sizes = [len(share) for share in shares.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
