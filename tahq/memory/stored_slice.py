"""Slices with their weights, which may be stored elsewhere, or in 4 bits: the frozen base of QLoRA.

In 4 bits (`small_floats/nf4.py`) are the matrices of blocks, those of experts too, apart from routers and adapters.
Such a parameter keeps its place, name and shape, but its own values are a single NaN; the weights are in its attribute
`packed`. The product decodes them (`cast_weight`), in the backward again, and nothing keeps what was decoded. Weights
are coded one after the other as they are read, so that beside codes one matrix is in memory.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from tahq.memory.dry_blocks import kinds_of_blocks
from tahq.memory.offload.host_part import copy_for_products, filled_weight, is_here, kept_values
from tahq.memory.shares import Shape, is_block_matrix
from tahq.memory.small_floats.nf4 import Nf4Weight
from tahq.models.adapters.config import MAGNITUDE, is_adapter
from tahq.models.adapters.lora import fill_magnitudes
from tahq.models.deferred_gradients import is_linear
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice, Parts, fill_weights, slice_parameters

_ROUTER = ".gate.weight"


def is_in_4_bits(spec: ModelSpec, name: str, shape: Shape) -> bool:
    """Whether a parameter, by its canonical name, is kept in NF4."""
    is_base = not is_adapter(name) and not name.endswith(_ROUTER)
    return _has_4_bits(spec) and is_base and is_block_matrix(spec, name, shape)


def _has_4_bits(spec: ModelSpec) -> bool:
    return spec.adapter is not None and spec.adapter.kind == "qlora"


def decoded_nbytes(spec: ModelSpec, element_nbytes: int, weight_nbytes: int = 4) -> int:
    """Bytes that the largest matrix of a block takes while it is decoded for a product, or while DoRA takes its norms.

    Norms take W + s·B·A, s·B·A, and W where it is not in fp32 anyway: 4 bytes each per weight.
    """
    if spec.adapter is None:
        return 0
    spec = replace(spec, adapter=spec.adapter.model_copy(update={"layers": None}))
    kinds, layers = kinds_of_blocks(spec), spec.num_layers
    firsts = [BlockRange(kinds.index(kind), kinds.index(kind) + 1, layers) for kind in set(kinds)]
    shapes = {name: shape for blocks in firsts for name, shape in slice_parameters(spec, blocks).items()}
    coded = [shape.numel() for name, shape in shapes.items() if is_in_4_bits(spec, name, shape)]
    ends = f".{MAGNITUDE}.weight"
    normed = [shapes[f"{name.removesuffix(ends)}.weight"].numel() for name in shapes if name.endswith(ends)]
    num_fp32 = 3 if coded or weight_nbytes != 4 else 2
    return max(element_nbytes * max(coded, default=0), 4 * num_fp32 * max(normed, default=0))


def materialise(
    module: ModelSlice, device: torch.device, placed: Callable[[nn.Module], None] = lambda block: None
) -> None:
    """`ModelSlice.materialise`, with zeros in NF4 where parameters are kept in 4 bits, which are never there whole."""
    packed = [
        (layer, name, parameter.shape)
        for path, layer in module.named_modules()
        for name, parameter in layer.named_parameters(recurse=False)
        if is_in_4_bits(module.spec, f"{path}.{name}", parameter.shape)
    ]
    for layer, name, _ in packed:
        layer.get_parameter(name).data = torch.empty(1, device="meta")
    module.materialise(device, placed)
    for layer, name, shape in packed:
        parameter = layer.get_parameter(name)
        parameter.data = parameter.data.fill_(torch.nan).expand(shape)
        is_transposed = is_linear(layer) and not isinstance(layer, nn.Linear)
        parameter.packed = Nf4Weight(shape, device, is_transposed=is_transposed)
    module.owns_products |= bool(packed)


def build_slice(
    spec: ModelSpec,
    blocks: BlockRange | Parts,
    *,
    seed: int,
    device: torch.device | str,
    random: RandomContext,
    weights: bool = True,
    filled: Callable[[int], None] = lambda numel: None,
    matrices: torch.dtype = torch.float32,
    placed: Callable[[nn.Module], None] = lambda block: None,
) -> ModelSlice:
    """Build a stage's slice, or any parts of a model, on `device`, in fp32, or matrices in `matrices` or in 4 bits.

    Random weights depend on `seed`, the run's, and on each parameter's name only; `random` is read by keyed dropout.
    `weights` False leaves those that are trained uninitialised, to be read from a checkpoint, which has no others.
    `filled` is called with the number of elements of each parameter that has its values, `placed` with each block that
    has memory, before the next one has; it may put the block's parameters elsewhere, as `place_on_host` does.

    Raises:
        ModelError: a configuration that cannot be built, or a folder whose weights do not fit it.
    """
    module = ModelSlice(spec, blocks, random, matrices)
    materialise(module, torch.device(device), placed)
    parameters = module.canonical_parameters()
    if not weights:
        parameters = {name: each for name, each in parameters.items() if not each.requires_grad}
    fill_weights(spec, {name: filled_weight(p) for name, p in parameters.items() if is_here(p)}, seed, filled)
    fill_magnitudes(module, kept_values)
    copy_for_products(parameters.values())
    return module
