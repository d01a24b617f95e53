"""The ends of a group link against a peer that says what it must not: an error that names it, never a crash."""

from functools import partial

import pytest
import torch

from tahq.comm.group.ends import GroupMessage, GroupReceiver, GroupSender, checksum_of, unpack_message
from tahq.comm.link.frame import CPU, FrameKind, header_of, pack_header
from tahq.comm.link.spec import SessionLimits
from tahq.errors import RemoteProtocolError

PEER = "link 1 to stage 1 (peer)"


class MemoryPath:
    """A PayloadPath whose payloads the test puts into `sent`."""

    device = CPU

    def __init__(self):
        self.sent = []

    def mark(self):
        return None

    def send(self, payload, mark):
        self.sent.append(payload)

    def allocate(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def post(self, buffer):
        return lambda: buffer.copy_(self.sent.pop(0))


class Receiving:
    """A receiver that has posted 100 bytes as id 0, and what it said and delivered."""

    def __init__(self, id):
        self.path, self.said, self.delivered = MemoryPath(), [], []
        self.end = GroupReceiver(self.path, self.said.append, self.delivered.append, PEER, run_id=77)
        self.end.expect(id, 100)

    def take(self, payload):
        self.path.sent.append(payload)
        self.end.end()
        self.end.run()


@pytest.fixture
def receiving(make_id):
    return Receiving(make_id(0))


def announcement(frame, **changes):
    header = header_of(frame, 0, 0)._replace(**changes)
    return pack_header(header, b"") + checksum_of(frame.payload).to_bytes(4, "little")


@pytest.mark.parametrize("changes", [{"offset": 1}, {"kind": FrameKind.HEARTBEAT}, {"run": 78}], ids=str)
def test_announcement_of_another_kind_or_run_is_a_protocol_error(receiving, make_frame, changes):
    frame = make_frame(100)
    if "run" in changes:
        changes = {"id": frame.id._replace(**changes)}
    with pytest.raises(RemoteProtocolError, match=r"link 1 to stage 1 \(peer\): (announced|sent)"):
        receiving.end.answer(announcement(frame, **changes))


@pytest.mark.parametrize("nbytes", [0, 3, 40, 104])
def test_damaged_or_short_announcement_is_a_protocol_error(receiving, make_frame, nbytes):
    message = bytearray(announcement(make_frame(100)))
    message[80] ^= 1
    with pytest.raises(RemoteProtocolError):
        receiving.end.answer(bytes(message[:nbytes]))


@pytest.mark.parametrize("nbytes", [101, 2**63])
def test_no_memory_is_taken_for_more_than_was_posted(receiving, make_frame, nbytes):
    with pytest.raises(RemoteProtocolError, match="at most 100 were expected"):
        receiving.end.answer(announcement(make_frame(100), total_nbytes=nbytes))


def test_frame_without_room_is_asked_for_once_it_is_posted_and_those_after_it_wait(monkeypatch, make_id, make_frame):
    monkeypatch.setattr("tahq.comm.group.ends.SessionLimits", partial(SessionLimits, unexpected_nbytes=1000))
    receiving, asked = Receiving(make_id(0)), bytes([GroupMessage.SEND])
    for number, nbytes in enumerate((400, 400, 400, 100), 1):
        receiving.end.answer(announcement(make_frame(nbytes, micro_batch=number % 4)))
    assert receiving.said == [asked] * 2
    receiving.end.expect(make_id(3), 400)
    receiving.end.go_on()
    assert receiving.said == [asked] * 4
    for number in range(4, 20):
        receiving.end.answer(announcement(make_frame(400, micro_batch=number)))
    with pytest.raises(RemoteProtocolError, match="more than 16 frames ahead"):
        receiving.end.answer(announcement(make_frame(400, micro_batch=20)))


def test_damaged_payload_is_a_protocol_error(receiving, make_frame):
    receiving.end.answer(announcement(make_frame(100)))
    damaged = make_frame(100).payload
    damaged[7] ^= 1
    with pytest.raises(RemoteProtocolError, match="its checksum does not match"):
        receiving.take(damaged)


def test_frame_is_asked_for_once_and_acknowledged(receiving, make_frame):
    frame = make_frame(100)
    receiving.end.answer(announcement(frame, shape=(2**32 - 1,) * 4, dtype=torch.int64))
    receiving.take(frame.payload)
    (got,) = receiving.delivered
    assert (got.shape, got.dtype) == ((2**32 - 1,) * 4, torch.int64)
    assert torch.equal(got.payload, frame.payload)
    receiving.end.answer(announcement(frame))
    assert b"".join(receiving.said) == bytes([GroupMessage.SEND, GroupMessage.RECEIVED, GroupMessage.HAVE_IT])


@pytest.mark.parametrize("message", [b"", b"\xff", bytes([5])])
def test_message_of_an_unknown_kind_is_a_protocol_error(message):
    with pytest.raises(RemoteProtocolError, match="link 1 to stage 1"):
        unpack_message(message, PEER)


@pytest.fixture
def said():
    return []


@pytest.fixture
def sender(said):
    return GroupSender(MemoryPath(), said.append, PEER)


def test_receipt_of_a_frame_that_was_not_sent_is_a_protocol_error(sender, make_frame):
    sender.send(make_frame(100))
    sender.answers.put(GroupMessage.RECEIVED)
    with pytest.raises(RemoteProtocolError, match=r"link 1 to stage 1 \(peer\): answered RECEIVED"):
        sender.run()


def test_sender_is_busy_from_the_queue_to_the_receipt(sender, said, make_frame):
    frame = make_frame(100)
    sender.send(frame)
    sender.close()
    for answer in (GroupMessage.SEND, GroupMessage.RECEIVED):
        assert sender.queued_nbytes == 100
        sender.answers.put(answer)
    sender.run()
    assert len(said) == 1
    assert sender.queued_nbytes == 0
    spent_s = sender.busy.total_s(frame.id.direction, 0.0)
    assert 0.0 < spent_s == sender.busy.total_s(frame.id.direction, 1e9)


def test_no_more_is_announced_than_the_window_holds(sender, said, make_frame):
    for number in range(20):
        sender.send(make_frame(10, micro_batch=number))
    sender.answers.put(None)
    sender.run()
    assert len(said) == 16
