"""The links of a run: which stages they join, which end dials, and the transport of their frames; a run's length.

Link c is the cut between chunk c and c + 1; chunk c is on stage c mod P, so with one chunk per stage it joins
stage c and c + 1. The link of tied embeddings, if there is one, has the number P·v − 1 and joins stage 0 and stage
P − 1. The stage of the later chunk dials the earlier one; if that cannot be dialled, the earlier one dials; if neither
can be dialled, both dial a relay.

R replicas of a pipeline have R·P stages, numbered through: stage s of replica r is r·P + s. The links of replica r
follow those of replica r − 1; last come those over which a stage's replicas sum their gradients, one for each two.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from tahq.comm.config import LinkTransport
from tahq.comm.relay.tickets import LOWER, UPPER
from tahq.errors import ConfigError, UserError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A worker as its neighbours see it."""

    stage: int
    host: str
    address: str
    """host:port to dial; empty: it only dials out."""
    site: str = ""
    """Empty: no other host is near."""
    device: str = "cpu"
    public_key: str = ""
    """Of CURVE; empty: no CURVE."""
    unreachable: Mapping[int, str] = field(default_factory=dict)
    """Stages that cannot dial it, and why."""

    def obstacle(self, dialler: "Endpoint") -> str:
        """Why another cannot dial it; empty: it can."""
        return self.unreachable.get(dialler.stage, "") if self.address else "it only dials out (advertise: none)"


Ticket = Callable[[int, int], str]
"""(link, LOWER or UPPER) -> what that end of a relayed link dials, as PLAN has it."""


@dataclass(frozen=True, slots=True)
class LinkEnds:
    """The two stages that a link joins."""

    link: int
    lower: int
    upper: int
    cut: int | None = None
    """The cut between two chunks of the model that it crosses; None: another link."""
    is_tie: bool = False
    """Whether it is for tied embeddings."""

    def other(self, stage: int) -> int:
        """The stage that it joins with this one."""
        return self.upper if stage == self.lower else self.lower


