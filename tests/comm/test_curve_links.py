"""Links under CURVE admit only the neighbour in the plan, even while this end has no plan yet."""

import logging
import threading
import time

import pytest
import torch
import zmq
from support.breaking_proxy import BreakingProxy

from tahq.comm.keys import new_key_pair
from tahq.comm.link.frame import Direction, Frame, FrameHeader, FrameKind, LogicalId, Purpose, pack_header
from tahq.comm.link.spec import LinkHello
from tahq.comm.zmq.sockets import dial_curve
from tahq.errors import LocalProtocolError, PeerLostError

SOON_S = 10.0
LOWER, UPPER, MEMBER, STRANGER = (new_key_pair() for _ in range(4))
PATTERN = b"what nobody else may read of an activation"


@pytest.fixture
def ends(make_endpoint):
    """ends(**changes): both ends of a link, lower and upper, of which the upper one dials."""

    def make(lower_keys=LOWER, upper_keys=UPPER):
        return make_endpoint(1, keys=lower_keys), make_endpoint(2, keys=upper_keys)

    return make


def pattern_frame(make_id) -> Frame:
    payload = torch.frombuffer(bytearray(PATTERN * 1000), dtype=torch.uint8)
    return Frame(make_id(), 3, torch.bfloat16, (2, len(payload)), payload)


def check_carried(make_id, sender, receiver) -> None:
    frame = pattern_frame(make_id)
    receiver.expect(make_id(), frame.payload.numel())
    sender.send(frame)
    assert torch.equal(receiver.recv(SOON_S).payload, frame.payload)


@pytest.mark.parametrize("connections", [1, 3])
def test_neighbours_meet_and_nobody_can_read_what_they_send(make_endpoint, make_id, connections):
    lower = make_endpoint(1, keys=LOWER, connections=connections)
    upper = make_endpoint(2, keys=UPPER, connections=connections)
    proxy = BreakingProxy(lower.address)
    sender = lower.open_link(1, 2, "upper", "", UPPER.public)
    receiver = upper.open_link(1, 1, "lower", proxy.address, LOWER.public)
    for endpoint in (lower, upper):
        endpoint.wait_connected(SOON_S)
    check_carried(make_id, sender, receiver)
    for endpoint in (lower, upper):
        endpoint.close()
    proxy.close()
    assert len(proxy.heard) > 1000 * len(PATTERN)
    assert PATTERN not in proxy.heard


def test_peer_that_has_its_plan_first_waits_and_is_let_in_at_once(ends, make_id):
    lower, upper = ends()
    receiver = upper.open_link(1, 1, "lower", lower.address, LOWER.public)
    time.sleep(0.5)
    started_s = time.monotonic()
    sender = lower.open_link(1, 2, "upper", "", UPPER.public)
    for endpoint in (lower, upper):
        endpoint.wait_connected(SOON_S)
    assert time.monotonic() - started_s < 0.5
    check_carried(make_id, sender, receiver)


def test_peer_that_was_refused_comes_again(ends, make_id, monkeypatch):
    """It is refused after a while, in which this end has no plan; ZMQ would not dial again."""
    monkeypatch.setattr("tahq.comm.zmq.endpoint._HOLD_S", 0.0)
    lower, upper = ends()
    receiver = upper.open_link(1, 1, "lower", lower.address, LOWER.public)
    time.sleep(0.3)
    sender = lower.open_link(1, 2, "upper", "", UPPER.public)
    for endpoint in (lower, upper):
        endpoint.wait_connected(SOON_S)
    check_carried(make_id, sender, receiver)


