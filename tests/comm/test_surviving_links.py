"""Links over real sockets that are reset, or get no answer for a while: nothing is lost and nothing comes twice."""

import time

import pytest
import torch
from support.breaking_proxy import BreakingProxy

from tahq.comm.link.frame import Direction

NBYTES = 100_000
COUNT = 300
SOON_S = 30.0


@pytest.fixture
def joined(make_endpoint):
    """joined(**what differs): a proxy, and both ends of a link that goes through it."""
    proxies = []

    def join(**changes):
        upper = make_endpoint(1, **changes)
        proxies.append(BreakingProxy(upper.address))
        lower = make_endpoint(0, bind="", **changes)
        ends = lower.open_link(0, 1, "upper", proxies[-1].address), upper.open_link(0, 0, "lower", "")
        lower.wait_connected(SOON_S)
        upper.wait_connected(SOON_S)
        return proxies[-1], *ends

    yield join
    for proxy in proxies:
        proxy.close()


def frames(make_frame, direction):
    return [make_frame(NBYTES, number, direction) for number in range(COUNT)]


def post(link, expected):
    for frame in expected:
        link.expect(frame.id, NBYTES)


def check_next(link, expected):
    got = link.recv(SOON_S)
    assert got.id == expected.id
    assert torch.equal(got.payload, expected.payload)


@pytest.mark.parametrize("connections", [1, 3])
def test_nothing_is_lost_when_connections_are_reset(joined, make_frame, connections):
    proxy, lower, upper = joined(connections=connections)
    forward, backward = (frames(make_frame, direction) for direction in Direction)
    post(upper, forward)
    post(lower, backward)
    for one, other in zip(forward, backward, strict=True):
        lower.send(one)
        upper.send(other)
    for number in range(COUNT):
        if number % 75 == 10:
            proxy.reset()
        check_next(upper, forward[number])
        check_next(lower, backward[number])
    assert proxy.num_connections > connections


@pytest.mark.parametrize("connections", [1, 3])
def test_what_a_reset_has_lost_comes_again_without_waiting_for_a_heartbeat(joined, make_frame, connections):
    proxy, lower, upper = joined(peer_timeout_s=300.0, heartbeat_s=2 * SOON_S, connections=connections)
    forward, backward = (make_frame(NBYTES, 0, direction) for direction in Direction)
    upper.expect(forward.id, NBYTES)
    lower.expect(backward.id, NBYTES)
    proxy.cut()
    lower.send(forward)
    upper.send(backward)
    time.sleep(0.3)  # they are on their way
    proxy.reset()
    proxy.heal()
    check_next(upper, forward)
    check_next(lower, backward)


def test_link_that_gets_no_answer_goes_on_soon_after_it_does(joined, make_frame, caplog):
    proxy, lower, upper = joined(peer_timeout_s=4.0, heartbeat_s=0.25)
    forward = frames(make_frame, Direction.FORWARD)
    post(upper, forward)
    for frame in forward[:200]:
        lower.send(frame)
    check_next(upper, forward[0])
    proxy.cut()
    for frame in forward[200:]:
        lower.send(frame)
    time.sleep(3.0)  # longer than ZMQ waits for an answer on a connection, here 2 s
    proxy.heal()
    healed_s = time.monotonic()
    for frame in forward[1:]:
        check_next(upper, frame)
    assert time.monotonic() - healed_s < 5.0
    said = [record.getMessage() for record in caplog.records]
    assert any("link 0 to stage 1" in text and "degraded: no sign of life from the peer" in text for text in said)
    assert any("link 0 to stage 1" in text and "connected again after" in text for text in said)
