"""What travels on a link: the logical id of a piece of data, and the frame that carries it.

docs/dev/protocol.md has the byte layout of the header. Invariant: `unpack_header` either returns a header whose every
field is in range and whose checksum covers the payload it came with, or raises RemoteProtocolError.
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
    SUM = 4
    """A part of the gradients that replicas sum."""
    WEIGHTS = 5
    """Weights that replicas lend each other to train; to evaluate, such frames have the purpose of the evaluation."""


EVALUATING = (Purpose.EVAL, Purpose.EVAL_RAW)


class Direction(IntEnum):
    """Activations go forward (to the higher stage), gradients backward."""

    FORWARD = 0
    BACKWARD = 1


class Channel(IntEnum):
    """What a message on a link belongs to; each channel has its own window (docs/dev/protocol.md)."""

    DATA = 0
    """Activations, gradients and everything else that has a logical id."""
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
    """The sender knows nothing of the session that it got a message for."""


class LogicalId(NamedTuple):
    """Names a piece of data, however it is delivered and how often.

    A tuple, not a dataclass, because it is made, hashed and compared a dozen times per frame.
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
        return self.purpose in EVALUATING


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


VOID = 0xFFFF
"""The codec of a frame without a tensor: its sender has abandoned the step."""


def void_frame(id: LogicalId) -> Frame:
    """What arrives under this id in an abandoned step."""
    return Frame(id, VOID, torch.float32, (), torch.empty(0, dtype=torch.uint8))


class Outgoing(NamedTuple):
    """A message for the wire, over one of the link's connections.

    `ready_s` is when it could first have been sent, had the wire been free.
    """

    header: bytes
    payload: memoryview | bytes
    ready_s: float
    connection: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of both parts; the framing of ZMQ, TCP and IP is not counted."""
        return len(self.header) + len(self.payload)


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
_NO_DIMS = (0,) * MAX_DIMS


def check_sendable(frame: Frame, device: torch.device = CPU) -> None:
    """Raise LocalProtocolError if a transport that sends from this device's memory cannot take this frame."""
    payload = frame.payload
    if payload.dtype != torch.uint8 or payload.ndim != 1 or payload.device != device or not payload.is_contiguous():
        raise LocalProtocolError(
            f"{frame.id}: a payload must be uint8, 1-D, contiguous and on {device}; got {payload.dtype}, shape "
            f"{tuple(payload.shape)}, on {payload.device}"
        )
    if len(frame.shape) > MAX_DIMS or frame.dtype not in _DTYPE_CODES:
        raise LocalProtocolError(f"{frame.id}: the header cannot describe {frame.dtype} of shape {frame.shape}")


def buffer_of(payload: torch.Tensor) -> memoryview:
    """The bytes of a uint8 CPU tensor, not copied; the view keeps them alive."""
    return memoryview(payload.numpy().data)


