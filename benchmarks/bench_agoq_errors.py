"""Error of a layer's gradients when its inputs are stored in few bits, by kind of layer and format (AGoQ Table 13).

    python benchmarks/bench_agoq_errors.py --tokenizer GPT2_FOLDER --text wikitext2-valid.txt wikitext2-test.txt stdlib
    python benchmarks/bench_agoq_errors.py --model tiny-llama --steps 3        # on a CPU: that it works, no figures

A Llama (`cut_training.py`) is trained with nothing stored. Then each layer's gradients are computed in fp32 at the
exact and at the decoded inputs, for the same gradient of its output: of its input; of a product behind a norm or behind
SiLU(gate)·up, of the weight; of attention, of Q, K and V. Normalised L2 is ‖g' − g‖/‖g‖; means over the layers.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from codec_schedule import Wire
from cut_training import BATCH, SEQ_LEN, CutTraining
from harness import Table, main, say
from torch.nn import functional as F
from training_runs import ARGUMENTS

from tahq.data.batches import BatchSource
from tahq.data.config import DataConfig
from tahq.memory.small_floats.block_codes import FORMATS, dequantize_blocks, quantize_blocks
from tahq.models.keyed_dropout import keyed_attention

PAPER = {
    "norm": 0.003, "weight behind a norm": 0.026, "weight behind SiLU": 0.026, "SiLU: gate": 0.051, "SiLU: up": 0.051,
    "attention: Q": 0.14, "attention: K": 0.15, "attention: V": 0.059,
}  # fmt: skip
NAMES = {4: "E2M1 (4 bits)", 5: "E2M2 (5 bits)", 6: "E2M3 (6 bits)", 8: "E4M3 (8 bits)"}
Layer = Callable[..., torch.Tensor]


class Call:
    """A layer with the inputs of one call and the gradient that comes to its output."""

    def __init__(self, layer: Layer, inputs: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        self.layer, self.inputs, self.output = layer, [x.detach().float() for x in inputs], output.detach().float()
        self._flowing: list[torch.Tensor] = []
        output.register_hook(self._flowing.append)

    @property
    def flowing(self) -> torch.Tensor:
        return self._flowing[0].float()

    def gradients(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = [x.requires_grad_() for x in inputs]
        return torch.autograd.grad(self.layer(*leaves), leaves, self.flowing)


class Block:
    """Calls of one block's layers."""

    def __init__(self, block: Any) -> None:
        self.calls: dict[str, Call] = {}
        mlp, attention = block.mlp, block.self_attn
        watched = {
            "norm 1": block.input_layernorm, "norm 2": block.post_attention_layernorm, "q": attention.q_proj,
            "gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj,
        }  # fmt: skip
        self._handles = [
            module.register_forward_hook(lambda module, x, y, name=name: self.keep(name, module, x, y))
            for name, module in watched.items()
        ]
        self._down = mlp.down_proj

    def keep(self, name: str, layer: Layer, inputs: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        if output.requires_grad:
            self.calls[name] = Call(layer, inputs, output)

    def errors(self, bits: int) -> Iterator[tuple[str, float]]:
        """Kind of layer and normalised L2."""
        calls = self.calls
        for name, behind in (("norm 1", "q"), ("norm 2", "gate")):
            norm, product = calls[name], calls[behind]
            x = _rounded(norm.inputs[0], bits)
            yield "norm", _distance(norm.gradients([x])[0], norm.gradients(norm.inputs)[0])
            with torch.no_grad():
                yield "weight behind a norm", _of_weights(product.flowing, norm.layer(x), norm.layer(*norm.inputs))
        gate, up = calls["gate"].output, calls["up"].output
        decoded = _rounded(gate, bits), _rounded(up, bits)
        down = calls["down"]
        yield "weight behind SiLU", _of_weights(down.flowing, _gated(*decoded), _gated(gate, up))
        flowing = down.flowing @ self._down.weight.detach().float()
        pairs = zip(_through(_gated, decoded, flowing), _through(_gated, (gate, up), flowing), strict=True)
        for name, pair in zip(("gate", "up"), pairs, strict=True):
            yield f"SiLU: {name}", _distance(*pair)
        attention = calls["attention"]
        found = attention.gradients([_rounded(x, bits) for x in attention.inputs])
        for name, got, exact in zip("QKV", found, attention.gradients(attention.inputs), strict=True):
            yield f"attention: {name}", _distance(got, exact)


def _gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _through(function: Layer, inputs: Sequence[torch.Tensor], flowing: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, flowing)


def _rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    return dequantize_blocks(quantize_blocks(x, bits), x.shape)


def _distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got - exact).norm() / exact.norm())


def _of_weights(flowing: torch.Tensor, got: torch.Tensor, exact: torch.Tensor) -> float:
    """Of flowingᵀ·x for two x."""
    rows = flowing.flatten(0, -2).t()
    return _distance(rows @ got.flatten(0, -2), rows @ exact.flatten(0, -2))


def watched(training: CutTraining) -> list[Block]:
    """The model's blocks, which keep their next calls."""
    own: dict[Any, Block] = {}

    def attend(module: Any, *states: Any, **options: Any) -> tuple[torch.Tensor, None]:
        def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return keyed_attention(module, query, key, value, None, **options)[0]

        output = attention(*states[:3])
        own[module].keep("attention", attention, states[:3], output)
        return output, None

    for part in training.slices:
        part.attend_by("recorded", attend)
        layout = part.spec.layout
        for block in part.get_submodule(f"{layout.trunk}.{layout.blocks}").children():
            own[block.self_attn] = Block(block)
    return list(own.values())


def tables(options: argparse.Namespace) -> Iterator[Table]:
    text = options.text[0] if len(options.text) == 1 else options.text
    data = DataConfig(text=text, tokenizer=options.tokenizer, seq_len=SEQ_LEN)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = CutTraining(options.model[0], data, device)
    loss = training.run(Wire(), seed=0, steps=options.steps)[-1]
    say(f"loss {loss:.4f}")
    blocks = watched(training)
    batches = BatchSource(training.dataset, seed=1, global_batch=BATCH, micro_batch=BATCH)
    training.model.compute_gradients(batches.train(0), 0)
    errors: dict[tuple[str, int], list[float]] = defaultdict(list)
    for block in blocks:
        for bits in FORMATS:
            for kind, distance in block.errors(bits):
                errors[kind, bits].append(distance)

    def rows() -> Iterator[list[str]]:
        for kind, paper in PAPER.items():
            means = [sum(errors[kind, bits]) / len(errors[kind, bits]) for bits in FORMATS]
            yield [kind, *(f"{mean:.4f}" for mean in means), f"{paper}"]

    caption = f"Normalised L2 after {options.steps} steps, loss {loss:.3f}; {len(blocks)} blocks, one batch."
    yield Table(("gradient", *NAMES.values(), "paper"), rows(), caption)


if __name__ == "__main__":
    main(__doc__, tables, {**ARGUMENTS, "--model": {"nargs": 1, "default": ["llama"]}})
