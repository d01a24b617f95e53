"""Files from worker to worker over real sockets: which bytes come, who may ask, and what odd requests get."""

import hashlib
import logging
import os
import random
import struct
import threading
import time
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.comm.keys import new_key_pair
from tahq.comm.link.frame import Direction
from tahq.comm.link.shaping import Shaping
from tahq.comm.zmq.files import (
    MAX_PIECE_NBYTES,
    WINDOW_PIECES,
    FileRequest,
    FileSource,
    FileTransfer,
    pieces,
    unpack_request,
)
from tahq.errors import PeerLostError, RemoteProtocolError
from tahq.pipeline.checkpoint.copies import PARTIAL_SUFFIX, fetch_file, has_file

RUN = 77
SERVER_KEYS, ASKER_KEYS = new_key_pair(), new_key_pair()


@pytest.fixture
def asker(make_endpoint):
    return make_endpoint(0, bind="")


@pytest.fixture
def server(make_endpoint):
    return make_endpoint(1)


@pytest.fixture
def offered(server, tmp_path):
    """Content of 3 MB and a bit, its hash, and its path."""
    content = os.urandom(3_000_017)
    path = tmp_path / "here.safetensors"
    path.write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    server.files.offer(RUN, sha256, path)
    return content, sha256, path


def source(server, sha256, run=RUN):
    return FileSource(server.address, run, sha256)


@pytest.mark.parametrize("partial_nbytes", [0, 1_000_000], ids=["anew", "after a part of it"])
def test_file_arrives_as_it_is(asker, server, offered, tmp_path, partial_nbytes):
    content, sha256, _ = offered
    target = tmp_path / "other" / "there.safetensors"
    target.parent.mkdir()
    if partial_nbytes:
        target.with_name(target.name + PARTIAL_SUFFIX).write_bytes(content[:partial_nbytes])
    offsets = []

    def counted(offset):
        offsets.append(offset)
        return pieces(asker.fetching, source(server, sha256), offset=offset)

    assert fetch_file(target, sha256, counted)
    assert offsets == [partial_nbytes]
    assert target.read_bytes() == content
    assert has_file(target, sha256)
    assert os.listdir(target.parent) == [target.name]


def test_file_that_another_process_fetches_is_left_to_it(tmp_path):
    def and_again(offset):
        yield b"one"
        with pytest.raises(PeerLostError, match=r"another process is fetching .*there; wait for it"):
            fetch_file(tmp_path / "there", "ab" * 32, lambda offset: iter([b"two"]))
        yield b" and two"

    assert fetch_file(tmp_path / "there", hashlib.sha256(b"one and two").hexdigest(), and_again)
    assert (tmp_path / "there").read_bytes() == b"one and two"


def test_damaged_bytes_are_not_kept(asker, server, offered, tmp_path):
    content, sha256, path = offered
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    target = tmp_path / "there"
    with pytest.raises(RemoteProtocolError, match="there arrived with SHA-256"):
        fetch_file(target, sha256, lambda offset: pieces(asker.fetching, source(server, sha256), offset=offset))
    assert not target.exists()
    assert not (tmp_path / f"there{PARTIAL_SUFFIX}").exists()


@pytest.mark.parametrize("why", ["hash", "run", "gone"])
def test_what_is_not_offered_is_not_there(asker, server, offered, why):
    _, sha256, path = offered
    if why == "gone":
        path.unlink()
    wanted = source(server, "ab" * 32 if why == "hash" else sha256, RUN + (why == "run"))
    with pytest.raises(PeerLostError, match="no longer there"):
        list(pieces(asker.fetching, wanted))


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"/etc/passwd",
        FileRequest(RUN, 0, MAX_PIECE_NBYTES + 1, bytes(32)).pack(),
        FileRequest(RUN, 0, 0, bytes(32)).pack(),
        FileRequest(RUN, 0, MAX_PIECE_NBYTES, bytes(32)).pack(),
    ],
    ids=["no request", "too much", "nothing", "too many"],
)
def test_odd_request_ends_the_link_and_others_are_answered(asker, server, offered, caplog, request_bytes):
    content, sha256, _ = offered
    with caplog.at_level(logging.WARNING, "tahq.comm"), asker.fetching(source(server, sha256)) as link:
        for _ in range(1000):
            link.send(request_bytes)
        with pytest.raises(PeerLostError, match=r"the peer ended it: files for stage 0: (sent a request|asked for)"):
            all(link.inbox.get(5.0) for _ in range(1000))
    assert "files for stage 0" in caplog.text
    assert b"".join(pieces(asker.fetching, source(server, sha256))) == content