class FrameHeader(NamedTuple):
    """One message on a link: a piece of a frame (DATA), or one of the session's own messages.

    `sequence` is the message's own number for DATA, the highest one received without a gap for ACK, and the last one
    sent for HEARTBEAT and BYE. Only DATA uses the fields after `id`. A tuple for the same reason as LogicalId.
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

    def frame(self, payload: torch.Tensor) -> Frame:
        """The frame that this header announces."""
        return Frame(self.id, self.codec, self.dtype, self.shape, payload, self.shard)


def header_of(frame: Frame, epoch: int, link: int) -> FrameHeader:
    """The header that announces a whole frame, not numbered yet."""
    fields = (frame.id, frame.shard, frame.codec, frame.dtype, frame.shape)
    return FrameHeader(FrameKind.DATA, epoch, link, 0, *fields, total_nbytes=frame.payload.numel())


def pack_header(header: FrameHeader, payload: bytes | memoryview) -> bytes:
    """The header's HEADER_NBYTES bytes, its checksum covering them and the payload.

    LocalProtocolError: a field is out of range, or `payload` does not have the length in the header.
    """
    id, shape = header.id, header.shape
    if len(payload) != header.payload_nbytes or len(shape) > MAX_DIMS or header.dtype not in _DTYPE_CODES:
        raise LocalProtocolError(f"this header cannot carry {len(payload)} bytes: {header}")
    try:
        fields = _FIELDS.pack(
            *(MAGIC, HEADER_VERSION, header.kind, id.purpose, id.direction),
            *(id.run, header.sequence, id.step),
            *(header.epoch, header.link, id.replica, id.micro_batch, id.cut),
            *(header.shard, header.codec),
            *(_DTYPE_CODES[header.dtype], len(shape), header.channel, 0, *shape, *_NO_DIMS[len(shape) :]),
            *(header.payload_nbytes, header.offset, header.total_nbytes),
        )
    except struct.error as error:
        raise LocalProtocolError(f"a field of this header is out of range ({error}): {header}") from None
    return fields + _CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(fields)))


def peek_kind(data: bytes | memoryview) -> int:
    """The kind in a header that is not verified yet; -1 if it is too short to have one."""
    return data[5] if len(data) == HEADER_NBYTES else -1


def peek_payload_nbytes(data: bytes | memoryview) -> int:
    """The length of the payload that goes with a header that is not verified yet; -1 if it is too short."""
    return int(_FIELDS.unpack_from(data)[-3]) if len(data) == HEADER_NBYTES else -1


def unpack_header(data: bytes | memoryview, payload: bytes | memoryview, peer: object) -> FrameHeader:
    """The header in `data`, which came from `peer` with this payload, everything in it verified.

    RemoteProtocolError: wrong length, magic, version or checksum, or a field out of range.
    """
    if len(data) != HEADER_NBYTES:
        raise RemoteProtocolError(f"{peer}: sent a header of {len(data)} bytes; expected {HEADER_NBYTES}")
    fields = bytes(data[: _FIELDS.size])
    (magic, version, kind, purpose, direction, run, sequence, step, epoch, link, replica, micro_batch, cut, *rest) = (
        _FIELDS.unpack(fields)
    )
    (shard, codec, dtype, num_dims, channel, reserved, *shape, payload_nbytes, offset, total_nbytes) = rest
    if magic != MAGIC or version != HEADER_VERSION:
        raise RemoteProtocolError(
            f"{peer}: sent a header with magic {magic!r}, version {version!r}; expected {MAGIC!r}, version "
            f"{HEADER_VERSION}; do both ends run the same tahq?"
        )
    if payload_nbytes != len(payload):
        raise RemoteProtocolError(f"{peer}: announced {payload_nbytes!r} bytes of payload and sent {len(payload)}")
    if _CHECKSUM.unpack(data[_FIELDS.size :])[0] != zlib.crc32(payload, zlib.crc32(fields)):
        raise RemoteProtocolError(
            f"{peer}: sent {len(payload)} bytes whose checksum does not match; damaged on the way"
        )
    try:
        if num_dims > MAX_DIMS or reserved or any(shape[num_dims:]):
            raise ValueError(f"{num_dims} dimensions in {shape}, reserved byte {reserved}")
        id = LogicalId(run, replica, step, _PURPOSES[purpose], micro_batch, cut, _DIRECTIONS[direction])
        tensor = (shard, codec, DTYPES[dtype], tuple(shape[:num_dims]))
        place = (offset, total_nbytes, payload_nbytes, _CHANNELS[channel])
        header = FrameHeader(_KINDS[kind], epoch, link, sequence, id, *tensor, *place)
    except (ValueError, IndexError) as error:
        raise RemoteProtocolError(f"{peer}: sent a header with a field out of range: {error}") from None
    if offset + payload_nbytes > total_nbytes and header.kind is FrameKind.DATA:
        raise RemoteProtocolError(f"{peer}: sent a piece that reaches past the end of its frame: {header}")
    return header
