"""Two sessions whose messages a test carries across, on a clock that it moves."""

import math
import zlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tahq.comm.link.frame import HEADER_NBYTES, Direction, FrameKind, Outgoing, pack_header, unpack_header
from tahq.comm.link.session import Session
from tahq.comm.link.signals import Acknowledgement
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
        """Back and forth until nobody has anything to say."""
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


def test_both_ends_are_open_after_a_hello_each(wire):
    assert wire.one.remote is wire.two.remote is End.OPEN


def test_nothing_but_hello_is_said_before_the_peer_is_known(make_frame):
    wire = Wire()
    wire.one.send(make_frame(10), wire.now_s)
    wire.two.send(make_frame(10), wire.now_s)
    assert kinds(wire.said_by(wire.one)) == [FrameKind.HELLO]
    assert wire.said_by(wire.two) == []


def test_hello_that_was_lost_is_said_again(make_frame):
    wire = Wire()
    wire.said_by(wire.one)
    wire.pass_time(LIMITS.heartbeat_s)
    assert wire.two.remote is End.OPEN


@pytest.mark.parametrize(
    ("changes", "identity", "peer_stage"),
    [
        ({"epoch": EPOCH + 1}, IDENTITY[1], 2),
        ({"link": 3}, IDENTITY[1], 2),
        ({}, replace(IDENTITY[1], stage=0), 2),
        ({}, IDENTITY[1], 3),
        ({}, replace(IDENTITY[1], config_hash="decaf"), 2),
    ],
    ids=["epoch", "link", "stage", "peer's stage", "configuration"],
)
def test_hello_of_somebody_else_is_a_protocol_error(changes, identity, peer_stage):
    wire = Wire()
    hello = message(FrameKind.HELLO, LinkHello(identity.stage, peer_stage, identity.config_hash).pack(), **changes)
    with pytest.raises(RemoteProtocolError, match=r"link 1 to stage 1 \(10.0.0.1:7000\)"):
        wire.hear(wire.two, [hello])
    assert wire.two.remote is End.CONNECTING


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


def test_delivery_that_is_repeated_is_dropped(wire, make_frame):
    frames = [make_frame(250, micro_batch=i) for i in range(2)]
    for frame in frames:
        wire.two.expect(frame.id, 250)
        wire.one.send(frame, wire.now_s)
    pieces = wire.said_by(wire.one)
    wire.hear(wire.two, pieces[:4])
    wire.hear(wire.two, pieces[:4])
    wire.hear(wire.two, pieces[1:])
    got = wire.two.take_delivered()
    assert [frame.id for frame in got] == [frame.id for frame in frames]
    assert all(torch.equal(a.payload, b.payload) for a, b in zip(got, frames, strict=True))


def sequences(messages: list[Outgoing]) -> list[tuple[FrameKind, int]]:
    headers = [unpack_header(m.header, m.payload, "") for m in messages]
    return [(header.kind, header.sequence) for header in headers]


def test_what_is_behind_a_gap_is_asked_for_and_sent_again(wire, make_frame):
    frame = make_frame(500)
    wire.two.expect(frame.id, 500)
    wire.one.send(frame, wire.now_s)
    pieces = wire.said_by(wire.one)
    wire.hear(wire.two, pieces[:1])
    wire.hear(wire.two, pieces[3:4])
    asked = wire.said_by(wire.two)
    assert (FrameKind.RESEND, 1) in sequences(asked)
    wire.hear(wire.one, asked)
    again = wire.said_by(wire.one)
    assert sequences(again) == [(FrameKind.RESUME, 1), *((FrameKind.DATA, number) for number in (2, 3, 4, 5))]
    wire.hear(wire.two, pieces[4:])  # of the round before, and dropped when it comes again
    wire.hear(wire.two, again)
    (got,) = wire.two.take_delivered()
    assert torch.equal(got.payload, frame.payload)
    wire.pass_time(0.01)
    assert wire.one.outbound.nbytes == 0


