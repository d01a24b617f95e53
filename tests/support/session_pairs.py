"""Two sessions that have met, for tests that carry their messages."""

from tahq.comm.control.client import CONTROL_IDENTITY
from tahq.comm.link.frame import Outgoing
from tahq.comm.link.session import Session
from tahq.comm.link.spec import ANY_STAGE, CONTROL_LINK, LinkSpec, PeerIdentity, SessionLimits
from tahq.comm.link.transitions import End

RUN = 77


def control_hello() -> list[bytes]:
    """The parts of the first message of a worker to the coordinator."""
    spec = LinkSpec(CONTROL_LINK, ANY_STAGE, "", dials=True, title="coordinator")
    message = Session(CONTROL_IDENTITY, spec, SessionLimits()).next_urgent(0.0)
    assert message is not None
    return [message.header, bytes(message.payload)]


def met_sessions(limits: SessionLimits, link: int = 0) -> tuple[Session, Session]:
    """Both ends of a link, open at time 0; the first one is of the lower stage, and dials."""
    ends = []
    for stage, peer_stage in ((link, link + 1), (link + 1, link)):
        spec = LinkSpec(link, peer_stage, f"host{peer_stage}", dials=stage == link)
        ends.append(Session(PeerIdentity(RUN, 1, stage, "c0ffee"), spec, limits))
    lower, upper = ends
    hear(upper, urgent(lower))
    hear(lower, urgent(upper))
    assert lower.remote is upper.remote is End.OPEN
    return lower, upper


def urgent(session: Session, now_s: float = 0.0) -> list[Outgoing]:
    """All that the session itself has to say."""
    said = []
    while (message := session.next_urgent(now_s)) is not None:
        said.append(message)
    return said


def pieces(session: Session, now_s: float = 0.0) -> list[Outgoing]:
    """All pieces that it may send now, and BYEs."""
    said = []
    while (message := session.next_piece(now_s)) is not None:
        said.append(message)
    return said


def hear(session: Session, messages: list[Outgoing], now_s: float = 0.0) -> None:
    """Have it receive these, each over its connection."""
    for message in messages:
        session.receive(message.header, message.payload, now_s, message.connection)
