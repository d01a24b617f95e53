"""Links whose peer is another process: real sockets, frames from the log, and a past that is not believed."""

import socket
import time
from dataclasses import replace

import pytest
from support.processes import wait_until

from tahq.comm.link.frame import VOID, Direction, Frame, Purpose
from tahq.comm.link.frame_log import FrameLog
from tahq.comm.zmq.transport import Wanted
from tahq.errors import PeerLostError

SOON_S = 10.0


@pytest.fixture
def survivor(make_endpoint, tmp_path):
    return make_endpoint(1, frame_log=lambda link: FrameLog(tmp_path / f"link-{link}", link, 1 << 24))


def linked(survivor, peer, *, survivor_dials):
    """Both ends of link 1, connected."""
    theirs = peer.open_link(1, 1, "left", "" if survivor_dials else survivor.address)
    mine = survivor.open_link(1, 2, "right", peer.address if survivor_dials else "")
    survivor.wait_connected(SOON_S)
    peer.wait_connected(SOON_S)
    return mine, theirs


def relinked(survivor, successor, wanted, *, survivor_dials, epoch=2):
    survivor.relink(1, epoch, "right", successor.address if survivor_dials else "", wanted)
    theirs = successor.open_link(1, 1, "left", "" if survivor_dials else survivor.address)
    successor.wait_connected(SOON_S)
    return theirs


def same(frame, other):
    return frame.id == other.id and bytes(frame.payload.numpy()) == bytes(other.payload.numpy())


@pytest.mark.parametrize("survivor_dials", [False, True])
def test_new_process_gets_what_it_wants_and_no_more(make_endpoint, make_frame, survivor, survivor_dials, tmp_path):
    peer = make_endpoint(2)
    mine, theirs = linked(survivor, peer, survivor_dials=survivor_dials)
    frames = [make_frame(3000, step=step) for step in range(5)]
    for frame in frames:
        theirs.expect(frame.id, 3000)
        mine.send(frame)
        theirs.recv(SOON_S)
    peer.abort(PeerLostError("killed"))
    successor = make_endpoint(2, epoch=2)
    again = relinked(survivor, successor, Wanted(since=2, through=3), survivor_dials=survivor_dials)
    for frame in frames[2:]:
        again.expect(frame.id, 3000)
    assert same(again.recv(SOON_S), frames[2])
    assert same(again.recv(SOON_S), frames[3])
    with pytest.raises(TimeoutError):
        again.recv(0.2)
    assert survivor.has_log(1, 0)
    late = make_frame(3000, step=5)
    again.expect(late.id, 3000)
    mine.send(late)
    survivor.widen(1, None)
    assert same(again.recv(SOON_S), frames[4])
    assert same(again.recv(SOON_S), late)
    assert (tmp_path / "link-1").exists()
    survivor.close()
    assert not (tmp_path / "link-1").exists()


@pytest.mark.parametrize("survivor_dials", [False, True])
def test_what_was_posted_is_still_posted_and_what_was_delivered_is_not_again(
    make_endpoint, make_frame, survivor, survivor_dials
):
    peer = make_endpoint(2)
    mine, theirs = linked(survivor, peer, survivor_dials=survivor_dials)
    gradients = [make_frame(3000, micro_batch=k, direction=Direction.BACKWARD) for k in range(3)]
    for gradient in gradients:
        mine.expect(gradient.id, 3000)
    theirs.send(gradients[0])
    assert same(mine.recv(SOON_S), gradients[0])
    successor = make_endpoint(2, epoch=2)
    again = relinked(survivor, successor, Wanted(), survivor_dials=survivor_dials)
    for gradient in gradients:
        again.send(gradient)
    assert [mine.recv(SOON_S).id for _ in range(2)] == [gradient.id for gradient in gradients[1:]]
    with pytest.raises(TimeoutError):
        mine.recv(0.2)


def test_process_of_before_is_not_heard_any_more(make_endpoint, make_frame, survivor):
    peer = make_endpoint(2)
    mine, theirs = linked(survivor, peer, survivor_dials=False)
    frame = make_frame(3000, direction=Direction.BACKWARD)
    mine.expect(frame.id, 3000)
    successor = make_endpoint(2, epoch=2)
    again = relinked(survivor, successor, Wanted(), survivor_dials=False)
    fake = Frame(frame.id, frame.codec, frame.dtype, frame.shape, frame.payload.flip(0))
    theirs.send(fake)
    with pytest.raises(TimeoutError):
        mine.recv(0.3)
    again.send(frame)
    assert same(mine.recv(SOON_S), frame)


