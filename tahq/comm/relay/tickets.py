"""Tickets to places at the relay: each end of a relayed link has one, and the relay joins the two ends' connections.

A ticket reads ``LINK-EPOCH-END-MAC``; a connection shows it with its own number, ``CONNECTION-LINK-EPOCH-END-MAC``. The
coordinator issues tickets over the control channel. The relay knows them by their MAC, so it keeps no list.
"""

import hmac
import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from tahq.comm.zmq.addresses import format_address
from tahq.errors import RemoteProtocolError

LOWER: Final = 0
UPPER: Final = 1
"""The ends of a link, by stage; the upper one takes the part of the end that dials."""
_MAC_NBYTES: Final = 16
_MAX_PORT: Final = 65_535
_TICKET: Final = r"[0-9]{1,10}-[0-9]{1,10}-[01]-[0-9a-f]{32}"
_SHOWN: Final = re.compile(f"([0-9]{{1,2}})-({_TICKET})")
_IN_PLAN: Final = re.compile(f"([0-9]{{1,5}})/({_TICKET})")


class Place(NamedTuple):
    """The place of one connection of one end of a link."""

    connection: int
    link: int
    epoch: int
    end: int

    @property
    def opposite(self) -> "Place":
        """The place of the same connection's other end."""
        return self._replace(end=1 - self.end)


def issue(secret: bytes, link: int, epoch: int, end: int) -> str:
    """The ticket of an end of a link."""
    text = f"{link}-{epoch}-{end}"
    return f"{text}-{hmac.digest(secret, text.encode(), 'sha256')[:_MAC_NBYTES].hex()}"


def place_of(secret: bytes, shown: str) -> Place | None:
    """The place that a connection asks for; None if its ticket was not issued with this secret."""
    match = _SHOWN.fullmatch(shown)
    if match is None:
        return None
    connection, ticket = match.groups()
    link, epoch, end = (int(number) for number in ticket.split("-")[:3])
    is_issued = hmac.compare_digest(ticket, issue(secret, link, epoch, end))
    return Place(int(connection), link, epoch, end) if is_issued else None


def split_planned(text: str) -> tuple[int, str]:
    """Port and ticket of ``PORT/TICKET`` in a plan; RemoteProtocolError if it is malformed."""
    match = _IN_PLAN.fullmatch(text)
    if match is None or int(match[1]) > _MAX_PORT:
        raise RemoteProtocolError(f"the coordinator sent {text!r} as a ticket for its relay; expected PORT/TICKET")
    return int(match[1]), match[2]


@dataclass(frozen=True, slots=True)
class RelayTicket:
    """The relay's host:port as this worker reaches it, and the ticket of this end of a link."""

    address: str
    ticket: str

    @classmethod
    def planned(cls, text: str, host: str) -> "RelayTicket":
        """Of ``PORT/TICKET`` in a plan, with the relay's host as this end reaches it; see `split_planned`."""
        port, ticket = split_planned(text)
        return cls(format_address(host, port), ticket)

    @property
    def dials(self) -> bool:
        """Whether this end takes the part of the one that dials."""
        return int(self.ticket.split("-")[2]) == UPPER

    def endpoint(self, connection: int) -> str:
        """What a ZMQ socket connects to with the relay as its SOCKS proxy."""
        return f"tcp://{connection}-{self.ticket}:1"

    def __str__(self) -> str:
        return f"the relay at {self.address}"
