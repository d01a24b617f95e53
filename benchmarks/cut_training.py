"""Training of one model cut in four, in one process, with codecs at the cuts.

Model parts, batches and initial weights are tahq's own, so two runs with the same seed differ only in what happens at
the cuts. bf16 autocast, AdamW, gradients clipped to norm 1, one micro-batch per step. The learning rate rises for 40
steps and then falls linearly to zero: at a constant rate two runs of one setting and seed end as far apart as the
codecs that are compared.

Shapes: B samples per step, S tokens per sample, C channels of a boundary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from tahq.data.batches import BatchSource
from tahq.data.config import DataConfig
from tahq.data.dataset import Dataset, load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec, load_spec
from tahq.models.slice import ModelSlice, Parts, build_slice, fill_weights
from tahq.randomness import derive_seed

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
    "tiny-llama": ModelConfig(
        family="llama", num_layers=4, hidden_size=128, num_heads=4, num_kv_heads=2, intermediate_size=256
    ),
    "tiny": ModelConfig(family="gpt2", num_layers=4, hidden_size=128, num_heads=4, overrides=FAST_GELU),
}
STAGES = 4

Transfer = Callable[[torch.Tensor, int], torch.Tensor]
"""(tensor [B, S, C], 64-bit key) to the tensor that the other side of the cut gets."""


@dataclass(frozen=True, slots=True)
class Wire:
    """What happens to activations and to their gradients at every cut; None: nothing."""

    activations: Transfer | None = None
    gradients: Transfer | None = None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, wire: Wire, keys: tuple[int, int]) -> torch.Tensor:  # type: ignore[override]
        ctx.transfer, ctx.key = wire.gradients, keys[1]
        return x.clone() if wire.activations is None else wire.activations(x, keys[0])

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):  # type: ignore[override]
        return (gradient if ctx.transfer is None else ctx.transfer(gradient, ctx.key)), None, None


class CutTraining:
    """A model (a key of MODELS), its data and its initial weights, ready for any number of runs."""

    def __init__(self, model: str, data: DataConfig, device: torch.device) -> None:
        self.name, tokenizer = model, load_tokenizer(data)
        self.dataset: Dataset = load_dataset(data, tokenizer)
        spec = load_spec(MODELS[model.partition("/")[0]], vocab_size=tokenizer.vocab_size, seq_len=data.seq_len)
        self._device, self._is_cuda = device, device.type == "cuda"
        self._spec: ModelSpec = spec
        self.slices = self._build(spec)
        named = {name: p for part in self.slices for name, p in part.canonical_parameters().items()}
        self._named, self._parameters = named, list(named.values())
        self._initial: dict[int, list[torch.Tensor]] = {}

    def run(self, wire: Wire, *, seed: int, steps: int) -> list[float]:
        """Loss (nats per token) of every step."""
        self._reset(seed)
        batches = BatchSource(self.dataset, seed=seed, global_batch=BATCH, micro_batch=BATCH)
        optimizer = self._optimizer()
        losses = []
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = PEAK_LR * min((step + 1) / WARM_UP, (steps - step) / (steps - WARM_UP), 1.0)
            tokens, labels = batches.train(step).micro_batch(0)
            loss = self.backward(tokens, labels, wire, seed, step)
            torch.nn.utils.clip_grad_norm_(self._parameters, CLIP_NORM, foreach=self._is_cuda)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss)
        return torch.stack(losses).tolist()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean loss of the last run's weights, without codecs, on data that is not trained on."""
        batches = BatchSource(self.dataset, seed=0, global_batch=BATCH, micro_batch=BATCH)
        losses = []
        for index in range(HELD_OUT_BATCHES):
            tokens, labels = batches.validation(index).micro_batch(0)
            losses.append(self._loss(tokens, labels, Wire(), 0, 0))
        return float(torch.stack(losses).mean())

    def _build(self, spec: ModelSpec) -> list[ModelSlice]:
        size = spec.num_layers // STAGES
        cuts = [range(stage * size, (stage + 1) * size) for stage in range(STAGES)]
        return [
            build_slice(
                spec,
                Parts(blocks, embedding=stage == 0, head=stage == STAGES - 1),
                seed=0,
                device=self._device,
                random=RandomContext(0),
                weights=False,
            )
            for stage, blocks in enumerate(cuts)
        ]

    @torch.no_grad()
    def _reset(self, seed: int) -> None:
        if seed not in self._initial:
            fill_weights(self._spec, {name: p.data for name, p in self._named.items()}, seed)
            self._initial[seed] = [parameter.detach().clone() for parameter in self._parameters]
        for parameter, value in zip(self._parameters, self._initial[seed], strict=True):
            parameter.copy_(value)
            parameter.grad = None

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self._groups(), lr=PEAK_LR, betas=(0.9, 0.95), fused=self._is_cuda)

    def _groups(self) -> list[dict[str, object]]:
        matrices = [p for p in self._parameters if p.ndim >= 2]
        others = [p for p in self._parameters if p.ndim < 2]
        return [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]

    def backward(self, tokens: torch.Tensor, labels: torch.Tensor, wire: Wire, seed: int, step: int) -> torch.Tensor:
        """Leave the gradients of a step with the parameters; returns its loss."""
        loss = self._loss(tokens, labels, wire, seed, step)
        loss.backward()
        return loss.detach()

    def _loss(self, tokens: torch.Tensor, labels: torch.Tensor, wire: Wire, seed: int, step: int) -> torch.Tensor:
        x, labels = tokens.to(self._device), labels.to(self._device)
        with torch.autocast("cuda", torch.bfloat16, enabled=self._is_cuda):
            for cut, part in enumerate(self.slices):
                if cut:
                    keys = (derive_seed(seed, step, cut, "forward"), derive_seed(seed, step, cut, "backward"))
                    x = _Cut.apply(x, wire, keys)
                x = part(x)
        return functional.cross_entropy(x.flatten(0, 1).float(), labels.flatten())