def test_server_that_is_gone_and_back_goes_on(asker, server, offered, make_endpoint):
    content, sha256, path = offered
    got = bytearray()

    def again():
        make_endpoint(1, bind=server.address).files.offer(RUN, sha256, path)

    timer = threading.Timer(0.5, again)
    for piece in pieces(asker.fetching, source(server, sha256), rate_bits_per_s=1e8, give_up_s=20.0):
        if not got:
            server.close(0.1)
            timer.start()
        got += piece
    assert bytes(got) == content
    timer.join()


def test_server_that_stays_away_is_given_up_and_what_came_is_kept(asker, offered, server, tmp_path):
    content, sha256, _ = offered
    target = tmp_path / "there"

    def interrupted(offset):
        for piece in pieces(asker.fetching, source(server, sha256), offset=offset, rate_bits_per_s=5e7, give_up_s=1.0):
            server.close(0.1)
            yield piece

    with pytest.raises(PeerLostError, match=r"silent for 1 s|closed the link"):
        fetch_file(target, sha256, interrupted)
    assert content.startswith((tmp_path / f"there{PARTIAL_SUFFIX}").read_bytes())


def test_file_that_is_no_longer_wanted_is_left(asker, server, offered, tmp_path):
    _, sha256, _ = offered
    begin_s = time.monotonic()
    wanted = {"is_wanted": lambda: time.monotonic() < begin_s + 0.3}
    target = tmp_path / "there"
    slow = {"rate_bits_per_s": 1e6, **wanted}
    assert not fetch_file(
        target, sha256, lambda offset: pieces(asker.fetching, source(server, sha256), offset=offset, **slow), **wanted
    )
    assert time.monotonic() - begin_s < 2.0
    assert not target.exists()


def keyed(server, sha256):
    return FileSource(server.address, RUN, sha256, SERVER_KEYS.public)


@pytest.fixture
def keyed_asker(make_endpoint):
    return make_endpoint(0, bind="", keys=ASKER_KEYS)


@pytest.fixture
def keyed_server(make_endpoint, offered):
    _, sha256, path = offered
    server = make_endpoint(1, keys=SERVER_KEYS)
    server.files.offer(RUN, sha256, path)
    return server


@pytest.mark.parametrize("named_after_s", [0.0, 0.5], ids=["before", "a moment later"])
def test_owner_of_a_key_that_was_named_gets_the_file(keyed_asker, keyed_server, offered, named_after_s):
    content, sha256, _ = offered
    naming = threading.Timer(named_after_s, keyed_server.allow, ([ASKER_KEYS.public],))
    naming.start()
    assert b"".join(pieces(keyed_asker.fetching, keyed(keyed_server, sha256))) == content
    naming.join()


def test_asker_that_was_not_named_is_told_that_it_is_the_key(make_endpoint, keyed_asker, offered, caplog, monkeypatch):
    monkeypatch.setattr("tahq.comm.zmq.endpoint._HOLD_S", 0.1)
    keyed_server, sha256 = make_endpoint(1, keys=SERVER_KEYS), offered[1]
    with pytest.raises(PeerLostError, match=r"silent for 2 s; the peer refuses this worker's key"):
        list(pieces(keyed_asker.fetching, keyed(keyed_server, sha256), give_up_s=2.0))
    assert f"its public key {ASKER_KEYS.public} is not one of the 0 that may connect" in caplog.text


def test_key_for_a_worker_that_has_none_is_refused_at_once(asker, server, offered):
    _, sha256, _ = offered
    with pytest.raises(RemoteProtocolError, match="CURVE is on at one end and off at the other"):
        list(pieces(asker.fetching, keyed(server, sha256)))