def test_evaluations_are_sent_again_from_the_step_on_at_which_one_is_under_way(make_endpoint, make_frame, survivor):
    peer = make_endpoint(2)
    mine, theirs = linked(survivor, peer, survivor_dials=False)
    frames = []
    for step in range(3):
        train = make_frame(100, step=step)
        frames += [train, Frame(train.id._replace(purpose=Purpose.EVAL), 3, train.dtype, train.shape, train.payload)]
    for frame in frames:
        theirs.expect(frame.id, 3000)
        mine.send(frame)
        theirs.recv(SOON_S)
    successor = make_endpoint(2, epoch=2)
    again = relinked(survivor, successor, Wanted(since=1, evaluations_since=2), survivor_dials=False)
    for frame in frames:
        again.expect(frame.id, 3000)
    assert [again.recv(SOON_S).id for _ in range(3)] == [frames[2].id, frames[4].id, frames[5].id]
    with pytest.raises(TimeoutError):
        again.recv(0.2)


def test_peer_that_leaves_without_a_word_is_waited_for_and_one_that_says_goodbye_is_gone(
    make_endpoint, make_frame, survivor
):
    peer = make_endpoint(2)
    mine, _ = linked(survivor, peer, survivor_dials=False)
    frame = make_frame(3000, direction=Direction.BACKWARD)
    mine.expect(frame.id, 3000)
    peer.abandon()
    with pytest.raises(TimeoutError):
        mine.recv(0.5)
    successor = make_endpoint(2, epoch=2)
    relinked(survivor, successor, Wanted(), survivor_dials=False).send(frame)
    assert same(mine.recv(SOON_S), frame)
    successor.close()
    with pytest.raises(PeerLostError, match="the peer has closed it"):
        mine.recv(SOON_S)


def test_other_links_go_on_while_a_lost_peer_is_dialled_and_given_up(make_endpoint, make_frame):
    """ZMQ's thread serves all connections: it must not wait for events of a connection that is closed meanwhile."""
    neighbour, survivor = make_endpoint(0, connections=8), make_endpoint(1, connections=8)
    mine = survivor.open_link(0, 0, "left", neighbour.address)
    theirs = neighbour.open_link(0, 1, "survivor", "")
    neighbour.wait_connected(SOON_S)
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = f"127.0.0.1:{server.getsockname()[1]}"
    survivor.open_link(1, 2, "right", gone)
    for number in range(1, 41):
        time.sleep(0.045 + 0.0005 * (number % 10))  # ZMQ dials again after 0.05 s
        survivor.relink(1, 1 + number, "right", gone, Wanted())
        frame = make_frame(8, step=number)
        theirs.expect(frame.id, 8)
        mine.send(frame)
        assert same(theirs.recv(SOON_S), frame)


def test_abandoned_step_is_void_where_its_frames_have_not_come_and_those_that_come_late_are_dropped(
    make_endpoint, make_frame, survivor
):
    """Posted before and after, begun, and whole before it is posted; other steps and evaluations are not touched."""
    peer = make_endpoint(2)
    mine, theirs = linked(survivor, peer, survivor_dials=True)
    came, posted, later, other = (make_frame(3000, n, step=step) for n, step in enumerate((4, 4, 4, 5)))
    evaluation = replace(other, id=posted.id._replace(purpose=Purpose.EVAL))
    theirs.send(came)
    wait_until(lambda: bool(mine.end.session.inbound.early), SOON_S, "the first frame")
    for frame in (posted, other, evaluation):
        mine.expect(frame.id, 3000)
    survivor.abandon_step(1, 4)
    void = mine.recv(SOON_S)
    assert (void.id, void.codec, void.payload.numel()) == (posted.id, VOID, 0)
    mine.expect(later.id, 3000)
    assert mine.recv(SOON_S).codec == VOID
    mine.expect(came.id, 3000)
    assert same(mine.recv(SOON_S), came)
    for frame in (posted, later, other, evaluation):
        theirs.send(frame)
    assert same(mine.recv(SOON_S), other)
    assert same(mine.recv(SOON_S), evaluation)
    with pytest.raises(TimeoutError):
        mine.recv(0.1)
    assert not mine.end.session.inbound.early
