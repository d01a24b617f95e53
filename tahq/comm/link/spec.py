"""What a session is told at its start: who speaks, over which link, within which times and bounds."""

import struct
from dataclasses import dataclass, field

from tahq.comm.link.inbound import UnexpectedBound
from tahq.comm.link.sending_order import First
from tahq.errors import RemoteProtocolError

MAX_CONNECTIONS = 16
DEFAULT_WINDOW_NBYTES = 64 * 1024 * 1024

_FIELDS = struct.Struct("<IIHHI")
_MAX_TEXT_NBYTES = 1024


def decode_text(data: bytes | memoryview) -> str:
    """Text from a peer, fit for a log."""
    return ascii(bytes(data[:_MAX_TEXT_NBYTES]).decode("utf-8", "replace"))[1:-1]


@dataclass(frozen=True, slots=True)
class Hello:
    """What the first message on a connection says."""

    stage: int
    peer_stage: int
    """The stage that is meant to hear it."""
    config_hash: str
    connection: int = 0
    """Which of the link's connections this is, from 0."""
    connections: int = 1
    window_nbytes: int = DEFAULT_WINDOW_NBYTES
    """Most that the hearer may have on its way, on all connections of the link, without an acknowledgement."""

    def pack(self) -> bytes:
        """The payload."""
        numbers = (self.stage, self.peer_stage, self.connection, self.connections, self.window_nbytes)
        return _FIELDS.pack(*numbers) + self.config_hash.encode()


def unpack_hello(payload: bytes | memoryview, peer: str) -> Hello:
    """What a HELLO says.

    Raises:
        RemoteProtocolError: it is too short, or names a connection or a window that cannot be.
    """
    if len(payload) < _FIELDS.size:
        raise RemoteProtocolError(f"{peer}: sent a HELLO of {len(payload)} bytes")
    stage, peer_stage, connection, connections, window_nbytes = _FIELDS.unpack_from(payload)
    if connection >= connections or window_nbytes == 0:
        raise RemoteProtocolError(
            f"{peer}: sent a HELLO of connection {connection} of {connections} with a window of {window_nbytes} bytes"
        )
    config_hash = decode_text(payload[_FIELDS.size :])
    return Hello(stage, peer_stage, config_hash, connection, connections, window_nbytes)


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who speaks: both ends of a link must agree on run, epoch and configuration."""

    run_id: int
    epoch: int
    stage: int
    config_hash: str


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One link as this end sees it; `dials` says whose part it is to say HELLO first."""

    link: int
    peer_stage: int
    peer_name: str
    dials: bool

    def __str__(self) -> str:
        return f"link {self.link} to stage {self.peer_stage} ({self.peer_name})"


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Times and bounds of a session."""

    peer_timeout_s: float = 10.0
    """A peer that is silent for half of it is in trouble, and is told of."""
    heartbeat_s: float = 2.0
    piece_nbytes: int = 256 * 1024
    window_nbytes: int = DEFAULT_WINDOW_NBYTES
    """Most that is on its way and not acknowledged."""
    unexpected: UnexpectedBound = field(default_factory=UnexpectedBound)
    receive_window_nbytes: int = DEFAULT_WINDOW_NBYTES
    """What the peer is asked to keep to as its window."""
    first: First = "oldest"
    """What goes first of all that waits."""
    connections: int = 1
    """Over so many connections; the same at both ends."""
    give_up_s: float | None = None
    """A peer that is silent for so long is lost for good; None: after `peer_timeout_s`."""
