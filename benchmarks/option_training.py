"""The only stage of a run as a worker builds and computes it, and trainings of it under OPTIONS of cluster.yaml."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from cut_training import BATCH, CLIP_NORM, HELD_OUT_BATCHES, MODELS, PEAK_LR, WARM_UP, WEIGHT_DECAY, Wire

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import autocast_dtype, with_memory_choices
from tahq.coordinator.steps import clip_factor, global_norm
from tahq.data.batches import BatchSource
from tahq.data.config import DataConfig
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.models.keyed_dropout import RandomContext
from tahq.models.slice import ModelSlice
from tahq.pipeline.stage import Stage, StagePlan
from tahq.worker.assembly import chunk_module, resolved_spec, use_repeatable_kernels

OPTIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "bf16 products": {},
    "fp8": {"training": {"precision": "fp8"}},
    "fp8, e5m2 backward": {"training": {"precision": "fp8", "fp8": {"backward": "e5m2"}}},
    "bf16 residual": {"memory": {"residual": "bf16"}},
    "bf16 weights": {
        "training": {"optimizer": "adamw_bf16", "adamw_bf16": {"weights": "bf16"}},
        "memory": {"gradients": "bf16", "residual": "bf16"},
    },
}
"""Keys that differ from fp32 weights, gradients, moments and residual stream with products in bf16."""


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


class OptionTraining:
    """Trainings of `<a key of MODELS>/<a key of OPTIONS>`, with the batches and rates of a `CutTraining`."""

    def __init__(self, model: str, data: DataConfig, device: torch.device) -> None:
        self._model, _, option = model.partition("/")
        self._changes, self._data, self._device = OPTIONS[option], data, device
        self._tokenizer = load_tokenizer(data)
        self._dataset = load_dataset(data, self._tokenizer)
        if device.type == "cuda":
            use_repeatable_kernels(device)

    def run(self, wire: Wire, *, seed: int, steps: int) -> list[float]:
        """Loss (nats per token) of every step; there are no cuts for `wire`."""
        config = self._config(seed, steps)
        spec = resolved_spec(config, self._tokenizer.vocab_size)
        config, random = with_memory_choices(config, spec), RandomContext(seed)
        module = chunk_module(config, spec, 0, device=self._device, random=random)
        batches = BatchSource(self._dataset, seed=seed, global_batch=BATCH, micro_batch=BATCH)
        self._stage = only_stage(config, module, batches, self._device)
        return [train_step(self._stage, number) for number in range(steps)]

    def held_out_loss(self) -> float:
        """Mean loss of the last run's weights on data that is not trained on."""
        (result,) = self._stage.engine.evaluate(0, HELD_OUT_BATCHES)
        return result.loss_sum / result.tokens

    def _config(self, seed: int, steps: int) -> ClusterConfig:
        sections: dict[str, dict[str, Any]] = {
            "run": {"name": "bench", "seed": seed},
            "model": MODELS[self._model].model_dump(exclude_unset=True),
            "data": self._data.model_dump(exclude_unset=True),
            "training": {
                "steps": steps, "global_batch": BATCH, "micro_batch": BATCH, "precision": "bf16", "lr": PEAK_LR,
                "lr_schedule": "linear", "warmup_steps": min(WARM_UP, steps // 10), "clip_norm": CLIP_NORM,
                "weight_decay": WEIGHT_DECAY,
            },
            "pipeline": {"stages": 1},
            "memory": {},
        }  # fmt: skip
        for section, keys in self._changes.items():
            sections[section].update(keys)
        return ClusterConfig.model_validate(sections)
