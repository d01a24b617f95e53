"""LoRA: a linear layer of a block with two small trained matrices beside its weight, which stays as it is.

    y = W·x + b + s·B·A·drop(x)                       s = alpha / rank, or alpha / √rank (rsLoRA)

W is [out, in] (in GPT-2's Conv1D stored as [in, out]), A [rank, in] and B [out, rank]. DoRA trains the norms of W's
rows too, m [out]:

    y = m / ‖W + s·B·A‖ · (W·x + s·B·A·x) + b         the norm of each row counts as a constant in the backward

The layer itself stays where it is, with its names; it gets children `lora_A`, `lora_B`, `lora_dropout` and with DoRA
`lora_magnitude_vector`, named as peft names them. A and B are linear layers, so a split backward leaves their
gradients for later, and all layers whose input they take share it.

A is drawn as peft draws it, uniform within ±1/√in, from (seed, parameter's name); B is 0, m the norms of W. So at first
a model computes what it computes without adapters. Adapters are fp32 whatever the type of W.

Sources: Hu et al. 2021 (LoRA), §4.1; Kalajdzievski 2023 (rsLoRA), §3; Liu et al. 2024 (DoRA), Eq. 5 and §4.3.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn

from tahq.errors import ModelError
from tahq.models.adapters.config import DOWN, MAGNITUDE, UP, AdapterConfig, is_end_of
from tahq.models.deferred_gradients import cast_weight, is_linear, shared_copies
from tahq.randomness import derive_seed


class _Magnitudes(nn.Module):
    """The norms of a weight's rows [out], as a parameter."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows))


def adapted_layers(tree: nn.Module) -> Iterator[tuple[str, Any]]:
    """The linear layers with an adapter, by path."""
    return ((path, layer) for path, layer in tree.named_modules() if hasattr(layer, DOWN))


def add_adapters(blocks: Mapping[int, nn.Module], config: AdapterConfig) -> None:
    """Give the linear layers of blocks, by number, their adapters, on the meta device.

    ModelError: a target names no linear layer of a block.
    """
    for number, block in blocks.items():
        linear = {path: layer for path, layer in block.named_modules() if is_linear(layer)}
        for target in config.targets if isinstance(config.targets, list) else ():
            if not any(is_end_of(path, target) for path in linear):
                raise ModelError(
                    f"adapter.targets: {target} names no linear layer of a block; it has {', '.join(linear)}"
                )
        for path, layer in linear.items() if config.layers is None or number in config.layers else ():
            if config.covers(path):
                _add(layer, config)


def _add(layer: Any, config: AdapterConfig) -> None:
    num_out, num_in = shape_of(layer)
    layer.add_module(DOWN, nn.Linear(num_in, config.rank, bias=False))
    layer.add_module(UP, nn.Linear(config.rank, num_out, bias=False))
    layer.add_module("lora_dropout", nn.Dropout(config.dropout))
    if config.dora:
        layer.add_module(MAGNITUDE, _Magnitudes(num_out))


