"""Links of several connections between endpoints on loopback: who is let in, and what happens when one breaks."""

import pytest
import torch
import zmq

from tahq.comm.link.frame import Direction
from tahq.errors import PeerLostError, TahqError

SOON_S = 10.0


def join(make_endpoint, **changes):
    lower, upper = make_endpoint(1, **changes), make_endpoint(2, **changes)
    sender, receiver = lower.open_link(1, 2, "upper", upper.address), upper.open_link(1, 1, "lower", "")
    for endpoint in (lower, upper):
        endpoint.wait_connected(SOON_S)
    return lower, sender, receiver


@pytest.mark.parametrize("connections", [2, 16])
def test_frames_cross_in_both_directions(connections, make_endpoint, make_frame):
    _, lower, upper = join(make_endpoint, connections=connections)
    ways = {Direction.FORWARD: (lower, upper), Direction.BACKWARD: (upper, lower)}
    frames = {way: [make_frame(300_000 * i, i, way) for i in range(8)] for way in Direction}
    for way, (source, target) in ways.items():
        for frame in frames[way]:
            target.expect(frame.id, frame.payload.numel())
            source.send(frame)
    for way, (_, target) in ways.items():
        assert all(torch.equal(target.recv(SOON_S).payload, frame.payload) for frame in frames[way])


def test_pieces_are_spread_over_the_connections(make_endpoint, make_frame, monkeypatch):
    lower, sender, receiver = join(make_endpoint, connections=4)
    (wire,) = lower._loop._wires
    used, put = [], type(wire).put
    monkeypatch.setattr(type(wire), "put", lambda wire, out: (used.append(out.connection), put(wire, out)))
    frame = make_frame(4_000_000)
    receiver.expect(frame.id, 4_000_000)
    sender.send(frame)
    assert torch.equal(receiver.recv(SOON_S).payload, frame.payload)
    assert set(used) == {0, 1, 2, 3}


def test_peer_with_another_number_of_connections_is_refused_on_both_sides(make_endpoint, caplog):
    upper, lower = make_endpoint(2, connections=2), make_endpoint(1, connections=3)
    upper.open_link(1, 1, "lower", "")
    lower.open_link(1, 2, "upper", upper.address)
    with pytest.raises(TahqError, match=r"refused.*connections.*3\); expected .* 2\)"):
        lower.wait_connected(SOON_S)
    assert "link 1 to stage 1 (lower)" in caplog.text


def test_second_peer_is_refused_and_the_first_stays(make_endpoint, make_frame):
    upper = make_endpoint(2, connections=2)
    receiver = upper.open_link(1, 1, "lower", "")
    first, second = make_endpoint(1, connections=2), make_endpoint(1, connections=2)
    sender = first.open_link(1, 2, "upper", upper.address)
    first.wait_connected(SOON_S)
    second.open_link(1, 2, "upper", upper.address)
    with pytest.raises(PeerLostError, match="connected already"):
        second.wait_connected(SOON_S)
    frame = make_frame(500_000)
    receiver.expect(frame.id, 500_000)
    sender.send(frame)
    assert torch.equal(receiver.recv(SOON_S).payload, frame.payload)


def test_link_that_loses_one_of_its_connections_is_lost(make_endpoint, make_frame):
    lower, sender, receiver = join(make_endpoint, connections=3, peer_timeout_s=1.0, heartbeat_s=0.1)
    (wire,) = lower._loop._wires
    endpoint = wire.sockets[1].getsockopt_string(zmq.LAST_ENDPOINT)
    lower._loop.submit(None, lambda: wire.sockets[1].disconnect(endpoint))
    frame = make_frame(2_000_000)
    receiver.expect(frame.id, 2_000_000)
    sender.send(frame)
    # Whichever end notices first tells the other.
    with pytest.raises(PeerLostError, match=r"link 1 to stage 1 \(lower\): .*(no sign of life|messages .* lost)"):
        receiver.recv(SOON_S)
    with pytest.raises(PeerLostError, match=r"link 1 to stage 2"):
        sender.recv(SOON_S)