@dataclass(frozen=True, slots=True)
class Grid:
    """The shape of a run: R replicas of a pipeline of P stages, each with v chunks of the model."""

    num_stages: int
    """P."""
    replicas: int = 1
    chunks_per_stage: int = 1
    tie_link: bool = False

    @property
    def num_workers(self) -> int:
        """R·P, the number of workers."""
        return self.num_stages * self.replicas

    @property
    def num_cuts(self) -> int:
        """Cuts of one replica."""
        return self.num_stages * self.chunks_per_stage - 1

    @property
    def first_sum_link(self) -> int:
        """The number of the first link that sums gradients."""
        return self.replicas * (self.num_cuts + self._has_tie_link)

    @property
    def _has_tie_link(self) -> bool:
        return self.tie_link and self.num_stages >= 2

    def is_last(self, stage: int) -> bool:
        """Whether a worker runs the last stage of its replica."""
        return stage % self.num_stages == self.num_stages - 1

    def replicas_of(self, stage: int) -> range:
        """All workers that run the same stage."""
        return range(stage % self.num_stages, self.num_workers, self.num_stages)

    def shares(self, num_micro_batches: int, computing: Sequence[int]) -> dict[int, range]:
        """The micro-batches of a step that each replica computes: the earlier ones at most one more than the later."""
        count, more = divmod(num_micro_batches, len(computing))
        firsts = [index * count + min(index, more) for index in range(len(computing) + 1)]
        return {replica: range(*firsts[index : index + 2]) for index, replica in enumerate(computing)}

    def links(self) -> tuple[LinkEnds, ...]:
        """Every link, by number."""
        stages, ends = self.num_stages, list[LinkEnds]()
        for first in range(0, self.num_workers, stages):
            for cut in range(self.num_cuts):
                ends.append(LinkEnds(len(ends), first + cut % stages, first + (cut + 1) % stages, cut))
            if self._has_tie_link:
                ends.append(LinkEnds(len(ends), first, first + stages - 1, is_tie=True))
        for stage in range(stages):
            for lower, upper in combinations(self.replicas_of(stage), 2):
                ends.append(LinkEnds(len(ends), lower, upper))
        return tuple(ends)

    def links_of(self, stage: int) -> list[LinkEnds]:
        """The links that end at a stage."""
        return [ends for ends in self.links() if stage in (ends.lower, ends.upper)]

    def pairs(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """The names of the stages that links join, each pair once; `names`: of all stages."""
        ends = (sorted((each.lower, each.upper)) for each in self.links())
        return list(dict.fromkeys((names[lower], names[upper]) for lower, upper in ends))


def plan_links(
    endpoints: Sequence[Endpoint], grid: Grid, inside: LinkTransport = "zmq", ticket: Ticket | None = None
) -> list[list[list[str | int]]]:
    """Rows for each stage, as in PLAN: link, peer stage, peer's host, what to dial, transport, peer's public key.

    Args:
        endpoints: all workers, by stage.
        grid: which of them are joined.
        inside: transport between two stages of one site.
        ticket: gives links a relay whose ends cannot dial each other; None: there is no relay.

    Raises:
        UserError: neither end of a link can be dialled, or NCCL cannot join them; the message names both.
    """
    rows: list[list[list[str | int]]] = [[] for _ in endpoints]
    for ends in grid.links():
        lower, upper = endpoints[ends.lower], endpoints[ends.upper]
        transport, dials = _transport(lower, upper, inside), [upper.address, lower.address]
        if not lower.obstacle(upper):
            dials[LOWER] = ""
        elif not upper.obstacle(lower):
            dials[UPPER] = ""
        elif ticket is not None:
            transport, dials = "zmq", [ticket(ends.link, end) for end in (LOWER, UPPER)]
        else:
            raise UserError(
                f"{link_name(ends.link, lower, upper)} cannot be made: {obstacles(lower, upper)}; open the port of one "
                "of them, give it an address that the other reaches (advertise), or set run.relay: auto"
            )
        rows[lower.stage].append([ends.link, upper.stage, upper.host, dials[LOWER], transport, upper.public_key])
        rows[upper.stage].append([ends.link, lower.stage, lower.host, dials[UPPER], transport, lower.public_key])
    return rows


def link_name(link: int, lower: Endpoint, upper: Endpoint) -> str:
    """``link 0 between stage 0 (host) and stage 1 (host)``."""
    return f"link {link} between " + " and ".join(f"stage {end.stage} ({end.host})" for end in (lower, upper))


def obstacles(lower: Endpoint, upper: Endpoint) -> str:
    """Why neither of two workers can dial the other."""
    return "; ".join(
        f"stage {end.stage} cannot be dialled from stage {other.stage}: {end.obstacle(other)}"
        for end, other in ((lower, upper), (upper, lower))
    )


def _transport(lower: Endpoint, upper: Endpoint, inside: LinkTransport) -> LinkTransport:
    if not lower.site or lower.site != upper.site:
        return "zmq"
    if inside != "nccl":
        return inside
    one, other = (f"stage {end.stage} ({end.host}) is on {end.device}" for end in (lower, upper))
    both = f"{one}, {other}"
    if not (lower.device.startswith("cuda") and upper.device.startswith("cuda")):
        raise ConfigError(f"links.inside: nccl joins CUDA devices, but {both}; use links.inside: gloo or zmq")
    if (lower.host, lower.device) == (upper.host, upper.device):
        raise ConfigError(f"links.inside: nccl joins two devices, but {both}; use links.inside: gloo or zmq")
    return inside


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run starts or continues: step, and training sample, counted over all epochs."""

    step: int = 0
    sample: int = 0


def total_steps(
    steps: int | None, epochs: float | None, num_train_samples: int, global_batch: int, start: Position = Position()
) -> int:
    """Length of a run: `steps`, or the steps of `epochs` epochs, at least 1.

    T = start.step + ⌊(epochs · num_train_samples − start.sample) / global_batch⌋, so that a run that continues
    with another number of samples per epoch (another sequence length) still ends with its epochs.
    """
    if steps is not None:
        return steps
    left = math.floor(((epochs or 0.0) * num_train_samples - start.sample) / global_batch)
    return max(1, start.step + max(0, left))
