"""Training of one model cut in four, in one process, with codecs at the cuts.

The parts are those that workers build from a cluster.yaml, and so are loss, keys of codecs, clipping and updates: with
one codec per direction, a run has the losses of `tahq-launch` with `CutTraining.config` (`tests/benchmarks/
test_long_trainings.py`). bf16 autocast on CUDA, AdamW, one micro-batch per step. The learning rate rises for 40 steps
and then falls linearly to zero: at a constant rate two runs of one setting and seed end as far apart as the codecs that
are compared.

Shapes: B samples per step, S tokens per sample, C channels of a boundary.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from codec_schedule import Wire
from harness import say
from option_training import OPTIONS

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import autocast_dtype, with_memory_choices
from tahq.coordinator.steps import clip_factor, global_norm
from tahq.data.batches import BatchSource, StepBatch
from tahq.data.config import DataConfig
from tahq.data.dataset import load_dataset, load_validation
from tahq.data.tokenizer import load_tokenizer
from tahq.memory.offload.host_part import filled_weight
from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.slice import ModelSlice, fill_weights, sharing_copies_of
from tahq.pipeline.cut_model import CodecPair, CutModel
from tahq.pipeline.update import StageUpdate
from tahq.worker.assembly import chunk_module, resolved_spec, use_repeatable_kernels

BATCH, SEQ_LEN = 16, 512
HELD_OUT_BATCHES = 16
WARM_UP, PEAK_LR, CLIP_NORM, WEIGHT_DECAY = 40, 6e-4, 1.0, 0.1
PADDED_VOCAB = 50304
"""GPT-2's 50,257 tokens padded to a multiple of 64, for the matrix units."""
FAST_GELU = {"activation_function": "gelu_pytorch_tanh"}
"""The same function as GPT-2's own, in one kernel instead of eight."""
MODELS = {
    "gpt2": ModelConfig(
        family="gpt2", num_layers=12, hidden_size=768, num_heads=12, vocab_size=PADDED_VOCAB, overrides=FAST_GELU
    ),
    "llama": ModelConfig(
        family="llama",
        num_layers=12,
        hidden_size=768,
        num_heads=12,
        num_kv_heads=4,
        intermediate_size=2048,
        vocab_size=PADDED_VOCAB,
    ),
    "llama-22m": ModelConfig(  # make_checkpoint.py
        family="llama",
        num_layers=12,
        hidden_size=256,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=768,
        vocab_size=PADDED_VOCAB,
        tie="sync",
    ),
    "tiny-llama": ModelConfig(
        family="llama", num_layers=4, hidden_size=128, num_heads=4, num_kv_heads=2, intermediate_size=256
    ),
    "tiny": ModelConfig(family="gpt2", num_layers=4, hidden_size=128, num_heads=4, overrides=FAST_GELU),
}
STAGES = 4


def split_name(model: str) -> tuple[ModelConfig, str]:
    """The model and the key of OPTIONS, or "", of `gpt2`, `gpt2/fp8` or a Hugging Face folder."""
    if model in MODELS or model.partition("/")[0] in MODELS:
        name, _, option = model.partition("/")
        return MODELS[name], option
    return ModelConfig(path=model), ""


