import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from tahq.comm.control.channel import ControlClient, ControlServer
from tahq.comm.control.encoding import decode_message, encode_message
from tahq.comm.control.messages import Abort, Bye, Heartbeat, Join, Message, Ready, Start
from tahq.comm.control.numbering import Numbering
from tahq.comm.link.shaping import Shaping
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
    client.set_timing(shaping=Shaping(delay_s=0.05), peer_timeout_s=5.0, heartbeat_s=0.2, give_up_s=5.0)
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
    number, _ = Numbering().wrap(b"")
    for parts in ([b"x"], [b"x", encode_message(JOIN)], [number, b"y"], [b""] * 7, [number, encode_message(JOIN), b""]):
        dealer.send_multipart(parts)
    client = connect(server.address)
    client.send(JOIN)
    assert hear(server, Join)[0].startswith(b"stage 1#")
    assert server.poll(0.2) is not None
    assert len(caplog.records) == 1
    assert "dropped a control message: a stranger" in caplog.text


def test_newcomer_is_answered_at_once(server, dealer):
    dealer.send_multipart(Numbering().wrap(encode_message(JOIN)))
    hear(server, Join)
    assert dealer.poll(1000)
    answer = decode_message(dealer.recv_multipart()[1], "coordinator")
    assert isinstance(answer, Heartbeat)
    assert (answer.stage, answer.held_s) == (-1, -1.0)  # it has heard no heartbeat yet
    assert abs(answer.sent_s - time.monotonic()) < SOON_S


def test_messages_of_a_worker_that_were_lost_are_asked_for_and_heard_in_order(server, dealer):
    numbers = Numbering()
    for stage in range(5):
        parts = numbers.wrap(encode_message(Ready(stage)))
        if stage != 2:
            dealer.send_multipart(parts)
    heard = []
    for _ in range(10):
        heard += [message for _, message in server.poll(0.05)]
        while dealer.poll(0):
            head, _ = dealer.recv_multipart()
            numbers.take(head, "coordinator")
        for again in numbers.again():
            dealer.send_multipart(again)
    assert heard == [Ready(stage) for stage in range(5)]


def test_worker_of_a_run_before_is_told_and_not_heard_any_more(server, dealer, caplog):
    numbers, coordinator = Numbering(), Numbering()
    for _ in range(3):  # what it had from a coordinator that is no more
        numbers.take(coordinator.wrap(b"")[0], "coordinator")
    dealer.send_multipart(numbers.wrap(encode_message(JOIN)))
    assert [message for _ in range(3) for _, message in server.poll(0.05)] == []
    assert dealer.poll(1000)
    abort = decode_message(dealer.recv_multipart()[1], "coordinator")
    assert isinstance(abort, Abort)
    assert "one of both was started again" in abort.message
    assert "one of both was started again" in caplog.text


def test_worker_whose_message_cannot_be_read_is_told_and_not_heard_any_more(server, dealer):
    numbers = Numbering()
    dealer.send_multipart(numbers.wrap(encode_message(JOIN)))
    hear(server, Join)
    dealer.send_multipart(numbers.wrap(b"\x07 of another version"))
    dealer.send_multipart(numbers.wrap(encode_message(Ready(1))))
    assert [message for _ in range(3) for _, message in server.poll(0.05)] == []
    assert "speaks version 7 of the control protocol" in said_at_last(dealer).message


def test_newcomer_of_another_version_is_told_why(server, dealer):
    dealer.send_multipart(Numbering().wrap(b"\x07 of another version"))
    assert server.poll(0.2) == []
    assert "speaks version 7 of the control protocol" in said_at_last(dealer).message


def said_at_last(dealer) -> Abort:
    """The Abort among what a worker was told."""
    said = []
    while dealer.poll(500):
        said.append(decode_message(dealer.recv_multipart()[1], "coordinator"))
    (abort,) = (message for message in said if isinstance(message, Abort))
    return abort