def test_copy_and_training_share_a_port_and_the_copy_delays_no_frame(make_endpoint, offered, make_frame):
    """An unpaced copy of 3 MB over an uplink of 8 Mbit/s takes 3 s; frames wait for a piece of it at most."""
    content, sha256, path = offered
    shaping = Shaping(rate_bits_per_s=8e6, piece_nbytes=16384)
    upper, lower = make_endpoint(1, shaping=shaping), make_endpoint(0, bind="", shaping=shaping)
    upper.files.offer(RUN, sha256, path)
    down, up = lower.open_link(0, 1, "upper", upper.address), upper.open_link(0, 0, "lower", "")
    upper.wait_connected(10.0)
    copy = threading.Thread(target=lambda: got.append(b"".join(pieces(lower.fetching, source(upper, sha256)))))
    got = []
    copy.start()
    time.sleep(0.5)
    waits_s = []
    for number in range(10):
        frame = make_frame(1000, number, Direction.BACKWARD)
        down.expect(frame.id, 1000)
        started_s = time.monotonic()
        up.send(frame)
        down.recv(10.0)
        waits_s.append(time.monotonic() - started_s)
    assert copy.is_alive()
    assert sorted(waits_s)[5] < 0.15
    copy.join()
    assert got == [content]


# Which pieces are asked for, and when: no socket, no clock


def source_of(content):
    return FileSource("host1:7000", RUN, hashlib.sha256(content).hexdigest())


def answer(content, request):
    piece = content[request.offset : request.offset + request.length]
    return struct.pack("<BQQ", 0, request.offset, len(content)) + piece


def fetched(content, dice, *, rate=None, offset=0):
    """Over a line that takes its time, and breaks now and then."""
    now_s = 0.0
    transfer = FileTransfer(source_of(content), offset, rate, now_s)
    line, got = deque(), b""
    while not transfer.is_done:
        line.extend(answer(content, unpack_request(data, "test")) for data in transfer.requests(now_s))
        if dice.random() < 0.05:
            line.clear()
            transfer.begin_again()
        elif line and dice.random() < 0.8:
            got += transfer.take(line.popleft(), now_s)
        else:
            now_s += min(transfer.wait_s(now_s), 0.3) + 1e-6
    return got, now_s


def test_no_more_than_a_window_is_under_way():
    content = bytes(3 * WINDOW_PIECES * MAX_PIECE_NBYTES)
    transfer = FileTransfer(source_of(content), 0, None, 0.0)
    (first,) = transfer.requests(0.0)
    transfer.take(answer(content, unpack_request(first, "test")), 0.0)
    assert len(list(transfer.requests(0.0))) == WINDOW_PIECES


@given(st.binary(max_size=30000), st.integers(0, 2**32), st.floats(0, 1), st.sampled_from([1e5, 3e5, 1e7]))
def test_bytes_come_once_in_order_and_no_faster_than_the_rate_over_links_that_break(content, seed, share, rate):
    offset = int(share * len(content))
    got, took_s = fetched(content, random.Random(seed), rate=rate, offset=offset)
    assert got == content[offset:]
    last_piece = max(4096, rate * 0.1 / 8)
    assert took_s >= (len(got) - last_piece) * 8 / rate * 0.99


@pytest.mark.parametrize(
    "reply",
    [b"", struct.pack("<BQQ", 2, 0, 1000), struct.pack("<BQQ", 0, 8, 1000) + bytes(1000),
     struct.pack("<BQQ", 0, 0, 1000) + bytes(999), struct.pack("<BQQ", 0, 0, 1000) + bytes(1001)],
    ids=["empty", "status", "offset", "short", "long"],
)  # fmt: skip
def test_reply_that_makes_no_sense_is_refused(reply):
    transfer = FileTransfer(source_of(bytes(1000)), 0, None, 0.0)
    list(transfer.requests(0.0))
    with pytest.raises(RemoteProtocolError, match="host1:7000"):
        transfer.take(reply, 0.0)
