"""Q-GaLore in a slice of a model: layers over `LowRankWeight`, which layers they replace, and their bytes.

The rule is `covered_layers`: the 2-D weights of the linear layers inside the blocks, which are the matrices of
attention and of the MLP, and, unless they stay in fp32, embedding and head, which are not projected. All others,
norms, biases and learned positions, are ordinary parameters, trained by AdamW, with 8-bit states where the covered
weights have them.

Source: Q-GaLore §4.1 and the authors' code, which covers the modules named `attn` and `mlp` and has the rest in bf16.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tahq.memory.adam.loop import states_nbytes
from tahq.memory.galore.low_rank_weight import LowRankSettings, LowRankWeight
from tahq.memory.galore.stored_weight import affine_nbytes
from tahq.memory.galore.subspace import low_rank_shape, rank_of
from tahq.models.deferred_gradients import (
    DeferredGradients,
    Recomputation,
    current_deferral,
    product_dtype,
    recomputed_input,
)
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange
from tahq.models.slice import HEAD_WEIGHT, ModelSlice, Parts, fill_weights

_NO_PADDING = -1


class LowRankLinear(nn.Module):
    """x·Wᵀ + b with W [out, in] (`is_linear`, nn.Linear), or x·W + b with W [in, out] (GPT-2's Conv1D).

    W, not a parameter of the module since its gradient has another shape, is decoded for each product and freed
    afterwards: the forward keeps the layer's input and no copy of the weight; the backward decodes the weight again,
    computes the input's gradient, then the weight's, which goes to `LowRankWeight.take` only. (Q-GaLore, Listing 1)
    """

    def __init__(self, weight: LowRankWeight, bias: nn.Parameter | None, *, is_linear: bool) -> None:
        super().__init__()
        self.low_rank, self.bias, self.is_linear = weight, bias, is_linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]; under autocast in its type."""
        kept = recomputed_input(x)
        recomputation, tensors = (None, ()) if kept is None else (kept.expect(), kept.tensors)
        y: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            x, self.bias, self.low_rank, self.is_linear, current_deferral(), recomputation, *tensors
        )
        return y


class _Product(torch.autograd.Function):
    """The product, whose backward passes the weight's gradient to `LowRankWeight.take`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        weight: LowRankWeight,
        is_linear: bool,
        deferred: DeferredGradients | None,
        recomputation: Recomputation | None,
        *kept: torch.Tensor,
    ) -> torch.Tensor:
        dtype = product_dtype(x)
        cast = x.to(dtype)
        ctx.weight, ctx.is_linear, ctx.deferred, ctx.recomputation = weight, is_linear, deferred, recomputation
        ctx.dtype, ctx.input_dtype, ctx.bias_dtype = dtype, x.dtype, None if bias is None else bias.dtype
        ctx.shape = x.shape
        ctx.save_for_backward(*(kept or (cast,)))
        matrix = weight.storage.decoded(dtype)
        b = None if bias is None else bias.to(dtype)
        if is_linear:
            return functional.linear(cast, matrix, b)
        rows = cast.reshape(-1, cast.shape[-1])
        product = rows.mm(matrix) if b is None else torch.addmm(b, rows, matrix)
        return product.view(*x.shape[:-1], matrix.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors, recomputation, dtype = ctx.saved_tensors, ctx.recomputation, ctx.dtype
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1])
        # the input's gradient first: taking the weight's may change the weight
        of_input = None
        if ctx.needs_input_grad[0]:
            matrix = ctx.weight.storage.decoded(gradient.dtype)
            of_input = gradient.mm(matrix if ctx.is_linear else matrix.t()).view(ctx.shape).to(ctx.input_dtype)
            del matrix
        of_bias = gradient.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[1] else None
        weight, is_linear = ctx.weight, ctx.is_linear

        def compute() -> None:
            x = tensors[0] if recomputation is None else recomputation.rows(tensors, dtype)
            rows = x.reshape(-1, x.shape[-1])
            weight.take(gradient.t().mm(rows) if is_linear else rows.t().mm(gradient))

        if ctx.deferred is None:
            compute()
        else:
            ctx.deferred.add(compute)
        return of_input, of_bias, *(None,) * (4 + (0 if recomputation is None else len(tensors)))


class LowRankEmbedding(nn.Module):
    """The rows of a table [V, C], which is not a parameter; `padding`: token whose row gets no gradient, or None.

    Only the rows that are looked up are decoded. The backward makes the gradient of the whole table, fp32 [V, C], with
    torch's operator, for `LowRankWeight.take`. It is cheap compared with a matrix product, so a split backward does not
    defer it.
    """

    def __init__(self, weight: LowRankWeight, padding: int | None) -> None:
        super().__init__()
        self.low_rank = weight
        self._padding = _NO_PADDING if padding is None else padding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> fp32 [..., C], under autocast too, as an ordinary embedding's."""
        # tokens have no gradient, and autograd only records what depends on a tensor that has one
        anchor = torch.empty(0, device=tokens.device, requires_grad=True)
        rows: torch.Tensor = _Rows.apply(tokens, anchor, self.low_rank, self._padding)  # type: ignore[no-untyped-call]
        return rows


