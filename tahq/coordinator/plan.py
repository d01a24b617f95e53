"""The plan of a run, once all stages are there: how long it is, and who dials whom.

Link i is the cut between stage i and i + 1; the link of tied embeddings, if there is one, has the
number P − 1 and joins stage 0 and stage P − 1. The higher stage dials the lower one; where the lower
one only dials out (it has no address), it dials the higher one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tahq.errors import UserError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A worker as its neighbours see it."""

    stage: int
    host: str
    address: str
    """host:port that can be dialled; empty: it only dials out."""


@dataclass(frozen=True, slots=True)
class LinkEnds:
    """The two stages that a link joins."""

    link: int
    lower: int
    upper: int


def link_ends(num_stages: int, tie_link: bool) -> tuple[LinkEnds, ...]:
    """Every link of a pipeline, by number."""
    cuts = [LinkEnds(cut, cut, cut + 1) for cut in range(num_stages - 1)]
    tie = [LinkEnds(num_stages - 1, 0, num_stages - 1)] if tie_link and num_stages >= 2 else []
    return (*cuts, *tie)


def plan_links(endpoints: Sequence[Endpoint], tie_link: bool) -> list[list[list[str | int]]]:
    """Rows of (link, peer stage, peer's host, address to dial or "") for each stage.

    Args:
        endpoints: all workers, by stage.
        tie_link: whether first and last stage have a link of their own.

    Raises:
        UserError: a pair of which neither can be dialled; the message names both.
    """
    rows: list[list[list[str | int]]] = [[] for _ in endpoints]
    for ends in link_ends(len(endpoints), tie_link):
        lower, upper = endpoints[ends.lower], endpoints[ends.upper]
        if not lower.address and not upper.address:
            raise UserError(
                f"link {ends.link} cannot be made: stage {lower.stage} ({lower.host}) and stage {upper.stage} "
                f"({upper.host}) both only dial out; give one of them an address that the other reaches (advertise)"
            )
        rows[lower.stage].append([ends.link, upper.stage, upper.host, "" if lower.address else upper.address])
        rows[upper.stage].append([ends.link, lower.stage, lower.host, lower.address])
    return rows


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run begins or goes on: at which step, and at which training sample, counted over all epochs."""

    step: int = 0
    sample: int = 0


def total_steps(
    steps: int | None, epochs: float | None, num_train_samples: int, global_batch: int, start: Position = Position()
) -> int:
    """Length of a run: `steps`, or as many as `epochs` epochs have, at least 1.

    T = start.step + ⌊(epochs · num_train_samples − start.sample) / global_batch⌋, so that a run that is continued
    with another number of samples an epoch (another sequence length) still ends where its epochs do.
    """
    if steps is not None:
        return steps
    left = math.floor(((epochs or 0.0) * num_train_samples - start.sample) / global_batch)
    return max(1, start.step + max(0, left))
