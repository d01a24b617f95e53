import math
import time
import tracemalloc
import types
import zlib
from dataclasses import fields
from typing import get_args, get_origin

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.comm.control.encoding import MAX_MESSAGE_NBYTES, conform, decode_message, encode_message, field_types
from tahq.comm.control.messages import Abort, Assign, Commit, Heartbeat, Join, Message, Plan, Prepare, Start
from tahq.errors import LocalProtocolError, RemoteProtocolError

MESSAGES = get_args(Message)


def values_of(hint) -> st.SearchStrategy:
    """Values of a field's type, found without the code under test."""
    if get_origin(hint) is types.UnionType:
        return st.one_of(*map(values_of, get_args(hint)))
    if get_origin(hint) is list:
        return st.lists(values_of(get_args(hint)[0]), max_size=5)
    if get_origin(hint) is dict:
        return st.dictionaries(*map(values_of, get_args(hint)), max_size=5)
    simple = {
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: st.text(max_size=30),
        type(None): st.none(),
    }
    return simple[hint]


def messages_of(cls) -> st.SearchStrategy:
    return st.builds(cls, **{name: values_of(hint) for name, hint in field_types(cls).items()})


messages = st.one_of(*map(messages_of, MESSAGES))


@given(messages)
def test_message_survives_a_round_trip(message):
    assert decode_message(encode_message(message), "worker 3") == message


@given(messages, st.data())
def test_any_damaged_byte_is_noticed_and_the_peer_named(message, data):
    encoded = bytearray(encode_message(message))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RemoteProtocolError, match="worker 3"):
        decode_message(bytes(encoded), "worker 3")


@given(st.binary(max_size=100))
def test_garbage_is_a_protocol_error(data):
    with pytest.raises(RemoteProtocolError, match="worker 3"):
        decode_message(data, "worker 3")


def sealed(body: bytes, version: int = 1) -> bytes:
    """As a peer would send it that means what it says."""
    return bytes([version]) + zlib.crc32(body).to_bytes(4, "little") + body


@given(st.binary(max_size=200))
def test_garbage_with_a_right_checksum_is_a_protocol_error(body):
    with pytest.raises(RemoteProtocolError, match="worker 3"):
        decode_message(sealed(body), "worker 3")


leaves = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats()),
    *(st.text(max_size=8), st.binary(max_size=8)),
)
anything = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(MESSAGES), st.data())
def test_fields_of_any_value_are_a_message_of_the_right_types_or_a_protocol_error(cls, data):
    values = {field.name: data.draw(anything | values_of(field_types(cls)[field.name])) for field in fields(cls)}
    try:
        message = decode_message(sealed(msgpack.packb([cls.__name__, values])), "worker 3")
    except RemoteProtocolError:
        return
    for name, hint in field_types(cls).items():
        conform(hint, getattr(message, name))


PREPARE = {
    "step": 1,
    "stage": 2,
    "norm2": [1.5, 2],
    "finite": True,
    "loss_sum": None,
    "tokens": None,
    "batch_digest": "",
    "timing": {"forward": 1},
    "links": [[1, 0.5]],
    "codec_state_bytes": 0,
    "active_s": 0,
    "codec_errors": [],
}


def test_int_will_do_for_a_float():
    message = decode_message(sealed(msgpack.packb(["Prepare", PREPARE])), "worker 3")
    assert message == Prepare(1, 2, [1.5, 2.0], True, None, None, "", {"forward": 1.0}, [[1.0, 0.5]])
    assert type(message.norm2[1]) is float


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", 1.0),
        ("step", True),
        ("step", None),
        ("norm2", [1, "2"]),
        ("norm2", {}),
        ("finite", 1),
        ("tokens", 1.5),
        ("batch_digest", 7),
        ("timing", {"forward": "long"}),
        ("timing", [["forward", 1.0]]),
        ("links", [1.0]),
    ],
    ids=str,
)
def test_field_of_another_type_is_a_protocol_error_that_names_it(field, value):
    body = msgpack.packb(["Prepare", PREPARE | {field: value}])
    with pytest.raises(RemoteProtocolError, match=rf"worker 3.*Prepare\.{field} is .*; got"):
        decode_message(sealed(body), "worker 3")