@pytest.fixture
def router() -> Iterator[zmq.Socket]:
    context = zmq.Context()
    yield context.socket(zmq.ROUTER)
    context.destroy(linger=0)


def test_messages_of_the_coordinator_that_were_lost_are_asked_for_and_heard_in_order(connect, router):
    port = router.bind_to_random_port("tcp://127.0.0.1")
    client = connect(f"127.0.0.1:{port}")
    identity, head, _ = router.recv_multipart()
    numbers = Numbering()
    numbers.take(head, "worker")
    for step in (1, 2, 3):
        parts = numbers.wrap(encode_message(Start(step)))
        if step != 2:
            router.send_multipart([identity, *parts])
    assert client.recv(SOON_S) == Start(1)
    again = []
    while not again and router.poll(1000 * SOON_S):
        _, head, _ = router.recv_multipart()
        numbers.take(head, "worker")
        again = numbers.again()
    for parts in again:
        router.send_multipart([identity, *parts])
    assert client.recv(SOON_S) == Start(2)
    assert client.recv(SOON_S) == Start(3)


def test_coordinator_that_was_started_again_is_lost(connect, router):
    port = router.bind_to_random_port("tcp://127.0.0.1")
    client = connect(f"127.0.0.1:{port}")
    identity, head, _ = router.recv_multipart()
    numbers = Numbering()
    numbers.take(head, "worker")
    router.send_multipart([identity, *numbers.wrap(encode_message(Start(1)))])
    assert client.recv(SOON_S) == Start(1)
    router.send_multipart([identity, *Numbering().wrap(encode_message(Start(1)))])
    with pytest.raises(PeerLostError, match=f"coordinator at 127.0.0.1:{port}: has another past"):
        client.recv(SOON_S)


def test_sending_to_a_worker_that_has_gone_is_no_error(server):
    server.send(b"nobody#1", Start(1))


def test_numbers_count_from_one_and_what_is_skipped_comes_again():
    sender, receiver = Numbering(), Numbering()
    first, _, third = (sender.wrap(bytes([number])) for number in range(3))
    assert receiver.take(first[0], "peer")
    assert not receiver.take(third[0], "peer")
    assert receiver.must_ask
    assert sender.take(receiver.wrap(b"")[0], "peer")
    again = sender.again()
    assert [message for _, message in again] == [b"\x01", b"\x02"]
    assert sender.again() == []
    assert [receiver.take(head, "peer") for head, _ in again] == [True, True]
    assert not receiver.take(again[0][0], "peer")  # twice
    assert not receiver.must_ask
    sender.take(receiver.wrap(b"")[0], "peer")
    assert sender.again() == []


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"abc", "number of 3 bytes"),
        (struct.pack("<QQQB", 1, 0, 5, 2), "message 1"),
        (struct.pack("<QQQB", 0, 0, 5, 0), "0"),
    ],
)
def test_first_part_that_cannot_be_is_a_protocol_error(head, reason):
    with pytest.raises(RemoteProtocolError, match=f"^peer: sent .*{reason}"):
        Numbering().take(head, "peer")


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60))
def test_whatever_is_lost_both_ends_hear_everything_in_order(script):
    """Each entry: who speaks, and whether that is lost; then both speak until nothing is missing."""
    ends, heard, said = (Numbering(), Numbering()), ([], []), ([], [])

    def bring(speaker, parts):
        head, message = parts
        if ends[1 - speaker].take(head, "peer"):
            heard[1 - speaker].append(message)
        for again in ends[1 - speaker].again():
            bring(1 - speaker, again)

    for speaker, is_lost in [*script, *((bool(number % 2), False) for number in range(6))]:
        said[speaker].append(str(len(said[speaker])).encode())
        parts = ends[speaker].wrap(said[speaker][-1])
        if not is_lost:
            bring(int(speaker), parts)
    assert heard[0] == said[1]
    assert heard[1] == said[0]


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
