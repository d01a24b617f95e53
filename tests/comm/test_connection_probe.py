"""Goodput by number of connections, over loopback; tests/netem has a path that one connection cannot fill."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.comm.connection_probe import ConnectionSink, choose_connections, measure_goodput, probe_connections
from tahq.errors import PeerLostError, UserError

SHORT_S = 0.1


@pytest.fixture
def sink():
    with ConnectionSink("127.0.0.1:0") as sink:
        yield sink


@pytest.mark.parametrize(
    ("goodputs", "chosen"),
    [
        ({1: 5e6, 2: 10e6, 4: 20e6, 8: 20.5e6}, 4),
        ({1: 95e6, 2: 96e6}, 1),
        ({8: 30e6, 4: 20e6, 1: 5e6}, 8),
        ({1: 100e6, 2: 80e6}, 1),
        ({2: 0.0}, 2),
    ],
)
def test_smallest_number_that_is_nearly_the_best_is_chosen(goodputs, chosen):
    assert choose_connections(goodputs) == chosen


@given(st.dictionaries(st.integers(1, 16), st.floats(0, 1e11), min_size=1))
def test_choice_is_within_a_tenth_of_the_best_and_no_smaller_number_is(goodputs):
    chosen, best = choose_connections(goodputs), max(goodputs.values())
    assert goodputs[chosen] >= 0.9 * best
    assert all(goodput < 0.9 * best for number, goodput in goodputs.items() if number < chosen)


def test_goodput_is_measured_with_each_number(sink):
    goodputs = probe_connections(sink.address, (1, 3), SHORT_S)
    assert list(goodputs) == [1, 3]
    assert all(goodput > 1e6 for goodput in goodputs.values())


def test_sink_survives_who_leaves_in_the_middle(sink):
    host, _, port = sink.address.rpartition(":")
    rude = socket.create_connection((host, int(port)))
    rude.sendall(bytes(100_000))
    rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
    rude.close()  # with a reset
    assert measure_goodput(sink.address, 2, SHORT_S) > 0


def test_sink_that_has_closed_cannot_be_reached():
    with ConnectionSink("127.0.0.1:0") as sink:
        pass
    sink.close()
    with pytest.raises(PeerLostError, match=f"{sink.address}: cannot measure with 1 connections"):
        measure_goodput(sink.address, 1, SHORT_S)


def test_server_that_does_not_count_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(PeerLostError, match=address):
            measure_goodput(address, 1, SHORT_S, timeout_s=0.2)


def test_port_in_use_is_a_user_error(sink):
    with pytest.raises(UserError, match=f"cannot listen on {sink.address}"):
        ConnectionSink(sink.address)
