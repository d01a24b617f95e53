"""One lane of a group against a peer that says what it must not: an error that names it, never a crash."""

import dataclasses
import queue
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tahq.comm.group.gloo_group import GlooGroup
from tahq.comm.group.lane import ANNOUNCEMENT_NBYTES, Answer, Lane, checksum_of, header_of, pack_announcement
from tahq.comm.group.lane_ends import GroupReceiver, GroupSender
from tahq.comm.link.frame import FrameHeader
from tahq.comm.link.spec import PeerIdentity
from tahq.errors import RemoteProtocolError

SOON_S = 20.0
IDENTITY = PeerIdentity(77, 1, 2, "c0ffee")


@pytest.fixture
def groups():
    """Both ends of a group, rank 0 first."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda rank: GlooGroup(store, "lane", rank, "127.0.0.1", SOON_S, SOON_S), (0, 1)))
    yield made
    for group in made:
        group.abort()


@pytest.fixture
def scene(groups):
    return Scene(*groups)


class Scene:
    """The test is one end of a lane; what happens at the other, which is tahq's, comes into `events`."""

    def __init__(self, mine: GlooGroup, other: GlooGroup) -> None:
        self.mine = mine
        self.events: queue.Queue = queue.Queue()
        self._lane = Lane(other, other, IDENTITY, 1, "link 1 to stage 1 (peer)", dist.HashStore())

    def receiver(self) -> GroupReceiver:
        return GroupReceiver(self._lane, self.events.put, self.events.put, self.events.put)

    def sender(self) -> GroupSender:
        return GroupSender(self._lane, self.events.put, self.events.put)

    def error(self) -> RemoteProtocolError:
        event = self.events.get(timeout=SOON_S)
        assert isinstance(event, RemoteProtocolError), event
        return event

    def wait_answer(self) -> int:
        message = torch.empty(1, dtype=torch.uint8)
        self.mine.wait_answer(message)
        return int(message)

    def answer(self, number: int) -> None:
        self.mine.answer(torch.tensor([number], dtype=torch.uint8))


def announcement(frame, sequence: int = 1, **changes) -> torch.Tensor:
    header: FrameHeader = dataclasses.replace(header_of(frame, IDENTITY, 1, sequence), **changes)
    return pack_announcement(header, checksum_of(frame.payload))


@pytest.mark.parametrize(
    "changes",
    [{"epoch": 2}, {"link": 2}, {"sequence": 2}, {"sequence": 0}, {"offset": 1}, {"kind": 3}, {"kind": 1}],
    ids=str,
)
def test_announcement_that_is_not_the_next_of_this_link_is_a_protocol_error(scene, make_frame, changes):
    scene.receiver()
    frame = make_frame(100)
    scene.mine.announce(announcement(frame, **changes))
    assert "link 1 to stage 1 (peer): " in str(scene.error())


def test_damaged_announcement_is_a_protocol_error(scene, make_frame):
    scene.receiver()
    message = announcement(make_frame(100))
    message[80] ^= 1
    scene.mine.announce(message)
    assert "checksum" in str(scene.error())


@pytest.mark.parametrize("nbytes", [101, 2**63])
def test_no_memory_is_taken_for_more_than_was_posted(scene, make_frame, make_id, nbytes):
    scene.receiver().expect(make_id(0), 100)
    scene.mine.announce(announcement(make_frame(100), total_nbytes=nbytes))
    assert "at most 100 were expected" in str(scene.error())


def test_frame_that_nobody_posted_is_kept_up_to_the_bound_only(scene, make_frame):
    scene.receiver()
    scene.mine.announce(announcement(make_frame(100), total_nbytes=2**40))
    assert "unexpected frames" in str(scene.error())


def test_damaged_payload_is_a_protocol_error(scene, make_frame, make_id):
    scene.receiver().expect(make_id(0), 100)
    frame = make_frame(100)
    scene.mine.announce(announcement(frame))
    assert scene.wait_answer() == Answer.SEND
    frame.payload[7] ^= 1
    scene.mine.send(frame.payload)
    assert "its checksum does not match" in str(scene.error())


def test_shape_and_dtype_that_the_payload_does_not_have_are_passed_on_as_said(scene, make_frame, make_id):
    scene.receiver().expect(make_id(0), 100)
    frame = make_frame(100)
    scene.mine.announce(announcement(frame, shape=(2**32 - 1,) * 4, dtype=torch.int64))
    assert scene.wait_answer() == Answer.SEND
    scene.mine.send(frame.payload)
    got = scene.events.get(timeout=SOON_S)
    assert (got.shape, got.dtype) == ((2**32 - 1,) * 4, torch.int64)
    assert torch.equal(got.payload, frame.payload)


def test_frame_that_was_delivered_is_not_sent_again(scene, make_frame, make_id):
    scene.receiver().expect(make_id(0), 100)
    frame = make_frame(100)
    scene.mine.announce(announcement(frame))
    scene.wait_answer()
    scene.mine.send(frame.payload)
    assert scene.wait_answer() == Answer.RECEIVED
    scene.mine.announce(announcement(frame, sequence=2))
    assert scene.wait_answer() == Answer.HAVE_IT


@pytest.mark.parametrize("number", [Answer.RECEIVED, 0, 255])
def test_answer_that_is_none_is_a_protocol_error(scene, make_frame, number):
    scene.sender().send(make_frame(100))
    announced = torch.empty(ANNOUNCEMENT_NBYTES, dtype=torch.uint8)
    scene.mine.post_announcement(announced)()
    scene.answer(number)
    assert "link 1 to stage 1 (peer): answered" in str(scene.error())


def test_sender_is_busy_from_the_queue_to_the_receipt(scene, make_frame):
    sender, frame = scene.sender(), make_frame(100)
    sender.send(frame)
    scene.mine.post_announcement(torch.empty(ANNOUNCEMENT_NBYTES, dtype=torch.uint8))()
    payload = torch.empty(100, dtype=torch.uint8)
    arrived = scene.mine.post(payload)
    scene.answer(Answer.SEND)
    arrived()
    assert torch.equal(payload, frame.payload)
    assert sender.queued_nbytes == 100
    scene.answer(Answer.RECEIVED)
    sender.close()
    scene.mine.post_announcement(torch.empty(ANNOUNCEMENT_NBYTES, dtype=torch.uint8))()
    assert sender.queued_nbytes == 0
    spent_s = sender.busy_s(frame.id.direction)
    assert 0.0 < spent_s == sender.busy_s(frame.id.direction)
    scene.answer(Answer.RECEIVED)
    assert sender.thread.join(SOON_S)


def test_thread_that_waits_is_woken_by_an_abort(groups, scene):
    receiver = scene.receiver()
    groups[1].abort()
    assert all(thread.join(SOON_S) for thread in receiver.threads)
    assert "timeout" in scene.events.get(timeout=SOON_S)
