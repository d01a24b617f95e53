"""Q-GaLore in a slice of a model: which weights are covered, how layers are replaced, how many bytes they take.

The rule is `covered_layers`: the 2-D weights of the linear layers inside the blocks, which are the matrices of
attention and of the MLP, and, unless they stay in fp32, embedding and head, which are not projected. All others,
norms, biases and learned positions, are ordinary parameters, trained by AdamW, with 8-bit states where the covered
weights have them.

Source: Q-GaLore §4.1 and the authors' code, which covers the modules named `attn` and `mlp` and has the rest in bf16.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from tahq.memory.adam.loop import states_nbytes
from tahq.memory.galore.affine_groups import affine_nbytes
from tahq.memory.galore.low_rank_layers import LowRankEmbedding, LowRankLinear
from tahq.memory.galore.low_rank_weight import LowRankSettings, LowRankWeight
from tahq.memory.galore.subspace import low_rank_shape, rank_of
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange
from tahq.models.slice import HEAD_WEIGHT, ModelSlice, Parts, fill_weights

_CONV1D = "Conv1D"
"""transformers' linear layer with a transposed weight; by name, so that it need not be imported."""


@dataclass(frozen=True, slots=True)
class Covered:
    """A layer whose weight is covered, and its settings."""

    layer: nn.Module
    settings: LowRankSettings

    @property
    def shape(self) -> tuple[int, int]:
        """The weight's."""
        rows, columns = self.layer.get_parameter("weight").shape
        return rows, columns


def covered_layers(model: ModelSlice, settings: LowRankSettings) -> dict[str, Covered]:
    """The layers whose weights are covered, by the canonical name of the weight."""
    layout = model.spec.layout
    ends = () if settings.ends == "fp32" else (layout.embedding_weight, HEAD_WEIGHT)
    covered = {}
    for path, module in model.named_modules():
        name, is_linear = f"{path}.weight", isinstance(module, nn.Linear) or type(module).__name__ == _CONV1D
        if name in ends:
            covered[name] = Covered(module, settings.of_ends())
        elif is_linear and path.startswith(f"{layout.trunk}.{layout.blocks}."):
            covered[name] = Covered(module, settings)
    return covered


def low_rank_weights(model: nn.Module) -> dict[str, LowRankWeight]:
    """The covered weights of a model after `cover`, by canonical name."""
    layers = (module for module in model.modules() if isinstance(module, LowRankLinear | LowRankEmbedding))
    return {layer.low_rank.name: layer.low_rank for layer in layers}


def cover(model: ModelSlice, settings: LowRankSettings, device: torch.device) -> dict[str, LowRankWeight]:
    """Replace the covered layers by ones on `device`, uninitialised; biases stay ordinary parameters.

    The model may be on any device, including `meta`: only the shapes of its covered weights are used. Returns the
    weights, by canonical name.
    """
    tied_head = model.spec.layout.embedding_weight if model.spec.tie == "sync" else None
    for name, covered in covered_layers(model, settings).items():
        drawn_as = tied_head if name == HEAD_WEIGHT else None
        layer, weight = covered.layer, LowRankWeight(name, covered.shape, covered.settings, device, drawn_as)
        new: nn.Module
        if isinstance(layer, nn.Embedding):
            new = LowRankEmbedding(weight, layer.padding_idx)
        else:
            new = LowRankLinear(weight, getattr(layer, "bias", None), is_linear=isinstance(layer, nn.Linear))
        model.set_submodule(name.removesuffix(".weight"), new)
    return low_rank_weights(model)


def build_low_rank_slice(
    spec: ModelSpec,
    blocks: BlockRange | Parts,
    settings: LowRankSettings,
    *,
    seed: int,
    device: torch.device,
    random: RandomContext,
    weights: bool = True,
) -> ModelSlice:
    """`build_slice` with covered layers: at most one of their weights at a time is in fp32.

    Raises:
        ModelError: as `build_slice`.
    """
    model = ModelSlice(spec, blocks, random)
    covered = cover(model, settings, device)
    model.materialise(device)
    if weights:
        fill_weights(spec, model.canonical_parameters(), seed)
        for weight in covered.values():  # one at a time
            values = torch.empty(weight.shape)
            fill_weights(spec, {weight.name: values}, seed)
            weight.storage.assign(values)
    return model


def divided_parameters(
    spec: ModelSpec, blocks: BlockRange, settings: LowRankSettings | None
) -> tuple[dict[str, torch.Size], dict[str, Covered]]:
    """A slice's ordinary parameters by name, their shapes, and its covered layers; allocates nothing."""
    model = ModelSlice(spec, blocks, RandomContext(0))
    covered = {} if settings is None else covered_layers(model, settings)
    return {name: parameter.shape for name, parameter in model.named_parameters() if name not in covered}, covered


class LowRankBytes(NamedTuple):
    """Bytes of covered weights by kind; gradients include the bases that a step with a search keeps until COMMIT."""

    weights: int = 0
    gradients: int = 0
    states: int = 0


def low_rank_bytes(weights: Iterable[tuple[tuple[int, int], LowRankSettings]]) -> LowRankBytes:
    """Bytes of covered weights with these shapes and settings, counted without allocating."""
    kinds = [_weight_bytes(shape, settings) for shape, settings in weights]
    return LowRankBytes(*map(sum, zip(*kinds, strict=True)))


def _weight_bytes(shape: tuple[int, int], settings: LowRankSettings) -> tuple[int, int, int]:
    rank, smaller = rank_of(shape, settings.rank), min(shape)
    low = low_rank_shape(shape, rank)
    projection = _nbytes((rank, smaller), settings.projections) if rank < smaller else 0
    states = states_nbytes(settings.moment_states(low)) + projection
    return _nbytes(shape, settings.weights), 4 * math.prod(low) + projection, states


def _nbytes(shape: tuple[int, int], kind: str) -> int:
    bits = {"int4": 4, "int8": 8, "bf16": 16, "fp32": 32}[kind]
    return affine_nbytes(shape, bits) if bits <= 8 else math.prod(shape) * bits // 8
