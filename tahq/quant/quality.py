"""The quality floor of `wire: auto`: what pairs of codecs cost in held-out loss, as measured."""

from dataclasses import dataclass

from tahq.quant.spec import CodecSpec

LARGEST_GAP = 0.03  # Nats per token that the floor may cost
FEWEST_STEPS = 2000  # Of training, for a gap to count


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """A pair of codecs; bits per element of both directions together; held-out loss minus that without compression.

    `gap` is a mean over `seeds` runs of `steps` steps of `model`, in nats per token; `result` is the file that has it.
    """

    activations: str
    gradients: str
    bits: float
    gap: float
    steps: int
    seeds: int
    result: str
    model: str = "GPT-2 small"


_GPT2 = "benchmarks/results/quality_floor_h100_202611.md"
_LONG = "benchmarks/results/compression_cost_h200_202611.md"
MEASURED = (
    MeasuredPair("wf:bits=5", "eden:bits=1.5", 6.63, 0.0310, 5000, 3, _LONG),
    MeasuredPair("wf:bits=5", "eden:bits=2", 7.13, 0.0399, 5000, 3, _LONG),
    MeasuredPair("wf:bits=6", "eden:bits=1.5", 7.63, 0.0093, 5000, 3, _LONG),
    MeasuredPair("wf:bits=6", "eden:bits=2", 8.13, -0.0217, 5000, 3, _LONG),
    MeasuredPair("tah", "fixed:bits=6", 10.66, 0.2266, 5000, 3, _LONG),
    MeasuredPair("tah", "fixed:bits=8", 12.66, 0.2365, 5000, 3, _LONG),
    MeasuredPair("tah", "fixed:bits=10", 14.66, 0.2344, 5000, 3, _LONG),
    MeasuredPair("wf:bits=5", "eden:bits=1.5", 6.63, 0.0161, 5000, 2, _LONG, "Llama"),
    MeasuredPair("wf:bits=6", "eden:bits=1.5", 7.63, 0.0083, 5000, 3, _LONG, "Llama"),
    MeasuredPair("wf:bits=6", "eden:bits=2", 8.13, 0.0039, 5000, 2, _LONG, "Llama"),
    MeasuredPair("tah", "fixed:bits=6", 10.66, 0.0435, 5000, 2, _LONG, "Llama"),
    MeasuredPair("tah", "fixed:bits=8", 12.66, 0.0410, 5000, 2, _LONG, "Llama"),
    MeasuredPair("wf:bits=5", "eden:bits=1.5", 6.63, 0.0288, 2000, 2, _GPT2),
    MeasuredPair("wf:bits=5", "eden:bits=2", 7.13, 0.025, 2000, 2, _GPT2),
    MeasuredPair("wf:bits=4", "eden:bits=3", 7.13, 0.047, 2000, 2, _GPT2),
    MeasuredPair("wf:bits=4", "eden:bits=1.5", 5.63, 0.0404, 2000, 2, _GPT2),
    MeasuredPair("wf:bits=6", "eden:bits=2", 8.13, 0.0025, 2000, 2, _GPT2),
    MeasuredPair("wf:bits=5", "eden:bits=3", 8.13, 0.022, 2000, 2, _GPT2),
    MeasuredPair("wf:bits=4", "eden:bits=2", 6.13, 0.047, 2000, 2, _GPT2),
    MeasuredPair("wf:bits=6", "eden:bits=3", 9.13, -0.0005, 2000, 2, _GPT2),
    MeasuredPair("wf:bits=8", "eden:bits=4", 12.13, 0.0117, 2000, 2, _GPT2),
    MeasuredPair("tah", "fixed:bits=6", 10.66, 0.1102, 2000, 2, _GPT2),
    MeasuredPair("wf:bits=3", "eden:bits=2", 5.13, 0.1182, 2000, 2, _GPT2),
)
"""Random start, three cuts; the Llama is of the same shape. Of a model's rows of one pair the first counts."""


def floor(rows: tuple[MeasuredPair, ...] = MEASURED) -> MeasuredPair:
    """The pair of fewest bits whose gap, of the model with the largest, is small enough; else that of the smallest."""
    counting = {(row.model, row.activations, row.gradients): row for row in reversed(rows)}
    long = sorted((row for row in counting.values() if row.steps >= FEWEST_STEPS), key=lambda row: row.gap)
    worst = {(row.activations, row.gradients): row for row in long}  # the largest gap of a pair comes last
    good = [row for row in worst.values() if row.gap <= LARGEST_GAP]
    return min(good, key=lambda row: (row.bits, row.gap)) if good else min(worst.values(), key=lambda row: row.gap)


FLOOR = floor()


def expected_gap(activations: str, gradients: str) -> str:
    """What is known of a pair's effect, for the user; empty: it was not measured."""
    wanted = [CodecSpec.parse(spec) for spec in (activations, gradients)]
    rows = (r for r in reversed(MEASURED) if [CodecSpec.parse(r.activations), CodecSpec.parse(r.gradients)] == wanted)
    gaps = [
        f"{row.gap:+.3f} ({row.model}, {row.steps:,} steps, {row.seeds} seed{'s' * (row.seeds > 1)})"
        for row in {row.model: row for row in rows}.values()
    ]
    return f"expected loss against no compression, nats per token: {', '.join(gaps)}" if gaps else ""
