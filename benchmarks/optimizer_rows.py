"""Shapes of a Llama, optimizers, and bytes of their states, for the two benchmarks of optimizers."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import Parameter

from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.optimizer import build_optimizer

FP32, BF16 = torch.float32, torch.bfloat16
RATES = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
OWN = ("adamw", "adamw8bit", "fp8_adamw", "adamw_bf16")
OTHER_PACKAGES = {
    "bitsandbytes AdamW8bit": ("bitsandbytes", "optim", "AdamW8bit"),
    "torchao AdamW8bit": ("torchao", "optim", "AdamW8bit"),
    "torchao AdamWFp8": ("torchao", "optim", "AdamWFp8"),
}
"""Package, module and class; measured on CUDA if the package is installed."""
ARGUMENTS: dict[str, dict[str, Any]] = {
    "--parameters": {"type": float, "default": 1e9, "help": "parameters of the model, about"},
    "--device": {"default": "cuda" if torch.cuda.is_available() else "cpu"},
}


@dataclass(frozen=True, slots=True)
class Entry:
    """An optimizer, how it is built, and the type of its weights and gradients."""

    name: str
    build: Callable[[list[Parameter]], torch.optim.Optimizer]
    dtype: torch.dtype = FP32


def llama_shapes(num_parameters: float) -> list[tuple[int, ...]]:
    """Parameters of a Llama of about this many: of 2,048 channels from 300 million on, of 128 below."""
    hidden, inner, vocabulary = (2048, 5632, 32000) if num_parameters >= 3e8 else (128, 352, 1000)
    layer = [(hidden, hidden)] * 4 + [(inner, hidden)] * 2 + [(hidden, inner)] + [(hidden,)] * 2
    ends = [(vocabulary, hidden), (hidden,), (vocabulary, hidden)]
    count = sum(map(math.prod, layer))
    num_layers = max(1, round((num_parameters - sum(map(math.prod, ends))) / count))
    return [ends[0], *layer * num_layers, *ends[1:]]


def entries(device: torch.device) -> Iterator[Entry]:
    """All that can be measured here, torch's first."""
    yield Entry("torch AdamW, loop", _torchs(foreach=False, fused=False))
    yield Entry("torch AdamW, foreach", _torchs(foreach=True, fused=False))
    yield Entry("torch AdamW, fused", _torchs(fused=True))
    for name in OWN:
        yield Entry(name, _by_name(name))
    yield Entry("adamw_bf16 of bf16", _by_name("adamw_bf16"), BF16)
    for name, (package, module, cls) in OTHER_PACKAGES.items():
        if device.type == "cuda" and find_spec(package) is not None:
            yield Entry(name, _others(getattr(import_module(f"{package}.{module}"), cls)))
    yield Entry("torch AdamW of bf16, loop", _torchs(foreach=False, fused=False), BF16)
    yield Entry("torch AdamW of bf16, fused", _torchs(fused=True), BF16)


def _torchs(**how: bool) -> Callable[[list[Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, **RATES, **how)


def _others(optimizer: type[torch.optim.Optimizer]) -> Callable[[list[Parameter]], torch.optim.Optimizer]:
    """As the package's documentation says, with weight decay on matrices only."""

    def build(parameters: list[Parameter]) -> torch.optim.Optimizer:
        decayed = [each for each in parameters if each.ndim > 1]
        others = [each for each in parameters if each.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": RATES["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
        rates = {name: value for name, value in RATES.items() if name != "weight_decay"}
        return optimizer([group for group in groups if group["params"]], **rates)

    return build


def _by_name(name: str) -> Callable[[list[Parameter]], torch.optim.Optimizer]:
    config = TrainingConfig(
        steps=1,
        optimizer=name,
        lr=RATES["lr"],
        betas=RATES["betas"],
        epsilon=RATES["eps"],
        weight_decay=RATES["weight_decay"],
    )

    def build(parameters: list[Parameter]) -> torch.optim.Optimizer:
        named = {str(number): parameter for number, parameter in enumerate(parameters)}
        return build_optimizer(config, named, lambda _, parameter: parameter.ndim > 1)

    return build


def state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors that an optimizer keeps, each counted once, without step counters."""
    seen: dict[int, int] = {}
    for state in optimizer.state.values():
        for tensor in _tensors(state):
            if tensor.ndim > 0:
                seen[tensor.data_ptr()] = tensor.nbytes
    return sum(seen.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Plain tensors in a state, also those that subclasses of tensors are made of."""
    if isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from _tensors(getattr(value, name))
        else:
            yield value


def make_parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[Parameter]:
    """Gaussian weights of 0.02 with gradients of many magnitudes."""
    generator = torch.Generator(device).manual_seed(0)
    parameters = []
    for shape in shapes:
        weight = torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(0.02)
        parameter = Parameter(weight)
        parameter.grad = torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(1e-3)
        parameter.grad.mul_(torch.randn(shape[-1], generator=generator, device=device, dtype=dtype).exp_())
        parameters.append(parameter)
    return parameters
