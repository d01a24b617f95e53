"""Files from worker to worker over real sockets, and what becomes of those who ask oddly."""

import hashlib
import logging
import os
import threading
import time

import pytest
import zmq

from tahq.comm.files import server as file_server
from tahq.comm.files.client import pieces
from tahq.comm.files.server import FileServer
from tahq.comm.files.transfer import FileSource, Patience
from tahq.comm.files.wire import FileRequest, Status, pack_request, unpack_reply
from tahq.comm.keys import new_key_pair
from tahq.errors import PeerLostError, RemoteProtocolError
from tahq.pipeline.checkpoint.fetched_file import PARTIAL_SUFFIX, fetch_file, has_file

RUN = 77
SHORT = Patience(0.3, 1.0)
SERVER_KEYS, ASKER_KEYS = new_key_pair(), new_key_pair()


@pytest.fixture
def server():
    server = FileServer(RUN, "127.0.0.1:0", None, None)
    yield server
    server.close()


@pytest.fixture
def offered(server, tmp_path):
    """Content of 3 MB and a bit, its hash, and where it lies."""
    content = os.urandom(3_000_017)
    path = tmp_path / "here.safetensors"
    path.write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    server.offer(sha256, path)
    return content, sha256, path


def source(server, sha256, run=RUN):
    return FileSource(server.address, run, sha256)


def test_file_arrives_as_it_is(server, offered, tmp_path):
    content, sha256, _ = offered
    target = tmp_path / "other" / "there.safetensors"
    assert fetch_file(target, sha256, lambda offset: pieces(source(server, sha256), offset=offset))
    assert target.read_bytes() == content
    assert has_file(target, sha256)
    assert os.listdir(target.parent) == [target.name]


def test_partial_file_is_gone_on_with(server, offered, tmp_path):
    content, sha256, _ = offered
    target = tmp_path / "there"
    (tmp_path / f"there{PARTIAL_SUFFIX}").write_bytes(content[:1_000_000])
    offsets = []

    def counted(offset):
        offsets.append(offset)
        return pieces(source(server, sha256), offset=offset)

    assert fetch_file(target, sha256, counted)
    assert offsets == [1_000_000]
    assert target.read_bytes() == content


def test_damaged_bytes_are_not_kept(server, offered, tmp_path):
    content, sha256, path = offered
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    target = tmp_path / "there"
    with pytest.raises(RemoteProtocolError, match="there has the SHA-256"):
        fetch_file(target, sha256, lambda offset: pieces(source(server, sha256), offset=offset))
    assert not target.exists()
    assert not (tmp_path / f"there{PARTIAL_SUFFIX}").exists()


@pytest.mark.parametrize("why", ["hash", "run", "gone"])
def test_what_is_not_offered_is_not_there(server, offered, why):
    _, sha256, path = offered
    if why == "gone":
        path.unlink()
    wanted = source(server, "ab" * 32 if why == "hash" else sha256, RUN + (why == "run"))
    with pytest.raises(PeerLostError, match="not there any more"):
        list(pieces(wanted))


def test_odd_requests_are_not_answered_and_others_are(server, offered, caplog):
    content, sha256, _ = offered
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(f"tcp://{server.address}")
    try:
        with caplog.at_level(logging.WARNING, logger=file_server.__name__):
            dealer.send(pack_request(FileRequest(RUN, 1, bytes.fromhex(sha256), 0, 256 * 1024 + 1)))
            dealer.send(b"/etc/passwd")
            dealer.send_multipart([b"a", b"b"])
            dealer.send(pack_request(FileRequest(RUN, 2, bytes.fromhex(sha256), len(content) + 9, 1)))
            assert dealer.poll(5000)
            header, data = dealer.recv_multipart()
    finally:
        context.destroy(linger=0)
    assert (unpack_reply(header, "server").status, data) == (Status.BEYOND, b"")
    assert "asked for 262145 bytes" in caplog.text
    assert b"".join(pieces(source(server, sha256))) == content


