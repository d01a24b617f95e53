"""Which peers CURVE admits to the control channel, and what the others are told; real sockets on loopback."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from support.breaking_proxy import BreakingProxy
from support.session_pairs import control_hello

from tahq.comm.control.client import ControlClient
from tahq.comm.control.messages import Heartbeat, Join, Message, Ready, Start
from tahq.comm.control.server import ControlServer
from tahq.comm.keys import Credentials, KeyPair, new_key_pair
from tahq.comm.link.shaping import Shaping
from tahq.comm.zmq.sockets import dial_curve
from tahq.errors import RefusedError

SOON_S = 10.0
COORDINATOR, WORKER, OTHER, STRANGER = (new_key_pair() for _ in range(4))
MARK = "the-name-of-a-host-that-nobody-else-may-read"
JOIN = Join(1, "0.1", MARK, 4711)


class Serving:
    """A coordinator's socket that a thread polls; `heard` is all that came."""

    def __init__(self, keys: KeyPair | None = COORDINATOR) -> None:
        self.server = ControlServer(
            "127.0.0.1:0", heartbeat_s=0.1, keys=keys, allowed={WORKER.public, OTHER.public} if keys else ()
        )
        self.address = self.server.address
        self.heard: list[tuple[bytes, Message]] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_closed:
            for identity, message in self.server.poll(0.02):
                self.heard.append((identity, message))
                if isinstance(message, Ready):
                    self.server.send(identity, Start(message.stage))
        self.server.close(linger_s=0.1)

    def of(self, kind: type[Message]) -> list[Message]:
        return [message for _, message in self.heard if isinstance(message, kind)]

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()


@pytest.fixture
def serving() -> Iterator[Serving]:
    serving = Serving()
    yield serving
    serving.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., ControlClient]]:
    clients = []

    def connect(peer: str, credentials: Credentials | None, **changes) -> ControlClient:
        settings = {"shaping": Shaping(), "peer_timeout_s": 5.0, "heartbeat_s": 0.1, "connect_timeout_s": 30.0}
        clients.append(ControlClient(peer, "stage 1", credentials=credentials, **(settings | changes)))
        clients[-1].send(JOIN)
        return clients[-1]

    yield connect
    for client in clients:
        client.close(linger_s=0.1)


def exchange(client: ControlClient, number: int) -> float:
    """Seconds from a message to its answer."""
    started_s = time.monotonic()
    client.send(Ready(number))
    assert client.recv(SOON_S) == Start(number)
    return time.monotonic() - started_s


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_member_is_heard_and_known_by_its_key_and_what_it_sends_cannot_be_read(serving, connect):
    proxy = BreakingProxy(serving.address)
    client = connect(proxy.address, Credentials(WORKER, COORDINATOR.public))
    exchange(client, 1)
    assert serving.of(Join) == [JOIN]
    assert {serving.server.public_key(identity) for identity, _ in serving.heard} == {WORKER.public}
    assert serving.server.public_key(b"nobody") == ""
    client.close()
    proxy.close()
    assert len(proxy.heard) > 500
    assert MARK.encode() not in proxy.heard


def test_coordinator_without_curve_can_be_read_and_is_not_joined_by_a_worker_with_keys(connect):
    serving = Serving(None)
    with pytest.raises(RefusedError, match=r"does not use CURVE; if security\.curve is off"):
        connect(serving.address, Credentials(WORKER, COORDINATOR.public)).recv(SOON_S)
    assert serving.heard == []
    proxy = BreakingProxy(serving.address)
    exchange(connect(proxy.address, None), 1)
    proxy.close()
    serving.close()
    assert MARK.encode() in proxy.heard


@pytest.mark.parametrize(
    ("credentials", "told", "logged"),
    [
        (
            Credentials(STRANGER, COORDINATOR.public),
            f"it does not know this worker's key {STRANGER.public}; add that to security.allow",
            f"refused a connection from 127.0.0.1: its public key {STRANGER.public} is not one of the 2",
        ),
        (
            Credentials(WORKER, STRANGER.public),
            f"its key is not {STRANGER.public} (given); give the one that it prints (--coordinator-key)",
            "it has another public key for this end than the right one",
        ),
        (None, "it uses CURVE; start this worker without --no-curve", "rejected a connection"),
    ],
    ids=["unknown key", "wrong key", "no CURVE"],
)
def test_stranger_is_refused_in_seconds_and_nothing_that_it_sends_is_read(
    serving, connect, caplog, credentials, told, logged
):
    caplog.set_level(logging.WARNING, "tahq.comm")
    member = connect(serving.address, Credentials(OTHER, COORDINATOR.public))
    exchange(member, 1)
    before = len(serving.of(Join))
    proxy = BreakingProxy(serving.address)
    started_s = time.monotonic()
    with pytest.raises(RefusedError) as refusal:  # already of what `connect` says, where this thread is held up
        connect(proxy.address, credentials).recv(SOON_S)
    assert time.monotonic() - started_s < 5
    assert f"coordinator at {proxy.address}: {told}" in str(refusal.value)
    assert refusal.value.exit_status == 2
    wait_for(lambda: logged in caplog.text)
    proxy.close()
    exchange(member, 2)
    assert len(serving.of(Join)) == before
    assert MARK.encode() not in proxy.heard


def test_member_cannot_speak_for_another(serving, caplog):
    """Anyone who learns the routing id of another member has to have its key too."""
    caplog.set_level(logging.WARNING, "tahq.comm")
    context = zmq.Context()
    dealers = [context.socket(zmq.DEALER) for _ in range(2)]
    said = iter((lambda: bool(dealers[0].poll(0)), lambda: "has another key than the peer with its" in caplog.text))
    for keys, dealer in zip((WORKER, OTHER), dealers, strict=True):
        dealer.setsockopt(zmq.ROUTING_ID, b"stage 1#the same")
        dial_curve(dealer, keys, COORDINATOR.public)
        dealer.connect(f"tcp://{serving.address}")
        dealer.send_multipart(control_hello())
        wait_for(next(said))
    context.destroy(linger=0)
    assert serving.heard == []


def test_garbage_and_silent_connections_are_dropped_and_members_go_on(serving, connect, caplog):
    caplog.set_level(logging.WARNING, "tahq.comm")
    member = connect(serving.address, Credentials(WORKER, COORDINATOR.public))
    exchange(member, 0)
    host, _, port = serving.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(300)]
    for number, said in enumerate(
        (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(1000), b"\xff" + bytes(8) + b"\x7f\x03\x00" * 99)
    ):
        with socket.create_connection((host, int(port))) as scanner:
            scanner.sendall(said)
            scanner.settimeout(SOON_S)
            with contextlib.suppress(ConnectionResetError):  # which is one way to hang up
                while said and scanner.recv(4096):
                    continue
        exchange(member, number)
    assert {type(message) for _, message in serving.heard} == {Join, Ready, Heartbeat}
    wait_for(lambda: "rejected a connection" in caplog.text)
    assert sum(record.name.endswith("gate") for record in caplog.records) <= 2
    late = connect(serving.address, Credentials(OTHER, COORDINATOR.public))
    assert max(exchange(client, 1) for client in (member, late)) < 2
    assert max(exchange(member, number) for number in range(2, 100)) < 0.5
    for connection in silent:
        connection.close()
