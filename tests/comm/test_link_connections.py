"""A link of several connections, its messages carried by the test in any order that connections can bring them in."""

from dataclasses import replace

import pytest
import torch
from support.session_pairs import RUN, hear, met_sessions, pieces, urgent

from tahq.comm.link.frame import Direction, Frame, FrameKind, LogicalId, Outgoing, Purpose, pack_header, unpack_header
from tahq.comm.link.inbound import Resequencer
from tahq.comm.link.session import Session
from tahq.comm.link.spec import LinkHello, LinkSpec, PeerIdentity, SessionLimits, unpack_hello
from tahq.comm.link.transitions import End
from tahq.errors import PeerLostError, RemoteProtocolError

LIMITS = SessionLimits(peer_timeout_s=10.0, heartbeat_s=2.0, piece_nbytes=100, connections=3)


def make_frame(nbytes: int, micro_batch: int = 0, direction: Direction = Direction.FORWARD) -> Frame:
    id = LogicalId(RUN, 0, 0, Purpose.TRAIN, micro_batch, 0, direction)
    return Frame(id, 0, torch.uint8, (nbytes,), torch.arange(nbytes).add(micro_batch).to(torch.uint8))


def header_of(message: Outgoing):
    return unpack_header(message.header, message.payload, "")


# Opening


def test_link_is_open_when_every_connection_has_said_hello():
    specs = [LinkSpec(0, 1, "", dials=True), LinkSpec(0, 0, "", dials=False)]
    dialling, listening = (Session(PeerIdentity(RUN, 1, s.peer_stage ^ 1, "c"), s, LIMITS) for s in specs)
    hellos = sorted(urgent(dialling), key=lambda message: message.connection)
    assert [unpack_hello(hello.payload, "").connection for hello in hellos] == [0, 1, 2]
    hear(listening, hellos[:2])
    hear(dialling, urgent(listening))
    assert (dialling.remote, listening.remote) == (End.CONNECTING, End.CONNECTING)
    # Only the one that was not answered is repeated.
    dialling.handle_timer(2.0)
    (again,) = urgent(dialling, 2.0)
    assert again.connection == 2
    hear(listening, [again])
    assert listening.remote is End.OPEN
    hear(dialling, urgent(listening))
    assert dialling.remote is End.OPEN


@pytest.mark.parametrize("hello", [LinkHello(0, 1, "c", 0, 2), LinkHello(0, 1, "c", 1, 3)], ids=["of 2", "another"])
def test_hello_of_another_connection_or_number_of_them_is_a_protocol_error(hello):
    listening = Session(PeerIdentity(RUN, 1, 1, "c"), LinkSpec(0, 0, "", dials=False), LIMITS)
    dialling = Session(PeerIdentity(RUN, 1, 0, "c"), LinkSpec(0, 1, "", dials=True), LIMITS)
    (message, *_) = sorted(urgent(dialling), key=lambda message: message.connection)
    header = pack_header(header_of(message)._replace(payload_nbytes=len(hello.pack())), hello.pack())
    with pytest.raises(RemoteProtocolError, match="connection"):
        listening.receive(header, hello.pack(), 0.0, connection=0)


@pytest.mark.parametrize(
    "payload", [b"short", LinkHello(0, 1, "c", 2, 2).pack(), LinkHello(0, 1, "c", window_nbytes=0).pack()]
)
def test_hello_that_cannot_be_is_a_protocol_error(payload):
    with pytest.raises(RemoteProtocolError, match="HELLO"):
        unpack_hello(payload, "peer")


# Working


def test_silence_of_one_connection_ends_the_link():
    lower, upper = met_sessions(LIMITS)
    for now_s in (2.0, 4.0, 6.0, 8.0):
        for connection in (0, 2):
            upper.heard(now_s, connection)
    with pytest.raises(PeerLostError, match="no sign of life for 10"):
        upper.handle_timer(10.0)
    assert lower.remote is End.OPEN


def test_connection_that_has_said_goodbye_may_be_silent_while_another_still_brings_data():
    lower, upper = met_sessions(LIMITS)
    lower.send(make_frame(100), 0.0)
    lower.close(0.0)
    goodbyes = [message for message in pieces(lower) if header_of(message).kind is FrameKind.BYE]
    assert [message.connection for message in goodbyes] == [0, 1, 2]
    hear(upper, goodbyes[2:])
    for now_s in (5.0, 10.0, 15.0):
        upper.heard(now_s, 0)
        upper.heard(now_s, 1)
        upper.handle_timer(now_s)
    assert upper.remote is End.OPEN


# The parts


def test_more_than_may_be_on_its_way_is_a_protocol_error():
    lower, _ = met_sessions(LIMITS)
    lower.send(make_frame(500), 0.0)
    _, second, third, *_ = pieces(lower)
    resequencer = Resequencer(replace(LIMITS, receive_window_nbytes=150 - (3 << 20)), "link 0")
    assert not list(resequencer.take(header_of(second), second.payload, second.connection))
    with pytest.raises(RemoteProtocolError, match="link 0: sent 200 B after message 1, which has not come"):
        list(resequencer.take(header_of(third), third.payload, third.connection))
