"""The relay joins connections of members only, keeps little, carries cipher text, and may die and come back."""

import contextlib
import os
import signal
import socket
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.processes import is_alive, wait_until

from tahq.comm.keys import new_key_pair
from tahq.comm.relay import forwarding
from tahq.comm.relay.process import Relay
from tahq.comm.relay.tickets import LOWER, UPPER, Place, RelayTicket, issue, place_of, split_planned
from tahq.comm.zmq.addresses import format_address
from tahq.errors import RemoteProtocolError, UserError

SOON_S = 20.0
OWN, PEER = new_key_pair(), new_key_pair()
U32 = st.integers(0, 2**32 - 1)
HOSTS = {"IPv4": "127.0.0.1", "IPv6": "::1"}


@pytest.fixture
def make_relay(tmp_path):
    """make_relay(host) listens on any free port of a loopback address."""
    relays = []

    def make(host: str = "127.0.0.1", port: int = 0) -> Relay:
        log = tmp_path / "relay.log"
        relays.append(Relay(host, port, secret=OWN.secret, run_id=77, num_links=3, log=log))
        return relays[-1]

    yield make
    for relay in relays:
        relay.close()
    log = tmp_path / "relay.log"
    assert not log.exists() or log.read_text() == ""


def ticket(relay: Relay, end: int, host: str = "127.0.0.1", epoch: int = 1) -> RelayTicket:
    port, text = split_planned(relay.ticket(1, epoch, end))
    return RelayTicket(format_address(host, port), text)


def pid_of(relay: Relay) -> int:
    return relay._process.pid


def open_link(make_endpoint, relay: Relay, host: str = "127.0.0.1", connections: int = 1):
    """Both ends of a link over the relay, lower and upper; the latter's endpoint has a port that it does not tell."""
    lower = make_endpoint(1, keys=OWN, connections=connections)
    upper = make_endpoint(2, keys=PEER, connections=connections)
    ends = (
        lower.open_link(1, 2, "upper", ticket(relay, LOWER, host), PEER.public),
        upper.open_link(1, 1, "lower", ticket(relay, UPPER, host), OWN.public),
    )
    for endpoint in (lower, upper):
        endpoint.wait_connected(SOON_S)
    return ends


def carry(make_frame, make_id, sender, receiver, step: int = 0, nbytes: int = 300_000) -> None:
    receiver.expect(make_id(step=step), nbytes)
    sender.send(make_frame(nbytes, step=step))
    assert torch.equal(receiver.recv(SOON_S).payload, make_frame(nbytes, step=step).payload)


@pytest.mark.parametrize("connections", [1, 3])
@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_link_over_the_relay_carries_and_counts_both_directions(
    make_relay, make_endpoint, make_frame, make_id, host, connections
):
    relay = make_relay(host)
    lower, upper = open_link(make_endpoint, relay, host, connections)
    carry(make_frame, make_id, lower, upper)
    sent = relay.take_counts()
    assert 300_000 < sent[1, LOWER] < 320_000
    assert 0 < sent[1, UPPER] < 20_000
    carry(make_frame, make_id, upper, lower)
    assert 300_000 < relay.take_counts()[1, UPPER] < 320_000
    assert sent[0, LOWER] == sent[2, UPPER] == 0


def test_relay_that_was_killed_comes_back_and_nothing_is_lost(make_relay, make_endpoint, make_frame, make_id):
    relay = make_relay()
    lower, upper = open_link(make_endpoint, relay)
    carry(make_frame, make_id, lower, upper)
    before = relay.take_counts()[1, LOWER]
    pid = pid_of(relay)
    os.kill(pid, signal.SIGKILL)
    upper.expect(make_id(step=1), 300_000)
    lower.send(make_frame(300_000, step=1))
    wait_until(lambda: "the relay has died (status -9" in relay.check(), SOON_S, "it is started again")
    assert torch.equal(upper.recv(SOON_S).payload, make_frame(300_000, step=1).payload)
    assert pid_of(relay) != pid
    assert before > 0
    assert relay.take_counts()[1, LOWER] >= 300_000


def socks(address: tuple[str, int], name: bytes) -> socket.socket:
    """A connection that asks the relay for a place."""
    connection = socket.create_connection(address, SOON_S)
    connection.sendall(b"\5\1\0" + b"\5\1\0\3" + bytes([len(name)]) + name + b"\0\1")
    return connection


