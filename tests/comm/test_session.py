"""Two sessions whose messages a test carries across, on a clock that it moves."""

import math
import zlib
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tahq.comm.link.frame import HEADER_NBYTES, FrameKind, Outgoing, pack_header, unpack_header
from tahq.comm.link.session import Session
from tahq.comm.link.signals import MAX_TIMES, Acknowledgement, Arrivals, unpack_acknowledgement
from tahq.comm.link.spec import LinkHello, LinkSpec, PeerIdentity, SessionLimits
from tahq.comm.link.transitions import End
from tahq.errors import LocalProtocolError, PeerLostError, RemoteProtocolError

RUN, EPOCH, LINK = 77, 4, 1
IDENTITY = {stage: PeerIdentity(RUN, EPOCH, stage, "c0ffee") for stage in (1, 2)}
LIMITS = SessionLimits(peer_timeout_s=10.0, heartbeat_s=2.0, piece_nbytes=100, window_nbytes=1000)


class Wire:
    """Stage 1, which dials, and stage 2; `carry` moves what they have to say."""

    def __init__(self, limits: SessionLimits = LIMITS) -> None:
        self.now_s = 50.0
        self.one = Session(IDENTITY[1], LinkSpec(LINK, 2, "10.0.0.2:7000", dials=True), limits)
        self.two = Session(IDENTITY[2], LinkSpec(LINK, 1, "10.0.0.1:7000", dials=False), limits)

    def said_by(self, session: Session) -> list[Outgoing]:
        said = []
        while (message := session.next_urgent(self.now_s) or session.next_piece(self.now_s)) is not None:
            said.append(message)
        return said

    def hear(self, session: Session, messages: list[Outgoing]) -> None:
        for message in messages:
            session.receive(message.header, message.payload, self.now_s)

    def carry(self) -> None:
        """Carry messages back and forth until neither end has any."""
        while (from_one := self.said_by(self.one)) or (from_two := self.said_by(self.two)):
            self.hear(self.two, from_one)
            if not from_one:
                self.hear(self.one, from_two)

    def pass_time(self, duration_s: float, carrying: bool = True) -> None:
        end_s = self.now_s + duration_s
        while True:
            timers = [s.timer_s for s in (self.one, self.two)]
            due_s = min(timers)
            if due_s > end_s:
                break
            self.now_s = max(self.now_s, due_s)
            for session in (self.one, self.two):
                session.handle_timer(self.now_s)
            if carrying:
                self.carry()
            if due_s == end_s:
                break
        self.now_s = end_s


@pytest.fixture
def wire() -> Wire:
    wire = Wire()
    wire.carry()
    return wire


def kinds(messages: list[Outgoing]) -> list[FrameKind]:
    return [unpack_header(m.header, m.payload, "").kind for m in messages]


def message(kind: FrameKind, payload: bytes = b"", **changes) -> Outgoing:
    """What stage 1 could send to stage 2, with some fields changed."""
    source = Session(IDENTITY[1], LinkSpec(LINK, 2, "", dials=True), LIMITS)
    hello = source.next_urgent(0.0)
    header = unpack_header(hello.header, hello.payload, "")
    header = header._replace(**({"kind": kind, "payload_nbytes": len(payload)} | changes))
    return Outgoing(pack_header(header, payload), payload, 0.0)


# Meeting


def test_nothing_but_hello_is_said_before_the_peer_is_known(make_frame):
    wire = Wire()
    wire.one.send(make_frame(10), wire.now_s)
    wire.two.send(make_frame(10), wire.now_s)
    assert kinds(wire.said_by(wire.one)) == [FrameKind.HELLO]
    assert wire.said_by(wire.two) == []


# Data


def test_frame_goes_in_pieces_and_comes_out_whole(wire, make_frame):
    frame = make_frame(250)
    wire.two.expect(frame.id, 250)
    wire.one.send(frame, wire.now_s)
    pieces = wire.said_by(wire.one)
    assert [len(piece.payload) for piece in pieces] == [100, 100, 50]
    assert [piece.nbytes - HEADER_NBYTES for piece in pieces] == [100, 100, 50]
    wire.hear(wire.two, pieces[:2])
    assert wire.two.take_delivered() == []
    wire.hear(wire.two, pieces[2:])
    (got,) = wire.two.take_delivered()
    assert torch.equal(got.payload, frame.payload)
    assert (got.id, got.codec, got.dtype, got.shape) == (frame.id, frame.codec, frame.dtype, frame.shape)


