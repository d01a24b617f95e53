"""When relayed chunks arrive, computed by hand. 1448 bytes of payload take 1514 on a line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq_netem.description import HostConfig, HostShape, NetworkConfig, PairConfig, PathShape, plan_network, uniform
from tahq_netem.relay_line import LARGEST_CHUNK_BYTES, SMALLEST_CHUNK_BYTES, Line, RelayPaths

PACKET_S = 1514 * 8 / 1e6
"""1448 bytes at 1 Mbit/s."""


def _paths(**shape) -> RelayPaths:
    return RelayPaths(plan_network(uniform(3, **shape)))


def test_a_line_carries_one_chunk_after_another():
    line = Line(1e6)
    assert line.send(1448, 10.0) == pytest.approx(10.0 + PACKET_S)
    assert line.send(1448, 10.0) == pytest.approx(10.0 + 2 * PACKET_S)


def test_an_idle_line_saves_nothing_for_later():
    line = Line(1e6)
    line.send(1448, 0.0)
    assert line.send(1448, 100.0) == pytest.approx(100.0 + PACKET_S)


def test_a_line_without_a_rate_takes_no_time():
    assert Line().send(10**9, 5.0) == 5.0


def test_an_equal_line_behind_another_adds_nothing():
    first, second = Line(1e6), Line(1e6)
    for number in range(1, 5):
        sent_s = first.send(1448, 0.0)
        assert second.pass_on(1448, sent_s - PACKET_S, sent_s) == pytest.approx(number * PACKET_S)


def test_a_slower_line_behind_another_decides():
    fast, slow = Line(2e6), Line(1e6)
    passed_s = 0.0
    for _ in range(4):
        sent_s = fast.send(1448, 0.0)
        passed_s = slow.pass_on(1448, sent_s - PACKET_S / 2, sent_s)
    assert passed_s == pytest.approx(4 * PACKET_S)


def test_a_chunk_takes_the_uplink_and_then_the_delay():
    paths = _paths(rate=1e6, delay=0.5)
    assert paths.send("host0", "host1", 1448, 0.0) == pytest.approx(PACKET_S + 0.5)
    assert paths.free_s("host0", "host1") == pytest.approx(PACKET_S)


def test_two_receivers_share_an_uplink_and_two_senders_a_downlink():
    paths = _paths(rate=1e6)
    first_s = paths.send("host0", "host1", 1448, 0.0)
    second_s = paths.send("host0", "host2", 1448, 0.0)
    other_s = paths.send("host2", "host1", 1448, 0.0)
    assert (first_s, second_s, other_s) == pytest.approx((PACKET_S, 2 * PACKET_S, PACKET_S))
    assert paths.deliver("host0", "host1", 1448, first_s) == pytest.approx(PACKET_S)
    assert paths.deliver("host2", "host1", 1448, other_s) == pytest.approx(2 * PACKET_S)


def test_the_cap_of_a_pair_holds_back_nobody_else():
    config = NetworkConfig(
        hosts=dict.fromkeys(["a", "b", "c"], HostConfig(up=2e6, down=2e6)),
        pairs=[PairConfig(between=("a", "b"), rate=1e6)],
    )
    paths = RelayPaths(plan_network(config))
    for number in range(1, 4):
        assert paths.send("a", "b", 1448, 0.0) == pytest.approx(number * PACKET_S)
    assert paths.free_s("a", "b") == pytest.approx(3 * PACKET_S)
    assert paths.free_s("a", "c") == pytest.approx(1.5 * PACKET_S)


def test_rates_and_paths_change_from_the_next_chunk_on():
    paths = _paths(rate=1e6)
    paths.send("host0", "host1", 1448, 0.0)
    paths.set_rates("host0", HostShape(2e6, None))
    paths.set_path("host0", "host1", PathShape(delay_s=1.0))
    assert paths.send("host0", "host1", 1448, 0.0) == pytest.approx(1.5 * PACKET_S + 1.0)


def test_a_host_that_is_cut_off_neither_sends_nor_receives():
    paths = _paths()
    paths.set_link("host1", is_up=False)
    assert not paths.is_open("host0", "host1")
    assert not paths.is_open("host1", "host0")
    assert paths.is_open("host0", "host2")
    paths.set_link("host1", is_up=True)
    assert paths.is_open("host0", "host1")


def test_a_path_that_loses_everything_is_closed_in_its_direction():
    paths = _paths()
    paths.set_path("host0", "host1", PathShape(loss=1.0))
    assert not paths.is_open("host0", "host1")
    assert paths.is_open("host1", "host0")


@pytest.mark.parametrize(
    ("rate", "chunk_bytes"),
    [(None, LARGEST_CHUNK_BYTES), (1e9, LARGEST_CHUNK_BYTES), (10e6, 2500), (1e5, SMALLEST_CHUNK_BYTES)],
)
def test_chunks_are_about_2_ms_long(rate, chunk_bytes):
    assert _paths(rate=rate).chunk_bytes("host0", "host1") == chunk_bytes


def test_a_window_holds_what_is_on_the_way():
    # 100 Mbit/s for 0.1 s are 1.25 MB, and 1 MiB may queue.
    assert _paths(rate=100e6, delay=0.1).window_bytes("host0", "host1") == 1_250_000 + 1024 * 1024


@given(st.lists(st.tuples(st.integers(1, 100_000), st.floats(0, 10)), min_size=1, max_size=30), st.floats(1e4, 1e9))
def test_nothing_is_faster_than_the_rate_and_nothing_overtakes(chunks, rate):
    line = Line(rate)
    ends_s = [line.send(num_bytes, ready_s) for num_bytes, ready_s in chunks]
    assert ends_s == sorted(ends_s)
    total_s = sum(num_bytes for num_bytes, _ in chunks) * 8 * 1514 / 1448 / rate
    assert ends_s[-1] >= min(ready_s for _, ready_s in chunks) + total_s * (1 - 1e-9)