def shape_of(layer: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    rows, columns = layer.weight.shape
    return (rows, columns) if isinstance(layer, nn.Linear) else (columns, rows)


def use_adapters(tree: nn.Module, config: AdapterConfig) -> None:
    """Make the layers with an adapter compute with it; call it after `let_own_products`."""
    for _, layer in adapted_layers(tree):
        layer.forward = partial(_dora if config.dora else _lora, layer, layer.forward, config.scale)


_Function = Callable[[torch.Tensor], torch.Tensor]
_are_off: ContextVar[bool] = ContextVar("adapters are off", default=False)


@contextmanager
def without_adapters() -> Iterator[None]:
    """A context in which this thread computes as if no layer had an adapter."""
    token = _are_off.set(True)
    try:
        yield
    finally:
        _are_off.reset(token)


def _lora(layer: Any, forward: _Function, scale: float, x: torch.Tensor) -> torch.Tensor:
    if _are_off.get():
        return forward(x)
    y: torch.Tensor = forward(x) + scale * layer.lora_B(layer.lora_A(layer.lora_dropout(x)))
    return y


def _dora(layer: Any, forward: _Function, scale: float, x: torch.Tensor) -> torch.Tensor:
    """As peft computes it, whose dropout holds for the product with W too, in what is added to the layer's output."""
    y: torch.Tensor = forward(x)
    if _are_off.get():
        return y
    plain = y
    dropped = layer.lora_dropout(x)
    if dropped is not x:
        plain = forward(dropped)
    if layer.bias is not None:
        plain = plain - layer.bias.to(plain.dtype)
    factor: torch.Tensor = layer.lora_magnitude_vector.weight / _norms(layer, scale)
    of_plain, of_low = ((factor - 1).to(y.dtype), (scale * factor).to(y.dtype))
    low: torch.Tensor = layer.lora_B(layer.lora_A(dropped))
    return y + of_plain * plain + of_low * low


@torch.no_grad()
def _norms(layer: Any, scale: float) -> torch.Tensor:
    """‖W + s·B·A‖ of each row, fp32 [out]; once per step where casts of weights are shared."""
    copies, key = shared_copies(), (layer.lora_magnitude_vector.weight, torch.float32)
    norms: torch.Tensor | None = None if copies is None else copies.get(key)
    if norms is not None:
        return norms
    with torch.autocast(layer.weight.device.type, enabled=False):
        change = change_of(layer.lora_A.weight, layer.lora_B.weight, scale)
        norms = row_norms(_by_rows(layer, cast_weight(layer.weight, torch.float32, None)) + change)
    if copies is not None:
        copies[key] = norms
    return norms


def _by_rows(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """A layer's weight as [out, in]."""
    return weight if isinstance(layer, nn.Linear) else weight.t()


def change_of(down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    """s·B·A, fp32 [out, in]."""
    return scale * (up.detach().float() @ down.detach().float())


def row_norms(weight: torch.Tensor) -> torch.Tensor:
    """‖W‖ of each row [out] of W [out, in]."""
    norms: torch.Tensor = torch.linalg.vector_norm(weight, dim=1)
    return norms


# -- values ------------------------------------------------------------------------------------------


def initial_values(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Of A or B by its canonical name, fp32 on the CPU; for m ones, which `fill_magnitudes` replaces."""
    values = torch.zeros(shape)
    if name.endswith(f"{DOWN}.weight"):
        generator = torch.Generator("cpu").manual_seed(derive_seed(seed, "init", name))
        bound = 1 / math.sqrt(shape[1])
        values.uniform_(-bound, bound, generator=generator)
    return values


@torch.no_grad()
def fill_magnitudes(tree: nn.Module, values_of: Callable[[nn.Parameter], torch.Tensor]) -> None:
    """Give DoRA's m the norms of the weights' rows, once the weights have their values."""
    for _, layer in adapted_layers(tree):
        if hasattr(layer, MAGNITUDE):
            weight = layer.lora_magnitude_vector.weight
            weight.copy_(row_norms(_by_rows(layer, values_of(layer.weight)).to(weight.device, torch.float32)))


def merged_weight(
    layer: Any, path: str, weight: torch.Tensor, read: Callable[[str], torch.Tensor], scale: float
) -> torch.Tensor:
    """The weight, shaped as the layer has it, that computes alone what it computes with its adapter; fp32.

    `layer`: on any device, for its kind only; `read`: an adapter's parameter by its canonical name.
    """
    rows = _by_rows(layer, weight.float())
    rows = rows + change_of(read(f"{path}.{DOWN}.weight"), read(f"{path}.{UP}.weight"), scale)
    if hasattr(layer, MAGNITUDE):
        rows = (read(f"{path}.{MAGNITUDE}.weight").float() / row_norms(rows))[:, None] * rows
    return _by_rows(layer, rows).contiguous()
