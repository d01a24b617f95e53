"""The measurements of the network that `tahq measure` asks of the workers, one batch after another. Pure.

A job is one worker's: it dials one peer or several and measures both directions. The jobs of a batch go at the same
time. As in a run, the higher stage dials the lower one; where the lower one has no address, it dials the higher one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tahq.comm.topology import Endpoint

Pair = tuple[int, int]
"""Two stages, the lower one first."""

JobKind = Literal["path", "connections", "access"]
"""A path, a path over several connections, or a host's uplink and downlink with all others at once."""


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """The user's request to `tahq measure`.

    Attributes:
        micro_batches: sizes to time.
        codecs: full specs.
        seconds: shortest duration of each stream.
        parallel: whether pairs of separate machines measure at the same time.
        access: whether each host's uplink and downlink are measured, with all others at once.
        connections: numbers of connections to try on each path, besides one.
    """

    micro_batches: tuple[int, ...]
    codecs: tuple[str, ...]
    seconds: float = 1.0
    parallel: bool = False
    access: bool = True
    connections: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """One worker's measurement; `peers` are stages, and a stage that is listed twice gets two connections."""

    kind: JobKind
    dialler: int
    peers: tuple[int, ...]

    @property
    def pair(self) -> Pair:
        """The two stages of a job that has one peer."""
        return min(self.dialler, self.peers[0]), max(self.dialler, self.peers[0])


def diallers(pair: Pair, endpoints: Sequence[Endpoint]) -> Pair | None:
    """The stage that dials and the stage that it dials; None: neither can be dialled."""
    lower, upper = pair
    if endpoints[lower].address:
        return upper, lower
    return (lower, upper) if endpoints[upper].address else None


def planned_jobs(
    endpoints: Sequence[Endpoint], machines: Sequence[str], request: MeasureRequest
) -> tuple[list[list[Job]], list[Pair]]:
    """Batches of jobs, and the pairs that cannot be joined.

    Args:
        endpoints: all workers, by stage.
        machines: the machine of each; stages on one machine share its uplink.
        request: what is wanted.
    """
    batches: list[list[Job]] = []
    apart: list[Pair] = []
    for pairs in measuring_rounds(machines, parallel=request.parallel):
        ends = {pair: diallers(pair, endpoints) for pair in pairs}
        apart += [pair for pair, end in ends.items() if end is None]
        joined = [end for end in ends.values() if end is not None]
        for count in (1, *request.connections):
            kind: JobKind = "path" if count == 1 else "connections"
            batches.append([Job(kind, dialler, (peer,) * count) for dialler, peer in joined])
    for stage in range(len(endpoints)) if request.access else ():
        others = tuple(end.stage for end in endpoints if end.address and machines[end.stage] != machines[stage])
        if len(others) > 1:  # with only one, its path has measured the same
            batches.append([Job("access", stage, others)])
    return [batch for batch in batches if batch], sorted(apart)


def measuring_rounds(machines: Sequence[str], *, parallel: bool) -> list[list[Pair]]:
    """Rounds of pairs that may measure at the same time, since no machine is in two of them.

    Args:
        machines: the machine of each stage; two stages may share one, and so its uplink.
        parallel: False measures one pair at a time, in the same order: pairs of separate machines can still share a
            bottleneck somewhere.
    """
    rounds: list[list[Pair]] = []
    for pairs in tournament(len(machines)):
        # a round of the tournament in as many parts as its shared machines require
        parts: list[tuple[list[Pair], set[str]]] = []
        for pair in pairs:
            wanted = {machines[stage] for stage in pair}
            part = next((part for part in parts if not part[1] & wanted), None)
            if part is None:
                parts.append(([pair], wanted))
            else:
                part[0].append(pair)
                part[1].update(wanted)
        rounds += [together for together, _ in parts]
    return rounds if parallel else [[pair] for pairs in rounds for pair in pairs]


def tournament(num_players: int) -> list[list[Pair]]:
    """Rounds of a round-robin tournament: every two players meet once, and each plays at most once per round.

    The circle method: the first stays, the others move on by one place each round; with an odd number, one place is
    empty.

    Example:
        Four players: (0,3) (1,2), then (0,2) (1,3), the last having moved behind the first, then (0,1) (2,3).
    """
    places: list[int | None] = list(range(num_players))
    if num_players % 2:
        places.append(None)
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        meetings = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append(sorted((min(a, b), max(a, b)) for a, b in meetings if a is not None and b is not None))
        places = [places[0], places[-1], *places[1:-1]]
    return [pairs for pairs in rounds if pairs]
