import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from tahq.comm.control.client import ControlClient, ControlHooks
from tahq.comm.control.encoding import encode_message
from tahq.comm.control.messages import (
    Abort,
    Assign,
    Bye,
    Commit,
    Failed,
    Heartbeat,
    Join,
    Message,
    Prepare,
    Published,
    Ready,
    Rejoin,
    Snapshotted,
    Start,
)
from tahq.comm.control.server import ControlServer
from tahq.comm.link.frame import Channel
from tahq.comm.link.shaping import Shaping
from tahq.errors import LocalProtocolError, PeerLostError

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


def poll_until(server: ControlServer, is_over: Callable[[list[Message]], bool]) -> list[Message]:
    """Messages but heartbeats that the server hears until the condition on them holds."""
    heard: list[Message] = []
    deadline_s = time.monotonic() + SOON_S
    while not is_over(heard):
        assert time.monotonic() < deadline_s, f"only {heard} came"
        heard += [message for _, message in server.poll(0.05) if not isinstance(message, Heartbeat)]
    return heard


def hear(server: ControlServer, kind: type[Message]) -> tuple[bytes, Message]:
    """The next message of this kind."""
    deadline_s = time.monotonic() + SOON_S
    while time.monotonic() < deadline_s:
        for identity, message in server.poll(0.1):
            if isinstance(message, kind):
                return identity, message
    raise AssertionError(f"no {kind.__name__} came")


def hear_newcomer(server: ControlServer) -> bytes:
    """The identity of a worker whose JOIN and first heartbeat have come, in either order; the next one is far away."""
    kinds: dict[bytes, set[type[Message]]] = {}
    deadline_s = time.monotonic() + SOON_S
    while time.monotonic() < deadline_s:
        for identity, message in server.poll(0.1):
            kinds.setdefault(identity, set()).add(type(message))
            if kinds[identity] >= {Join, Heartbeat}:
                return identity
    raise AssertionError(f"only {kinds} came")


def recv(client: ControlClient, server: ControlServer) -> Message:
    """The client's next message, the server being polled."""
    deadline_s = time.monotonic() + SOON_S
    while time.monotonic() < deadline_s:
        server.poll(0.02)
        with contextlib.suppress(TimeoutError):
            return client.recv(0.02)
    raise AssertionError("nothing came")


@pytest.fixture
def joined(server, connect) -> tuple[ControlClient, bytes]:
    """A worker that has been heard, and its identity."""
    client = connect(server.address)
    client.send(JOIN)
    identity, message = hear(server, Join)
    assert message == JOIN
    return client, identity


def test_messages_go_both_ways_in_order(server, joined):
    client, identity = joined
    with pytest.raises(TimeoutError, match="coordinator at 127"):
        client.recv(0.02)
    server.send(b"nobody#1", Start(1))  # no error
    for step in range(20):
        server.send(identity, Start(step))
    assert [recv(client, server) for _ in range(20)] == [Start(step) for step in range(20)]
    assert client.poll() is None


def test_flushed_messages_come_though_nobody_polls(server, joined):
    client, identity = joined
    server.send(identity, Start(1))
    with pytest.raises(TimeoutError):
        client.recv(0.1)
    server.flush()
    assert client.recv(SOON_S) == Start(1)


def test_coordinator_that_is_not_there_is_lost_after_the_connect_timeout(connect):
    lost = threading.Event()
    client = connect("127.0.0.1:9", connect_timeout_s=0.3, hooks=ControlHooks(on_lost=lambda error: lost.set()))
    with pytest.raises(PeerLostError, match=r"coordinator at 127.0.0.1:9: no answer within 0\.3 s; check"):
        client.recv(SOON_S)
    assert lost.wait(1.0)
    with pytest.raises(PeerLostError):
        client.send(JOIN)


def test_coordinator_is_lost_once_it_stops_polling(server, joined):
    client, _ = joined
    until_s = time.monotonic() + 1.5
    while time.monotonic() < until_s:
        server.poll(1.0)
    assert client.poll() is None
    started_s = time.monotonic()
    with pytest.raises(PeerLostError, match=rf"coordinator at {server.address}: no sign of life for 0\.6 s"):
        client.recv(SOON_S)
    assert time.monotonic() - started_s < 1.5


