"""A bound on connections of which nothing is known: real ones, accepted here."""

import os
import socket

import pytest
import zmq

from tahq.comm.zmq.gate import Connections


@pytest.fixture
def accepted():
    """accepted(): the two ends of one more connection, the near one as ZMQ has it, by its descriptor."""
    listener = socket.create_server(("127.0.0.1", 0))
    held = [listener]

    def accept() -> tuple[socket.socket, socket.socket]:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
        held.extend((near, far))
        return near, far

    yield accept
    for one in held:
        one.close()


def is_hung_up_on(far: socket.socket) -> bool:
    far.settimeout(0.2)
    try:
        return far.recv(1) == b""
    except TimeoutError:
        return False


@pytest.mark.parametrize("bounds", [{"most": 3}, {"most_of_one": 3}])
def test_beyond_the_bound_the_oldest_is_hung_up_on(accepted, bounds):
    connections = Connections(**bounds)
    ends = [accepted() for _ in range(5)]
    hung_up = [connections.accept(near.fileno()) for near, _ in ends]
    assert hung_up[:3] == [None] * 3
    assert [str(one) for one in hung_up[3:]] == ["{}:{}".format(*far.getsockname()) for _, far in ends[:2]]
    assert [is_hung_up_on(far) for _, far in ends] == [True, True, False, False, False]


def test_who_has_left_makes_room(accepted):
    connections = Connections(most=1)
    (first, far), (second, _) = accepted(), accepted()
    connections.accept(first.fileno())
    assert str(connections.forget(first.fileno())) == "{}:{}".format(*far.getsockname())
    assert connections.forget(first.fileno()) is None
    assert connections.accept(second.fileno()) is None


def test_number_that_is_somebody_elses_by_now_is_left_alone(accepted):
    connections = Connections(most=1)
    (first, _), (second, far), (third, _) = accepted(), accepted(), accepted()
    connections.accept(first.fileno())
    os.dup2(second.fileno(), first.fileno())  # which closes what had the number
    assert connections.accept(third.fileno()) is None
    assert not is_hung_up_on(far)


def test_connection_that_has_sent_a_message_is_not_counted():
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    dealer.connect(f"tcp://127.0.0.1:{port}")
    dealer.send(b"here")
    assert router.poll(5000)
    frame, _ = router.recv_multipart(copy=False)
    descriptor = frame.get(zmq.SRCFD)
    connections = Connections(most=1)
    connections.accept(descriptor)
    assert not connections.is_known(descriptor)
    connections.know(frame)
    assert connections.is_known(descriptor)
    other = socket.create_connection(("127.0.0.1", port))
    assert connections.accept(other.fileno()) is None
    dealer.send(b"still")
    assert router.poll(5000)
    other.close()
    context.destroy(linger=0)
