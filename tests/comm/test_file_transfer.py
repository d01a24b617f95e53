"""Which pieces of a file are asked for, and when: no socket, no clock, a line that loses what it likes."""

import hashlib
import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.comm.files.transfer import WINDOW_PIECES, FileSource, FileTransfer, Patience
from tahq.comm.files.wire import (
    MAX_PIECE_NBYTES,
    FileReply,
    FileRequest,
    Status,
    crc_of,
    pack_reply,
    pack_request,
    unpack_reply,
    unpack_request,
)
from tahq.errors import PeerLostError, RemoteProtocolError

RUN = 2**63 - 5


def source_of(content):
    return FileSource("host1:7000", RUN, hashlib.sha256(content).hexdigest())


def answer(content, request):
    piece = content[request.offset : request.offset + request.length]
    return pack_reply(FileReply(Status.HERE, request.number, request.offset, len(content), crc_of(piece))), piece


def fetched(content, dice, *, loss=0.0, rate=None, offset=0):
    """Over a line that loses requests and replies, keeps the order of the rest, and takes its time."""
    now_s = 0.0
    transfer = FileTransfer(source_of(content), offset, rate, Patience(1.0, 1e6), now_s)
    line, got = deque(), b""
    while not transfer.is_done:
        for data in transfer.requests(now_s):
            request = unpack_request(data, "test")
            if dice.random() >= loss:
                line.append(answer(content, request))
        if line and dice.random() < 0.8:
            reply = line.popleft()
            if dice.random() >= loss:
                got += transfer.take(*reply, now_s)
        else:
            now_s += min(transfer.wait_s(now_s), 0.3) + 1e-6
    return got, now_s


@given(st.binary(max_size=30000), st.integers(0, 2**32), st.sampled_from([0.0, 0.2, 0.5]), st.floats(0, 1))
def test_bytes_come_once_and_in_order_over_any_line(content, seed, loss, share):
    offset = int(share * len(content))
    got, _ = fetched(content, random.Random(seed), loss=loss, rate=3e5, offset=offset)
    assert got == content[offset:]


@given(st.integers(0, 2**32), st.sampled_from([1e5, 1e6, 1e7]))
def test_rate_is_kept(seed, rate):
    content = bytes(50000)
    got, took_s = fetched(content, random.Random(seed), rate=rate)
    last_piece = max(4096, rate * 0.1 / 8)
    assert len(got) == len(content)
    assert took_s >= (len(content) - last_piece) * 8 / rate * 0.99


def test_no_more_than_a_window_is_under_way():
    content = bytes(3 * WINDOW_PIECES * MAX_PIECE_NBYTES)
    transfer = FileTransfer(source_of(content), 0, None, Patience(), 0.0)
    (first,) = transfer.requests(0.0)
    transfer.take(*answer(content, unpack_request(first, "test")), 0.0)
    asked = [unpack_request(data, "test") for data in transfer.requests(0.0)]
    assert sum(request.length for request in asked) == WINDOW_PIECES * MAX_PIECE_NBYTES
    assert transfer.requests(0.0) == []


def test_silence_is_asked_again_and_then_given_up():
    transfer = FileTransfer(source_of(b"a"), 0, None, Patience(1.0, 3.0), 0.0)
    assert len(transfer.requests(0.0)) == 1
    assert transfer.requests(0.9) == []
    assert len(transfer.requests(1.0)) == 1
    assert len(transfer.requests(2.0)) == 1
    with pytest.raises(PeerLostError, match=r"host1:7000 .*silent for 3 s"):
        transfer.requests(3.0)


@pytest.mark.parametrize("change", ["status", "offset", "length", "crc", "longer"])
def test_replies_that_make_no_sense_are_refused(change):
    content = bytes(1000)
    transfer = FileTransfer(source_of(content), 0, None, Patience(), 0.0)
    request = unpack_request(transfer.requests(0.0)[0], "test")
    reply = {"status": Status.HERE, "number": request.number, "offset": 0, "total": 1000, "data_crc": crc_of(content)}
    data = content
    if change == "status":
        reply["status"] = Status.BEYOND
    elif change == "offset":
        reply["offset"] = 8
    elif change == "crc":
        reply["data_crc"] += 1
    else:
        data = content[:-1] if change == "length" else content + b"x"
    with pytest.raises(RemoteProtocolError, match="host1:7000"):
        transfer.take(pack_reply(FileReply(**reply)), data, 0.0)


def test_source_without_the_file_is_named():
    transfer = FileTransfer(source_of(b"a"), 0, None, Patience(), 0.0)
    request = unpack_request(transfer.requests(0.0)[0], "test")
    with pytest.raises(PeerLostError, match="not there any more"):
        transfer.take(pack_reply(FileReply(Status.UNKNOWN, request.number, 0, 0, 0)), b"", 0.0)


@given(st.binary(max_size=200), st.data())
def test_any_bytes_are_a_header_or_a_remote_protocol_error(noise, data):
    request = pack_request(FileRequest(RUN, 3, bytes(32), 5, 100))
    reply = pack_reply(FileReply(Status.HERE, 3, 5, 100, 7))
    for packed, unpack in ((request, unpack_request), (reply, unpack_reply)):
        index = data.draw(st.integers(0, len(packed) - 1))
        changed = packed[:index] + bytes([packed[index] ^ data.draw(st.integers(1, 255))]) + packed[index + 1 :]
        for odd in (noise, changed, packed[:index]):
            with pytest.raises(RemoteProtocolError):
                unpack(odd, "host1")


@pytest.mark.parametrize(("offset", "length"), [(0, 0), (0, MAX_PIECE_NBYTES + 1), (2**63, 1)])
def test_requests_beyond_the_limits_are_refused(offset, length):
    with pytest.raises(RemoteProtocolError, match="at most"):
        unpack_request(pack_request(FileRequest(RUN, 1, bytes(32), offset, length)), "host1")


def test_example_of_the_document():
    packed = pack_request(FileRequest(0x1122334455667788, 1, bytes(range(32)), 0, 4096))
    assert packed[:4] == b"TAHF"
    assert (len(packed), len(pack_reply(FileReply(Status.HERE, 1, 0, 10, 0)))) == (65, 34)