def test_pieces_point_into_the_senders_tensor(wire, make_frame):
    frame = make_frame(250)
    wire.one.send(frame, wire.now_s)
    first = wire.said_by(wire.one)[0].payload
    assert torch.frombuffer(first, dtype=torch.uint8).data_ptr() == frame.payload.data_ptr()


def test_nothing_comes_twice_over_a_new_connection_if_nothing_was_lost(wire, make_frame):
    frame = make_frame(250)
    wire.two.expect(frame.id, 250)
    wire.one.send(frame, wire.now_s)
    wire.carry()
    wire.one.reconnected(0)
    assert wire.one.trouble(wire.now_s) == ""
    wire.carry()
    assert [got.id for got in wire.two.take_delivered()] == [frame.id]
    assert wire.one.outbound.num_again == wire.two.outbound.num_again == 0
    assert wire.one.trouble(wire.now_s) == wire.two.trouble(wire.now_s) == ""


def test_heartbeat_never_counts_a_piece_that_is_still_queued(wire, make_frame):
    wire.one.send(make_frame(250), wire.now_s)
    first = wire.one.next_piece(wire.now_s)
    wire.now_s += LIMITS.heartbeat_s
    wire.one.handle_timer(wire.now_s)
    heartbeat = wire.one.next_urgent(wire.now_s)
    assert unpack_header(heartbeat.header, heartbeat.payload, "").sequence == 1
    wire.hear(wire.two, [first, heartbeat])


ROUND_7 = (7).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (message(FrameKind.DATA, b"ab", sequence=1, total_nbytes=5, offset=2), "expected byte 0"),
        (message(FrameKind.DATA, b"", sequence=1, total_nbytes=5), "expected byte 0"),
        (message(FrameKind.DATA, b"ab", sequence=1, total_nbytes=2**62), "unexpected frames"),
        (message(FrameKind.HEARTBEAT, epoch=EPOCH + 1), r"expected \(77, "),
        (message(FrameKind.HEARTBEAT, link=LINK + 1), r"expected \(77, "),
        (message(FrameKind.ACK, sequence=9), "acknowledged message 9; the last one sent was 0"),
        (message(FrameKind.ACK, Acknowledgement(heartbeat=9).pack()), "acknowledged heartbeat 9; the last one sent"),
        (message(FrameKind.RESEND, ROUND_7, sequence=3), "the last one sent was 0"),
        (message(FrameKind.RESUME, ROUND_7, sequence=3), "names round 7"),
        (message(FrameKind.HEARTBEAT, ROUND_7 + bytes(4), sequence=3), "names round 7"),
        *((message(kind, b"abc"), "3 bytes with a ") for kind in (FrameKind.RESEND, FrameKind.RESUME)),
    ],
)
def test_message_that_cannot_be_is_a_protocol_error(wire, said, error):
    with pytest.raises(RemoteProtocolError, match=rf"link 1 to stage 1 \(10.0.0.1:7000\): .*{error}"):
        wire.hear(wire.two, [said])


def test_data_before_hello_is_a_protocol_error():
    wire = Wire()
    with pytest.raises(RemoteProtocolError, match="DATA while connecting"):
        wire.hear(wire.two, [message(FrameKind.DATA, sequence=1)])


def test_delivery_of_an_older_epoch_is_dropped(wire):
    wire.hear(wire.two, [message(FrameKind.DATA, b"ab", sequence=1, total_nbytes=2, epoch=EPOCH - 1)])
    assert not wire.two.inbound.early


def test_frame_of_another_run_is_our_own_error(wire, make_frame):
    frame = make_frame(10)
    with pytest.raises(LocalProtocolError, match="not of run 77"):
        wire.one.send(replace(frame, id=frame.id._replace(run=78)), wire.now_s)


# Acknowledgements


def test_large_frame_is_acknowledged_at_once_and_small_ones_together():
    wire = Wire(replace(LIMITS, piece_nbytes=1 << 20, window_nbytes=1 << 30))
    wire.carry()
    for sequence in (1, 2, 3):
        wire.hear(wire.two, [message(FrameKind.DATA, b"ab", sequence=sequence, total_nbytes=2)])
    assert wire.said_by(wire.two) == []
    wire.now_s += 0.006
    wire.two.handle_timer(wire.now_s)
    (ack,) = wire.said_by(wire.two)
    assert unpack_header(ack.header, ack.payload, "").sequence == 3
    large = bytes(100_000)
    wire.hear(wire.two, [message(FrameKind.DATA, large, sequence=4, total_nbytes=len(large))])
    assert kinds(wire.said_by(wire.two)) == [FrameKind.ACK]


TIMES = st.integers(0, 2**50).map(lambda ticks: ticks / 1e6)