def test_abort_is_noticed_without_anyone_asking(server, connect):
    seen = threading.Event()
    client = connect(server.address, hooks=ControlHooks(on_abort=lambda abort: seen.set()))
    client.send(JOIN)
    identity, _ = hear(server, Join)
    server.send(identity, Abort("stage 3 was lost", 3))
    server.poll(0.1)
    assert seen.wait(SOON_S)
    assert client.aborted == Abort("stage 3 was lost", 3)
    assert client.recv(SOON_S) == client.aborted


def test_worker_that_computes_without_a_pause_still_gives_signs_of_life(server, connect):
    client = connect(server.address)
    client.send(JOIN)
    client.set_activity(1, 7, "forward")
    until_s = time.monotonic() + 0.5
    while time.monotonic() < until_s:
        sum(range(1000))
    heard = [message for _ in range(10) for _, message in server.poll(0.1) if isinstance(message, Heartbeat)]
    assert [(beat.stage, beat.step, beat.activity) for beat in heard].count((1, 7, "forward")) >= 4


def test_close_sends_what_is_queued(server, connect):
    client = connect(server.address, shaping=Shaping(delay_s=0.05))
    for stage in range(50):
        client.send(Ready(stage))
    closing = threading.Thread(target=client.close)
    closing.start()
    assert poll_until(server, lambda heard: len(heard) == 50) == [Ready(stage) for stage in range(50)]
    closing.join()
    client.close()
    with pytest.raises(LocalProtocolError, match="closed on this side"):
        client.send(JOIN)


def test_delay_holds_both_ways_and_may_change(server, joined):
    client, identity = joined
    client.set_timing(shaping=Shaping(delay_s=0.05), peer_timeout_s=5.0, heartbeat_s=0.2, give_up_s=5.0)
    trips_s = []
    for stage in range(8):
        started_s = time.monotonic()
        client.send(Ready(stage))
        hear(server, Ready)
        server.send(identity, Start(stage))
        server.poll(0)
        client.recv(SOON_S)
        trips_s.append(time.monotonic() - started_s)
    assert 0.099 <= min(trips_s) < 0.105  # handling is taken off the delay


# Strangers, and what the network does


@pytest.fixture
def dealer(server) -> Iterator[zmq.Socket]:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://{server.address}")
    yield dealer
    context.destroy(linger=0)


def say(client: ControlClient, data: bytes) -> None:
    """Have a worker send these bytes as a control message."""
    client._loop.submit(client._end, lambda: client._end.say(Channel.CONTROL, data))


def test_garbage_from_strangers_is_dropped_with_one_line_in_the_log(server, connect, dealer, caplog):
    caplog.set_level(logging.WARNING, "tahq.comm")
    for parts in ([b"x"], [b"x", encode_message(JOIN)], [b"y" * 100, b"z"], [b""] * 7, [HELLO_OF_VERSION_2, b""]):
        dealer.send_multipart(parts)
    client = connect(server.address)
    client.send(JOIN)
    assert hear(server, Join)[0].startswith(b"stage 1#")
    assert server.poll(0.2) is not None
    assert len(caplog.records) == 1
    assert "dropped a message: a stranger" in caplog.text


HELLO_OF_VERSION_2 = b"TAHQ" + bytes([2, 1]) + bytes(94)


@pytest.mark.parametrize("is_newcomer", [True, False])
def test_worker_whose_message_cannot_be_read_is_told_and_not_heard_any_more(server, connect, is_newcomer):
    client = connect(server.address)
    if not is_newcomer:
        client.send(JOIN)
        hear(server, Join)
    say(client, b"\x07 of another version")
    client.send(Ready(1))
    assert poll_until(server, lambda _: client.aborted is not None) == []
    assert "speaks version 7 of the control protocol" in client.aborted.message


