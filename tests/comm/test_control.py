"""Bytes of control messages: what is sent comes out again, and nothing else gets in."""

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
from tahq.comm.control.messages import Abort, Assign, Commit, Join, Message, Plan, Prepare, Start
from tahq.errors import LocalProtocolError, RemoteProtocolError

MESSAGES = get_args(Message)
SIMPLE = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=30),
    type(None): st.none(),
}


def values_of(hint) -> st.SearchStrategy:
    """Values of a field's type, found without the code under test."""
    if get_origin(hint) is types.UnionType:
        return st.one_of(*map(values_of, get_args(hint)))
    if get_origin(hint) is list:
        return st.lists(values_of(get_args(hint)[0]), max_size=5)
    if get_origin(hint) is dict:
        return st.dictionaries(*map(values_of, get_args(hint)), max_size=5)
    return SIMPLE[hint]


def messages_of(cls) -> st.SearchStrategy:
    return st.builds(cls, **{name: values_of(hint) for name, hint in field_types(cls).items()})


messages = st.one_of(*map(messages_of, MESSAGES))


def sealed(body: bytes, version: int = 1) -> bytes:
    """As a peer would send it that means what it says."""
    return bytes([version]) + zlib.crc32(body).to_bytes(4, "little") + body


def refused(data: bytes, reason: str = "") -> str:
    """The error of a message that must be refused; it names the peer."""
    with pytest.raises(RemoteProtocolError, match=rf"worker 3.*{reason}") as error:
        decode_message(data, "worker 3")
    return str(error.value)


@given(messages)
def test_message_survives_a_round_trip(message):
    assert decode_message(encode_message(message), "worker 3") == message


@given(messages, st.data())
def test_any_damaged_byte_is_noticed(message, data):
    encoded = bytearray(encode_message(message))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    refused(bytes(encoded))


@given(st.binary(max_size=200), st.booleans())
def test_garbage_is_a_protocol_error_also_with_a_right_checksum(data, is_sealed):
    refused(sealed(data) if is_sealed else data)


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
    "weights_digest": "",
    "abandoned": False,
    "peak_bytes": 0,
    "router_loss": None,
    "rewards": [],
}


def test_ints_pass_for_floats_and_non_finite_numbers_travel():
    message = decode_message(sealed(msgpack.packb(["Prepare", PREPARE])), "worker 3")
    assert message == Prepare(1, 2, [1.5, 2.0], True, None, None, "", {"forward": 1.0}, [[1.0, 0.5]])
    assert type(message.norm2[1]) is float
    commit = decode_message(encode_message(Commit(1, False, math.nan, False, False, False)), "")
    assert math.isnan(commit.clip_factor)


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
    refused(sealed(body), rf"Prepare\.{field} is .*; got")


NOT_MESSAGES = {
    "field missing": ["Prepare", {name: value for name, value in PREPARE.items() if name != "norm2"}],
    "field unknown": ["Prepare", PREPARE | {"more": 1}],
    "no fields": ["Prepare", [1, 2]],
    "no pair": ["Prepare"],
    "type unknown": ["NoSuchMessage", {}],
    "type not text": [3, {}],
    "text": "Prepare",
    "key not text": ["Start", {1: 2}],
    "binary": ["Start", {"step": b"1"}],
}
ANNOUNCED_ONLY = {
    "map": b"\x92\xa5Start\xdf\xff\xff\xff\xff",
    "array": b"\xdd\xff\xff\xff\xff",
    "long text": b"\xdb\xff\xff\xff\xff",
    "long binary": b"\xc6\xff\xff\xff\xff",
    "extension": b"\xc9\xff\xff\xff\xff\x01",
    "nesting": b"\x91" * 10_000,
}


def nested() -> bytes:
    """15 MiB of lists of lists, one value per byte."""
    return b"\xdd" + (15 << 20).to_bytes(4, "big") + b"\x91\x90" * (15 << 19)


LARGE = {
    "bare": nested,
    "in a field": lambda: b"\x92\xa5Start\x81\xa4step" + nested(),
    "many lists": lambda: b"\x92\xa5Start\x81\xa4step\xdc\x00\xff" + (b"\xdc\xff\xff" + b"\xc0" * 65535) * 255,
    "type": lambda: msgpack.packb(["x" * (15 << 20), {}]),
    "key": lambda: msgpack.packb(["Start", {"y" * (15 << 20): 1}]),
    "value": lambda: msgpack.packb(["Start", {"step": "z" * (15 << 20), "codecs": []}]),
}


@pytest.mark.parametrize("name", [*NOT_MESSAGES, *ANNOUNCED_ONLY, *LARGE])
def test_body_that_is_not_a_message_is_refused_at_little_cost_and_not_quoted_whole(name):
    """Lengths that are only announced and nesting allocate nothing."""
    if name in NOT_MESSAGES:
        body = msgpack.packb(NOT_MESSAGES[name])
    else:
        body = ANNOUNCED_ONLY[name] if name in ANNOUNCED_ONLY else LARGE[name]()
    data = sealed(body)
    started_s = time.process_time()
    tracemalloc.start()
    try:
        assert len(refused(data)) < 500
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 64 << 20
    assert time.process_time() - started_s < 5


def test_length_limit_holds_at_both_ends_and_the_largest_messages_of_a_run_fit():
    message = Prepare(1, 2, [float(number) for number in range(100_000)], True, None, None, "", {}, [])
    assert decode_message(encode_message(message), "worker 3") == message
    with pytest.raises(LocalProtocolError, match="at most"):
        encode_message(Assign(0, 1, "x" * MAX_MESSAGE_NBYTES, ""))
    refused(bytes(MAX_MESSAGE_NBYTES + 6), "control message of")


def test_other_version_says_what_to_do():
    refused(sealed(b"", version=9), "speaks version 9 .*install the same tahq")


@pytest.mark.parametrize(
    "message",
    [Start("1"), Start(2**64), Join(0, "v", None, 1), Abort("\ud800", 1), Plan(0, 0, 1, [[None]])],
    ids=["text for int", "int too long", "None", "no Unicode", "None in a row"],
)
def test_message_that_breaks_its_own_types_is_our_own_error(message):
    with pytest.raises(LocalProtocolError, match=f"cannot send {type(message).__name__}"):
        encode_message(message)
