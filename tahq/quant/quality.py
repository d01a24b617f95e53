"""The quality floor of `wire: auto`: what pairs of codecs cost in held-out loss, as measured."""

from dataclasses import dataclass

LARGEST_GAP = 0.03
"""Nats per token that the floor may cost."""
FEWEST_STEPS = 2000
"""Of training, for a gap to count."""


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """A pair of codecs; bits per element of both directions together; held-out loss minus that without compression.

    `gap` is a mean over `seeds` runs of `steps` steps, in nats per token; `result` is the file that has it.
    """

    activations: str
    gradients: str
    bits: float
    gap: float
    steps: int
    seeds: int
    result: str


MEASURED = (
    MeasuredPair("wf:bits=4", "eden:bits=3", 7.13, 0.0, 2000, 1, "benchmarks/results/quality_floor_h100_202611.md"),
)
"""GPT-2 small from a random start, codecs at three cuts."""


def floor(rows: tuple[MeasuredPair, ...] = MEASURED) -> MeasuredPair:
    """The pair of fewest bits whose gap is small enough; if none is, that of the smallest gap."""
    long = [row for row in rows if row.steps >= FEWEST_STEPS]
    good = [row for row in long if row.gap <= LARGEST_GAP]
    return min(good, key=lambda row: (row.bits, row.gap)) if good else min(long, key=lambda row: row.gap)


FLOOR = floor()
