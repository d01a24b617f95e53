"""Moments of torch's AdamW in fp32 out of a real training on the CPU, for benchmarks of how to store them.

Model, text, batches and initial weights are tahq's own; the optimizer is torch's, with tahq's defaults.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from tahq.data.batches import BatchSource
from tahq.data.config import DataConfig
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice, build_slice

BATCH, SEQ_LEN = 16, 128
RATE, BETAS, EPSILON, WEIGHT_DECAY, CLIP_NORM, WARM_UP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0, 20
MODELS = {
    "gpt2": ModelConfig(family="gpt2", num_layers=4, hidden_size=192, num_heads=6),
    "llama": ModelConfig(family="llama", num_layers=4, hidden_size=192, num_heads=6, intermediate_size=512),
}

Moments = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""m and v of every parameter, fp32, by canonical name."""


def states_of_training(model: str, at_steps: Sequence[int]) -> Iterator[tuple[int, float, Moments]]:
    """Train on the standard library's source, byte by byte: (step, its loss in nats a token, copies of all moments)."""
    data = DataConfig(text="stdlib", seq_len=SEQ_LEN)
    tokenizer = load_tokenizer(data)
    spec = load_spec(MODELS[model], vocab_size=tokenizer.vocab_size, seq_len=SEQ_LEN)
    blocks = BlockRange(0, spec.num_layers, spec.num_layers)
    module = build_slice(spec, blocks, seed=1, device="cpu", random=RandomContext(1))
    batches = BatchSource(load_dataset(data, tokenizer), seed=1, global_batch=BATCH, micro_batch=BATCH)
    optimizer = _optimizer(module)
    for step in range(1, max(at_steps) + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(step / WARM_UP, 1.0)
        tokens, labels = batches.train(step - 1).micro_batch(0)
        loss = functional.cross_entropy(module(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if step in at_steps:
            yield step, loss.item(), _copies(module, optimizer)


def _optimizer(module: ModelSlice) -> torch.optim.Optimizer:
    named = module.canonical_parameters()
    decayed = [p for name, p in named.items() if module.is_decayed(name, p)]
    others = [p for name, p in named.items() if not module.is_decayed(name, p)]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPSILON, foreach=False)


def _copies(module: ModelSlice, optimizer: torch.optim.Optimizer) -> Moments:
    states = {name: optimizer.state[p] for name, p in module.canonical_parameters().items()}
    return {name: (state["exp_avg"].clone(), state["exp_avg_sq"].clone()) for name, state in states.items()}
