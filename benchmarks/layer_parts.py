"""Parts of bench_layer.py: the layers that are compared, and what a layer saves, operator by operator."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tahq.memory.agoq.stored_inputs import store_inputs
from tahq.memory.coat.fp8_flow import CoatBlock, use_fp8_flow
from tahq.memory.config import AgoqConfig, CoatConfig, Fp8Config
from tahq.memory.fp8_products import use_fp8_products
from tahq.memory.stored_slice import build_slice
from tahq.models.config import ModelConfig
from tahq.models.deferred_gradients import shared_copies, sharing_weight_copies
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice

BLOCK = "model.layers.1"
OPERATORS = ("RMSNorm", "Act Func", "RoPE", "FlashAttn", "Linear")
PAPER_UNITS = {
    "BF16, paper": {"RMSNorm": 4.0, "Act Func": 8.0, "RoPE": 2.0, "FlashAttn": 3.0, "Linear": 5.66},
    "TE, paper": {"RMSNorm": 2.0, "Act Func": 8.0, "RoPE": 2.0, "FlashAttn": 3.0, "Linear": 3.33},
    "COAT, paper": {"RMSNorm": 1.0, "Act Func": 4.0, "RoPE": 2.0, "FlashAttn": 3.0, "Linear": 3.33},
}
"""COAT Table 2: Llama-2's proportions."""
AGOQ_PAPER_UNITS = {
    "BF16 in Megatron, AGoQ's paper": {"RMSNorm": 4.0, "Act Func": 12.0, "FlashAttn": 5.0, "Linear": 7.0},
    "COAT, AGoQ's paper": {"RMSNorm": 1.0, "Act Func": 6.0, "FlashAttn": 5.0, "Linear": 4.5},
    "AGoQ, paper": {"RMSNorm": 0.5, "Act Func": 2.0, "FlashAttn": 5.0, "Linear": 0.25},
}
"""AGoQ Table 1: an MLP of four times the hidden size."""


@dataclass(frozen=True, slots=True)
class Size:
    """One layer of Llama-2's kind, and a micro-batch for it."""

    hidden: int
    inner: int
    heads: int
    batch: int
    seq_len: int
    kv_heads: int | None = None  # None: as many as `heads`

    @property
    def unit(self) -> int:
        """U: bytes of one bf16 tensor [B, S, C]."""
        return 2 * self.batch * self.seq_len * self.hidden

    def __str__(self) -> str:
        grouped = "" if self.kv_heads is None else f", {self.kv_heads} key and value heads of {self.heads}"
        return f"hidden {self.hidden}, inner {self.inner}{grouped}, batch {self.batch}, sequence {self.seq_len}"


LayerConfig = CoatConfig | AgoqConfig | Fp8Config | None


def make_layer(size: Size, device: torch.device, config: LayerConfig, *, master: bool) -> ModelSlice:
    """One block as a slice; weights in bf16, or (`master`) in fp32 for autocast.

    Args:
        size: of it.
        device: where.
        config: FP8 flow, stored inputs in bits, or products in FP8; None: transformers' layer.
        master: keep weights and residual stream in fp32, as tahq trains.
    """
    sizes = {"hidden_size": size.hidden, "intermediate_size": size.inner, "num_heads": size.heads, "num_layers": 3}
    sizes["num_kv_heads"] = size.kv_heads or size.heads
    spec = load_spec(ModelConfig(family="llama", **sizes), vocab_size=100, seq_len=size.seq_len)
    module = build_slice(spec, BlockRange(1, 2, 3), seed=0, device=device, random=RandomContext(0)).train()
    if not master:
        module.to(torch.bfloat16)
    if isinstance(config, CoatConfig):
        use_fp8_flow(module, config)
    elif isinstance(config, Fp8Config):
        use_fp8_products(module, config)
    elif config is not None:
        store_inputs(module, config, config.bits_of(0))
    return module