@given(st.integers(1, 5), st.integers(0, 2**32 - 1), TIMES, st.lists(TIMES, max_size=MAX_TIMES))
def test_acknowledgement_survives_a_round_trip(connections, heartbeat, heartbeat_s, arrivals_s):
    passed = tuple(range(connections)) if connections > 1 else ()
    ack = Acknowledgement(passed, heartbeat, heartbeat_s, arrivals_s)
    assert unpack_acknowledgement(ack.pack(), connections, "peer") == ack


@given(st.binary(max_size=64) | st.just(bytes(12 + 8 * (MAX_TIMES + 1))), st.integers(1, 3))
def test_any_bytes_are_an_acknowledgement_or_a_protocol_error(payload, connections):
    with suppress(RemoteProtocolError):
        ack = unpack_acknowledgement(payload, connections, "peer")
        assert len(ack.arrivals_s) <= MAX_TIMES
        assert all(0 <= time_s < math.inf for time_s in (ack.heartbeat_s, *ack.arrivals_s))


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


# Time


def test_silence_of_a_peer_that_others_know_to_be_lost_is_borne(wire):
    for end in (wire.one, wire.two):
        end.hold()
    wire.pass_time(10 * LIMITS.peer_timeout_s, carrying=False)
    assert wire.one.trouble(wire.now_s) == "the peer is lost, and will be replaced"
    wire.pass_time(1.0)  # what the old process still says makes no difference
    wire.pass_time(10 * LIMITS.peer_timeout_s, carrying=False)


def test_timer_that_was_handled_is_not_asked_for_again(wire, make_frame):
    """Else an I/O thread whose uplink is taken would spin until it is free."""
    wire.hear(wire.two, [message(FrameKind.DATA, b"ab", sequence=1, total_nbytes=2)])
    for _ in range(5):
        wire.now_s = wire.two.timer_s
        wire.two.handle_timer(wire.now_s)
        assert wire.two.timer_s > wire.now_s


# Parting


def test_bye_comes_after_what_is_queued_and_ends_the_timers(wire, make_frame):
    frame = make_frame(250)
    wire.two.expect(frame.id, 250)
    wire.one.send(frame, wire.now_s)
    wire.one.close(wire.now_s)
    said = wire.said_by(wire.one)
    assert kinds(said) == [FrameKind.DATA] * 3 + [FrameKind.BYE]
    wire.hear(wire.two, said)
    assert len(wire.two.take_delivered()) == 1
    assert not wire.one.is_settled
    wire.hear(wire.one, wire.said_by(wire.two))
    assert wire.one.is_settled
    wire.pass_time(60.0)
    assert wire.one.timer_s == wire.two.timer_s == math.inf


def test_reason_for_leaving_reaches_the_peer_before_what_is_queued(wire, make_frame):
    wire.one.send(make_frame(250), wire.now_s)
    wire.one.close(wire.now_s, reason="out of memory")
    with pytest.raises(PeerLostError, match=r"link 1 to stage 1 .*the peer ended it: out of memory"):
        wire.hear(wire.two, wire.said_by(wire.one))


# Whatever a peer may say


kind_values = st.sampled_from(FrameKind)
small = st.integers(0, 6)


@given(st.lists(st.tuples(kind_values, small, small, small, st.binary(max_size=4)), max_size=30))
def test_no_sequence_of_valid_messages_raises_anything_but_our_errors(script):
    wire = Wire()
    for kind, sequence, offset, more, payload in script:
        hello = LinkHello(1, 2, IDENTITY[1].config_hash).pack() if kind is FrameKind.HELLO and more else payload
        total_nbytes = offset + len(hello) + more
        said = message(kind, hello, sequence=sequence, offset=offset, total_nbytes=total_nbytes)
        try:
            wire.hear(wire.two, [said])
            wire.said_by(wire.two)
        except (RemoteProtocolError, PeerLostError) as error:
            assert str(error).startswith("link 1 to stage 1 (10.0.0.1:7000): ")  # noqa: PT017
            return


@given(st.binary(min_size=96, max_size=96), st.binary(max_size=20))
def test_any_bytes_with_a_right_checksum_raise_nothing_but_our_errors(fields, payload):
    data = b"TAHQ\x01" + fields[5:]
    wire = Wire()
    wire.carry()
    try:
        wire.two.receive(data + zlib.crc32(data + payload).to_bytes(4, "little"), payload, 0.0)
    except (RemoteProtocolError, PeerLostError):
        return
    assert wire.two.remote in (End.OPEN, End.CLOSED)
