import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from tahq.comm.control import Abort, Bye, Heartbeat, Join, Message, Ready, Start, decode_message, encode_message
from tahq.comm.control_channel import ControlClient, ControlServer
from tahq.comm.control_numbering import Numbering
from tahq.comm.shaping import Shaping
from tahq.errors import LocalProtocolError, PeerLostError, RemoteProtocolError, UserError

SOON_S = 10.0
JOIN = Join(1, "0.1", "host", 4711)


@pytest.fixture
def server() -> Iterator[ControlServer]:
    server = ControlServer("127.0.0.1:0", heartbeat_s=0.1)
    yield server
    server.close(linger_s=0.1)


@pytest.fixture
def connect() -> Iterator[Callable[..., ControlClient]]:
    clients = []

    def connect(peer: str, **changes) -> ControlClient:
        settings = {"shaping": Shaping(), "peer_timeout_s": 0.6, "heartbeat_s": 0.1}
        clients.append(ControlClient(peer, "stage 1", **(settings | changes)))
        return clients[-1]

    yield connect
    for client in clients:
        client.close(linger_s=0.1)


def hear(server: ControlServer, kind: type[Message]) -> tuple[bytes, Message]:
    """The next message of this kind."""
    deadline_s = time.monotonic() + SOON_S
    while time.monotonic() < deadline_s:
        for identity, message in server.poll(0.1):
            if isinstance(message, kind):
                return identity, message
    raise AssertionError(f"no {kind.__name__} came")


def test_messages_go_both_ways_in_order(server, connect):
    client = connect(server.address)
    client.send(JOIN)
    identity, message = hear(server, Join)
    assert message == JOIN
    for step in range(20):
        server.send(identity, Start(step))
    assert [client.recv(SOON_S) for _ in range(20)] == [Start(step) for step in range(20)]
    assert client.poll() is None


def test_client_may_be_there_before_the_server(connect):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    client = connect(address)
    client.send(JOIN)
    time.sleep(0.1)
    server = ControlServer(address)
    assert hear(server, Join)[1] == JOIN
    server.close()


def test_recv_times_out_and_can_be_called_again(server, connect):
    client = connect(server.address)
    client.send(JOIN)
    identity, _ = hear(server, Join)
    with pytest.raises(TimeoutError, match="coordinator at 127"):
        client.recv(0.02)
    server.send(identity, Start(3))
    assert client.recv(SOON_S) == Start(3)


def test_coordinator_that_is_not_there_is_lost_after_the_connect_timeout(connect):
    lost = threading.Event()
    client = connect("127.0.0.1:9", connect_timeout_s=0.3, on_lost=lambda error: lost.set())
    with pytest.raises(PeerLostError, match=r"coordinator at 127.0.0.1:9: no answer within 0\.3 s; check"):
        client.recv(SOON_S)
    assert lost.wait(1.0)
    with pytest.raises(PeerLostError):
        client.send(JOIN)


def test_coordinator_that_falls_silent_is_lost(server, connect):
    client = connect(server.address)
    client.send(JOIN)
    hear(server, Join)
    started_s = time.monotonic()
    with pytest.raises(PeerLostError, match=rf"coordinator at {server.address}: no sign of life for 0\.6 s"):
        client.recv(SOON_S)
    assert time.monotonic() - started_s < 1.5


def test_polling_keeps_the_workers_content(server, connect):
    client = connect(server.address)
    client.send(JOIN)
    until_s = time.monotonic() + 1.5
    while time.monotonic() < until_s:
        server.poll(1.0)
    assert client.poll() is None


def test_abort_is_noticed_without_anyone_asking(server, connect):
    seen = threading.Event()
    client = connect(server.address, on_abort=lambda abort: seen.set())
    client.send(JOIN)
    identity, _ = hear(server, Join)
    server.send(identity, Abort("stage 3 was lost", 3))
    assert seen.wait(SOON_S)
    assert client.aborted == Abort("stage 3 was lost", 3)
    assert client.recv(SOON_S) == client.aborted


def test_silence_after_bye_is_no_loss(server, connect):
    client = connect(server.address)
    client.send(JOIN)
    identity, _ = hear(server, Join)
    server.send(identity, Bye())
    assert client.recv(SOON_S) == Bye()
    with pytest.raises(TimeoutError):
        client.recv(1.0)


def test_close_sends_what_is_queued(server, connect):
    client = connect(server.address, shaping=Shaping(delay_s=0.05))
    for stage in range(50):
        client.send(Ready(stage))
    client.close()
    client.close()
    heard: list[Message] = []
    deadline_s = time.monotonic() + SOON_S
    while len(heard) < 50 and time.monotonic() < deadline_s:
        heard += [message for _, message in server.poll(0.1) if isinstance(message, Ready)]
    assert heard == [Ready(stage) for stage in range(50)]
    with pytest.raises(LocalProtocolError, match="closed on this side"):
        client.send(JOIN)


def test_delay_holds_both_ways_and_may_change(server, connect):
    client = connect(server.address)
    client.send(JOIN)
    identity, _ = hear(server, Join)
    client.set_timing(shaping=Shaping(delay_s=0.05), peer_timeout_s=5.0, heartbeat_s=0.2)
    trips_s = []
    for stage in range(8):
        started_s = time.monotonic()
        client.send(Ready(stage))
        hear(server, Ready)
        server.send(identity, Start(stage))
        client.recv(SOON_S)
        trips_s.append(time.monotonic() - started_s)
    assert 0.1 <= min(trips_s) < 0.105