class _Rows(torch.autograd.Function):
    """The look-up, whose backward passes the table's gradient to `LowRankWeight.take`."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, anchor: torch.Tensor, weight: LowRankWeight, padding: int
    ) -> torch.Tensor:
        ctx.weight, ctx.padding = weight, padding
        ctx.save_for_backward(tokens)
        return weight.storage.rows(tokens, torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None, None]:
        (tokens,) = ctx.saved_tensors
        num_rows = ctx.weight.shape[0]
        ctx.weight.take(torch.ops.aten.embedding_dense_backward(gradients[0], tokens, num_rows, ctx.padding, False))
        return None, None, None, None


_CONV1D = "Conv1D"  # transformers' linear layer with a transposed weight; by name, so that it need not be imported


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
    """The layers whose weights are covered, by the canonical name of the weight.

    A matrix's place among all of the model's comes from its block and its position there, not from the slice.
    """
    layout = model.spec.layout
    ends = () if settings.ends == "fp32" else (layout.embedding_weight, HEAD_WEIGHT)
    covered = {}
    for path, module in model.named_modules():
        name, is_linear = f"{path}.weight", isinstance(module, nn.Linear) or type(module).__name__ == _CONV1D
        if name in ends:
            covered[name] = Covered(module, settings.of_ends())
        elif is_linear and path.startswith(f"{layout.trunk}.{layout.blocks}."):
            covered[name] = Covered(module, settings)
    for block in model.parts.blocks:
        names = [name for name in covered if name.startswith(f"{layout.trunk}.{layout.blocks}.{block}.")]
        for place, name in enumerate(names, start=block * len(names)):
            rule = settings.rule.spread(place, len(names) * model.spec.num_layers)
            covered[name] = Covered(covered[name].layer, replace(settings, rule=rule))
    return covered


def low_rank_weights(model: nn.Module) -> dict[str, LowRankWeight]:
    """The covered weights of a model after `cover`, by canonical name."""
    layers = (module for module in model.modules() if isinstance(module, LowRankLinear | LowRankEmbedding))
    return {layer.low_rank.name: layer.low_rank for layer in layers}


def cover(
    model: ModelSlice,
    settings: LowRankSettings,
    device: torch.device,
    placed: Callable[[nn.Module], None] | None = None,
) -> dict[str, LowRankWeight]:
    """Replace the covered layers by ones on `device`, uninitialised; biases stay ordinary parameters.

    `placed` is called with each new layer, such as `place_on_host`.

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
        if placed is not None:
            placed(new)
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
    filled: Callable[[int], None] = lambda numel: None,
    placed: Callable[[nn.Module], None] | None = None,
) -> ModelSlice:
    """`build_slice` with covered layers: only those of their weights that are being filled are in fp32."""
    model = ModelSlice(spec, blocks, random)
    covered = cover(model, settings, device, placed)
    model.materialise(device)
    if weights:
        fill_weights(spec, {**model.canonical_parameters(), **covered}, seed, filled)
    return model


def divided_parameters(
    spec: ModelSpec, blocks: BlockRange, settings: LowRankSettings | None
) -> tuple[dict[str, torch.Size], dict[str, Covered]]:
    """A slice's ordinary parameters by name, their shapes, and its covered layers; allocates nothing."""
    model = ModelSlice(spec, blocks, RandomContext(0))
    covered = {} if settings is None else covered_layers(model, settings)
    return {name: parameter.shape for name, parameter in model.named_parameters() if name not in covered}, covered


class LowRankBytes(NamedTuple):
    """Bytes of a covered weight; `gradient` includes the basis that a step with a search keeps until COMMIT, and
    `states` the moments."""

    weight: int
    gradient: int
    states: int
    moments: int


def low_rank_bytes(shape: tuple[int, int], settings: LowRankSettings) -> LowRankBytes:
    """Bytes of a covered weight, counted without allocating."""
    rank, smaller = rank_of(shape, settings.rank), min(shape)
    low = low_rank_shape(shape, rank)
    projection = _nbytes((rank, smaller), settings.projections) if rank < smaller else 0
    moments = states_nbytes(settings.moment_states(low))
    return LowRankBytes(
        _nbytes(shape, settings.weights), 4 * math.prod(low) + projection, moments + projection, moments
    )


def _nbytes(shape: tuple[int, int], kind: str) -> int:
    bits = {"int4": 4, "int8": 8, "bf16": 16, "fp32": 32}[kind]
    return affine_nbytes(shape, bits) if bits <= 8 else math.prod(shape) * bits // 8