def test_what_was_lost_with_a_connection_comes_over_the_next_at_once(wire, make_frame):
    there, back = make_frame(250), make_frame(250, direction=Direction.BACKWARD)
    wire.two.expect(there.id, 250)
    wire.one.expect(back.id, 250)
    wire.one.send(there, wire.now_s)
    wire.two.send(back, wire.now_s)
    wire.said_by(wire.one), wire.said_by(wire.two)  # and nobody hears it
    wire.one.reconnected(0)
    wire.carry()  # at the same moment: no heartbeat is due
    assert [got.id for got in wire.two.take_delivered()] == [there.id]
    assert [got.id for got in wire.one.take_delivered()] == [back.id]


def test_hello_that_was_lost_with_a_connection_is_said_over_the_next_at_once():
    wire = Wire()
    wire.said_by(wire.one)
    wire.one.reconnected(0)
    wire.carry()
    assert wire.one.remote is wire.two.remote is End.OPEN


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


def test_request_that_comes_behind_the_peers_bye_holds_nobody_up(wire, make_frame):
    """Over another connection it may; the BYE says that nothing is waited for."""
    wire.one.send(make_frame(250), wire.now_s)
    wire.one.close(wire.now_s)
    wire.said_by(wire.one)
    bye, request = message(FrameKind.BYE), message(FrameKind.RESEND, (1).to_bytes(4, "little"))
    for each in (bye, request):
        header = unpack_header(each.header, each.payload, "")
        wire.one.receive(pack_header(header, each.payload), each.payload, wire.now_s)
    assert wire.one.is_settled
    assert wire.one.local is End.CLOSED


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
        (message(FrameKind.RESUME, ROUND_7, sequence=3), "is in round 7"),
        (message(FrameKind.HEARTBEAT, ROUND_7 + bytes(4), sequence=3), "is in round 7"),
        *((message(kind, b"abc"), "3 bytes with a ") for kind in (FrameKind.RESEND, FrameKind.RESUME)),
    ],
)
def test_message_that_cannot_be_is_a_protocol_error(wire, said, error):
    with pytest.raises(RemoteProtocolError, match=rf"link 1 to stage 1 \(10.0.0.1:7000\): .*{error}"):
        wire.hear(wire.two, [said])


def test_pieces_of_two_frames_mixed_up_are_a_protocol_error(wire):
    wire.hear(wire.two, [message(FrameKind.DATA, b"ab", sequence=1, total_nbytes=4)])
    with pytest.raises(RemoteProtocolError, match="expected byte 2"):
        wire.hear(wire.two, [message(FrameKind.DATA, b"ab", sequence=2, total_nbytes=5, offset=2)])


def test_data_before_hello_is_a_protocol_error():
    wire = Wire()
    with pytest.raises(RemoteProtocolError, match="DATA while connecting"):
        wire.hear(wire.two, [message(FrameKind.DATA, sequence=1)])


def test_delivery_of_an_older_epoch_is_dropped(wire):
    wire.hear(wire.two, [message(FrameKind.DATA, b"ab", sequence=1, total_nbytes=2, epoch=EPOCH - 1)])
    assert not wire.two.inbound.has_early


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


def test_no_more_is_under_way_than_the_window_holds(wire, make_frame):
    wire.one.send(make_frame(5000), wire.now_s)
    pieces = wire.said_by(wire.one)
    assert len(pieces) == LIMITS.window_nbytes // LIMITS.piece_nbytes
    wire.hear(wire.two, pieces)
    wire.pass_time(1.0)
    assert wire.one.outbound.nbytes == 0


def test_busy_time_runs_from_queueing_to_acknowledgement_by_direction(wire, make_frame):
    wire.one.send(make_frame(250, micro_batch=0), wire.now_s)
    wire.now_s += 1.0
    wire.one.send(make_frame(250, micro_batch=1), wire.now_s)
    pieces = wire.said_by(wire.one)
    wire.now_s += 2.0
    wire.hear(wire.two, pieces)
    wire.now_s += 1.0
    wire.two.handle_timer(wire.now_s)
    wire.hear(wire.one, wire.said_by(wire.two))
    wire.now_s += 5.0
    assert wire.one.outbound.busy.total_s(Direction.FORWARD, wire.now_s) == pytest.approx(4.0)
    assert wire.one.outbound.busy.total_s(Direction.BACKWARD, wire.now_s) == 0.0


