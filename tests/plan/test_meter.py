"""Measuring between two ends over loopback, and how uninvited peers are refused."""

import contextlib
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.errors import PeerLostError, RemoteProtocolError, UserError
from tahq.plan.measure import meter_wire
from tahq.plan.measure.meter import MAX_CONNECTIONS, Meter, MeterServer, Peer
from tahq.plan.measure.meter_wire import (
    GREETING,
    MAGIC,
    REPORT,
    REQUEST,
    VERSION,
    Kind,
    MeterRequest,
    Settling,
    Welcome,
)

RUN = 2**63 - 3
OUT, IN = (MeterRequest(kind, 0.1, 0.2, 0.5) for kind in (Kind.TAKE, Kind.GIVE))


@pytest.fixture
def server():
    server = MeterServer(RUN, 1, "127.0.0.1:0", None)
    yield server
    server.close()


@pytest.fixture
def peer(server):
    return Peer(1, "host1", server.address)


@pytest.fixture
def dial(server):
    """A connection of our own to the server."""
    host, port = server.address.split(":")
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection((host, int(port)), timeout=5))


def test_peer_has_a_round_trip_and_a_rate_each_way(peer):
    assert 0 < Meter(RUN, 0).round_trip_s(peer, 5) < 0.05
    for request in (OUT, IN):
        assert min(Meter(RUN, 0).rates([peer] * 2, [request] * 2)) > 1e6


@pytest.mark.parametrize("has_others", [False, True])
def test_unreachable_host_is_named_with_the_reason(peer, has_others):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone = Peer(2, "host2", f"127.0.0.1:{taken.getsockname()[1]}")
    with pytest.raises(PeerLostError, match=rf"^host2 \({gone.address}\): Connection refused$"):
        Meter(RUN, 0).rates([peer, gone] if has_others else [gone], [OUT] * (1 + has_others))


@pytest.mark.parametrize(
    ("run", "stage", "words"), [(RUN - 1, 1, "worker of another run"), (RUN, 2, "worker of another stage")]
)
def test_wrong_worker_is_named_as_that(server, run, stage, words):
    with pytest.raises(RemoteProtocolError, match=f"host1 .*{words}"):
        Meter(run, 0).round_trip_s(Peer(stage, "host1", server.address), 1)


def test_another_program_at_the_address_is_named_as_that():
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        listener.settimeout(5)
        dialled = Peer(1, "host1", f"127.0.0.1:{listener.getsockname()[1]}")
        exchange = pool.submit(Meter(RUN, 0).round_trip_s, dialled, 1)
        connection, _ = listener.accept()
        connection.recv(GREETING.size)
        connection.close()
        with pytest.raises(PeerLostError, match="another program"):
            exchange.result()


