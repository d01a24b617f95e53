"""Bytes of control messages: version, CRC-32, msgpack of [type, {field: value}].

`encode_message` and `decode_message` are the only ways in and out of bytes. Decoding checks length, checksum, version
and the number of values before it builds anything, then type, field names and field types; whatever is wrong raises
RemoteProtocolError.
"""

import reprlib
import struct
import zlib
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgpack

from tahq.comm.control.messages import Message
from tahq.errors import LocalProtocolError, RemoteProtocolError

PROTOCOL_VERSION = 1
MAX_MESSAGE_NBYTES = 16 * 1024 * 1024
MAX_VALUES = 1 << 18
"""Most numbers, strings, lists and maps in one message, all nesting levels together. A traced part has about 16,000."""

_ENVELOPE = struct.Struct("<BI")
_TYPES: dict[str, type[Message]] = {cls.__name__: cls for cls in get_args(Message)}


def encode_message(message: Message) -> bytes:
    """The bytes of a control message.

    Raises:
        LocalProtocolError: a field has the wrong type, or the message is too long.
    """
    cls: Any = type(message)
    try:
        body = bytes(
            msgpack.packb([cls.__name__, check_fields(cls, {n: getattr(message, n) for n in field_types(cls)})])
        )
        _check_size(body)
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"cannot send {cls.__name__}: {error}") from error
    return _ENVELOPE.pack(PROTOCOL_VERSION, zlib.crc32(body)) + body


def decode_message(data: bytes | memoryview, peer: str) -> Message:
    """The message in these bytes; `peer` names their sender in errors.

    Raises:
        RemoteProtocolError: not a message of this version, damaged, too large, or a field of the wrong type.
    """
    body = _open_envelope(data, peer)
    try:
        _check_size(body)
        # Binary and extension types have no place in a message.
        unpacked = msgpack.unpackb(body, max_str_len=len(body), max_array_len=len(body), max_map_len=len(body),
                                   max_bin_len=0, max_ext_len=0)  # fmt: skip
        match unpacked:
            case [str(name), values] if name in _TYPES:
                return _TYPES[name](**check_fields(_TYPES[name], values))
            case _:
                raise ValueError(f"expected [type, fields], got {reprlib.repr(unpacked)}")
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"{peer}: sent a malformed control message: {error}") from None


def _open_envelope(data: bytes | memoryview, peer: str) -> memoryview:
    body = memoryview(data)[_ENVELOPE.size :]
    if len(data) < _ENVELOPE.size or len(body) > MAX_MESSAGE_NBYTES:
        raise RemoteProtocolError(
            f"{peer}: sent a control message of {len(data)} bytes; expected {_ENVELOPE.size} to {MAX_MESSAGE_NBYTES}"
        )
    version, checksum = _ENVELOPE.unpack_from(data)
    if version != PROTOCOL_VERSION:
        raise RemoteProtocolError(
            f"{peer}: speaks version {version} of the control protocol; expected {PROTOCOL_VERSION}; install the "
            f"same tahq on every machine"
        )
    if checksum != zlib.crc32(body):
        raise RemoteProtocolError(f"{peer}: sent a control message whose checksum does not match")
    return body


# How many values are in a message, without building them

_SIZES = {
    **dict.fromkeys((0xCC, 0xD0), 2), **dict.fromkeys((0xCD, 0xD1, 0xDC, 0xDE), 3),
    **dict.fromkeys((0xCA, 0xCE, 0xD2, 0xDD, 0xDF), 5), **dict.fromkeys((0xCB, 0xCF, 0xD3), 9),
    0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18,
}  # fmt: skip
"""Bytes of a msgpack value with this first byte, the items of an array or map not counted; others have 1."""
_LENGTH_NBYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes of the length that follows this first byte, in front of a string, binary or extension."""


def _check_size(body: bytes | memoryview) -> None:
    if len(body) > MAX_MESSAGE_NBYTES:
        raise ValueError(f"{len(body)} bytes; at most {MAX_MESSAGE_NBYTES}")
    if len(body) <= MAX_VALUES:  # a value takes a byte at least
        return
    at = count = 0
    while at < len(body):
        count += 1
        if count > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values in {len(body)} bytes")
        first = body[at]
        if 0xA0 <= first <= 0xBF:
            at += 1 + (first & 0x1F)
        elif (width := _LENGTH_NBYTES.get(first)) is not None:
            at += 1 + width + int.from_bytes(body[at + 1 : at + 1 + width], "big")
        else:
            at += _SIZES.get(first, 1)


# Whether plain values have the types of a dataclass's fields


@cache
def field_types(cls: type) -> dict[str, Any]:
    """The type of every field of a dataclass, by name."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def check_fields(cls: type, values: object) -> dict[str, Any]:
    """`values` as keyword arguments for `cls`: exactly its fields, each of its type.

    Raises:
        TypeError: a field is missing, unknown or of another type.
    """
    types = field_types(cls)
    if not isinstance(values, dict) or values.keys() != types.keys():
        raise TypeError(f"{cls.__name__} has fields {sorted(types)}; got {reprlib.repr(values)}")
    return {name: _check_field(cls, name, hint, values[name]) for name, hint in types.items()}


def _check_field(cls: type, name: str, hint: Any, value: object) -> object:
    try:
        return conform(hint, value)
    except TypeError:
        expected = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
        raise TypeError(f"{cls.__name__}.{name} is {expected}; got {reprlib.repr(value)}") from None


def conform(hint: Any, value: object) -> object:
    """`value`, ints converted where `hint` says float; an int never passes for a bool, nor a bool for an int.

    Raises:
        TypeError: it has another type. `hint` is int, float, bool, str, None, or a list, dict or union of these.
    """
    origin = get_origin(hint)
    if origin is UnionType:
        for option in get_args(hint):
            try:
                return conform(option, value)
            except TypeError:
                continue
    elif origin is list and isinstance(value, list):
        (item_hint,) = get_args(hint)
        return [conform(item_hint, item) for item in value]
    elif origin is dict and isinstance(value, dict):
        key_hint, item_hint = get_args(hint)
        return {conform(key_hint, key): conform(item_hint, item) for key, item in value.items()}
    elif hint is float and type(value) is int:
        return float(value)
    elif type(value) is hint:
        return value
    raise TypeError(f"{reprlib.repr(value)} is not {hint}")
