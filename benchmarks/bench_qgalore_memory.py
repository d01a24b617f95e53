"""Memory of weights and optimizer under Q-GaLore (Table 1 of the paper), counted from real tensors.

    python benchmarks/bench_qgalore_memory.py [--output benchmarks/results/qgalore_memory_<yyyymm>.md]

The models are those of GaLore's paper (vocabulary 32,000, head not tied), the ranks those of Q-GaLore §4.2.1. Each
covered weight is built as in a stage, with its codes, packed projection and 8-bit moments, and its tensors are added
up; so are embedding and head where `training.qgalore.ends` is bf16 or int8. All other parameters are in fp32 with 8-bit
moments, the small ones with moments in fp32. The paper has everything that is not covered in bf16. *One byte per code*:
the projections unpacked, as in the authors' code. 1 G is 10^9 bytes; gradients and activations are not included.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from harness import Table, main

from tahq.memory.adam.adamw import adamw8bit_states
from tahq.memory.adam.loop import states_nbytes
from tahq.memory.galore.low_rank_weight import LowRankSettings, LowRankWeight
from tahq.memory.galore.qgalore import divided_parameters
from tahq.models.config import ModelConfig
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange

VOCAB = 32000
COUNTERS = ("step/", "gap/", "similarities/")


class Size(NamedTuple):
    """A model, its rank, and the paper's figures in G."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    rank: int
    full: float
    galore: float
    qgalore: float

    def model(self, shrink: int = 1) -> ModelConfig:
        """A Llama of this size, or with all sizes divided by `shrink`."""
        return ModelConfig(
            family="llama",
            num_layers=max(1, self.layers // shrink),
            hidden_size=self.hidden // shrink,
            num_heads=max(1, self.heads // shrink),
            intermediate_size=self.inner // shrink,
        )


SIZES = (
    Size("60M", 8, 512, 1376, 8, 128, 0.36, 0.24, 0.18),
    Size("130M", 12, 768, 2048, 12, 256, 0.76, 0.52, 0.39),
    Size("350M", 24, 1024, 2736, 16, 256, 2.06, 1.22, 0.88),
    Size("1B", 24, 2048, 5461, 32, 512, 7.80, 4.38, 3.08),
)


def count(size: Size, settings: LowRankSettings) -> Counter[str]:
    """Build every covered weight of the model, one after the other, and add up bytes by kind; and parameters."""
    spec = load_spec(size.model(), vocab_size=VOCAB, seq_len=256)
    ordinary, covered = divided_parameters(spec, BlockRange(0, spec.num_layers, spec.num_layers), settings)
    found: Counter[str] = Counter(parameters=sum(shape.numel() for shape in ordinary.values()))
    found["norms"] = sum(4 * s.numel() + states_nbytes(adamw8bit_states(tuple(s))) for s in ordinary.values())
    for name, layer in covered.items():
        weight = LowRankWeight(name, layer.shape, layer.settings, torch.device("cpu"))
        is_end = layer.settings.is_end
        found["parameters"] += weight.numel()
        found["ends" if is_end else "weights"] += sum(tensor.nbytes for tensor in weight.weight_tensors().values())
        for state, tensor in weight.states().items():
            if state.startswith("projection"):
                found["projections"] += tensor.nbytes
            elif not state.startswith(COUNTERS):
                found["ends' moments" if is_end else "moments"] += tensor.nbytes
    return found


def tables(options: argparse.Namespace) -> Iterator[Table]:
    found = {
        (size.name, ends): count(size, LowRankSettings(rank=size.rank, ends=ends))
        for size in SIZES
        for ends in ("bf16", "int8", "fp32")
    }

    def total(size: Size, ends: str, extra: int = 0) -> str:
        gigabytes = (found[size.name, ends].total() - found[size.name, ends]["parameters"] + extra) / 1e9
        return f"{gigabytes:.3f} ({100 * gigabytes / size.qgalore:.0f} %)"

    def main_row(size: Size) -> list[object]:
        bf16 = found[size.name, "bf16"]
        ours = [total(size, ends) for ends in ("bf16", "int8", "fp32")]
        parameters = f"{bf16['parameters'] / 1e6:.1f} M"
        paper = (size.full, size.galore, size.qgalore)
        return [size.name, parameters, size.rank, *paper, *ours, total(size, "bf16", bf16["projections"])]

    def detail_row(size: Size) -> list[str]:
        bf16, int8 = found[size.name, "bf16"], found[size.name, "int8"]
        parts = [bf16[kind] for kind in ("weights", "projections", "moments", "ends")]
        parts += [int8["ends"], bf16["ends' moments"]]
        return [size.name, *(f"{nbytes / 1e9:.3f}" for nbytes in parts), f"{bf16['norms'] / 1e9:.4f}"]

    columns = ("model", "parameters", "rank", "paper: full", "paper: GaLore", "paper: Q-GaLore")
    columns += ("ours, ends bf16 (default)", "ours, ends int8", "ours, ends fp32", "bf16, one byte per code")
    caption = (
        "In G (10^9 bytes): a run of `optimizer: qgalore`, by `training.qgalore.ends`, the type of embedding and head. "
        "In brackets the share of the paper's figure for Q-GaLore."
    )
    yield Table(columns, map(main_row, SIZES), caption)
    columns = ("model", "INT8 weights", "INT4 projections", "moments in the low rank", "ends, bf16", "ends, int8")
    yield Table((*columns, "ends' moments", "norms in fp32, with moments"), map(detail_row, SIZES))


if __name__ == "__main__":
    main(__doc__, tables)
