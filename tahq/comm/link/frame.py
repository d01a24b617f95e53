"""What travels on a link: the logical id of a piece of data, and the frame that carries it.

The byte layout of the header (`pack_header`, `unpack_header`) is in this module too; see
docs/dev/protocol.md for the table. Invariant: `unpack_header` either returns a header whose every field
is in range and whose checksum covers the payload it came with, or raises RemoteProtocolError.
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch

from tahq.errors import LocalProtocolError, RemoteProtocolError


class Purpose(IntEnum):
    """Why a tensor is sent."""

    TRAIN = 0
    EVAL = 1
    EVAL_RAW = 2
    TIE = 3
    GROUP = 4
    """No tensor of the model: the address at which a link's process group is made."""


_EVALUATING = (Purpose.EVAL, Purpose.EVAL_RAW)


class Direction(IntEnum):
    """Activations go forward (to the higher stage), gradients backward."""

    FORWARD = 0
    BACKWARD = 1


class Channel(IntEnum):
    """What a message on a link belongs to; each channel has its own window (docs/dev/protocol.md, Channels)."""

    DATA = 0
    """Activations, gradients and what else has a logical id."""
    CONTROL = 1
    FILES = 2


class FrameKind(IntEnum):
    """What a frame is for."""

    DATA = 0
    HELLO = 1
    ACK = 2
    HEARTBEAT = 3
    BYE = 4
    RESEND = 5
    RESUME = 6
    RESET = 7
    """The sender knows nothing of the session that it was spoken to in."""


class LogicalId(NamedTuple):
    """Names a piece of data, independently of who delivers it and how often (DESIGN: logical id).

    A tuple and no dataclass, because each frame's is made, hashed and compared a dozen times.
    """

    run: int
    replica: int
    step: int
    purpose: Purpose
    micro_batch: int
    cut: int
    direction: Direction

    @classmethod
    def of_session(cls, run: int) -> "LogicalId":
        """Fills the header of messages that carry no data."""
        return cls(run, 0, 0, Purpose.TRAIN, 0, 0, Direction.FORWARD)

    @property
    def is_evaluation(self) -> bool:
        """Whether it is sent to evaluate; such frames are in no step's figures."""
        return self.purpose in _EVALUATING


@dataclass(frozen=True, slots=True)
class Frame:
    """One tensor on its way: its id, how to decode it, and its bytes.

    `payload` is uint8, 1-D, contiguous; `shape` and `dtype` are the decoded tensor's.
    """

    id: LogicalId
    codec: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    payload: torch.Tensor
    shard: int = 0


CPU = torch.device("cpu")
MAGIC = b"TAHQ"
HEADER_VERSION = 3
MAX_DIMS = 4
MAX_PIECE_NBYTES = 1024 * 1024

DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
"""The dtype field is an index into this tuple; new ones go to its end."""

_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
# Indexing a tuple is several times cheaper than calling an enum, and this runs for every message.
_KINDS, _PURPOSES, _DIRECTIONS, _CHANNELS = tuple(FrameKind), tuple(Purpose), tuple(Direction), tuple(Channel)
_FIELDS = struct.Struct("<4s4B3Q5I2H4B4IIQQ")
_CHECKSUM = struct.Struct("<I")
HEADER_NBYTES = _FIELDS.size + _CHECKSUM.size


def check_sendable(frame: Frame, device: torch.device = CPU) -> None:
    """Whether a transport that sends from this device's memory can take this frame.

    Raises:
        LocalProtocolError: the payload is no contiguous 1-D uint8 tensor there, or a field has no place.
    """
    payload = frame.payload
    if payload.dtype != torch.uint8 or payload.ndim != 1 or payload.device != device or not payload.is_contiguous():
        raise LocalProtocolError(
            f"{frame.id}: a payload must be uint8, 1-D, contiguous and on {device}; got {payload.dtype}, shape "
            f"{tuple(payload.shape)}, on {payload.device}"
        )
    if len(frame.shape) > MAX_DIMS or frame.dtype not in DTYPES:
        raise LocalProtocolError(f"{frame.id}: the header has no place for {frame.dtype} of shape {frame.shape}")


def buffer_of(payload: torch.Tensor) -> memoryview:
    """The bytes of a uint8 CPU tensor, not copied; the view keeps them alive."""
    return memoryview(payload.numpy().data)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """One message on a link: a piece of a frame (DATA), or one of the session's own messages.

    `sequence` is the message's own number for DATA, the highest one received without a gap for ACK,
    and the last one sent for HEARTBEAT and BYE. The fields after it mean something for DATA alone.
    """

    kind: FrameKind
    epoch: int
    link: int
    sequence: int
    id: LogicalId
    shard: int = 0
    codec: int = 0
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    offset: int = 0
    total_nbytes: int = 0
    payload_nbytes: int = 0
    channel: Channel = Channel.DATA


