"""Which neighbours can dial each other: they try it themselves, once all have joined, before they are sent their links.

A pair is settled when one direction works, or when both were tried; a worker that does not report a try in time counts
as one that cannot dial. Only links of workers that wait for their plan are tried, and not those within one machine.
"""

from collections.abc import Iterator

from tahq.comm.control.messages import Tried, TryPeers
from tahq.comm.zmq.addresses import LOOPBACK
from tahq.coordinator.context import CoordinatorOptions
from tahq.coordinator.joining.seats import Seat, SeatPhase, Seats, Try

REPORT_S = 15.0
"""How long the report of a try may take."""


def order_tries(options: CoordinatorOptions, seats: Seats, now_s: float) -> dict[int, TryPeers]:
    """Note tries that no worker was told to make yet, and return the orders by stage; those without a report fail."""
    orders = dict[int, TryPeers]()
    for dialler, peer in _directions(options, seats):
        attempt = _attempt(dialler, peer)
        if attempt is None:
            dialler.tries[peer.stage] = Try(_address(peer), now_s)
            order = orders.setdefault(dialler.stage, TryPeers([]))
            order.peers.append([peer.stage, _address(peer), peer.public_key])
        elif attempt.failure is None and now_s > attempt.since_s + REPORT_S:
            attempt.failure = f"no report for {REPORT_S:g} s"
    return orders


def note_report(seat: Seat, tried: Tried) -> None:
    """Take the outcome of a try; one that was made of another address, or never ordered, changes nothing."""
    attempt = seat.tries.get(tried.peer_stage)
    if attempt is not None and attempt.address == tried.address:
        attempt.failure = tried.failure


def are_settled(options: CoordinatorOptions, seats: Seats) -> bool:
    """Whether it is known of every link how it can be made."""
    failures = {(dialler.stage, peer.stage): failure(dialler, peer) for dialler, peer in _directions(options, seats)}
    return all(known is not None or failures.get((peer, dialler)) == "" for (dialler, peer), known in failures.items())


def failure(dialler: Seat, peer: Seat) -> str | None:
    """Why a worker cannot dial a peer; empty: it can; None: it has not been tried, or is not reported yet."""
    attempt = _attempt(dialler, peer)
    return None if attempt is None else attempt.failure


def _attempt(dialler: Seat, peer: Seat) -> Try | None:
    attempt = dialler.tries.get(peer.stage)
    return attempt if attempt is not None and attempt.address == _address(peer) else None


def _address(seat: Seat) -> str:
    return seat.hello.address if seat.hello is not None else ""


def _directions(options: CoordinatorOptions, seats: Seats) -> Iterator[tuple[Seat, Seat]]:
    """Who is to dial whom, and has an address to do so."""
    for ends in options.grid.links() if options.tries_links else ():
        pair = seats[ends.lower], seats[ends.upper]
        are_planned = all(seat.phase is not SeatPhase.GREETED for seat in pair)
        if not are_planned and not all(_address(seat).startswith(LOOPBACK) for seat in pair):
            yield from ((dialler, peer) for dialler, peer in (pair, pair[::-1]) if _address(peer))
