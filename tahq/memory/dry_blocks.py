"""Bytes that a block keeps of a micro-batch where its layers are not those of GPT-2 or Llama: it is computed, dry.

torch's fake tensors have shapes and storages, and no data, so a block of any size takes no memory. Fused attention
keeps what it does on a CPU: output and statistics. Experts keep as much whichever tokens they have, so each gets the
same number.
"""

import json
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from tahq.models.deferred_gradients import is_linear, product_dtype, sharing_weight_copies
from tahq.models.experts.expert_products import is_experts
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec
from tahq.models.slice import ModelSlice, Parts


class KeptBytes(NamedTuple):
    """Of one micro-batch and block: `saved` until its backward, `deferred` between the two parts of a split one."""

    saved: int
    deferred: int


_Key = tuple[str, str, str, int, int, int, torch.dtype, bool, bool]
_known: dict[_Key, KeptBytes] = {}


def kept_by_block(
    spec: ModelSpec, block: int, micro_batch: int, seq_len: int, stream: torch.dtype, *, bf16: bool, packed: bool
) -> KeptBytes:
    """Of a block without recomputation, but for what blocks share.

    `stream`: type of the residual stream; `bf16`: whether products are; `packed`: whether rows have several records.
    """
    config = spec.hf_config
    kinds = kinds_of_blocks(spec)
    alike = kinds.index(kinds[block])
    text = json.dumps(config.to_dict(), sort_keys=True, default=str)
    if spec.adapter is not None:  # a block that has some stands for all
        spec = replace(spec, adapter=spec.adapter.model_copy(update={"layers": None}))
    key = spec.family, text, str(spec.adapter), alike, micro_batch, seq_len, stream, bf16, packed
    if key not in _known:
        _known[key] = _computed(spec, alike, micro_batch, seq_len, stream, bf16=bf16, packed=packed)
    return _known[key]


def kinds_of_blocks(spec: ModelSpec) -> list[tuple[str, bool]]:
    """Blocks that keep the same have the same kind: the type of their attention, and whether they have experts."""
    types = getattr(spec.hf_config, "layer_types", None) or [""] * spec.num_layers
    return [(each, spec.layout.has_experts(spec.hf_config, block)) for block, each in enumerate(types)]


def _computed(
    spec: ModelSpec, block: int, micro_batch: int, seq_len: int, stream: torch.dtype, *, bf16: bool, packed: bool
) -> KeptBytes:
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import

    layout, config = spec.layout, spec.hf_config
    assert layout.rotary is not None, "GPT-2's layers are known"
    kind = (config.layer_types[block],) if layout.rotates_by_layer_type else ()
    rotary = layout.layer_class(layout.rotary)(config=config)
    width = rotary(torch.empty(0), torch.arange(2)[None], *kind)[0].shape[-1]
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=bf16), sharing_weight_copies():
        model = ModelSlice(replace(spec, first_trainable=0), Parts(range(block, block + 1)), RandomContext(0))
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(parameter.shape), parameter.requires_grad))
        table = torch.empty(1, seq_len, width)
        model._rotary = lambda *_: (table, table)
        hidden = torch.empty(micro_batch, seq_len, spec.hidden_size, dtype=stream)
        positions = torch.zeros(micro_batch, seq_len, dtype=torch.int64) if packed else None
        masks = model._attention_masks(hidden, positions)
        model._attention_masks = lambda *_: masks  # type: ignore[method-assign]
        first, _ = _saved_by(model, hidden)
        second, of_products = _saved_by(model, hidden)
        of_all = (*model.parameters(), table, *(mask for mask in masks.values() if mask is not None))
        shared = {each.untyped_storage()._cdata for each in of_all}
        own = second.keys() - first.keys() - shared
        return KeptBytes(sum(second[each].untyped_storage().nbytes() for each in own), of_products)


def _saved_by(model: ModelSlice, hidden: torch.Tensor) -> tuple[dict[int, torch.Tensor], int]:
    """What autograd saves of a pass, by storage, and the bytes of all products' inputs and outputs."""
    saved: dict[int, torch.Tensor] = {}
    inputs: dict[Any, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    def count(layer: Any, args: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        (x,), dtype = args, product_dtype(args[0])
        # each product makes its own copy of an input in another type
        inputs[x.untyped_storage()._cdata if x.dtype == dtype else layer] = x.numel() * dtype.itemsize
        inputs[layer, "out"] = y.numel() * dtype.itemsize

    def count_experts(layer: Any, args: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        gate_up, down, num_rows = layer.gate_up_proj.shape, layer.down_proj.shape, args[1].numel()
        inputs[layer] = num_rows * sum(gate_up[1:] + down[1:]) * product_dtype(args[0]).itemsize

    hooks = [layer.register_forward_hook(count) for layer in filter(is_linear, model.modules())]
    hooks += [layer.register_forward_hook(count_experts) for layer in filter(is_experts, model.modules())]
    x = hidden.clone().requires_grad_() * 1.0  # of a leaf autocast would keep one copy for all products
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.through_blocks(x)
    for hook in hooks:
        hook.remove()
    return saved, sum(inputs.values())
