"""Memory of weights and optimizer states under Q-GaLore: Table 1 of the paper, counted from real tensors.

The models are those of GaLore's paper (vocabulary 32,000, head not tied), the ranks those of Q-GaLore §4.2.1. Each
covered weight is made as a stage has it, with its codes, packed projection and 8-bit moments, and what its tensors have
is added up; so are embedding and head where `training.qgalore.ends` is bf16 or int8. All other parameters are in fp32
with 8-bit moments, the small ones with moments in fp32. The paper has all that is not covered in bf16. `one byte a
code` is what the projections would take unpacked, as in the authors' code.
1 G is 10^9 bytes; gradients and activations are not in it.

Run:  python benchmarks/bench_qgalore_memory.py [--out benchmarks/results/qgalore_memory_<yyyymm>.md]
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import describe

from tahq.memory.adam.adamw import adamw8bit_states
from tahq.memory.adam.loop import states_nbytes
from tahq.memory.galore.low_rank_weight import LowRankSettings, LowRankWeight
from tahq.memory.galore.qgalore import divided_parameters
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


ENDS = ("bf16", "int8", "fp32")


@dataclass(frozen=True, slots=True)
class Bytes:
    """Of one model. `ends`: embedding and head, if they are covered, with their moments beside."""

    parameters: int
    weights: int
    projections: int
    moments: int
    ends: int
    ends_moments: int
    ordinary: int
    ordinary_moments: int

    @property
    def total(self) -> int:
        covered = self.weights + self.projections + self.moments
        return covered + self.ends + self.ends_moments + self.ordinary + self.ordinary_moments


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
    ordinary, covered = divided_parameters(spec, BlockRange(0, spec.num_layers, spec.num_layers), settings)
    kinds = dict.fromkeys(("weights", "projections", "moments", "ends", "ends_moments"), 0)
    parameters = sum(shape.numel() for shape in ordinary.values())
    for name, layer in covered.items():
        weight = LowRankWeight(name, layer.shape, layer.settings, torch.device("cpu"))
        is_end = layer.settings.is_end
        parameters += weight.numel()
        kinds["ends" if is_end else "weights"] += sum(tensor.nbytes for tensor in weight.weight_tensors().values())
        for state, tensor in weight.states().items():
            if state.startswith("projection"):
                kinds["projections"] += tensor.nbytes
            elif not state.startswith(COUNTERS):
                kinds["ends_moments" if is_end else "moments"] += tensor.nbytes
    return Bytes(
        parameters,
        **kinds,
        ordinary=4 * sum(shape.numel() for shape in ordinary.values()),
        ordinary_moments=sum(states_nbytes(adamw8bit_states(tuple(shape))) for shape in ordinary.values()),
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
        "Counted from the tensors themselves, in G (10^9 bytes), for Q-GaLore's Table 1: what a run of "
        "`optimizer: qgalore` has, by `training.qgalore.ends`, which is what embedding and head are kept in. "
        "In brackets the share of the paper's.",
        "",
        "| model | parameters | rank | paper: full | paper: GaLore | paper: Q-GaLore | **ours, ends bf16 (default)** "
        "| ours, ends int8 | ours, ends fp32 | bf16, one byte a code of projections |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    details = [
        "",
        "| model | INT8 weights | INT4 projections | moments in the low rank | ends, bf16 | ends, int8 | ends' moments "
        "| norms in fp32, with moments |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        ours = {ends: count(size, settings_of(size, ends=ends)) for ends in ENDS}
        print(f"{size.name}: {ours}", flush=True)
        bf16, int8, fp32 = (ours[ends] for ends in ENDS)
        lines.append(
            f"| {size.name} | {bf16.parameters / 1e6:.1f} M | {size.rank} | {size.full} | {size.galore} "
            f"| {size.qgalore} | **{against(bf16.total, size)}** | {against(int8.total, size)} "
            f"| {against(fp32.total, size)} | {against(bf16.total + bf16.projections, size)} |"
        )
        parts = (bf16.weights, bf16.projections, bf16.moments, bf16.ends, int8.ends, bf16.ends_moments)
        norms = bf16.ordinary + bf16.ordinary_moments
        details.append(f"| {size.name} | {' | '.join(map(gigabytes, parts))} | {norms / 1e9:.4f} |")
    return "\n".join(lines + details) + "\n"


def against(nbytes: float, size: Size) -> str:
    return f"{gigabytes(nbytes)} ({100 * nbytes / 1e9 / size.qgalore:.0f} %)"


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