def read(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes and (piece := connection.recv(nbytes - len(data))):
        data += piece
    return data


@pytest.fixture
def relay(make_relay):
    relay = make_relay()
    relay.open()
    return relay


def address_of(relay: Relay) -> tuple[str, int]:
    return "127.0.0.1", split_planned(relay.ticket(0, 1, LOWER))[0]


def shown(relay: Relay, end: int, connection: int = 0) -> bytes:
    return f"{connection}-{split_planned(relay.ticket(1, 1, end))[1]}".encode()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\4\1\0\x50\x7f\0\0\1\0",
        b"\5\1\0\5\1\0\1\x7f\0\0\1\0\x50",
        b"\5\1\0\5\1\0\3\x09localhost\0\x50",
        b"\5\1\0\5\1\0\3\x2a0-1-1-0-" + b"0" * 32 + b"\0\1",
        b"\5\xff" + bytes(2000),
    ],
    ids=["http", "SOCKS4", "an address", "a name", "a forged ticket", "too long"],
)
def test_stranger_is_hung_up_on_and_reaches_nothing(relay, said):
    with socket.create_connection(address_of(relay), SOON_S) as stranger:
        stranger.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            assert read(stranger, 100) in (b"", b"\5\0")
    assert is_alive(pid_of(relay))


def test_newer_connection_takes_the_place_of_one_whose_host_is_gone(relay):
    address = address_of(relay)
    gone = socks(address, shown(relay, LOWER))
    assert read(gone, 2) == b"\5\0"
    lower = socks(address, shown(relay, LOWER))
    assert read(lower, 2) == b"\5\0"
    upper = socks(address, shown(relay, UPPER))
    joined = b"\5\0\0\1" + bytes(6)
    assert read(lower, 10) == joined
    assert read(upper, 12) == b"\5\0" + joined
    lower.sendall(b"hello")
    assert read(upper, 5) == b"hello"
    upper.close()
    assert read(lower, 1) == b""
    lower.close()
    gone.close()


def test_slow_receiver_holds_the_sender_back_and_the_relay_keeps_little(relay):
    address = address_of(relay)
    lower, upper = socks(address, shown(relay, LOWER)), socks(address, shown(relay, UPPER))
    assert read(lower, 12) == read(upper, 12)
    before = resident_nbytes(pid_of(relay))
    lower.settimeout(1.0)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < 64 << 20:
            sent += lower.send(bytes(1 << 16))
    assert sent < 64 << 20
    assert resident_nbytes(pid_of(relay)) - before < 8 << 20
    lower.close()
    upper.close()


def resident_nbytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_silent_strangers_make_room_for_the_next(relay):
    address = address_of(relay)
    strangers = [socket.create_connection(address, SOON_S) for _ in range(forwarding.MOST_UNKNOWN + 10)]
    lower, upper = socks(address, shown(relay, LOWER)), socks(address, shown(relay, UPPER))
    assert read(lower, 12) == read(upper, 12)
    for connection in (*strangers, lower, upper):
        connection.close()


def test_relay_ends_when_its_coordinator_does(relay):
    pid = pid_of(relay)
    relay._process.stdin.close()
    wait_until(lambda: not is_alive(pid), SOON_S, "the relay ends")


def test_port_that_is_taken_is_named_with_the_key_that_changes_it(make_relay):
    with socket.create_server(("127.0.0.1", 0)) as other:
        relay = make_relay(port=other.getsockname()[1])
        with pytest.raises(UserError, match=r"cannot listen on port .* Address already in use; set run\.relay"):
            relay.open()


@given(
    secret=st.binary(min_size=1, max_size=64),
    place=st.builds(Place, st.integers(0, 99), U32, U32, st.sampled_from((0, 1))),
)
def test_ticket_names_its_place_and_only_under_its_secret(secret, place):
    text = f"{place.connection}-{issue(secret, place.link, place.epoch, place.end)}"
    assert place_of(secret, text) == place
    assert place_of(secret + b"x", text) is None
    assert place.opposite.opposite == place
    other = f"{place.connection}-{place.link}-{place.epoch}-{1 - place.end}-{text[-32:]}"
    assert place_of(secret, other) is None


@given(st.text(max_size=80))
def test_text_that_is_no_ticket_is_refused(text):
    assert place_of(b"secret", text) is None
    with pytest.raises(RemoteProtocolError, match="PORT/TICKET"):
        split_planned(text)


def test_cost_is_small_beside_a_fast_link(relay):
    """On loopback the relay passes on far more than an uplink of 100 Mbit/s."""
    address = address_of(relay)
    lower, upper = socks(address, shown(relay, LOWER)), socks(address, shown(relay, UPPER))
    assert read(lower, 12) == read(upper, 12)
    began_s, nbytes = time.monotonic(), 0
    lower.setblocking(False)
    while nbytes < 50 << 20:
        try:
            lower.send(bytes(1 << 18))
        except BlockingIOError:
            nbytes += len(upper.recv(1 << 18))
    rate = 8 * nbytes / (time.monotonic() - began_s)
    lower.close()
    upper.close()
    assert rate > 100e6