@pytest.mark.parametrize(
    ("upper_keys", "lower_key", "told", "logged"),
    [
        (
            STRANGER,
            LOWER.public,
            "refuses this worker's key",
            f"public key {STRANGER.public} is not one of the 1",
        ),
        (UPPER, STRANGER.public, "hangs up in the handshake", "another public key for this end"),
        (None, "", "without CURVE|one end uses CURVE", "rejected a connection"),
    ],
    ids=["unknown key", "wrong key", "no CURVE"],
)
def test_another_than_the_neighbour_is_not_met_and_both_sides_say_why(
    ends, caplog, monkeypatch, upper_keys, lower_key, told, logged
):
    caplog.set_level(logging.WARNING, "tahq.comm")
    monkeypatch.setattr("tahq.comm.zmq.endpoint._HOLD_S", 0.1)
    lower, upper = ends(upper_keys=upper_keys)
    proxy = BreakingProxy(lower.address)
    lower.open_link(1, 2, "upper", "", UPPER.public)
    upper.open_link(1, 1, "lower", proxy.address, lower_key)
    with pytest.raises(PeerLostError, match=told) as refusal:
        upper.wait_connected(1.5)
    assert "stage 1 (lower at " in str(refusal.value)
    with pytest.raises(PeerLostError, match="not connected"):
        lower.wait_connected(0)
    proxy.close()
    assert logged in caplog.text
    assert b"c0ffee" not in proxy.heard  # of the configuration's hash in HELLO


def test_member_cannot_take_another_members_link(ends, make_endpoint, caplog, make_id):
    """Two neighbours have links to stage 1; the one of link 2 says HELLO for link 1."""
    caplog.set_level(logging.WARNING, "tahq.comm")
    lower, upper = ends()
    sender = lower.open_link(1, 2, "upper", "", UPPER.public)
    lower.open_link(2, 3, "member", "", MEMBER.public)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dial_curve(dealer, MEMBER, LOWER.public)
    dealer.connect(f"tcp://{lower.address}")
    payload = LinkHello(2, 1, "c0ffee").pack()
    id = LogicalId(77, 0, 0, Purpose.TRAIN, 0, 1, Direction.FORWARD)
    dealer.send_multipart(
        [pack_header(FrameHeader(FrameKind.HELLO, 1, 1, 0, id, payload_nbytes=len(payload)), payload), payload]
    )
    assert dealer.poll(int(1000 * SOON_S))
    assert b"has another key than this member" in dealer.recv_multipart()[1]
    context.destroy(linger=0)
    receiver = upper.open_link(1, 1, "lower", lower.address, LOWER.public)
    upper.wait_connected(SOON_S)
    check_carried(make_id, sender, receiver)
    assert "has another key than this member; it was refused" in caplog.text


def test_member_is_no_stranger_whether_its_connections_are_new_or_come_again(ends, make_id, make_frame, caplog):
    caplog.set_level(logging.WARNING, "tahq.comm.zmq.gate")
    lower, upper = ends()
    proxy = BreakingProxy(lower.address)
    sender = lower.open_link(1, 2, "upper", "", UPPER.public)
    receiver = upper.open_link(1, 1, "lower", proxy.address, LOWER.public)
    for endpoint in (lower, upper):
        endpoint.wait_connected(SOON_S)
    for number in range(3):
        receiver.expect(make_id(number), 1000)
        sender.send(make_frame(1000, number))
        receiver.recv(SOON_S)
        proxy.reset()
        time.sleep(0.3)
    for endpoint in (upper, lower):
        endpoint.close()
    proxy.close()
    assert proxy.num_connections >= 3
    assert caplog.text == ""


def test_plan_without_keys_is_refused(ends):
    lower, _ = ends()
    with pytest.raises(LocalProtocolError, match="CURVE is on at one end and off at the other"):
        lower.open_link(1, 2, "upper", "")


def test_closing_leaves_no_thread_and_takes_no_time(make_endpoint):
    """With a peer before the gate, one that was refused, and one that was never there."""
    before = threading.active_count()
    lower, upper = make_endpoint(1, keys=LOWER), make_endpoint(2, keys=UPPER)
    upper.open_link(1, 1, "lower", lower.address, LOWER.public)
    upper.open_link(2, 1, "nobody", "127.0.0.1:9", LOWER.public)
    time.sleep(0.2)
    started_s = time.monotonic()
    for endpoint in (lower, upper):
        endpoint.close(linger_s=0.1)
    assert time.monotonic() - started_s < 2
    assert threading.active_count() == before