def pack_header(header: FrameHeader, payload: bytes | memoryview) -> bytes:
    """The header's HEADER_NBYTES bytes, its checksum covering them and the payload.

    Raises:
        LocalProtocolError: a field does not fit its place, or `payload` is not of the length it names.
    """
    if len(payload) != header.payload_nbytes or len(header.shape) > MAX_DIMS or header.dtype not in _DTYPE_CODES:
        raise LocalProtocolError(f"this header cannot carry {len(payload)} bytes: {header}")
    try:
        fields = _FIELDS.pack(*_values(header))
    except struct.error as error:
        raise LocalProtocolError(f"a field of this header is out of range ({error}): {header}") from None
    return fields + _CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(fields)))


def _values(header: FrameHeader) -> tuple[bytes | int, ...]:
    id = header.id
    shape = header.shape + (0,) * (MAX_DIMS - len(header.shape))
    return (
        *(MAGIC, HEADER_VERSION, header.kind, id.purpose, id.direction),
        *(id.run, header.sequence, id.step),
        *(header.epoch, header.link, id.replica, id.micro_batch, id.cut),
        *(header.shard, header.codec),
        *(_DTYPE_CODES[header.dtype], len(header.shape), header.channel, 0, *shape),
        *(header.payload_nbytes, header.offset, header.total_nbytes),
    )


def peek_kind(data: bytes | memoryview) -> int:
    """The kind in a header that nobody has verified yet; -1 if it is too short to have one."""
    return data[5] if len(data) == HEADER_NBYTES else -1


def peek_payload_nbytes(data: bytes | memoryview) -> int:
    """The length of the payload that goes with a header of which nothing is verified yet; -1 if it is too short."""
    return int(_FIELDS.unpack_from(data)[-3]) if len(data) == HEADER_NBYTES else -1


def unpack_header(data: bytes | memoryview, payload: bytes | memoryview, peer: str) -> FrameHeader:
    """The header in these bytes, everything in it verified.

    Args:
        data: HEADER_NBYTES bytes from the peer.
        payload: what came with them.
        peer: who sent them, for the message of the error.

    Raises:
        RemoteProtocolError: wrong length, magic, version or checksum, or a field out of range.
    """
    if len(data) != HEADER_NBYTES:
        raise RemoteProtocolError(f"{peer}: sent a header of {len(data)} bytes; expected {HEADER_NBYTES}")
    fields = bytes(data[: _FIELDS.size])
    values = _FIELDS.unpack(fields)
    _check_envelope(values, data, fields, payload, peer)
    try:
        header = _header(values)
    except (ValueError, IndexError) as error:
        raise RemoteProtocolError(f"{peer}: sent a header with a field out of range: {error}") from None
    if header.offset + header.payload_nbytes > header.total_nbytes and header.kind is FrameKind.DATA:
        raise RemoteProtocolError(f"{peer}: sent a piece that reaches past the end of its frame: {header}")
    return header


def _check_envelope(
    values: tuple[bytes | int, ...],
    data: bytes | memoryview,
    fields: bytes,
    payload: bytes | memoryview,
    peer: str,
) -> None:
    magic, version, payload_nbytes = values[0], values[1], values[-3]
    if magic != MAGIC or version != HEADER_VERSION:
        raise RemoteProtocolError(
            f"{peer}: sent a header with magic {magic!r}, version {version!r}; expected {MAGIC!r}, version "
            f"{HEADER_VERSION}; do both ends run the same tahq?"
        )
    if payload_nbytes != len(payload):
        raise RemoteProtocolError(f"{peer}: announced {payload_nbytes!r} bytes of payload and sent {len(payload)}")
    (checksum,) = _CHECKSUM.unpack(data[_FIELDS.size :])
    if checksum != zlib.crc32(payload, zlib.crc32(fields)):
        raise RemoteProtocolError(
            f"{peer}: sent {len(payload)} bytes whose checksum does not match; damaged on the way"
        )


def _header(values: tuple[int, ...]) -> FrameHeader:
    (_, _, kind, purpose, direction, run, sequence, step, epoch, link, replica, micro_batch, cut) = values[:13]
    (shard, codec, dtype, num_dims, channel, reserved, *shape, payload_nbytes, offset, total_nbytes) = values[13:]
    if num_dims > MAX_DIMS or reserved or any(shape[num_dims:]):
        raise ValueError(f"{num_dims} dimensions in {shape}, reserved byte {reserved}")
    return FrameHeader(
        kind=_KINDS[kind],
        epoch=epoch,
        link=link,
        sequence=sequence,
        id=LogicalId(run, replica, step, _PURPOSES[purpose], micro_batch, cut, _DIRECTIONS[direction]),
        shard=shard,
        codec=codec,
        dtype=DTYPES[dtype],
        shape=tuple(shape[:num_dims]),
        offset=offset,
        total_nbytes=total_nbytes,
        payload_nbytes=payload_nbytes,
        channel=_CHANNELS[channel],
    )
