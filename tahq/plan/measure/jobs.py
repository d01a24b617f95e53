"""What `tahq measure` asks of the workers about the network, one batch after another. Pure.

A job is one worker's: it dials one peer or several and measures both directions. The jobs of a batch go at the same
time. As in a run, the higher stage dials the lower one; where the lower one has no address, it dials the higher one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tahq.comm.topology import Endpoint
from tahq.plan.measure.rounds import Pair, measuring_rounds

JobKind = Literal["path", "connections", "access"]
"""One way, one way over several connections, or a host's uplink and downlink with all others at once."""


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """What a person asked for on the command line of `tahq measure`."""

    micro_batches: tuple[int, ...]
    codecs: tuple[str, ...]
    """Specs, written out in full."""
    seconds: float = 1.0
    """How long each stream is looked at, at least."""
    parallel: bool = False
    access: bool = True
    """Whether each host's uplink and downlink are measured, with all others at once."""
    connections: tuple[int, ...] = ()
    """Numbers of connections that are tried on each way, beside one."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one worker is asked to measure; `peers` are stages, one that is there twice gets two connections."""

    kind: JobKind
    dialler: int
    peers: tuple[int, ...]

    @property
    def pair(self) -> Pair:
        """The two stages of a job that has one peer."""
        return min(self.dialler, self.peers[0]), max(self.dialler, self.peers[0])


def diallers(pair: Pair, endpoints: Sequence[Endpoint]) -> tuple[int, int] | None:
    """Who dials whom; None: neither can be dialled."""
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
        machines: where each runs; stages with one machine share its uplink.
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
    if request.access:
        batches += [[job] for stage in range(len(endpoints)) if (job := _access_job(stage, endpoints, machines))]
    return [batch for batch in batches if batch], sorted(apart)


def _access_job(stage: int, endpoints: Sequence[Endpoint], machines: Sequence[str]) -> Job | None:
    """With one other there is nothing to learn that its path has not said."""
    others = [end.stage for end in endpoints if end.address and machines[end.stage] != machines[stage]]
    return Job("access", stage, tuple(others)) if len(others) > 1 else None
