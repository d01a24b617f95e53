"""What a session is told at its start: who speaks, over which link, within which times and bounds."""

from dataclasses import dataclass, field

from tahq.comm.link.hello import DEFAULT_WINDOW_NBYTES
from tahq.comm.link.inbound import UnexpectedBound
from tahq.comm.link.sending_order import First


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
