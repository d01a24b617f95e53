"""What an ACK says, and the times that it tells."""

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.comm.link.signals import MAX_TIMES, Acknowledgement, Arrivals, unpack_acknowledgement
from tahq.errors import RemoteProtocolError

TIMES = st.integers(0, 2**50).map(lambda ticks: ticks / 1e6)


@given(st.integers(1, 5), st.integers(0, 2**32 - 1), TIMES, st.lists(TIMES, max_size=MAX_TIMES))
def test_acknowledgement_survives_a_round_trip(connections, heartbeat, heartbeat_s, arrivals_s):
    passed = tuple(range(connections)) if connections > 1 else ()
    ack = Acknowledgement(passed, heartbeat, heartbeat_s, arrivals_s)
    assert unpack_acknowledgement(ack.pack(), connections, "peer") == ack


@given(st.binary(max_size=64), st.integers(1, 3))
def test_any_bytes_are_an_acknowledgement_or_a_protocol_error(payload, connections):
    with suppress(RemoteProtocolError):
        ack = unpack_acknowledgement(payload, connections, "peer")
        assert all(0 <= time_s < math.inf for time_s in (ack.heartbeat_s, *ack.arrivals_s))


@pytest.mark.parametrize("nbytes", [0, 11, 13, 12 + 8 * (MAX_TIMES + 1)])
def test_acknowledgement_of_a_length_that_it_cannot_have_is_a_protocol_error(nbytes):
    with pytest.raises(RemoteProtocolError, match=f"sent {nbytes} bytes with an ACK for 1 connections"):
        unpack_acknowledgement(bytes(nbytes), 1, "peer")


def test_arrivals_are_told_once_in_order_and_those_after_a_gap_when_it_is_filled():
    arrivals = Arrivals()
    for sequence, now_s in ((1, 10.0), (3, 11.0), (2, 12.0), (3, 13.0)):
        arrivals.note(sequence, 1, now_s)
    assert arrivals.tell(1, ()).arrivals_s == [10.0]
    arrivals.note(1, 1, 14.0)  # sent again
    assert arrivals.tell(3, ()).arrivals_s == [12.0, 11.0]
    assert arrivals.tell(3, ()).arrivals_s == []


def test_messages_beyond_the_most_that_are_told_came_no_later_than_the_first_that_is():
    arrivals = Arrivals()
    last = MAX_TIMES + 10
    for sequence in range(1, last + 1):
        arrivals.note(sequence, 1, float(sequence))
    ack = unpack_acknowledgement(arrivals.tell(last, ()).pack(), 1, "peer")
    assert [ack.arrival_s(behind) for behind in (0, 1, MAX_TIMES - 1, last - 1)] == [last, last - 1, 11.0, 11.0]
    assert Acknowledgement().arrival_s(0) is None
