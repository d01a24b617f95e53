"""Which model, learning rate and initialisation get the demo to the bigram level in sixty steps.

One process, no pipeline, no codec: the demo's model and data at half its batch, sixty steps of AdamW (β = 0.9, 0.95,
five steps of warm-up, linear decay, one seed). The figure is the mean training loss of the last ten steps in nats a
byte, by which launch/examples/demo.yaml was chosen; docs/dev/experiment-log.md says what was expected.

Run:  python benchmarks/bench_demo_settings.py [--output benchmarks/results/demo_settings_<hardware>_<yyyymm>.md]
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from machine import describe

from tahq.data.batches import BatchSource
from tahq.data.config import DataConfig
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice, build_slice
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.loss import summed_cross_entropy
from tahq.pipeline.update.learning_rate import learning_rate
from tahq.pipeline.update.optimizer import build_optimizer

STEPS = 60
BATCH = 16
SEQ_LEN = 128
LAYERS = 8


@dataclass(frozen=True)
class Setting:
    """One row."""

    family: Literal["gpt2", "llama"]
    lr: float
    initializer_range: float


SETTINGS = (
    Setting("gpt2", 1e-3, 0.02),
    Setting("gpt2", 3e-3, 0.06),
    Setting("llama", 3e-3, 0.02),
    Setting("llama", 3e-3, 0.06),
)


def build(setting: Setting) -> ModelSlice:
    config = ModelConfig(
        family=setting.family,
        num_layers=LAYERS,
        hidden_size=256,
        num_heads=8,
        overrides={"initializer_range": setting.initializer_range},
    )
    spec = load_spec(config, vocab_size=256, seq_len=SEQ_LEN)
    return build_slice(spec, BlockRange(0, LAYERS, LAYERS), seed=0, device="cpu", random=RandomContext(0))


def train(setting: Setting, batches: BatchSource) -> list[float]:
    """The loss of every step."""
    model = build(setting)
    training = TrainingConfig(
        steps=STEPS, global_batch=BATCH, micro_batch=BATCH, lr=setting.lr, lr_schedule="linear", warmup_steps=5
    )
    optimizer = build_optimizer(training, model.canonical_parameters(), model.is_decayed)
    losses = []
    for step in range(STEPS):
        batch = batches.train(step)
        loss = summed_cross_entropy(model(batch.tokens), batch.labels) / batch.num_tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, step, STEPS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def report() -> str:
    data = DataConfig(text="stdlib", seq_len=SEQ_LEN)
    dataset = load_dataset(data, load_tokenizer(data))
    batches = BatchSource(dataset, seed=0, global_batch=BATCH, micro_batch=BATCH)
    lines = [
        "# Settings for the demo",
        "",
        f"{describe()}. `python benchmarks/bench_demo_settings.py`",
        "",
        f"{STEPS} steps of {BATCH} × {SEQ_LEN} bytes of the standard library, 8 layers of 256 channels, one seed.",
        "",
        "| model | learning rate | initializer_range | loss, last ten steps |",
        "|---|---|---|---|",
    ]
    for setting in SETTINGS:
        loss = sum(train(setting, batches)[-10:]) / 10
        lines.append(f"| {setting.family} | {setting.lr:g} | {setting.initializer_range:.2f} | {loss:.2f} |")
        print(lines[-1], flush=True)
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    text = report()
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