@pytest.mark.parametrize(
    "body",
    [
        ["Prepare", {name: value for name, value in PREPARE.items() if name != "norm2"}],
        ["Prepare", PREPARE | {"more": 1}],
        ["Prepare", [1, 2]],
        ["Prepare"],
        ["NoSuchMessage", {}],
        [3, {}],
        "Prepare",
        ["Start", {1: 2}],
        ["Start", {"step": b"1"}],
    ],
    ids=[
        "field missing",
        "field unknown",
        "no fields",
        "no pair",
        "type unknown",
        "type no text",
        "text",
        "key no text",
        "binary",
    ],
)
def test_body_that_is_no_message_is_a_protocol_error(body):
    with pytest.raises(RemoteProtocolError, match="worker 3"):
        decode_message(sealed(msgpack.packb(body)), "worker 3")


@pytest.mark.parametrize(
    "body",
    [
        b"\x92\xa5Start\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x91" * 10_000,
    ],
    ids=["map", "array", "text", "binary", "extension", "nesting"],
)
def test_length_that_is_only_announced_allocates_nothing(body):
    with pytest.raises(RemoteProtocolError, match="worker 3"):
        decode_message(sealed(body), "worker 3")


def nested(nbytes: int) -> bytes:
    """Lists of lists, one value per byte."""
    return b"\xdd" + nbytes.to_bytes(4, "big") + b"\x91\x90" * (nbytes // 2)


@pytest.mark.parametrize(
    "body",
    [
        nested(15 << 20),
        b"\x92\xa5Start\x81\xa4step" + nested(15 << 20),
        b"\x92\xa5Start\x81\xa4step\xdc\x00\xff" + (b"\xdc\xff\xff" + b"\xc0" * 65535) * 255,
        msgpack.packb(["x" * (15 << 20), {}]),
        msgpack.packb(["Start", {"y" * (15 << 20): 1}]),
        msgpack.packb(["Start", {"step": "z" * (15 << 20), "codecs": []}]),
    ],
    ids=["bare", "in a field", "many lists", "type", "key", "value"],
)
def test_large_message_costs_little_and_is_not_quoted_whole(body):
    started_s = time.process_time()
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError, match="worker 3") as error:
        decode_message(sealed(body), "worker 3")
    _, peak_nbytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(str(error.value)) < 500
    assert peak_nbytes < 64 << 20
    assert time.process_time() - started_s < 5


def test_largest_messages_that_a_run_sends_fit():
    numbers = [float(number) for number in range(100_000)]
    message = Prepare(1, 2, numbers, True, None, None, "", {}, [])
    assert decode_message(encode_message(message), "worker 3") == message


def test_other_version_says_what_to_do():
    with pytest.raises(RemoteProtocolError, match=r"speaks version 9 .*install the same tahq"):
        decode_message(sealed(b"", version=9), "worker 3")


def test_message_longer_than_the_limit_is_refused_at_both_ends():
    long = Assign(0, 1, "x" * MAX_MESSAGE_NBYTES, "")
    with pytest.raises(LocalProtocolError, match="at most"):
        encode_message(long)
    with pytest.raises(RemoteProtocolError, match="control message of"):
        decode_message(bytes(MAX_MESSAGE_NBYTES + 6), "worker 3")


@pytest.mark.parametrize(
    "message",
    [Start("1"), Start(2**64), Join(0, "v", None, 1), Abort("\ud800", 1), Plan(0, 0, 1, [[None]])],
    ids=["text for int", "int too long", "None", "no Unicode", "None in a row"],
)
def test_message_that_breaks_its_own_types_is_our_own_error(message):
    with pytest.raises(LocalProtocolError, match=f"cannot send {type(message).__name__}"):
        encode_message(message)


def test_non_finite_numbers_travel():
    message = decode_message(encode_message(Commit(1, False, math.nan, False, False, False)), "")
    assert math.isnan(message.clip_factor)
    assert decode_message(encode_message(Heartbeat()), "") == Heartbeat()