def test_ack_says_when_each_piece_came_however_late_it_is_itself(wire, make_frame):
    """Three pieces that come 0.1, 0.2 and 0.3 s after they left; what acknowledges them needs another 5 s."""
    wire.one.send(make_frame(250), wire.now_s)
    left_s, pieces = wire.now_s, wire.said_by(wire.one)
    for piece in pieces:
        wire.now_s += 0.1
        wire.hear(wire.two, [piece])
    wire.two.handle_timer(wire.now_s)
    acks = wire.said_by(wire.two)
    assert kinds(acks) == [FrameKind.ACK]
    wire.now_s += 5.0
    wire.hear(wire.one, acks)
    times = [
        (p.taken_s - left_s, p.arrived_s - left_s, p.acked_s - left_s) for p in wire.one.outbound.take_piece_times()
    ]
    assert times == [pytest.approx((0.0, arrived_s, 5.3)) for arrived_s in (0.1, 0.2, 0.3)]


def test_heartbeat_is_told_apart_from_those_that_left_before_it_was_answered(wire):
    """The way is 5 s there and 1 s back, and a heartbeat leaves every 2 s."""
    beats, acks, left_s, start_s = [], [], {}, wire.now_s
    for _ in range(12):
        wire.now_s += 1.0
        wire.one.handle_timer(wire.now_s)
        for beat in wire.said_by(wire.one):
            left_s[wire.now_s] = None
            beats.append((wire.now_s + 5.0, beat))
        while beats and beats[0][0] <= wire.now_s:
            wire.hear(wire.two, [beats.pop(0)[1]])
            acks += [(wire.now_s + 1.0, ack) for ack in wire.said_by(wire.two)]
        while acks and acks[0][0] <= wire.now_s:
            wire.hear(wire.one, [acks.pop(0)[1]])
    seen = [beat for beat in wire.one.heartbeats.recent if beat.left_s > start_s]
    assert len(seen) == 3
    assert all(beat.left_s in left_s and beat.arrived_s - beat.left_s == pytest.approx(5.0) for beat in seen)


def test_pieces_that_only_a_request_to_send_again_accounts_for_are_in_no_figures(wire, make_frame):
    wire.one.send(make_frame(250), wire.now_s)
    first, _, third = wire.said_by(wire.one)
    wire.hear(wire.two, [first, third])
    (request,) = [m for m in wire.said_by(wire.two) if kinds([m]) == [FrameKind.RESEND]]
    wire.hear(wire.one, [request])
    assert wire.one.outbound.take_piece_times() == []
    wire.carry()
    wire.pass_time(1.0)
    assert [piece.is_again for piece in wire.one.outbound.take_piece_times()] == [True, True]


# Time


def test_silence_of_a_peer_that_others_know_to_be_lost_is_borne(wire):
    for end in (wire.one, wire.two):
        end.hold()
    wire.pass_time(10 * LIMITS.peer_timeout_s, carrying=False)
    assert wire.one.trouble(wire.now_s) == "the peer is lost, and will be replaced"
    wire.pass_time(1.0)  # what the old process still says makes no difference
    wire.pass_time(10 * LIMITS.peer_timeout_s, carrying=False)


def test_peer_that_never_came_is_not_lost():
    wire = Wire()
    wire.two.handle_timer(1e6)
    assert wire.two.timer_s == math.inf


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


def test_reason_for_leaving_reaches_the_peer_at_once(wire, make_frame):
    wire.one.send(make_frame(250), wire.now_s)
    wire.one.close(wire.now_s, reason="out of memory")
    with pytest.raises(PeerLostError, match=r"link 1 to stage 1 .*the peer ended it: out of memory"):
        wire.hear(wire.two, wire.said_by(wire.one))


def test_closed_end_sends_no_more(wire, make_frame):
    wire.one.close(wire.now_s)
    with pytest.raises(LocalProtocolError, match="this end is clos"):
        wire.one.send(make_frame(1), wire.now_s)


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