class Layer:
    """A layer that can be run forward and backward on a fixed micro-batch."""

    def __init__(self, size: Size, device: torch.device, module: ModelSlice, *, master: bool) -> None:
        shape = (size.batch, size.seq_len, size.hidden)
        generator = torch.Generator(device).manual_seed(0)
        dtype = torch.float32 if master else torch.bfloat16
        self.module, self._master = module, master
        self._x, self._gradient = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in "xg")
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=master)

    def forward(self) -> torch.Tensor:
        """A forward pass on a fresh leaf."""
        return self._output(self._x.detach())

    def forward_elsewhere(self) -> torch.Tensor:
        """The same of a copy of the input."""
        return self._output(self._x.clone())

    def _output(self, x: torch.Tensor) -> torch.Tensor:
        with self._autocast:
            return self.module(x.requires_grad_())

    def backward(self, y: torch.Tensor) -> None:
        """Its backward; gradients of weights are added to those that are there."""
        y.backward(self._gradient)

    def begin_step(self) -> None:
        """What a new step does: weights are coded anew."""
        self.module.train()

    @property
    def weight_codes_nbytes(self) -> int:
        """Bytes of weights' codes that are kept, or of copies that autocast keeps."""
        block = self.module.get_submodule(BLOCK)
        if isinstance(block, CoatBlock):
            return block.weight_codes_nbytes
        own = set(block.parameters())
        if codes := sum(each.nbytes for (weight, _), each in (shared_copies() or {}).items() if weight in own):
            return codes
        has_copies = self._master and type(block).__name__ != "OptimizedModule"  # compiled, they are made anew
        return 2 * sum(each.numel() for each in block.parameters() if each.ndim > 1) if has_copies else 0


PARTS = {"norm": "input_layernorm", "attention": "self_attn", "second norm": "post_attention_layernorm", "FFN": "mlp"}


class PartMarks:
    """Marks where each part of a layer begins and ends, forward and backward.

    A part's backward begins when the gradient of its output is there, and ends with that of its input.

    Args:
        layer: whose parts.
        mark: a point in time.
    """

    def __init__(self, layer: Layer, mark: Callable[[], Any]) -> None:
        self._mark = mark
        self.forward: dict[str, list[Any]] = {}
        self.backward: dict[str, list[Any]] = {}
        block = layer.module.get_submodule(BLOCK)
        for part, name in PARTS.items():
            module = block.get_submodule(name)
            module.register_forward_pre_hook(partial(self._enter, part), with_kwargs=True)
            module.register_forward_hook(partial(self._leave, part))

    def _enter(self, part: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.forward[part] = [self._mark()]
        x = args[0] if args else kwargs["hidden_states"]
        x.register_hook(lambda _: self.backward[part].append(self._mark()))

    def _leave(self, part: str, _: nn.Module, __: object, output: Any) -> None:
        self.forward[part].append(self._mark())
        y = output[0] if isinstance(output, tuple) else output
        y.register_hook(lambda _: self.backward.update({part: [self._mark()]}))


def compiled(layer: Layer) -> Layer:
    """The layer with its block under torch.compile."""
    blocks = layer.module.get_submodule("model.layers")
    blocks.add_module("1", torch.compile(blocks.get_submodule("1")))
    return layer


def saved_by_operator(layer: Layer) -> dict[str, int]:
    """Bytes that a micro-batch saves, each storage where it is saved first.

    Left out are parameters, and what another micro-batch has saved already: bf16 copies of weights, and tables.
    """
    saved: dict[int, torch.Tensor] = {}
    by_operator: dict[str, int] = defaultdict(int)
    running = ["Act Func"]
    block = layer.module.get_submodule(BLOCK)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in saved:
            saved[storage.data_ptr()] = tensor
            by_operator[running[-1]] += storage.nbytes()
        return tensor

    with sharing_weight_copies(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer.forward_elsewhere()
        by_operator.clear()
        with _telling(block, running):
            layer.forward()
    return dict(by_operator) if not isinstance(block, CoatBlock) else _of_coat(layer, sum(by_operator.values()))


@contextmanager
def _telling(block: nn.Module, running: list[str]) -> Iterator[None]:
    """Keep the name of the operator that is running on top of a stack."""
    handles = []

    def leave(*_: object) -> None:
        running.pop()

    for module in block.modules():
        name = _operator(module)
        if name is not None:
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
            handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _operator(module: nn.Module) -> str | None:
    kinds: dict[str, Callable[[str], bool]] = {
        "RMSNorm": lambda name: name.endswith("RMSNorm"),
        "Linear": lambda name: name == "Linear",
        "FlashAttn": lambda name: name.endswith("Attention"),
        "Act Func": lambda name: name.endswith("MLP"),
    }
    return next((kind for kind, fits in kinds.items() if fits(type(module).__name__)), None)


def _of_coat(layer: Layer, total: int) -> dict[str, int]:
    """The FP8 flow saves in two functions; what is whose follows from the sizes, and the rest is attention's."""
    block = layer.module.get_submodule(BLOCK)
    tokens, hidden = layer._x.shape[0] * layer._x.shape[1], layer._x.shape[2]
    inner = block.mlp.gate_proj.out_features
    norms, linear = 2 * tokens * (hidden + hidden // 8 + 4), tokens * (2 * hidden + inner)
    activation = 2 * tokens * (inner + inner // 8)
    return {
        "RMSNorm": norms, "Act Func": activation, "Linear": linear, "FlashAttn": total - norms - linear - activation
    }  # fmt: skip