def test_messages_longer_than_a_piece_go_both_ways(server, connect):
    client = connect(server.address)
    long = Abort("x" * 3_000_000, 1)
    client.send(Failed(1, "y" * 3_000_000, 1))
    identity, message = hear(server, Failed)
    assert len(message.message) == 3_000_000
    server.send(identity, long)
    poll_until(server, lambda _: client.aborted is not None)
    assert client.aborted == long


# Another process of the coordinator


def test_coordinator_that_was_started_again_is_lost_to_a_worker_that_cannot_rejoin(server, connect):
    client = connect(server.address, peer_timeout_s=SOON_S)
    client.send(JOIN)
    hear(server, Join)
    server.close()
    other = ControlServer(server.address, heartbeat_s=0.1)
    with pytest.raises(PeerLostError, match=f"coordinator at {server.address}: was started again"):
        recv(client, other)
    other.close()


def test_coordinator_that_was_started_again_hears_what_the_one_before_may_not_have_heard(server, connect):
    rejoin = Rejoin(1, 7, 3)
    client = connect(server.address, peer_timeout_s=SOON_S, hooks=ControlHooks(on_return=lambda: rejoin))
    written = [Snapshotted(step, 1, "", "", 0) for step in (1, 2)]
    for step in (1, 2):
        client.send(prepare(step))
        client.send(written[step - 1])
    client.send(Ready(1))
    identity, _ = hear(server, Ready)
    server.send(identity, Published(1, 0))
    server.send(identity, Commit(1, True, 1.0, False, False, False))
    assert recv(client, server).step == 1
    server.close()
    other = ControlServer(server.address, heartbeat_s=0.1)
    assert poll_until(other, lambda heard: len(heard) >= 3) == [rejoin, prepare(2), written[1]]
    client.send(Ready(2))
    identity, _ = hear(other, Ready)
    other.send(identity, Start(5))
    assert recv(client, other) == Start(5)
    other.close()


def prepare(step: int) -> Prepare:
    return Prepare(step, 1, [], True, None, None, "", {}, [])


def test_clock_of_a_worker_is_known_to_within_half_a_round_trip(connect):
    """The coordinator's clock is an hour ahead of the worker's, and messages take 10 ms each way."""
    server = ControlServer("127.0.0.1:0", heartbeat_s=0.05, clock=lambda: time.monotonic() + 3600)
    client = connect(server.address, shaping=Shaping(delay_s=0.01))
    client.send(JOIN)
    identity, _ = hear(server, Join)
    poll_until(server, lambda _: server.clock_offset(identity) is not None)
    offset = server.clock_offset(identity)
    assert offset is not None
    assert abs(offset.offset_s + 3600) <= offset.error_s
    assert 0.0094 <= offset.error_s < 1.0  # a delay counts what threads and sockets take, 0.6 ms
    assert server.clock_offset(b"a stranger") is None
    server.close(linger_s=0.1)


# Strangers cannot make the coordinator forget a member, or remember without end


def test_member_stays_and_the_stranger_silent_longest_makes_room(connect):
    server = ControlServer("127.0.0.1:0", heartbeat_s=SOON_S, max_strangers=3)
    clients, identities = [], []
    for stage in range(8):
        clients.append(connect(server.address, peer_timeout_s=3 * SOON_S, heartbeat_s=SOON_S))
        clients[-1].send(Join(stage, "0.1", "host", 1))
        identities.append(hear_newcomer(server))
        if stage == 0:
            server.send(identities[0], Assign(1, 7, "{}", "c0ffee"))
        if stage == 3:  # 1 to 3 are strangers, of which 2 was silent longest
            clients[1].send(Ready(1))
            hear(server, Ready)
        if stage == 4:
            assert list(server._peers) == [identities[n] for n in (0, 3, 1, 4)]
    assert list(server._peers) == [identities[n] for n in (0, 5, 6, 7)]
    for number in (0, 5, 6, 7):
        clients[number].send(Ready(number))
        assert hear(server, Ready)[1] == Ready(number)
    server.send(identities[0], Bye())  # now it is a stranger, and silent longest; it still gets this
    assert list(server._peers) == [identities[n] for n in (6, 7, 0)]
    assert [recv(clients[0], server) for _ in range(2)][1] == Bye()
    server.close(linger_s=0.0)
