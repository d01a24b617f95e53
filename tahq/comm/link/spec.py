"""The settings of a session (identities, times, bounds), and HELLO, which tells some of them to the peer."""

import struct
from dataclasses import dataclass
from typing import Final, Literal

from tahq.comm.link.frame import Channel
from tahq.errors import RemoteProtocolError

First = Literal["oldest", "activations", "gradients"]
"""Which data goes first: the frame that was queued first, or all of one direction, the oldest of them first."""

MAX_CONNECTIONS = 16
DEFAULT_WINDOW_NBYTES = 64 * 1024 * 1024
MESSAGE_WINDOW_NBYTES = 1024 * 1024
"""Most unacknowledged bytes on the control channel, and on the files channel."""

FILES_LINK: Final = 0xFFFFFFFF
"""Number of links that carry only files, opened by the end that wants one."""
CONTROL_LINK: Final = 0xFFFFFFFE
"""Number of the link between a worker and the coordinator."""
ANY_STAGE: Final = 0xFFFFFFFF
"""Stands for a stage that is not known, or does not matter."""

_FIELDS = struct.Struct("<IIHHI")
_MAX_TEXT_NBYTES = 1024


def decode_text(data: bytes | memoryview) -> str:
    """Text from a peer, fit for a log."""
    return ascii(bytes(data[:_MAX_TEXT_NBYTES]).decode("utf-8", "replace"))[1:-1]


@dataclass(frozen=True, slots=True)
class LinkHello:
    """Payload of the first message on a connection."""

    stage: int
    peer_stage: int
    """The stage that is meant to receive it."""
    config_hash: str
    connection: int = 0
    """Which of the link's connections this is, from 0."""
    connections: int = 1
    window_nbytes: int = DEFAULT_WINDOW_NBYTES
    """Most unacknowledged data that the receiver of this may send, on all connections of the link."""

    def pack(self) -> bytes:
        """The payload."""
        numbers = (self.stage, self.peer_stage, self.connection, self.connections, self.window_nbytes)
        return _FIELDS.pack(*numbers) + self.config_hash.encode()


def unpack_hello(payload: bytes | memoryview, peer: str) -> LinkHello:
    """Parse a HELLO; RemoteProtocolError if it is too short, or its connection or window is impossible."""
    if len(payload) < _FIELDS.size:
        raise RemoteProtocolError(f"{peer}: sent a HELLO of {len(payload)} bytes; expected at least {_FIELDS.size}")
    stage, peer_stage, connection, connections, window_nbytes = _FIELDS.unpack_from(payload)
    if connection >= connections or window_nbytes == 0:
        raise RemoteProtocolError(
            f"{peer}: sent a HELLO of connection {connection} of {connections} with a window of {window_nbytes} bytes"
        )
    config_hash = decode_text(payload[_FIELDS.size :])
    return LinkHello(stage, peer_stage, config_hash, connection, connections, window_nbytes)


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """This end's identity: both ends of a link must agree on run, epoch and configuration."""

    run_id: int
    epoch: int
    stage: int
    config_hash: str


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One link as this end sees it; the end that `dials` says HELLO first. `title` replaces its usual name."""

    link: int
    peer_stage: int
    peer_name: str
    dials: bool
    title: str = ""

    def __str__(self) -> str:
        return self.title or f"link {self.link} to stage {self.peer_stage} ({self.peer_name})"


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Times and bounds of a session."""

    peer_timeout_s: float = 10.0
    """The user is warned of a peer that is silent for half as long."""
    heartbeat_s: float = 2.0
    piece_nbytes: int = 256 * 1024
    window_nbytes: int = DEFAULT_WINDOW_NBYTES
    """Most unacknowledged data."""
    unexpected_frames: int = 4096
    unexpected_nbytes: int = 4 << 30
    """Frames, and bytes of them, that are kept for ids not posted yet: a replica's gradients, if this one is late."""
    receive_window_nbytes: int = DEFAULT_WINDOW_NBYTES
    """The window that the peer is asked to keep to."""
    first: First = "oldest"
    """Which data goes first."""
    connections: int = 1
    """Connections of the link; the same at both ends."""
    give_up_s: float | None = None
    """A peer that is silent this long is lost for good; None: after `peer_timeout_s`."""
    max_message_nbytes: int = 0
    """Longest message on the control and files channels; 0: the link carries data alone."""

    @property
    def windows(self) -> dict[Channel, int]:
        """Most unacknowledged bytes of each channel."""
        return dict.fromkeys(Channel, MESSAGE_WINDOW_NBYTES) | {Channel.DATA: self.window_nbytes}

    @property
    def silence_s(self) -> float:
        """After how long a silent peer is lost."""
        return self.peer_timeout_s if self.give_up_s is None else self.give_up_s