def test_silent_peer_is_given_up(monkeypatch):
    for module in ("tahq.plan.measure.meter_wire", "tahq.plan.measure.meter"):
        monkeypatch.setattr(f"{module}.STALL_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = Peer(1, "host1", f"127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(PeerLostError, match=r"no answer within 0.2 s"):
            Meter(RUN, 0).round_trip_s(peer, 1)


def test_peer_that_takes_no_connection_is_given_up_sooner(monkeypatch):
    monkeypatch.setattr("tahq.plan.measure.meter.DIAL_S", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        for _ in range(3):  # with these the kernel drops what else arrives there, as a firewall does
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        began_s = time.monotonic()
        with pytest.raises(PeerLostError, match=r"no answer within 0\.3 s"):
            Meter(RUN, 0).round_trip_s(Peer(1, "host1", f"127.0.0.1:{full.getsockname()[1]}"), 1)
        assert time.monotonic() - began_s < meter_wire.STALL_S / 2


def test_peer_that_answers_late_is_waited_for(monkeypatch):
    monkeypatch.setattr("tahq.plan.measure.meter.DIAL_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        dialled = Peer(1, "host1", f"127.0.0.1:{listener.getsockname()[1]}")
        exchange = pool.submit(Meter(RUN, 0).round_trip_s, dialled, 1)
        connection, _ = listener.accept()
        with connection:
            assert not wait({exchange}, timeout=0.5).done
            for answer in (Welcome.WELCOME, 0):
                connection.recv(GREETING.size)
                connection.sendall(bytes([answer]))
            assert exchange.result() < 5


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost:", b"", b"TAHM"])
def test_stranger_gets_no_answer(dial, garbage):
    connection = dial()
    connection.sendall(garbage)
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1) == b""


@pytest.mark.parametrize("request_bytes", [(9, 0, 0, 0), (1, 0, 0, 1e9), (1, float("nan"), 0, 0)])
def test_malformed_request_ends_the_connection(dial, request_bytes):
    connection = dial()
    connection.sendall(GREETING.pack(MAGIC, VERSION, RUN, 0, 1))
    assert connection.recv(1) == bytes([Welcome.WELCOME])
    connection.sendall(REQUEST.pack(*request_bytes))
    assert connection.recv(1) == b""


@given(st.binary(min_size=REQUEST.size, max_size=REQUEST.size))
def test_any_bytes_are_a_request_or_a_remote_protocol_error(data):
    try:
        request = MeterRequest.unpack(data, "host1")
    except RemoteProtocolError:
        return
    assert 0 <= request.most_s <= meter_wire.LONGEST_S
    assert REQUEST.pack(*request) == data


def test_impossible_report_is_a_remote_protocol_error():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(REPORT.pack(float("inf"), 1, 1.0))
        with pytest.raises(RemoteProtocolError, match="host1: reported a rate"):
            meter_wire.send_stream(ours, 1.0, "host1")


def test_too_many_connections_are_rejected(dial):
    for _ in range(MAX_CONNECTIONS + 1):
        connection = dial()
        connection.sendall(GREETING.pack(MAGIC, VERSION, RUN, 0, 1))
        verdict = connection.recv(1)
    assert verdict == bytes([Welcome.BUSY])


def test_bytes_of_a_greeting_and_a_request():
    """As docs/dev/protocol.md has them."""
    assert GREETING.pack(MAGIC, 1, 0x1122334455667788, 2, 1).hex(" ", 1) == (
        "54 41 48 4d 01 88 77 66 55 44 33 22 11 02 00 00 00 01 00 00 00"
    )
    assert REQUEST.pack(*MeterRequest(Kind.GIVE, 0.1, 1.0, 30.0)) == b"\x02" + struct.pack("<ddd", 0.1, 1.0, 30.0)


def test_address_in_use_is_a_user_error(server):
    with pytest.raises(UserError, match=f"cannot listen on {server.address}"):
        MeterServer(RUN, 0, server.address, None)


# -- when a stream has settled: arrivals on a virtual clock --------------------------------------


def feed(settling, rate_of, step_s=0.01, until_s=60.0):
    """Arrivals every `step_s` at a rate that depends on the time, until it is enough; returns when."""
    now_s = 0.0
    settling.add(now_s, 1500)
    while not settling.is_over and now_s < until_s:
        now_s += step_s
        settling.add(now_s, int(rate_of(now_s) * step_s / 8))
    return now_s


def test_a_steady_stream_is_over_after_the_least_time():
    settling = Settling(0.1, least_s=1.0, most_s=30.0)
    assert feed(settling, lambda now_s: 100e6) == pytest.approx(1.0, abs=0.05)
    assert settling.rate_bits_per_s == pytest.approx(100e6, rel=1e-3)


def test_slow_start_is_no_part_of_the_rate():
    """It doubles every 0.3 s, from 1 to 100 Mbit/s: for 2 s it has not settled."""
    settling = Settling(0.1, least_s=0.5, most_s=30.0)
    over_s = feed(settling, lambda now_s: min(100e6, 1e6 * 2 ** (now_s / 0.3)))
    assert 2.0 < over_s < 4.0
    assert settling.rate_bits_per_s == pytest.approx(100e6, rel=0.01)


@given(st.lists(st.tuples(st.floats(1e-6, 2.0), st.integers(1, 10**6)), min_size=1, max_size=50))
def test_the_rate_lies_between_the_slowest_and_the_fastest_moment(arrivals):
    settling, now_s, rates = Settling(0.1, 1.0, 5.0), 0.0, []
    settling.add(now_s, 1)
    for gap_s, nbytes in arrivals:
        now_s += gap_s
        settling.add(now_s, nbytes)
        rates.append(8 * nbytes / gap_s)
    # The times are differences of sums, off by a part in 10^7 where 1e-6 s follow tens of seconds.
    assert 0.999 * min(rates) <= settling.rate_bits_per_s <= 1.001 * max(rates)
