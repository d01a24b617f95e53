"""The largest model that fits on a card with LLMQ's options for memory, and without each of them: estimated

    python benchmarks/bench_largest_model.py --output benchmarks/results/largest_model_202611.md

Llama-2's proportions: L layers of hidden size 128·L, heads of 128, an MLP of 8/3 of that, so L = 32 is 7B and 40 is
13B; with Qwen2.5's vocabulary, as LLMQ's models have. The first row is `launch/examples/llama_7b_16gb.yaml`, LLMQ's
Table 7 for 7B in bf16; every other row takes one option away, the last all of them. Bytes are those of `--dry-run` for
CUDA. Nothing is run, and any computer will do.
"""

import argparse
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml
from harness import Table, main

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import block_ranges, stage_estimate, with_memory_choices
from tahq.models.slice import slice_parameters
from tahq.worker.assembly import resolved_spec

EXAMPLE = Path(__file__).parents[1] / "launch/examples/llama_7b_16gb.yaml"
CARDS = {"16 GB": 14.9, "24 GB": 22.4}  # GiB that a card has for all processes
CONTEXT_GIB = 0.5  # CUDA's context, the libraries' workspaces, and kernels
VOCABULARY = 152_064
OFFLOAD = ["residual", "m", "v", "weights", "gradients"]
MOST_LAYERS = 128
Change = Mapping[str, Mapping[str, Any]]


def without(*names: str) -> Change:
    """Offload the rest."""
    return {"memory": {"offload": [name for name in OFFLOAD if name not in names]}}


FP32_WEIGHTS = {"training": {"adamw_bf16": {"weights": "fp32"}}}
REMOVED: Mapping[str, Change] = {
    "nothing": {},
    "`recompute: block`": {"memory": {"recompute": "none"}},
    "residual stream on the host": without("residual"),
    "moments on the host": without("m", "v"),
    "weights on the host": without("weights"),
    "gradients on the host": without("gradients"),
    "loss in chunks": {"memory": {"loss_chunks": 1}},
    "bf16 residual stream": {"memory": {"residual": "fp32"}},
    "bf16 weights": {**FP32_WEIGHTS, "memory": {"offload": [*OFFLOAD, "master"]}},
    "bf16 gradients": {"memory": {"gradients": "fp32"}},
    "all of these, and bf16 moments": {
        "training": {"optimizer": "adamw", **FP32_WEIGHTS["training"]},
        "memory": {"recompute": "none", "offload": [], "loss_chunks": 1, "residual": "fp32", "gradients": "fp32"},
    },
}


@cache
def estimate(removed: str, num_stages: int, layers: int) -> tuple[int, int, int]:
    """Parameters, and the largest stage's bytes on the card and on the host."""
    sections = deepcopy(_example())
    hidden = 128 * layers
    sections["model"] |= {
        "num_layers": layers, "hidden_size": hidden, "num_heads": layers, "vocab_size": VOCABULARY,
        "intermediate_size": -(-hidden * 8 // (3 * 256)) * 256,
    }  # fmt: skip
    sections["pipeline"]["stages"] = num_stages
    sections["training"]["global_batch"] = 2 * num_stages * sections["training"]["micro_batch"]
    for section, keys in REMOVED[removed].items():
        sections[section].update(keys)
    config = ClusterConfig.model_validate(sections)
    spec = resolved_spec(config, None)
    config = with_memory_choices(config, spec)
    memories = [stage_estimate(config, spec, stage, device="cuda") for stage in range(num_stages)]
    shapes = [slice_parameters(spec, blocks).values() for blocks in block_ranges(config, spec)]
    num_parameters = sum(shape.numel() for each in shapes for shape in each)
    return num_parameters, max(each.total for each in memories), max(each.host_total for each in memories)


@cache
def _example() -> dict[str, Any]:
    sections: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    return sections


def is_too_large(removed: str, num_stages: int, room: float, layers: int) -> bool:
    return estimate(removed, num_stages, layers)[1] > room


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    example = _example()
    yield (
        f"Estimated, not run. Micro-batches of {example['training']['micro_batch']} × {example['data']['seq_len']:,} "
        "tokens in every row (a smaller one lets larger models fit, most where blocks are not recomputed), two per "
        "stage and step, 1F1B. Usable are "
        + ", ".join(f"{gib} GiB of a card of {name}" for name, gib in CARDS.items())
        + f"; of these {CONTEXT_GIB} GiB are left for CUDA's context. Python, fragments of the allocator and pinned "
        "memory's rounding are not counted. The host's memory is not limited; its column has what a stage needs there."
    )

    def rows(num_stages: int) -> Iterator[list[str]]:
        for removed in REMOVED:
            cells = [removed]
            for usable_gib in CARDS.values():
                room = (usable_gib - CONTEXT_GIB) * 2**30
                is_too_large_here = partial(is_too_large, removed, num_stages, room)
                layers = bisect_left(range(MOST_LAYERS), True, lo=num_stages, key=is_too_large_here) - 1
                num_parameters, card, host = estimate(removed, num_stages, layers)
                cells += [f"{num_parameters / 1e9:.2f} B, L = {layers}", f"{card / 2**30:.1f}", f"{host / 2**30:.1f}"]
            yield cells

    columns = ["taken away", *(cell for name in CARDS for cell in (f"{name}: largest model", "card, GiB", "host, GiB"))]
    yield Table(columns, rows(1), heading="The only stage")
    yield Table(columns, rows(4), "Bytes of the largest of the four stages.", "Four stages, each with a card and host")


if __name__ == "__main__":
    main(__doc__, tables)
