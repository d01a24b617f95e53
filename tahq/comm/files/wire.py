"""What is said between who wants a file and who has it: fixed headers, checked before anything else is looked at.

A file is named by its SHA-256, never by a path. docs/protocol.md has the layout.
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from tahq.errors import RemoteProtocolError

MAGIC = b"TAHF"
VERSION = 1
MAX_PIECE_NBYTES = 256 * 1024
MAX_FILE_NBYTES = 1 << 44
"""16 TiB."""
SHA256_NBYTES = 32

_REQUEST = struct.Struct("<4sBQIQI32s")
_REPLY = struct.Struct("<4sBBIQQI")
_CHECKSUM = struct.Struct("<I")
REQUEST_NBYTES = _REQUEST.size + _CHECKSUM.size
REPLY_NBYTES = _REPLY.size + _CHECKSUM.size
MAX_MESSAGE_NBYTES = max(REQUEST_NBYTES, REPLY_NBYTES, MAX_PIECE_NBYTES)


class Status(IntEnum):
    """What comes of a request."""

    HERE = 0
    UNKNOWN = 1
    """No such file is here, or not any more."""
    BEYOND = 2
    """The file is shorter than that."""


@dataclass(frozen=True, slots=True)
class FileRequest:
    """`length` bytes of a file from `offset` on; `number` comes back in the reply."""

    run: int
    number: int
    sha256: bytes
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class FileReply:
    """A piece of a file of `total` bytes; the bytes themselves are the message part after this one."""

    status: Status
    number: int
    offset: int
    total: int
    data_crc: int


def pack_request(request: FileRequest) -> bytes:
    """Its bytes."""
    return _checked(
        _REQUEST.pack(MAGIC, VERSION, request.run, request.number, request.offset, request.length, request.sha256)
    )


def unpack_request(data: bytes, peer: str) -> FileRequest:
    """Raises RemoteProtocolError if these bytes are none, or ask for more than there may be."""
    magic, version, run, number, offset, length, sha256 = _REQUEST.unpack(
        _opened(data, REQUEST_NBYTES, f"{peer}: sent a request for a file")
    )
    _check_kind(magic, version, peer)
    if not 0 < length <= MAX_PIECE_NBYTES or offset > MAX_FILE_NBYTES:
        raise RemoteProtocolError(f"{peer}: asked for {length} bytes at {offset}; at most {MAX_PIECE_NBYTES} at once")
    return FileRequest(run, number, sha256, offset, length)


def pack_reply(reply: FileReply) -> bytes:
    """Its bytes, without those of the file."""
    return _checked(_REPLY.pack(MAGIC, VERSION, reply.status, reply.number, reply.offset, reply.total, reply.data_crc))


def unpack_reply(data: bytes, peer: str) -> FileReply:
    """Raises RemoteProtocolError if these bytes are none."""
    magic, version, status, number, offset, total, data_crc = _REPLY.unpack(
        _opened(data, REPLY_NBYTES, f"{peer}: sent a piece of a file")
    )
    _check_kind(magic, version, peer)
    if status not in tuple(Status) or total > MAX_FILE_NBYTES:
        raise RemoteProtocolError(f"{peer}: sent status {status} for a file of {total} bytes")
    return FileReply(Status(status), number, offset, total, data_crc)


def crc_of(data: bytes) -> int:
    """The checksum of a piece."""
    return zlib.crc32(data)


def _checked(header: bytes) -> bytes:
    return header + _CHECKSUM.pack(zlib.crc32(header))


def _opened(data: bytes, nbytes: int, what: str) -> bytes:
    if len(data) != nbytes:
        raise RemoteProtocolError(f"{what} whose header has {len(data)} bytes, expected {nbytes}")
    header, (checksum,) = data[: -_CHECKSUM.size], _CHECKSUM.unpack_from(data, nbytes - _CHECKSUM.size)
    if zlib.crc32(header) != checksum:
        raise RemoteProtocolError(f"{what} whose header is damaged")
    return header


def _check_kind(magic: bytes, version: int, peer: str) -> None:
    if (magic, version) != (MAGIC, VERSION):
        raise RemoteProtocolError(
            f"{peer}: sent {magic!r}, version {version}; expected {MAGIC!r}, version {VERSION}: install the same tahq "
            "on every machine"
        )