class CutTraining:
    """A model and its data, ready for any number of runs.

    Args:
        model: see `split_name`.
        data: token files, text or records.
        device: of all stages.
        changes: further keys of cluster.yaml, by section.
    """

    def __init__(
        self,
        model: str,
        data: DataConfig,
        device: torch.device,
        changes: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._model, option = split_name(model)
        self._changes = [OPTIONS[option] if option else {}, changes or {}]
        self._data, self._device = data, device
        self.tokenizer = load_tokenizer(data)
        self.dataset = load_dataset(data, self.tokenizer, BATCH)
        self._sets = load_validation(data, self.dataset, self.tokenizer)
        self.slices: list[ModelSlice] = []
        self.steps_done = 0
        """Of the last call of `run`."""
        if device.type == "cuda":
            use_repeatable_kernels(device)

    def config(self, seed: int, steps: int) -> ClusterConfig:
        """What a run is as a cluster.yaml, but for the codecs."""
        sections: dict[str, dict[str, Any]] = {
            "run": {"name": "bench", "seed": seed},
            "model": self._model.model_dump(exclude_unset=True),
            "data": self._data.model_dump(exclude_unset=True),
            "training": {
                "steps": steps, "global_batch": BATCH, "micro_batch": BATCH, "lr": PEAK_LR, "lr_schedule": "linear",
                "warmup_steps": min(WARM_UP, steps // 10), "clip_norm": CLIP_NORM, "weight_decay": WEIGHT_DECAY,
            },
            "pipeline": {"stages": STAGES},
            "memory": {},
        }  # fmt: skip
        for changes in self._changes:
            for section, keys in changes.items():
                sections[section].update(keys)
        return ClusterConfig.model_validate(sections)

    def run(
        self, wire: Wire, *, seed: int, steps: int, deadline_s: float | None = None, state: Path | None = None
    ) -> list[float]:
        """Loss (nats per token) of every step; every 10 s it is shown.

        Past `deadline_s`, by `time.time()`, it stops and keeps what it has in the file `state`, from which the same
        call goes on, to the bit; the steps done so far are then fewer than `steps`.
        """
        config = self._begin(seed, steps)
        batches = BatchSource(self.dataset, seed=seed, global_batch=BATCH, micro_batch=BATCH)
        weights = self.model.weights
        update = StageUpdate(
            config.training, weights, self.model.is_decayed, steps, self.model.tied,
            gradients=config.memory.gradients, seed=seed,
        )  # fmt: skip
        losses: list[float] = []
        if state is not None and state.exists():
            kept = torch.load(state, map_location="cpu")
            update.load(kept["tensors"].__getitem__, set(kept["tensors"]))
            losses = kept["losses"]
        self.steps_done = 0
        shown_s = time.time()
        for step in range(len(losses), steps):
            if losses and time.time() > shown_s + 10.0:
                shown_s = time.time()
                say(f"seed {seed}, step {step} of {steps}, loss {losses[-1]:.3f}")
            if deadline_s is not None and time.time() > deadline_s:
                if state is not None:
                    torch.save({"tensors": update.tensors(), "losses": losses}, state)
                return losses
            update.begin(step)
            codecs = wire.codecs(step, steps, STAGES - 1)
            with self._one_step():
                losses.append(self.compute_gradients(batches.train(step), step, codecs))
            norm = global_norm(update.squared_norms())
            if norm < float("inf"):
                update.apply(step, clip_factor(norm, CLIP_NORM))
            else:
                update.discard()
            self.steps_done += 1
        self._last = wire.codecs(steps, steps, STAGES - 1), steps
        if state is not None:
            state.unlink(missing_ok=True)
        return losses

    def held_out_loss(self, *, with_codecs: bool = False, num_batches: int | None = None) -> float:
        """Mean loss of the last run's weights on data that is not trained on, with its last codecs or without."""
        batches = BatchSource(self.dataset, seed=0, global_batch=BATCH, micro_batch=BATCH, sets=self._sets)
        codecs, step = self._last
        codecs = codecs if with_codecs else [(None, None)] * len(codecs)
        there = -(-self._sets[0].num_samples // BATCH)
        count = min(HELD_OUT_BATCHES if num_batches is None else num_batches, there)
        return self.model.evaluate(map(batches.validation, range(count)), step, codecs)

    def compute_gradients(self, batch: StepBatch, step: int, codecs: Sequence[CodecPair]) -> float:
        """Leave the gradients of a step with the parameters; returns its loss."""
        return self.model.compute_gradients(batch, step, codecs)

    @contextmanager
    def _one_step(self) -> Iterator[None]:
        for part in self.slices:
            if part.graphs is not None:
                part.graphs.begin()
        with sharing_copies_of(self.slices):
            yield

    def _begin(self, seed: int, steps: int) -> ClusterConfig:
        """A model with the initial weights of a seed; modules stay, so that nothing is compiled or recorded again."""
        config = self.config(seed, steps)
        spec = resolved_spec(config, self.tokenizer.vocab_size)
        config = with_memory_choices(config, spec)
        if not self.slices:
            build = partial(chunk_module, config, spec, device=self._device, random=RandomContext(seed), weights=False)
            self.slices = [build(stage) for stage in range(STAGES)]
        dtype = autocast_dtype(config, self._device)
        self.model = CutModel(self.slices, seed=seed, autocast=dtype)
        fill_weights(spec, {name: filled_weight(each) for name, each in self.model.weights.items()}, seed)
        return config
