"""Options of cluster.yaml that trainings are compared under, and the only stage of a run, taken step by step."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import autocast_dtype
from tahq.coordinator.steps import clip_factor, global_norm
from tahq.data.batches import BatchSource
from tahq.models.slice import ModelSlice
from tahq.pipeline.stage import Stage, StagePlan

Changes = Mapping[str, Mapping[str, Any]]
"""Keys of cluster.yaml, by section."""
_BF16 = {"training": {"precision": "bf16"}}
_A = {"activations": "agoq"}
_BY_STAGE = {"memory": {**_A, "agoq": {"bits": [4, 5, 8, 8]}}}  # 1F1B, strict
OPTIONS: Mapping[str, Changes] = {
    "bf16 products": _BF16,
    "fp8": {"training": {"precision": "fp8"}},
    "fp8, e5m2 backward": {"training": {"precision": "fp8", "fp8": {"backward": "e5m2"}}},
    "bf16 residual": {**_BF16, "memory": {"residual": "bf16"}},
    "bf16 weights": {
        "training": {"precision": "bf16", "optimizer": "adamw_bf16", "adamw_bf16": {"weights": "bf16"}},
        "memory": {"gradients": "bf16", "residual": "bf16"},
    },
    "coat optimizer": {"training": {"precision": "bf16", "optimizer": "fp8_adamw"}},
    "coat activations": {**_BF16, "memory": {"activations": "coat"}},
    "coat": {
        "training": {"precision": "bf16", "optimizer": "fp8_adamw"},
        "memory": {"activations": "coat"},
    },
    "bf16": {},
    "A": {"memory": {**_A, "agoq": {"bits": 4}}},
    "A, bits by stage": _BY_STAGE,
    "4 bits everywhere": {"memory": {**_A, "agoq": {"bits": 4, "stored": ["norms", "mlp", "attention"]}}},
    "A, bits by stage, O, G": {**_BY_STAGE, "training": {"optimizer": "adamw8bit"}},
    "FP8 all-reduce": {},
}
"""By what differs from fp32 weights, gradients, moments and residual stream, and from storing everything.

`A` to `FP8 all-reduce` are AGoQ's (`bench_agoq_loss.py`).
"""


def only_stage(config: ClusterConfig, module: ModelSlice, batches: BatchSource, device: torch.device) -> Stage:
    """The stage of a configuration with one, whose number of steps is given."""
    assert config.training.steps is not None
    plan = StagePlan(
        stage=0,
        run=1,
        seed=config.run.seed,
        seq_len=config.data.seq_len,
        total_steps=config.training.steps,
        training=config.training,
        pipeline=config.pipeline,
        wire=config.wire,
        tie=config.model.tie == "sync",
        gradients=config.memory.gradients,
    )
    return Stage(plan, {0: module}, batches, {}, device=device, autocast=autocast_dtype(config, device))


def train_step(stage: Stage, number: int) -> float:
    """A step, with the coordinator's decision about it; returns the mean loss."""
    result = stage.engine.run_step(number)
    assert result.loss_sum is not None
    assert result.tokens is not None
    norm = global_norm(stage.update.squared_norms())
    if math.isfinite(norm):
        stage.update.apply(number, clip_factor(norm, stage.plan.training.clip_norm))
    else:
        stage.update.discard()
    stage.stopwatch.take()
    return result.loss_sum / result.tokens