def test_port_in_use_is_one_line_for_the_user(server):
    with pytest.raises(
        UserError, match=rf"coordinator: cannot listen on {server.address}: Address already in use"
    ) as e:
        ControlServer(server.address)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("peer", ["localhost", "host:port", "host:70000", ":7000", ""])
def test_address_that_is_none_is_a_user_error(peer):
    with pytest.raises(UserError, match="expected host:port"):
        ControlClient(peer, "x", shaping=Shaping(), peer_timeout_s=1.0, heartbeat_s=1.0)


# Strangers, and what the network does


@pytest.fixture
def dealer(server) -> Iterator[zmq.Socket]:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://{server.address}")
    yield dealer
    context.destroy(linger=0)


def test_garbage_from_strangers_is_dropped_with_one_line_in_the_log(server, connect, dealer, caplog):
    caplog.set_level(logging.WARNING, "tahq.comm")
    number = Numbering().next_number()
    for parts in ([b"x"], [b"x", encode_message(JOIN)], [number, b"y"], [b""] * 7, [number, encode_message(JOIN), b""]):
        dealer.send_multipart(parts)
    client = connect(server.address)
    client.send(JOIN)
    assert hear(server, Join)[0].startswith(b"stage 1#")
    assert server.poll(0.2) is not None
    assert len(caplog.records) == 1
    assert "dropped a control message: a stranger" in caplog.text


def test_newcomer_is_answered_at_once(server, dealer):
    dealer.send_multipart([Numbering().next_number(), encode_message(JOIN)])
    hear(server, Join)
    assert dealer.poll(1000)
    answer = decode_message(dealer.recv_multipart()[1], "coordinator")
    assert isinstance(answer, Heartbeat)
    assert (answer.stage, answer.held_s) == (-1, -1.0)  # it has heard no heartbeat yet
    assert abs(answer.sent_s - time.monotonic()) < SOON_S


def test_worker_of_which_messages_were_lost_is_told_and_not_heard_any_more(server, dealer, caplog):
    numbers = Numbering()
    for stage in range(5):
        parts = [numbers.next_number(), encode_message(Ready(stage))]
        if stage != 2:
            dealer.send_multipart(parts)
    heard = []
    for _ in range(5):
        heard += [message for _, message in server.poll(0.05)]
    assert heard == [Ready(0), Ready(1)]
    replies = []
    while dealer.poll(100):
        replies.append(dealer.recv_multipart()[1])
    lost = "messages 3 to 3 were lost on the way"
    assert any(lost.encode() in reply for reply in replies)
    assert lost in caplog.text


@pytest.fixture
def router() -> Iterator[zmq.Socket]:
    context = zmq.Context()
    yield context.socket(zmq.ROUTER)
    context.destroy(linger=0)


def test_coordinator_of_which_messages_were_lost_is_given_up(connect, router):
    port = router.bind_to_random_port("tcp://127.0.0.1")
    client = connect(f"127.0.0.1:{port}")
    identity = router.recv_multipart()[0]
    numbers = Numbering()
    for step in (1, 2, 3):
        parts = [identity, numbers.next_number(), encode_message(Start(step))]
        if step != 2:
            router.send_multipart(parts)
    assert client.recv(SOON_S) == Start(1)
    with pytest.raises(PeerLostError, match=f"coordinator at 127.0.0.1:{port}: control messages 2 to 2 were lost"):
        client.recv(SOON_S)


def test_sending_to_a_worker_that_has_gone_is_no_error(server):
    server.send(b"nobody#1", Start(1))


def test_numbers_count_from_one_without_gaps():
    sender, receiver = Numbering(), Numbering()
    first, second, third = (sender.next_number() for _ in range(3))
    receiver.check(first, "peer")
    with pytest.raises(PeerLostError, match="peer: control messages 2 to 2 were lost"):
        receiver.check(third, "peer")
    receiver.check(second, "peer")
    with pytest.raises(RemoteProtocolError, match="peer: sent control message 1 again; expected 3"):
        receiver.check(first, "peer")
    with pytest.raises(RemoteProtocolError, match="number of 3 bytes"):
        receiver.check(b"abc", "peer")


def test_clock_of_a_worker_is_known_to_within_half_a_round_trip(connect):
    """The coordinator's clock is an hour ahead of the worker's, and messages take 10 ms each way."""
    server = ControlServer("127.0.0.1:0", heartbeat_s=0.05, clock=lambda: time.monotonic() + 3600)
    client = connect(server.address, shaping=Shaping(delay_s=0.01))
    client.send(JOIN)
    identity, _ = hear(server, Join)
    assert server.clock_offset(identity) is None
    deadline_s = time.monotonic() + SOON_S
    while time.monotonic() < deadline_s and server.clock_offset(identity) is None:
        server.poll(0.1)
    offset = server.clock_offset(identity)
    assert offset is not None
    assert abs(offset.offset_s + 3600) <= offset.error_s
    assert 0.01 <= offset.error_s < 1.0
    assert server.clock_offset(b"a stranger") is None
    server.close(linger_s=0.1)
