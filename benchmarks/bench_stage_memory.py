"""Memory per stage of well-known models, as `tahq-launch --dry-run` estimates it for CUDA

    python benchmarks/bench_stage_memory.py [--output benchmarks/results/stage_memory_<yyyymm>.md]

Nothing is run, and any computer will do. Shapes are those of the models' config.json.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from harness import Table, main

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import block_ranges, stage_estimate, with_memory_choices
from tahq.models.slice import slice_parameters
from tahq.worker.assembly import resolved_spec

KEYS = ("family", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size", "vocab_size")
MODELS: Mapping[str, tuple[str, int, int, int, int | None, int | None, int]] = {
    "GPT-2": ("gpt2", 12, 768, 12, None, None, 50257),
    "GPT-2 XL": ("gpt2", 48, 1600, 25, None, None, 50257),
    "Qwen2.5-0.5B": ("qwen2", 24, 896, 14, 2, 4864, 151936),
    "Qwen2.5-1.5B": ("qwen2", 28, 1536, 12, 2, 8960, 151936),
    "Qwen2.5-3B": ("qwen2", 36, 2048, 16, 2, 11008, 151936),
    "Qwen3-4B": ("qwen3", 36, 2560, 32, 8, 9728, 151936),
    "Llama-2-7B": ("llama", 32, 4096, 32, 32, 11008, 32000),
    "Mistral-7B": ("mistral", 32, 4096, 32, 8, 14336, 32000),
    "Llama-3.1-8B": ("llama", 32, 4096, 32, 8, 14336, 128256),
    "Qwen2.5-14B": ("qwen2", 48, 5120, 40, 8, 13824, 152064),
    "Qwen2.5-32B": ("qwen2", 64, 5120, 40, 8, 27648, 152064),
}
OVERRIDES: Mapping[str, Mapping[str, object]] = {"Qwen3-4B": {"head_dim": 128}}
STAGES = (1, 2, 3, 4, 8)
SMALL: Mapping[str, Mapping[str, Any]] = {
    "training": {"optimizer": "adamw_bf16", "adamw_bf16": {"weights": "bf16"}},
    "memory": {"recompute": "block", "residual": "bf16", "gradients": "bf16"},
}
SEQ_LEN = 2048


def largest_stage(name: str, num_stages: int, changes: Mapping[str, Mapping[str, Any]]) -> tuple[float, float]:
    """Billions of parameters of all stages, and GiB of the largest stage."""
    model = {**dict(zip(KEYS, MODELS[name], strict=True)), "overrides": OVERRIDES.get(name, {})}
    sections: dict[str, dict[str, Any]] = {
        "model": model,
        "data": {"text": "stdlib", "seq_len": SEQ_LEN},
        "training": {"steps": 1, "global_batch": 16, "micro_batch": 1, "precision": "bf16"},
        "pipeline": {"stages": num_stages},
    }
    for section, keys in changes.items():
        sections.setdefault(section, {}).update(keys)
    config = ClusterConfig.model_validate(sections)
    spec = resolved_spec(config, None)
    config = with_memory_choices(config, spec)
    shapes = [slice_parameters(spec, blocks).values() for blocks in block_ranges(config, spec)]
    num_parameters = sum(shape.numel() for each in shapes for shape in each)
    most = max(stage_estimate(config, spec, stage, device="cuda").total for stage in range(num_stages))
    return num_parameters / 1e9, most / 2**30


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    yield (
        f"GiB of the largest stage. Sequences of {SEQ_LEN:,} tokens, micro-batches of one, 16 per step, 1F1B, products "
        "in bf16, embedding and head untied. CUDA's context and fragments, about 1 GiB, are not counted."
    )
    settings = {"Default settings": {}, "bf16 weights, moments and gradients, blocks recomputed": SMALL}
    for heading, changes in settings.items():

        def rows(changes: Mapping[str, Mapping[str, Any]] = changes) -> Iterator[list[str]]:
            for name in MODELS:
                cells = [largest_stage(name, stages, changes) for stages in STAGES]
                yield [name, f"{cells[0][0]:.2f}", *(f"{gib:.1f}" for _, gib in cells)]

        columns = ["model", "billion parameters", *(f"{n} stage{'s' * (n > 1)}" for n in STAGES)]
        yield Table(columns, rows(), heading=heading)


if __name__ == "__main__":
    main(__doc__, tables)
