"""Memory of weights and optimizer states under Q-GaLore: Table 1 of the paper, counted from real tensors.

The models are those of GaLore's paper (vocabulary 32,000, head not tied), the ranks those of Q-GaLore §4.2.1. Each
covered weight is made, with its INT8 codes, packed projection and 8-bit moments, and what its tensors have is added up;
what is not covered (embedding, head, norms) has 8-bit moments beside a weight of 16 bits, as the paper counts it, or of
32, as a stage of tahq keeps it. `one byte a code` is what the projections would take unpacked, as in the authors' code.
1 G is 10^9 bytes; gradients and activations are not in it.

Run:  python benchmarks/bench_qgalore_memory.py [--out benchmarks/results/qgalore_memory_<yyyymm>.md]
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import describe

from tahq.memory.adamw8bit import adamw8bit_states
from tahq.memory.low_rank_weight import LowRankSettings, LowRankWeight
from tahq.memory.qgalore import divided_parameters
from tahq.memory.state_spec import states_nbytes
from tahq.models.config import ModelConfig
from tahq.models.model_spec import ModelSpec, load_spec
from tahq.models.partition import BlockRange

VOCAB = 32000
COUNTERS = ("step/", "gap/", "similarities/")


@dataclass(frozen=True, slots=True)
class Size:
    """One column: the model, its rank, and the paper's figures in G."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    rank: int
    full: float
    galore: float
    qgalore: float


SIZES = (
    Size("60M", 8, 512, 1376, 8, 128, 0.36, 0.24, 0.18),
    Size("130M", 12, 768, 2048, 12, 256, 0.76, 0.52, 0.39),
    Size("350M", 24, 1024, 2736, 16, 256, 2.06, 1.22, 0.88),
    Size("1B", 24, 2048, 5461, 32, 512, 7.80, 4.38, 3.08),
)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Of one model."""

    parameters: int
    weights: int
    projections: int
    moments: int
    ordinary: int
    """Parameters that are not covered."""
    ordinary_moments: int

    def total(self, ordinary_nbytes: int) -> int:
        return self.weights + self.projections + self.moments + self.ordinary_moments + ordinary_nbytes * self.ordinary


def spec_of(size: Size) -> ModelSpec:
    config = ModelConfig(
        family="llama",
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_heads=size.heads,
        intermediate_size=size.inner,
    )
    return load_spec(config, vocab_size=VOCAB, seq_len=256)


def count(size: Size, settings: LowRankSettings) -> Bytes:
    """Make every covered weight of the model, one after the other, and add up its tensors."""
    spec = spec_of(size)
    ordinary, covered = divided_parameters(spec, BlockRange(0, spec.num_layers, spec.num_layers))
    kinds = {"weights": 0, "projection": 0, "exp_avg": 0}
    num_covered = 0
    for name, shape in covered.items():
        weight = LowRankWeight(name, shape, settings, torch.device("cpu"))
        num_covered += weight.numel()
        kinds["weights"] += sum(tensor.nbytes for tensor in weight.weight_tensors().values())
        for state, tensor in weight.states().items():
            if not state.startswith(COUNTERS):
                kinds["projection" if state.startswith("projection") else "exp_avg"] += tensor.nbytes
    num_ordinary = sum(shape.numel() for shape in ordinary.values())
    return Bytes(
        num_covered + num_ordinary,
        kinds["weights"],
        kinds["projection"],
        kinds["exp_avg"],
        num_ordinary,
        sum(states_nbytes(adamw8bit_states(tuple(shape))) for shape in ordinary.values()),
    )


def settings_of(size: Size, **changes: object) -> LowRankSettings:
    return LowRankSettings(rank=size.rank, **changes)  # type: ignore[arg-type]


def gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3f}"


def report() -> str:
    lines = [
        "# Memory of weights and optimizer under Q-GaLore",
        "",
        f"{describe()}. `python benchmarks/bench_qgalore_memory.py`",
        "",
        "Counted from the tensors themselves, in G (10^9 bytes), for Q-GaLore's Table 1.",
        "",
        "| model | parameters | rank | paper: full | paper: GaLore | paper: Q-GaLore | **ours, rest in bf16** "
        "| of the paper's | ours, rest in fp32 | one byte a code |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    details = [
        "",
        "| model | INT8 weights | INT4 projections | moments in the low rank | rest, bf16 | its moments |",
        "|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        ours = count(size, settings_of(size))
        print(f"{size.name}: {ours}", flush=True)
        total = ours.total(2)
        lines.append(
            f"| {size.name} | {ours.parameters / 1e6:.1f} M | {size.rank} | {size.full} | {size.galore} "
            f"| {size.qgalore} | **{gigabytes(total)}** | {100 * total / 1e9 / size.qgalore:.0f} % "
            f"| {gigabytes(ours.total(4))} | {gigabytes(total + ours.projections)} |"
        )
        details.append(
            f"| {size.name} | {gigabytes(ours.weights)} | {gigabytes(ours.projections)} | {gigabytes(ours.moments)} "
            f"| {gigabytes(2 * ours.ordinary)} | {gigabytes(ours.ordinary_moments)} |"
        )
    return "\n".join(lines + details) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "qgalore_memory_202611.md")
    arguments = parser.parse_args()
    text = report()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