def test_server_that_is_gone_and_back_goes_on(offered, server, tmp_path):
    content, sha256, path = offered
    wanted = FileSource(server.address, RUN, sha256)
    got = bytearray()
    for piece in pieces(wanted, rate_bits_per_s=1e8, patience=Patience(0.2, 20.0)):
        if not got:
            server.close()
            threading.Timer(0.5, lambda: again(server.address, sha256, path)).start()
        got += piece
    assert bytes(got) == content
    AGAIN.pop().close()


AGAIN = []


def again(address, sha256, path):
    server = FileServer(RUN, address, None, None)
    server.offer(sha256, path)
    AGAIN.append(server)


def test_server_that_stays_away_is_given_up_and_what_came_is_kept(offered, server, tmp_path):
    content, sha256, _ = offered
    target = tmp_path / "there"

    def interrupted(offset):
        for piece in pieces(source(server, sha256), offset=offset, rate_bits_per_s=5e7, patience=SHORT):
            server.close()
            yield piece

    with pytest.raises(PeerLostError, match=r"silent for 1 s"):
        fetch_file(target, sha256, interrupted)
    assert content.startswith((tmp_path / f"there{PARTIAL_SUFFIX}").read_bytes())


def test_file_that_is_no_longer_wanted_is_left(server, offered, tmp_path):
    _, sha256, _ = offered
    begin_s = time.monotonic()
    wanted = {"is_wanted": lambda: time.monotonic() < begin_s + 0.3}
    target = tmp_path / "there"
    slow = {"rate_bits_per_s": 1e6, **wanted}
    assert not fetch_file(
        target, sha256, lambda offset: pieces(source(server, sha256), offset=offset, **slow), **wanted
    )
    assert time.monotonic() - begin_s < 2.0
    assert not target.exists()


@pytest.mark.serial
def test_cap_is_kept_and_used(server, offered):
    content, sha256, _ = offered
    begin_s = time.monotonic()
    assert b"".join(pieces(source(server, sha256), rate_bits_per_s=2e7)) == content
    rate = len(content) * 8 / (time.monotonic() - begin_s)
    assert 1.4e7 < rate < 2.25e7  # at most a tenth of a second's piece is free


def keyed(server, sha256):
    return FileSource(server.address, RUN, sha256, SERVER_KEYS.public)


@pytest.fixture
def keyed_server(offered):
    _, sha256, path = offered
    server = FileServer(RUN, "127.0.0.1:0", None, SERVER_KEYS)
    server.offer(sha256, path)
    yield server
    server.close()


def test_owner_of_a_key_that_was_named_gets_the_file(keyed_server, offered):
    content, sha256, _ = offered
    keyed_server.allow([ASKER_KEYS.public])
    assert b"".join(pieces(keyed(keyed_server, sha256), keys=ASKER_KEYS)) == content


def test_asker_who_is_named_a_moment_later_waits(keyed_server, offered):
    content, sha256, _ = offered
    naming = threading.Timer(0.5, keyed_server.allow, ([ASKER_KEYS.public],))
    naming.start()
    assert b"".join(pieces(keyed(keyed_server, sha256), keys=ASKER_KEYS, patience=Patience(5.0, 20.0))) == content
    naming.join()


def test_asker_whom_nobody_named_is_told_that_it_is_the_key(keyed_server, offered, caplog):
    _, sha256, _ = offered
    with pytest.raises(PeerLostError, match=r"silent for 5 s; the peer does not take this worker's key"):
        list(pieces(keyed(keyed_server, sha256), keys=ASKER_KEYS, patience=Patience(1.0, 5.0)))
    assert f"its public key {ASKER_KEYS.public} is not one of the 0 that may connect" in caplog.text


def test_asker_without_curve_gets_nothing(keyed_server, offered):
    _, sha256, _ = offered
    # Which of the two is seen depends on how far the handshake came in that time.
    with pytest.raises(PeerLostError, match=r"one end uses CURVE and the other does not|without CURVE"):
        list(pieces(source(keyed_server, sha256), patience=Patience(0.5, 2.0)))


def test_key_for_who_has_none_is_refused_at_once(server, offered):
    _, sha256, _ = offered
    with pytest.raises(RemoteProtocolError, match="CURVE is on at one end and off at the other"):
        list(pieces(keyed(server, sha256)))
